"""Builds components from settings. Only this package refers to adapters by name, and it imports each on first use.

The modules of this package are also imported on first use, so a command imports only what it builds. `__init__.pyi`
lists their names.
"""

from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {line.split()[3]: line.split()[1] for line in _STUB.splitlines()}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    """Import the module of a name when the name is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
