"""Write the owner of the repository wherever it is named.

    python3 .ci/owner.py NAME    set it
    python3 .ci/owner.py ""      unset it

`owner` in settings.ini is the setting; empty means that none is set. What follows
from it: four more keys of settings.ini, the copies of two of them in
tformer/_modidx.py, the passages of text between two marks, and the cell of each
notebook that installs the package on Colab. The book reads the setting itself
(book/_ext/site_address.py). Nothing else names an owner.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGIN = r"[A-Za-z0-9][A-Za-z0-9-]{0,38}"

# text that is there only where an owner is set, by the word in its mark
PASSAGE = re.compile(
    r"(<!-- owner: (\w+) -->|^# owner: (\w+)\n).*?(<!-- end -->|^# end$)", re.M | re.S
)
PASSAGES = {
    "addresses": (
        "repository-code: https://github.com/{owner}/tformer\n"
        "url: https://{owner}.github.io/tformer/\n"
    ),
    "install": (
        ' Without a clone: `pip install "tformer[plot] @ '
        'https://{owner}.github.io/tformer/_static/wheel/{wheel}"`.'
    ),
    "read": "; once published, <https://{owner}.github.io/tformer/>",
}

# how the cell for Colab installs the package, as it stands in a notebook's file
# from the wheel beside the pages, so that it is of their version
WHEEL = r"tformer-[\w.]+-py3-none-any\.whl"
INSTALL = (
    r"%pip install -q \"tformer{extra} @ "
    r"https://{owner}.github.io/tformer/_static/wheel/{wheel}\""
)
TELL = (
    r'print(\"Copy a clone of the repository here, and run:\")\n",'
    "\n    "
    r""""    print('%pip install \"./tformer{extra}\"')"""
)
EXTRA = r"((?:\[\w+\])?)"
INSTALLS = re.compile(
    re.escape(INSTALL)
    .replace(r"\{extra\}", EXTRA)
    .replace(r"\{owner\}", LOGIN)
    .replace(r"\{wheel\}", WHEEL)
    + "|"
    + re.escape(TELL).replace(r"\{extra\}", EXTRA)
)


def wheel_name():
    "Return the name of the wheel, which says the version of the package."
    text = (ROOT / "settings.ini").read_text(encoding="utf-8")
    version = re.search(r"(?m)^version = (\S+)$", text)[1]
    return f"tformer-{version}-py3-none-any.whl"


def settings(owner):
    "Return the keys of settings.ini; nbdev wants addresses in any case."
    keys = {"owner": owner, "user": owner}
    if owner:
        return keys | {
            "doc_host": f"https://{owner}.github.io",
            "git_url": f"https://github.com/{owner}/tformer",
            "author_email": f"{owner}@users.noreply.github.com",
        }
    return keys | {  # reserved ones, which lead nowhere
        "doc_host": "https://example.org",
        "git_url": "https://example.org/tformer",
        "author_email": "nobody@example.org",
    }


def files(root):
    "Return the paths of all files that name the owner, if there is one."
    return [
        root / "settings.ini",
        root / "tformer" / "_modidx.py",
        root / "CITATION.cff",
        *sorted(root.glob("*.md")),
        *sorted(root.glob("book/*.md")),
        *sorted(root.glob("nbs/**/*.ipynb")),
    ]


def written(path, text, owner):
    "Return the text of a file with this owner."
    if path.name == "settings.ini":
        for key, value in settings(owner).items():
            text = re.sub(rf"(?m)^{key} =.*$", f"{key} = {value}".rstrip(), text)
    elif path.name == "_modidx.py":
        for key in ("doc_host", "git_url"):
            text = re.sub(
                rf"'{key}': '.*?'", f"'{key}': '{settings(owner)[key]}'", text
            )
    elif path.suffix == ".ipynb":

        def install(match):
            extra = match[1] or match[2] or ""
            line = INSTALL if owner else TELL
            line = line.replace("{extra}", extra).replace("{owner}", owner)
            return line.replace("{wheel}", wheel_name())

        text = INSTALLS.sub(install, text)
    else:

        def passage(match):
            said = PASSAGES[match[2] or match[3]] if owner else ""
            said = said.format(owner=owner, wheel=wheel_name())
            return match[1] + said + match[4]

        text = PASSAGE.sub(passage, text)
    return text


def main(owner):
    if owner and not re.fullmatch(LOGIN, owner):
        sys.exit(f"a GitHub login was expected, or nothing, got {owner!r}")
    for path in files(ROOT):
        text = path.read_bytes().decode()
        new = written(path, text, owner)
        if new != text:
            path.write_bytes(new.encode())
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("`make owner NAME=…` sets the owner, `make owner NAME=` unsets it")
    main(sys.argv[1])
