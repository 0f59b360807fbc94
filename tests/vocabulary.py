"""Find the names that texts for readers speak of, and say which of them exist.

`texts` yields what is read: the prose, captions, claims and stored outputs of
notebooks, the docstrings, comments and messages of code, the pages of the book.
`names_in` takes the names out of a text. `Vocabulary.knows` says whether a name exists
where it stands: in the same file, in the package, in Python or in a library.
"""

import ast
import builtins
import functools
import html
import importlib
import inspect
import json
import keyword
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import course

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
# `code` and ``code``, with the role of MyST before it, such as {py:func}
SPAN = re.compile(
    r"(?P<role>\{[\w:-]+\})?(?<![`\\])(?P<ticks>`{1,2})(?!`)"
    r"(?P<code>[^`]+?)(?<!`)(?P=ticks)(?!`)"
)
# name( and name= in a sentence; but not token(s), and not a == b
CALL = re.compile(r"(?<![\w.`$\\{}-])([^\W\d][\w.]*\w)\((?!s\))")
KEYWORD = re.compile(r"(?<![\w.`$\\\"'<{}-])([a-z_]\w+)=(?![=>])")
# call f with name=
WITH = re.compile(r"\b([\w.]+\w)(?:`{1,2}|\(\))? with `{0,2}(\w+)=")
# of an output: a.b, and name( in the middle of a line
OUTPUT = re.compile(
    r"(?<![\w./$'\"-])"
    r"([a-z]\w+(?:\.[a-z]\w*)+(?=[\s(])|[a-z]\w*_\w+(?=\())"
)
# a word that can only be a name, but not a matrix W_K
SNAKE = re.compile(r"(?<![\w.`$\\{}/:<-])_?[A-Za-z]\w+_\w*[^\W_](?![\w/:{}>-])")
# what is not read as a name: paths, options, commands, addresses, words-with-hyphens
FILE = re.compile(
    r"^-|/|^\.?[\w*.-]*\.(py|md|yml|yaml|cfg|csv|json|jsonl|ipynb|js|css"
    r"|txt|toml|ini|svg|gz|npy|tok|pt|bin|safetensors|tiktoken|cff|lock|git\w*)$"
    r"|^\.[a-z]+rc$|^\.(venv|pre-commit)|^\w+(-\w+)+(: .*)?$"
)
STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|'
    r"'''(?:\\.|[^\\])*?'''|"
    r'"(?:\\.|[^"\\\n])*"|'
    r"'(?:\\.|[^'\\\n])*'|#[^\n]*",
    re.S,
)
# strings that are code of another kind: HTML, CSS, JavaScript, or of Python
CODE = re.compile(r"<\w|=>|\bdocument\.|\w\{|;\s*$|\n.*[=(]|^\w+ = |\bimport \w+(;|$)")


# Code


@dataclass
class Code:
    "The code of a file: its trees, the names in them, the words that are strings."

    sources: list
    names: set = field(default_factory=set)
    attributes: set = field(default_factory=set)
    aliases: dict = field(default_factory=dict)

    def __post_init__(self):
        self.cells = {source: read_code(source) for source in self.sources}
        for cell in self.cells.values():
            self.names |= cell.identifiers | cell.words
            self.attributes |= cell.attributes
            self.aliases |= cell.aliases


@dataclass
class Cell:
    "One piece of code, read once."

    identifiers: set = field(default_factory=set)
    attributes: set = field(default_factory=set)  # and methods
    words: set = field(default_factory=set)  # strings that could be names
    aliases: dict = field(default_factory=dict)
    docstrings: list = field(default_factory=list)  # pairs of a line and a text
    strings: list = field(default_factory=list)
    comments: list = field(default_factory=list)


def parse(source):
    "Return the syntax tree of a cell or a module; lines for IPython are left out."
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.parse(without_magic(source))


def without_magic(source):
    return course.MAGIC.sub(r"\1pass", source)


