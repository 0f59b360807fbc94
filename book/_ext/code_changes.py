"""Change one place of a module, found by its name and its syntax.

A test that claims to see a mistake has to be seen failing on that mistake. Such
a mistake is written down as a place and a pair of patterns::

    where: attend.causal_mask
    old: $key_positions[:, None, :] <= $positions[:, :, None]
    new: $key_positions[:, None, :] < $positions[:, :, None]

``where`` is a module of the package, followed by the qualified name of a function,
a class or a constant in it. ``old`` is Python code in which ``$name`` stands for any
expression; behind a dot, before ``=`` in a call, and where a function or a parameter
is named, it stands for any name. ``$$name`` stands for any number of statements,
elements or arguments, ``**$$name`` for any number of keyword arguments. The
same ``$name`` has to match the same code each time. ``new`` is what takes the place of
the match, with the same stand-ins; an empty ``new`` removes statements.

Patterns are compared with the syntax tree, so neither the layout of the code nor a
comment matters, and because local names are written as stand-ins, renaming them
leaves every pattern as it is. A pattern has to match exactly once.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

ONE = "STAND_IN_"
MANY = "STAND_INS_"
SKIPPED = {"ctx", "type_comment", "kind"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class ChangeError(ValueError):
    """A change does not apply: its place or its pattern is not there, or not unique."""


@dataclass(frozen=True)
class CodeChange:
    """One mistake to be made on purpose; see the module's docstring."""

    where: str
    old: str
    new: str


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a YAML file that lists changes.

    They are read by libyaml where PyYAML has it, in a tenth of the time.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)


# --- patterns


def parse_pattern(text: str) -> ast.expr | list[ast.stmt]:
    """Return the pattern's expression, or its statements where it is not one."""
    text = re.sub(r"\$\$(\w+)", rf"{MANY}\1", text)
    text = re.sub(r"\$(\w+)", rf"{ONE}\1", text)
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        try:
            return ast.parse(text).body
        except SyntaxError as error:
            raise ChangeError(f"the pattern is not Python: {text!r}") from error


def unparse_pattern(pattern: ast.AST | list[ast.stmt]) -> str:
    """Return the text of a pattern; the inverse of `parse_pattern`."""
    nodes = pattern if isinstance(pattern, list) else [pattern]
    text = "\n".join(ast.unparse(node) for node in nodes)
    return text.replace(MANY, "$$").replace(ONE, "$")


def stand_in(node: object, prefix: str) -> str | None:
    """Return the name of a stand-in of this kind, or None if it is something else."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.keyword) and node.arg is None:
        node = node.value
    if isinstance(node, ast.arg):
        node = node.arg
    if isinstance(node, ast.Name):
        node = node.id
    if isinstance(node, str) and node.startswith(prefix):
        return node.removeprefix(prefix)
    return None


def all_parameters(node: ast.AST) -> str | None:
    """Return the name of the stand-in for a whole list of parameters, or None."""
    if isinstance(node, ast.arguments) and len(node.args) == 1:
        return stand_in(node.args[0], MANY)
    return None


def same(a: object, b: object) -> bool:
    """Return whether two pieces of code are equal, wherever they stand."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, ast.AST) and isinstance(b, ast.AST):
        return type(a) is type(b) and all(
            same(getattr(a, name, None), getattr(b, name, None))
            for name in a._fields
            if name not in SKIPPED
        )
    return type(a) is type(b) and a == b


def match(pattern: object, code: object, found: dict) -> dict | None:
    """Return what the stand-ins stand for if `code` matches, else None.

    `found` holds what is known before; it is not changed.
    """
    if isinstance(pattern, list):
        return match_list(pattern, code, found) if isinstance(code, list) else None
    if isinstance(pattern, ast.Name) and (name := stand_in(pattern, ONE)):
        return (
            bind(("expression", name), code, found)
            if isinstance(code, ast.expr)
            else None
        )
    if isinstance(pattern, ast.Expr) and (name := stand_in(pattern, ONE)):
        return (
            bind(("statement", name), code, found)
            if isinstance(code, ast.stmt)
            else None
        )
    if isinstance(pattern, ast.AST):
        return match_node(pattern, code, found)
    return found if type(pattern) is type(code) and pattern == code else None


def match_node(pattern: ast.AST, code: object, found: dict) -> dict | None:
    if type(pattern) is not type(code):
        return None
    if name := all_parameters(pattern):
        return bind(("parameters", name), code, found)
    for field in pattern._fields:
        if field in SKIPPED:
            continue
        part = getattr(pattern, field, None)
        other = getattr(code, field, None)
        if isinstance(part, str) and (name := stand_in(part, ONE)):
            kind = f"{type(pattern).__name__}.{field}"
            found = bind((kind, name), other, found) if isinstance(other, str) else None
        else:
            found = match(part, other, found)
        if found is None:
            return None
    return found


