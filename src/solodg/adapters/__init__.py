"""Test-time methods by name. Adding one: a file here, an entry below, a row in the README."""

from solodg.adapters.base import Adapter
from solodg.adapters.none import NoAdapter

ADAPTERS: dict[str, type[Adapter]] = {"none": NoAdapter}

__all__ = ["ADAPTERS", "Adapter"]