@functools.cache
def read_code(source):
    "Return the names, imports, docstrings, strings and comments of some code."
    cell = Cell()
    nodes = [parse(source)]
    while nodes:
        node = nodes.pop()
        cell.identifiers |= names_of_node(node)
        cell.aliases |= imported(node)
        if isinstance(node, ast.Attribute):
            cell.attributes.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            cell.attributes |= class_members(node)
        if isinstance(node, ast.JoinedStr):
            cell.strings.append(
                (
                    node.lineno,
                    "".join(
                        "{}" if isinstance(part, ast.FormattedValue) else part.value
                        for part in node.values
                    ),
                )
            )
            nodes += [
                part.value
                for part in node.values
                if isinstance(part, ast.FormattedValue)
            ]
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            cell.strings.append((node.lineno, node.value))
            cell.words |= names_in_program(node.value)
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node):
            text = node.body.pop(0).value
            cell.docstrings.append((text.lineno, text.value))
        for name in node._fields:
            value = getattr(node, name, None)
            nodes += [
                part
                for part in (value if isinstance(value, list) else [value])
                if isinstance(part, ast.AST)
            ]
    cell.words |= {text for _, text in cell.strings if text.isidentifier()}
    cell.comments = list(comments(source))
    return cell


def names_of_node(node):
    "Return the names that a node of a syntax tree brings in itself."
    kind = type(node)
    if kind is ast.Name:
        return {node.id}
    if kind is ast.Attribute:
        return {node.attr}
    if kind is ast.arg or kind is ast.keyword:
        return {node.arg} - {None}
    if kind is ast.alias:
        return {*node.name.split("."), node.asname} - {None}
    if kind is ast.ExceptHandler or kind in DEFINITIONS:
        return {node.name} - {None}
    return set()


def names_in_program(text):
    "Return the names of the Python program that a string is, if it is one."
    if not re.search(r"^(def|class|import|from|for|with|@\w+)\b|\w = \S", text, re.M):
        return set()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return set()
    return {
        getattr(node, key)
        for node in ast.walk(tree)
        for key in ("id", "name", "arg", "attr")
        if getattr(node, key, None)
    }


def defined(source):
    "Return the names that some code defines, assigns or takes as parameters."
    names = set()
    for node in ast.walk(parse(source)):
        if not isinstance(node, (ast.Name, ast.Attribute)) or (
            isinstance(node.ctx, ast.Store)
        ):
            names |= set() if isinstance(node, ast.keyword) else names_of_node(node)
    return names


def imported(node):
    "Return what each name of an import stands for, as a dotted name."
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: alias.name
            if alias.asname
            else alias.name.split(".")[0]
            for alias in node.names
        }
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for alias in node.names
        }
    return {}


def comments(source):
    "Yield the line and the text of each comment that is no directive."
    for found in STRING_OR_COMMENT.finditer(source):
        text = found[0].lstrip("# ")
        if found[0][0] == "#" and not text.startswith(("|", "!", "noqa", "%%")):
            yield source.count("\n", 0, found.start()) + 1, text


# Texts


@dataclass(frozen=True)
class Text:
    "A text, what kind of text it is, where it stands, and beside which code."

    where: str
    kind: str
    text: str
    code: Code = field(repr=False)


def texts(root):
    "Yield every text for readers that may speak of names."
    for path in sorted((root / "tformer").rglob("*.py")):
        if path.name != "_modidx.py":
            source = path.read_text(encoding="utf-8")
            where = path.relative_to(root).as_posix()
            yield from texts_of_code(where, source, Code([source]))
    for path in course.notebook_paths(root):
        yield from texts_of_notebook(root, path)
    for path in [*sorted((root / "book").glob("*.md")), *sorted(root.glob("*.md"))]:
        yield from texts_of_page(root, path)


def texts_of_code(where, source, code):
    "Yield the docstrings, messages and comments of a module or a cell."
    cell = code.cells[source]
    for line, text in cell.docstrings:
        yield Text(f"{where}:{line}", "docstring", text, code)
    for line, text in cell.strings:
        if " " in text.strip() and not CODE.search(text):
            yield Text(f"{where}:{line}", "message", text, code)
    for line, text in cell.comments:
        yield Text(f"{where}:{line}", "comment", text, code)