def match_list(pattern: list, code: list, found: dict) -> dict | None:
    if not pattern:
        return found if not code else None
    name = stand_in(pattern[0], MANY)
    if name is None:
        if not code or (now := match(pattern[0], code[0], found)) is None:
            return None
        return match_list(pattern[1:], code[1:], now)
    for length in range(len(code) + 1):
        now = bind(("list", name), code[:length], found)
        if now is not None:
            now = match_list(pattern[1:], code[length:], now)
        if now is not None:
            return now
    return None


def bind(key: tuple[str, str], code: object, found: dict) -> dict | None:
    if key[1] == "_":  # stands for anything, each time for something else
        return found
    if key in found:
        return found if same(found[key], code) else None
    return {**found, key: code}


class Filled(ast.NodeTransformer):
    """Puts the code that was found in the place of the stand-ins."""

    def __init__(self, found: dict):
        self.found = found

    def look_up(self, kind: str, name: str):
        try:
            return copy.deepcopy(self.found[kind, name])
        except KeyError:
            raise ChangeError(
                f"${name} is in the new code, but not as the same kind "
                "of thing in the old code"
            ) from None

    def fill_list(self, nodes: list) -> list:
        out = []
        for node in nodes:
            if name := stand_in(node, MANY):
                out += self.look_up("list", name)
            else:
                out.append(self.visit(node) if isinstance(node, ast.AST) else node)
        return out

    def visit_Name(self, node):
        name = stand_in(node, ONE)
        return self.look_up("expression", name) if name else node

    def visit_Expr(self, node):
        name = stand_in(node, ONE)
        return self.look_up("statement", name) if name else self.generic_visit(node)

    def generic_visit(self, node):
        if name := all_parameters(node):
            return self.look_up("parameters", name)
        for field, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, field, self.fill_list(value))
            elif isinstance(value, ast.AST):
                setattr(node, field, self.visit(value))
            elif name := stand_in(value, ONE):
                kind = f"{type(node).__name__}.{field}"
                setattr(node, field, self.look_up(kind, name))
        return node


def fill(pattern: ast.expr | list[ast.stmt], found: dict):
    """Return a copy of the pattern with code in the place of the stand-ins."""
    filled = Filled(found)
    pattern = copy.deepcopy(pattern)
    if isinstance(pattern, list):
        return filled.fill_list(pattern)
    return filled.visit(pattern)


# --- places


def split_where(where: str, root: Path) -> tuple[Path, str]:
    """Return the module's file under `root` and the qualified name in it.

    `root` is the folder of the package. The longest beginning that names a file is
    the module.
    """
    parts = where.split(".")
    for length in range(len(parts), 0, -1):
        path = Path(root, *parts[:length]).with_suffix(".py")
        if path.is_file():
            return path, ".".join(parts[length:])
    raise ChangeError(f"no module of the package begins the name {where!r}")


def definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each name that a body defines, also under if, try and with."""
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield node.name, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in getattr(target, "elts", [target]):
                    if isinstance(part, ast.Name):
                        yield part.id, node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, DEFINITIONS):
                yield from definitions(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from definitions(handler.body)


def scopes(tree: ast.Module, qualname: str) -> list[ast.AST]:
    """Return the definitions of a qualified name; the whole module for an empty one."""
    found: list[ast.AST] = [tree]
    for part in qualname.split(".") if qualname else []:
        found = [
            node
            for scope in found
            for name, node in definitions(getattr(scope, "body", []))
            if name == part
        ]
    return found


def places(scope: ast.AST, pattern) -> Iterator[tuple[object, dict]]:
    """Yield each match in a scope: an expression, or a list of statements."""
    for node in ast.walk(scope):
        if isinstance(pattern, ast.expr):
            if isinstance(node, ast.expr):
                found = match(pattern, node, {})
                if found is not None:
                    yield node, found
            continue
        for body in bodies(node):
            for first in range(len(body) - len(pattern) + 1):
                for end in ends(pattern, first, len(body)):
                    found = match_list(pattern, body[first:end], {})
                    if found is not None:
                        yield body[first:end], found
                        break
    if isinstance(pattern, list) and isinstance(scope, ast.stmt):
        found = match_list(pattern, [scope], {})
        if found is not None:
            yield [scope], found


def ends(pattern: list, first: int, length: int) -> Iterable[int]:
    if any(stand_in(part, MANY) for part in pattern):
        return range(length, first, -1)
    return [first + len(pattern)]


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list):
            yield body


@lru_cache(maxsize=64)
def parse(source: str) -> ast.Module:
    """Return the syntax tree of a source, which callers must not change."""
    return ast.parse(source)


def locate(source: str, qualname: str, change: CodeChange):
    """Return the tree, the one match of a change, and what its stand-ins stand for."""
    tree = parse(source)
    within = scopes(tree, qualname)
    if not within:
        raise ChangeError(f"{change.where} is not defined")
    pattern = parse_pattern(change.old)
    found = [place for scope in within for place in places(scope, pattern)]
    if len(found) != 1:
        raise ChangeError(
            f"{change.where} has {len(found)} places, expected one, "
            f"that match: {change.old}"
        )
    return tree, *found[0]


def apply(source: str, qualname: str, change: CodeChange) -> str:
    """Return a module's source, changed in the one place that matches.

    Raises ``ChangeError`` if the qualified name is not defined, if the pattern
    matches there more or less often than once, or if nothing would change.
    """
    tree, place, found = locate(source, qualname, change)
    new = parse_pattern(change.new) if change.new.strip() else []
    if isinstance(place, list) and isinstance(new, ast.expr):
        new = [ast.Expr(new)]
    if not isinstance(place, list) and isinstance(new, list):
        raise ChangeError(f"{change.where}: an expression cannot become {change.new!r}")
    new = fill(new, found)
    if same(place, new):
        raise ChangeError(f"{change.where}: {change.new!r} changes nothing")
    first, end, text = splice(source, tree, place, new)
    return source[:first] + text + source[end:]


def preview(source: str, qualname: str, change: CodeChange) -> tuple[str, str]:
    """Return the code that a change replaces and what replaces it, for a reader."""
    _, place, found = locate(source, qualname, change)
    new = parse_pattern(change.new) if change.new.strip() else []
    if isinstance(place, list) and isinstance(new, ast.expr):
        new = [ast.Expr(new)]
    filled = fill(new, found)
    return tuple(
        "\n".join(
            ast.unparse(ast.fix_missing_locations(n))
            for n in (code if isinstance(code, list) else [code])
        )
        for code in (place, filled)
    )


# --- text


def offset(source: str, line: int, column: int) -> int:
    """Return the index in the text of a line (from 1) and a column in bytes."""
    lines = source.splitlines(keepends=True)
    before = sum(map(len, lines[: line - 1]))
    return before + len(lines[line - 1].encode()[:column].decode())


def splice(source: str, tree: ast.Module, place, new) -> tuple[int, int, str]:
    """Return where the match stands in the text, and what is to stand there."""
    if isinstance(place, ast.expr):
        if (outer := f_string_around(tree, place)) is not None:
            new = replaced(outer, place, new)
            place = outer
        first = offset(source, place.lineno, place.col_offset)
        end = offset(source, place.end_lineno, place.end_col_offset)
        return first, end, f"({ast.unparse(ast.fix_missing_locations(new))})"
    head = place[0]
    line = min([head.lineno, *(d.lineno for d in getattr(head, "decorator_list", []))])
    column = head.col_offset
    first = offset(source, line, column)
    end = offset(source, place[-1].end_lineno, place[-1].end_col_offset)
    texts = [ast.unparse(ast.fix_missing_locations(node)) for node in new] or ["pass"]
    if source[:first].rpartition("\n")[2].strip():  # behind a colon
        return first, end, "; ".join(texts)
    text = "\n".join(texts)
    return first, end, text.replace("\n", "\n" + " " * column)


def f_string_around(tree: ast.Module, place: ast.expr) -> ast.JoinedStr | None:
    """Return the f-string in which an expression stands: its parts have no place."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.JoinedStr)
            and node is not place
            and any(inner is place for inner in ast.walk(node))
        ):
            return node
    return None


def replaced(tree: ast.AST, old: ast.AST, new: ast.AST) -> ast.AST:
    """Return a copy of a tree in which one node is another."""

    class Swap(ast.NodeTransformer):
        def visit(self, node):
            return new if node is old else self.generic_visit(node)

        def generic_visit(self, node):
            node = copy.copy(node)
            for name, value in ast.iter_fields(node):
                if isinstance(value, list):
                    setattr(
                        node,
                        name,
                        [self.visit(v) if isinstance(v, ast.AST) else v for v in value],
                    )
                elif isinstance(value, ast.AST):
                    setattr(node, name, self.visit(value))
            return node

    return Swap().visit(tree)
