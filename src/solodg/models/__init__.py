"""Networks that turn images into features: backbones by name, image norm, extractors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from solodg.models.backbones import Backbone, build_backbone
    from solodg.models.extractor import Extractor, ReadyFeatures, Standardised

__all__ = ["Backbone", "Extractor", "ReadyFeatures", "Standardised", "build_backbone"]

_MODULES = {"Backbone": "backbones", "build_backbone": "backbones"}


def __getattr__(name: str) -> Any:
    """Imports a public name from its module when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'extractor')}"), name)