def texts_of_page(root, path):
    "Yield the paragraphs of a page, with the names of the code that it is about."
    code = Code([])
    if path.name in {"maintain.md", "CONTRIBUTING.md"}:
        code = maintenance(root)
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(root).as_posix()
    yield from programs(name, text, code)
    line = 1
    for block in re.split(r"(\n\s*\n)", prose(text)):
        if block.strip():
            yield Text(f"{name}:{line}", "prose", block, code)
        line += block.count("\n")


@functools.cache
def maintenance(root):
    "Return the names of the tests and of the book's extensions; targets of make."
    files = [*(root / "tests").glob("*.py"), *(root / "book" / "_ext").glob("*.py")]
    code = Code([path.read_text(encoding="utf-8") for path in files])
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    code.names |= set(re.findall(r"^(\w+)(?=:| \?=)", makefile, re.M))
    return code


FENCE = re.compile(r"^(`{3,}|~{3,}|:{3,})(?!\{)([^\n]*)\n(.*?)^\1[ \t]*$", re.M | re.S)


def programs(where, text, code):
    "Yield the blocks of Python in a page, beside the names that they define."
    blocks = [
        found[3] for found in FENCE.finditer(text) if found[2].strip() == "python"
    ]
    own = Code([])
    own.names = code.names.union(*map(defined, blocks))
    own.attributes = code.attributes
    own.aliases = code.aliases | Code(blocks).aliases
    for block in blocks:
        yield Text(where, "program", block, own)


def prose(text):
    "Return Markdown without its blocks of code; the lines keep their numbers."
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


EXPORT = {"export", "exporti"}


def texts_of_notebook(root, path):
    """Yield the prose, captions, claims and outputs of a notebook, and its code.

    Exported cells are read where they are exported to, in their module.
    """
    name = path.relative_to(root).as_posix()
    cells = [
        (
            cell,
            without_magic(course.source(cell)),
            course.directives(course.source(cell))[0],
        )
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]
    module = course.read_notebook(path).module
    sources = [
        source
        for cell, source, said in cells
        if cell["cell_type"] == "code" and not EXPORT & said.keys()
    ]
    if module:
        sources.append(course.module_path(root, module).read_text(encoding="utf-8"))
    code = Code(sources)
    for n, (cell, source, said) in enumerate(cells):
        where = f"{name}:cell {n}"
        if cell["cell_type"] == "markdown":
            yield Text(where, "prose", prose(source), code)
            yield from programs(where, source, code)
            continue
        for key in ("code-summary", "verified", "setup"):
            if key in said:
                yield Text(
                    where,
                    "caption" if key == "code-summary" else "claim",
                    said[key],
                    code,
                )
        if not EXPORT & said.keys():
            yield from texts_of_code(where, source, code)
        for out in cell.get("outputs", []):
            yield from (Text(where, kind, text, code) for kind, text in shown(out))


def shown(out):
    "Yield what an output shows as text, and the words of its drawings."
    data = out.get("data", {})
    yield "output", "".join(out.get("text", "")) + out.get("evalue", "")
    if "text/html" not in data:
        yield "output", "".join(data.get("text/plain", ""))
    for words in re.findall(
        r"<(?:text|title|desc)\b[^>]*>([^<]*)<", "".join(data.get("text/html", ""))
    ):
        yield "figure", html.unescape(words)


# Names in a text


def names_in(text):
    """Yield the dotted names of which a text speaks.

    In prose they are the spans of code. In docstrings, comments and messages they are
    these, `name(`, `name=` and words with an underscore; in captions, claims and
    drawings these words too. An output is searched for calls and for the modules of the
    package with what is behind their dot.
    """
    if text.kind == "output":
        for name in OUTPUT.findall(text.text):
            if not FILE.search(name):  # a report is headed by its check
                yield f"tformer.{name}" if name.startswith("check.") else name
        return
    if text.kind == "program":
        yield from names_in_tree(parse(text.text))
        return
    for found in SPAN.finditer(text.text):
        role = found["role"] or ""
        if not role or role.startswith("{py:"):
            yield from names_in_span(found["code"])
    if text.kind != "prose":
        rest = SPAN.sub("``", text.text)
        words = SNAKE.findall(rest)
        # a message in which every third word has an underscore is a table of data
        if text.kind != "message" or len(words) < max(3, len(rest.split()) / 3):
            yield from words
        if text.kind != "figure":
            yield from CALL.findall(rest)
            yield from KEYWORD.findall(rest)
            yield from ("(".join(found) for found in WITH.findall(text.text))


