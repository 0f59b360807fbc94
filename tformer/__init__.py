"""The Transformer, part by part; a module is imported when it is first used."""

import importlib
import pkgutil

__version__ = "0.1.0"
_modules = sorted(
    m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")
)
# what `from tformer import *` imports: tformer.plot needs the extra [plot]
__all__ = [name for name in _modules if name != "plot"]


def __getattr__(name: str):
    "``tformer.check`` and the like, imported when they are asked for."
    if name == "load":  # tformer.load("stories"): a trained model
        return importlib.import_module(".bundle", __name__).load_bundle
    if name in _modules:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(
        f"tformer has no module {name!r}; it has {', '.join(_modules)}"
    )


def __dir__() -> list[str]:
    own = [name for name in globals() if name.startswith("__")]
    return [*own, *_modules, "load"]  # without what this file imports
