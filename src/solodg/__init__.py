"""SoloDG: image classifiers, trained on several domains, that adapt to each single test image."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from solodg.model import Model, load
    from solodg.sklearn import SoloClassifier
    from solodg.training import train

__all__ = ["Model", "SoloClassifier", "__version__", "load", "train"]
# Imported on first use: `SoloClassifier` imports torch.
_MODULES = {
    "Model": "solodg.model",
    "SoloClassifier": "solodg.sklearn",
    "load": "solodg.model",
    "train": "solodg.training",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use; the version takes a while to read as well."""
    if name == "__version__":
        from importlib.metadata import version

        return version("solodg")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'solodg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