def names_in_span(code):
    """Yield the names that a span of code holds, each as a dotted name.

    What is no Python has none: a path, an option, a command, a token of a text. An
    attribute of something that has no name begins with a dot.
    """
    code = re.sub(r"^(.*\S)\s*<([^<>]*)>$", r"\2", code.strip()).lstrip("~!")
    if FILE.search(code):
        return
    code = re.sub(r"=(…|\.\.\.)?$", "=0", code)
    code = re.sub(r"^\.(?=[a-z_])", "_.", code)
    try:
        tree = ast.parse(code.replace("…", "..."))
    except SyntaxError:
        return
    yield from names_in_tree(tree)


def names_in_tree(tree):
    "Yield the names of a tree, `a.b.c` as one, and its keywords as `f(keyword`."
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in inner:
            yield dotted(node)
        elif isinstance(node, ast.Call):
            yield from (
                f"{dotted(node.func)}({keyword.arg}"
                for keyword in node.keywords
                if keyword.arg
            )
        elif isinstance(node, DEFINITIONS):
            yield node.name


def dotted(node):
    "Return a name or an attribute as a dotted name; that of ``f(x).y`` is ``.y``."
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return (
        node.id.removeprefix("_")
        if isinstance(node, ast.Name) and (node.id == "_")
        else getattr(node, "id", "")
    )


def first_name(caption):
    "Return the name with which a caption begins, or None."
    found = re.match(
        r"`(?P<a>[^`]+)`|(?P<b>\w+)\(\)|(?P<c>\w+)(?=[,:]|$)"
        r"|(?P<d>\w+_\w+|[A-Za-z]+[a-z][A-Z]\w*)",
        caption,
    )
    return found and next(filter(None, found.groups()))


# What exists


@functools.cache
def load(name):
    "Import a module; None if there is none."
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@functools.cache
def exists(name):
    "Whether a dotted name leads from a module that can be imported to something."
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        found = load(".".join(parts[:n]))
        if found is not None:
            for part in parts[n:]:
                if not hasattr(found, part):
                    return hasattr(found, "__annotations__") and (
                        part in found.__annotations__
                    )
                found = getattr(found, part)
            return True
    return False


def parameters(function):
    "Return the names of the parameters of a callable, as far as Python knows them."
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


class Package:
    """The names that the package defines, and the members of each of its classes.

    ``names`` are those of modules, functions, classes, methods, parameters, attributes
    and of the variables of modules. Local variables are none of them.
    """

    def __init__(self, root):
        self.names = set()
        self.members = {}
        self.bases = {}
        self.modules = set()
        self.parameters = {}  # of each function and class of a module
        for path in sorted((root / "tformer").rglob("*.py")):
            if path.name == "_modidx.py":
                continue
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            self.names |= set(parts)
            self.modules.add(".".join(parts))
            self._read(parse(path.read_text(encoding="utf-8")))
        self.paths = {}  # of the modules, by their last names
        for module in self.modules:
            self.paths.setdefault(module.rpartition(".")[2], []).append(module)
        self.attributes = {name for names in self.members.values() for name in names}
        self.names |= self.attributes
        # the programs of the project, and the models that come with it
        self.names |= {
            path.stem
            for folder in ("tests", "experiments", "book/_ext")
            for path in (root / folder).rglob("*.py")
        }
        self.names |= {path.name for path in (root / "tformer" / "weights").iterdir()}

    def _read(self, tree):
        for node in tree.body:
            self.names |= assigned(node)
            if isinstance(node, DEFINITIONS):
                self.parameters.setdefault(node.name, set()).update(
                    fields(node) if isinstance(node, ast.ClassDef) else takes(node)
                )
        for node in ast.walk(tree):
            if isinstance(node, DEFINITIONS):
                self.names.add(node.name)
            if isinstance(node, ast.ClassDef):
                self.members.setdefault(node.name, set()).update(class_members(node))
                self.bases.setdefault(node.name, set()).update(
                    ast.unparse(base).split("[")[0].split(".")[-1]
                    for base in node.bases
                )
            elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
                self.names |= takes(node)

    def path_of(self, name):
        """Return the path of the module that a text means by its last name.

        The names of a text do without the room: `validate.integer`. A name that
        no module has is taken to stand in no room.
        """
        path = f"tformer.{name}"
        found = self.paths.get(name, [path])
        return path if path in found else found[0]

    @functools.cache  # noqa: B019 (there is one package)
    def all_members(self, cls):
        "Return the members of a class and of its bases."
        if cls not in self.members:
            library = BASES.get(cls)
            return set(dir(find(library))) if library else set(dir(object))
        return self.members[cls].union(
            set(dir(type)), *map(self.all_members, self.bases[cls])
        )


