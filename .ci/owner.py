"""Write the owner of the repository wherever it is named, or check that all agree.

    python3 .ci/owner.py --set NAME    set it, and write all that names it
    python3 .ci/owner.py --set ""      unset it, likewise
    python3 .ci/owner.py --write       write anew all that names it
    python3 .ci/owner.py --check       print each place that does not agree

`owner` in settings.ini is the setting; empty means that none is set. What follows
from it: four more keys of settings.ini, the copies of two of them in
tformer/_modidx.py, the passages of text between two marks, and the cell of each
notebook that installs the package on Colab. The book reads the setting itself
(book/_ext/site_address.py). Nothing else names an owner.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from site_address import book_url, read_owner, repository_url  # noqa: E402

LOGIN = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})"
# an address of the repository or of its book, or of the owner's mail
ADDRESS = re.compile(
    rf"(?:github\.com[/:]|\bgh/){LOGIN}/tformer\b|\b{LOGIN}\.github\.io/tformer\b"
    rf"|\b{LOGIN}@users\.noreply\.github\.com"
)

# nbdev wants addresses in any case: these are reserved and lead nowhere
UNSET_KEYS = {
    "user": "",
    "doc_host": "https://example.org",
    "git_url": "https://example.org/tformer",
    "author_email": "nobody@example.org",
}
COPIED = ("doc_host", "git_url")  # from settings.ini to _modidx.py

# text that is there only where an owner is set, by the word in its mark
PASSAGE = re.compile(
    r"(?P<begin><!-- owner: (?P<text>\w+) -->|^# owner: (?P<yaml>\w+)\n)"
    r".*?(?P<end><!-- end -->|^# end$)",
    re.M | re.S,
)
PASSAGES = {
    "addresses": "repository-code: {repository}\nurl: {book}\n",
    "install": ' Without a clone: `pip install "tformer[plot] @ git+{repository}"`.',
    "read": "; once published, <{book}>",
}

# the line of a notebook's cell that installs the package on Colab, for both states
COLAB = '"google.colab" in sys.modules'
INSTALL = {
    True: '    %pip install -q "tformer{extra} @ git+{repository}"',
    False: '    print("Copy a clone of the repository here, and run:")\n'
    "    print('%pip install \"./tformer{extra}\"')",
}
INSTALLS = re.compile(
    "^(?:"
    + "|".join(
        re.escape(line)
        .replace(r"\{repository\}", repository_url(LOGIN))
        .replace(r"\{extra\}", rf"(?P<{name}>\[\w+\])?")
        for name, line in (("set", INSTALL[True]), ("unset", INSTALL[False]))
    )
    + r")(?P<others>(?: [\w-]+)*)$",
    re.M,
)


class NoPlaceError(ValueError):
    "A file lacks what names the owner."


def addresses(owner):
    return {"repository": repository_url(owner), "book": book_url(owner)}


def keys(owner):
    "The keys of settings.ini that follow from the owner."
    if not owner:
        return UNSET_KEYS
    return {
        "user": owner,
        "doc_host": f"https://{owner}.github.io",
        "git_url": repository_url(owner),
        "author_email": f"{owner}@users.noreply.github.com",
    }


def replace_once(pattern, new, text):
    out, count = re.subn(pattern, lambda match: new, text, flags=re.M)
    if count != 1:
        raise NoPlaceError(f"{pattern} occurs {count} times")
    return out


def write_settings(text, owner):
    for key, value in {"owner": owner, **keys(owner)}.items():
        text = replace_once(rf"^{key} =.*$", f"{key} = {value}".rstrip(), text)
    return text


def write_index(text, owner):
    for key in COPIED:
        text = replace_once(
            rf"'{key}': '[^']*'", f"'{key}': '{keys(owner)[key]}'", text
        )
    return text


def write_passages(text, owner):
    def passage(match):
        name = match["text"] or match["yaml"]
        if name not in PASSAGES:
            raise NoPlaceError(f"no passage is called {name}")
        body = PASSAGES[name].format(**addresses(owner)) if owner else ""
        return match["begin"] + body + match["end"]

    return PASSAGE.sub(passage, text)


def write_install(code, owner):
    "The code of a cell for Colab; what it installs besides has a line of its own."

    def line(match):
        extra = match["set"] or match["unset"] or ""
        new = INSTALL[bool(owner)].format(extra=extra, **addresses(owner))
        others = match["others"].strip()
        return new + (f"\n    %pip install -q {others}" if others else "")

    out, count = INSTALLS.subn(line, code)
    if count != 1:
        raise NoPlaceError(f"the cell for Colab installs the package {count} times")
    return out


def as_json(code):
    "Lines of a cell as they stand in a notebook's file."
    return ",\n    ".join(
        json.dumps(line, ensure_ascii=False) for line in code.splitlines(keepends=True)
    )


def write_notebook(text, owner):
    "All of a notebook but the cell for Colab stays as it is, to the byte."
    for cell in json.loads(text)["cells"]:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and COLAB in code:
            if text.count(as_json(code)) != 1:
                raise NoPlaceError("the cell for Colab is not written as usual")
            text = text.replace(as_json(code), as_json(write_install(code, owner)))
    return text


def writer(name):
    "The function that writes the owner into a file of this name, or None."
    if name == "settings.ini":
        return write_settings
    if name == "tformer/_modidx.py":
        return write_index
    if name.endswith(".ipynb"):
        return write_notebook
    if name.endswith((".md", ".cff")):
        return write_passages
    return None


def files():
    "Name and text of each file that git tracks or would track."
    out = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in sorted({*out.stdout.decode().split("\0")} - {""}):
        path = ROOT / name
        if path.is_file():
            try:
                yield name, path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue


def line_of(text, at):
    return text.count("\n", 0, at) + 1


def first_difference(text, other):
    "The number of the first line that differs."
    pairs = enumerate(zip(text.splitlines(), other.splitlines(), strict=False), 1)
    return next((i for i, (a, b) in pairs if a != b), 1)


def disagreements(owner):
    "Places that do not say what follows from the owner, and addresses elsewhere."
    for name, text in files():
        write = writer(name)
        bare = text
        if write:
            try:
                wanted = write(text, owner)
                bare = write(text, "")
            except NoPlaceError as error:
                yield f"{name}:1: {error}"
                continue
            if wanted != text:
                line = first_difference(text, wanted)
                yield f"{name}:{line}: does not agree with the setting"
        for m in ADDRESS.finditer(bare):
            yield f"{name}:{line_of(bare, m.start())}: {m[0]}"


def write_all(owner):
    "Write what follows from the owner; return the names of the files changed."
    new = {
        name: (text, writer(name)(text, owner))
        for name, text in files()
        if writer(name)
    }
    changed = [name for name, (text, wanted) in new.items() if wanted != text]
    for name in changed:
        (ROOT / name).write_bytes(new[name][1].encode("utf-8"))
    return changed


def login(name):
    if name and not re.fullmatch(LOGIN, name):
        raise argparse.ArgumentTypeError(
            f"a GitHub login was expected, or nothing, got {name!r}"
        )
    return name


def main(args):
    parser = argparse.ArgumentParser(
        description="`make owner NAME=…` sets the owner, `make owner NAME=` unsets it"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--set", type=login, metavar="NAME")
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    args = parser.parse_args(args)
    if args.check:
        found = list(disagreements(read_owner(ROOT)))
        print("\n".join(found) or f"all agrees with owner = {read_owner(ROOT)}")
        return bool(found)
    owner = read_owner(ROOT) if args.write else args.set
    for name in write_all(owner):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
