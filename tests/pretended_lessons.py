"""Run lessons on the pretended card, and compare what they print with what is stored.

    python tests/pretended_lessons.py              # all that ask for a device
    python tests/pretended_lessons.py nbs/05*.ipynb

The kernels enter the mode of `tests/pretend.py` before the first cell, and
`TFORMER_DEVICE` is ``cuda``: a lesson that mixes its tensors fails as it would on a
real card.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
STARTUP = """
import sys

import torch

sys.path.insert(0, {tests!r})
from pretend import PretendedCard

PretendedCard().__enter__()
torch.accelerator.synchronize = lambda device=None: None
# PyTorch leaves its fast path for transformers while such a mode is entered
torch.overrides.has_torch_function = lambda arguments: False
"""


def main(paths):
    paths = [str(Path(path).resolve()) for path in paths] or [
        str(path)
        for path in sorted((ROOT / "nbs").rglob("*.ipynb"))
        if "lesson_device" in path.read_text(encoding="utf-8")
    ]
    with tempfile.TemporaryDirectory() as folder:
        startup = Path(folder) / "profile_default" / "startup"
        startup.mkdir(parents=True)
        text = STARTUP.format(tests=str(TESTS))
        (startup / "00_card.py").write_text(text, encoding="utf-8")
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-n",
                "0",
                "-p",
                "no:cacheprovider",
                "--nbval",
                "--nbval-current-env",
                "--nbval-cell-timeout=600",
                "--nbval-sanitize-with",
                str(TESTS / "sanitize.cfg"),
                *paths,
            ],
            cwd=ROOT,
            env=os.environ
            | {"IPYTHONDIR": folder, "TFORMER_DEVICE": "cuda", "OMP_NUM_THREADS": "1"},
        ).returncode  # the operations are small


if __name__ == "__main__":
    # whoever is stopped stops its kernels
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