def takes(function):
    "Return the names of the parameters of a function; ** if it takes any."
    args = function.args
    return {
        arg.arg
        for arg in [
            *args.posonlyargs,
            *args.args,
            *args.kwonlyargs,
            args.vararg,
            args.kwarg,
        ]
        if arg
    } | ({"**"} if args.kwarg else set())


def fields(cls):
    "Return the names by which a class is made: of its fields, or of its __init__."
    names = {"**"} if cls.bases else set()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return takes(node)
        if isinstance(node, ast.AnnAssign):
            names |= assigned(node)
    return names


def find(name):
    "Return a class by its dotted name."
    module, _, last = name.rpartition(".")
    return getattr(load(module), last)


# the bases of the package's classes, as far as they have members worth naming
BASES = {
    "Module": "torch.nn.Module",
    "Linear": "torch.nn.Linear",
    "Embedding": "torch.nn.Embedding",
    "Optimizer": "torch.optim.Optimizer",
    "NamedTuple": "builtins.tuple",
    "ValueError": "builtins.ValueError",
    "RuntimeError": "builtins.RuntimeError",
    "dict": "builtins.dict",
}


def assigned(node):
    "Return the names that a statement assigns."
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else ([node.target] if isinstance(node, ast.AnnAssign) else [])
    )
    return {
        part.id
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name)
    }


def class_members(cls):
    "Return the methods and attributes that the body of a class defines."
    names = set()
    for node in cls.body:
        names |= assigned(node)
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {
            "self.register_buffer",
            "self.register_parameter",
        }:
            names |= {
                arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)
            }
    return names


# libraries that may be looked into, and their usual short names
LIBRARIES = {
    "torch",
    "numpy",
    "einops",
    "matplotlib",
    "tokenizers",
    "sacrebleu",
    "transformers",
    "safetensors",
    "tiktoken",
    "jaxtyping",
    "regex",
    "tqdm",
    "huggingface_hub",
    *sys.stdlib_module_names,
}
SHORT = {
    "np": "numpy",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "plt": "matplotlib.pyplot",
}
# whatever they stand for has attributes
VALUES = {"self", "cls", "model", "tokenizer", "cache", "engine"}
# modules of which every public name counts, with the parameters of functions
NAMESPACES = (
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
)
CLASSES = (
    "torch.Tensor",
    "torch.dtype",
    "torch.nn.Module",
    "torch.nn.MultiheadAttention",
    "torch.nn.Linear",
    "torch.nn.Embedding",
    "torch.optim.Optimizer",
    "torch.utils.flop_counter.FlopCounterMode",
    "numpy.ndarray",
    "pathlib.Path",
    "matplotlib.figure.Figure",
    *(
        f"builtins.{cls}"
        for cls in (
            "str",
            "bytes",
            "list",
            "tuple",
            "dict",
            "set",
            "int",
            "float",
            "type",
            "object",
            "BaseException",
        )
    ),
)
# of transformers, the files whose parameters and attributes count
PEERS = (
    "models/bert/configuration_bert",
    "models/bert/modeling_bert",
    "models/gpt2/configuration_gpt2",
    "models/gpt2/modeling_gpt2",
    "models/llama/configuration_llama",
    "models/llama/modeling_llama",
    "generation/configuration_utils",
    "generation/utils",
    "cache_utils",
    "modeling_outputs",
    "pytorch_utils",
)


