"""What reading a batch costs beside a training step of it.

    python -m tests.bench.bench_data        or --quick: that everything runs

The step is that of a GPT of 6 layers, width 384 and 10,000 tokens, with
PyTorch's AdamW and one thread; a batch has 8 x 256 places and comes from a token
file on the disk. Both in processor time, in turn, in this process. The last
rows compare a window with what indexing a tensor in memory costs, and say how
fast text becomes a token file.
"""

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.corpora.documents import TokenFile, load_documents, write_token_file
from tformer.models.gpt import GPT, GPTConfig
from tformer.text.tokenizer import Tokenizer
from tformer.training.data import PackedLoader, PaddedLoader, RandomWindowLoader
from timing import AT_MOST

LENGTH = 256
BATCH = 8


def training_step(vocab_size):
    "A function that trains on a batch."
    small = timing.quick
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocab_size=vocab_size,
            d_model=32 if small else 384,
            n_layers=1 if small else 6,
            n_heads=2 if small else 6,
            max_len=LENGTH,
            dropout=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(batch):
        logits = model(batch.ids, positions=batch.positions, mask=batch.mask)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main():
    timing.begin(__doc__)
    texts = list(load_documents("pydocs", 300 if timing.quick else None))
    tokenizer = Tokenizer.train(texts, 500 if timing.quick else 10_000)
    print(
        f"processor time, one thread of {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}, numpy "
        f"{np.__version__}, Python {sys.version.split()[0]}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "docs.tok"
        took = timing.once(lambda: write_token_file(path, texts, tokenizer))[0]
        file = TokenFile(path, tokenizer)
        loaders = {
            "RandomWindowLoader": RandomWindowLoader(file, LENGTH, BATCH),
            "PackedLoader": PackedLoader(file, LENGTH, BATCH),
            "PaddedLoader": PaddedLoader(
                [file[i][: LENGTH + 1] for i in range(len(file))],
                max_tokens=LENGTH * BATCH,
            ),
        }
        step = training_step(len(tokenizer))
        timing.head(f"reading {BATCH} x {LENGTH} tokens / a training step")
        for name, loader in loaders.items():
            batches = itertools.count()
            read, n = timing.repeated(lambda: loader.get_batch(next(batches)), 0.2)
            batch = loader.get_batch(0)
            t = timing.in_turn(
                {"read": read, "step": lambda: step(batch)}, 5, time.process_time
            )
            share = t["read"] / n / t["step"]
            timing.row(
                f"{name} / a step",
                share,
                (AT_MOST, 0.01),
                f"{share:.3%}: {1e6 * t['read'] / n:,.0f} µs of "
                f"{1e3 * t['step']:,.0f} ms",
            )
        ids = torch.from_numpy(np.asarray(file.ids, np.int64))
        start = torch.randint(len(ids) - LENGTH, (BATCH, 1))
        plain, n = timing.repeated(lambda: ids[start + torch.arange(LENGTH + 1)], 0.2)
        read, m = timing.repeated(
            lambda: loaders["RandomWindowLoader"].get_batch(7), 0.2
        )
        t = timing.in_turn({"read": read, "plain": plain}, 5, time.process_time)
        timing.row(
            "RandomWindowLoader / indexing a tensor in memory",
            t["read"] / m / (t["plain"] / n),
            None,
            f"{1e6 * t['read'] / m:,.0f} µs",
        )
        size = sum(map(len, texts))
        print(
            f"\na token file of {size / 1e6:.1f} MB of text took "
            f"{took:.2f} s: {size / 1e6 / took:.1f} MB/s"
        )


if __name__ == "__main__":
    main()
