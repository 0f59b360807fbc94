"""Set the owner of the repository everywhere, or list where owners disagree.

    python3 .ci/owner.py NAME      set it in every tracked text file
    python3 .ci/owner.py --check   print each place that names another owner

settings.ini holds it (`user`); every address in the project names the same.
"""
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGIN = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})"
# an owner stands before /tformer in an address of the repository, before
# .github.io, before the address of a mail, and in settings.ini
PLACES = re.compile(
    rf"(?P<before>github(?:\.com)?[/:]|gh/|^user = |\b)(?P<owner>{LOGIN})"
    rf"(?P<after>/tformer\b|\.github\.io\b|@users\.noreply\.github\.com|$)",
    re.MULTILINE)
# pages of other people are named there
CITED = ROOT / "book" / "references.bib"


def owner_places(text, known):
    "Each match that names an owner; bare `known`/tformer is one too."
    for m in PLACES.finditer(text):
        before = m["before"]
        after = m["after"]
        if after == "/tformer":
            named = before not in ("", "user = ") or m["owner"] == known
        elif after == "":
            named = before == "user = "
        else:
            named = True
        if named:
            yield m


def files():
    "Every text file of the project that git tracks or would track."
    out = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others",
         "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for name in out.stdout.decode().split("\0"):
        path = ROOT / name
        if path in (Path(__file__).resolve(), CITED):
            continue
        if name and path.is_file():
            try:
                yield path, path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue


def current():
    ini = ConfigParser(delimiters="=", interpolation=None)
    ini.read(ROOT / "settings.ini", encoding="utf-8")
    return ini["DEFAULT"]["user"]


def disagreements(owner):
    "Places that name another owner than settings.ini."
    for path, text in files():
        for m in owner_places(text, owner):
            if m["owner"] != owner:
                line = text.count("\n", 0, m.start()) + 1
                yield f"{path.relative_to(ROOT)}:{line}: {m[0].strip()}"


def rename(new):
    "Write `new` wherever an owner is named; return the files changed."
    changed = []
    old = current()
    for path, text in files():
        parts = []
        at = 0
        for m in owner_places(text, old):
            parts += [text[at:m.start("owner")], new]
            at = m.end("owner")
        out = "".join([*parts, text[at:]])
        if out != text:
            path.write_bytes(out.encode("utf-8"))
            changed.append(str(path.relative_to(ROOT)))
    return changed


def main(args):
    if args == ["--check"]:
        found = list(disagreements(current()))
        print("\n".join(found) or f"every address names {current()}")
        return bool(found)
    if len(args) != 1 or not re.fullmatch(LOGIN, args[0]):
        print(f"make owner NAME=…: a GitHub login was expected, got "
              f"{' '.join(args)!r}", file=sys.stderr)
        return 2
    for name in rename(args[0]):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