def library_attributes():
    "Return the members of the classes that everybody knows."
    names = set()
    for name in CLASSES:
        cls = find(name)
        names |= {cls.__name__, *dir(cls)}
        if name.startswith("torch.nn."):  # what its __init__ sets
            names |= class_members(parse(inspect.getsource(cls)).body[0])
        for member in {*public(cls), "__init__"}:
            names |= parameters(getattr(cls, member))
    return names


def library_names():
    "Return what Python and the libraries call their functions and parameters."
    names = {
        *keyword.kwlist,
        *dir(builtins),
        *LIBRARIES,
        *SHORT,
        *VALUES,
        "__getattr__",
        "__all__",
        "__main__",
        "__file__",
        "__version__",
    }
    for module in map(load, NAMESPACES):
        for name in public(module):
            names |= {name, *parameters(getattr(module, name))}
    return names


@functools.cache
def peer_names():
    "Return the classes of transformers, and the names in the models we compare with."
    transformers = load("transformers")
    names = public(transformers)
    for file in PEERS:
        path = Path(transformers.__file__).parent / f"{file}.py"
        for node in ast.walk(parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names |= {node.name, *class_members(node)}
            elif isinstance(node, ast.FunctionDef):
                names |= {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]}
    return names


class Vocabulary:
    "What the package, Python and the libraries call things."

    def __init__(self, root):
        self.package = Package(root)
        self.attributes = self.package.attributes | library_attributes()
        self.names = self.package.names | self.attributes | library_names()

    def knows(self, name, code):
        """Whether a name, perhaps dotted, exists where it stands.

        Its first part is looked up in the file, in the package and in the libraries.
        Each other part has to be a member of what stands before it; if that is the
        value of a variable, it has to be a member of some class. A private name has to
        stand in the same file.
        """
        first, *rest = name.split(".")
        if len(name) == 1:
            return True
        if "(" in name:
            return self._takes(*name.split("("), code)
        if not rest:
            return self._is_name(name, code)
        return self._is_path(first, rest, code)

    def _is_name(self, name, code):
        private = re.match(r"_[a-z]", name) and not name.endswith("__")
        return name in code.names or (
            not private and (name in self.names or name in peer_names())
        )

    def _is_path(self, first, rest, code):
        "Whether a name with dots leads from a module, a class or a value to something."
        name = ".".join([first, *rest])
        if self._is_in_module(name, code) or exists(f"builtins.{name}"):
            return True
        if first in self.package.members:
            return self._is_member(first, rest)
        if first == "tformer":
            return False
        is_module = self.package.path_of(first) in self.package.modules
        is_value = (
            not first
            or first in code.names
            or first in VALUES
            or (
                first in peer_names() or (first in self.package.names and not is_module)
            )
        )
        return (
            is_value
            and code.aliases.get(first) is None
            and all(self._is_attribute(part, code) for part in rest)
        )

    def _takes(self, function, keyword, code):
        "Whether a function, if the package has one of that name, has that parameter."
        module, _, last = function.rpartition(".")
        known = self.package.parameters.get(last, {"**"})
        if "**" in known or (
            module and self.package.path_of(module) not in self.package.modules
        ):
            return self.knows(keyword, code)
        return keyword in known

    def _is_attribute(self, name, code):
        return (
            len(name) == 1
            or name in self.attributes
            or name in code.attributes
            or name in peer_names()
        )

    def _is_member(self, cls, rest):
        "Whether a class of the package has a member of its own or of its bases."
        return (
            cls in self.package.members
            and (rest[0] in self.package.all_members(cls))
            and all(part in self.attributes for part in rest[1:])
        )

    def _is_in_module(self, name, code):
        "Whether a dotted name leads from a module to something."
        first, _, rest = name.partition(".")
        head = code.aliases.get(first) or SHORT.get(first)
        if head is None:
            head = first if first in LIBRARIES else self.package.path_of(first)
        name = f"{head}.{rest}" if first != "tformer" else name
        if name.split(".")[0] == "tformer":
            parts = name.split(".")
            for n in range(len(parts) - 1, 0, -1):
                if ".".join(parts[:n]) in self.package.modules:
                    return exists(name) or self._is_member(
                        parts[n], parts[n + 1 :] or ["__class__"]
                    )
            return False
        return name.split(".")[0] in LIBRARIES and exists(name)
