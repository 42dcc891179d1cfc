"""Makes the backend that a setting names: slimectl's own, or that of another package."""

from __future__ import annotations

from typing import Any, TypeVar

from slimectl.errors import BackendError
from slimectl.registry import Registry

Backend = TypeVar("Backend")


def backend(registry: Registry, name: str, base: type[Backend]) -> Backend:
    """Load and make a backend. Raises BackendError, with the package's name, for one that does not fit `base`."""
    cls: Any = registry.load(name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise BackendError(
            f"{registry.package(name)}: its {registry.kind} {name} does not derive from "
            f"{base.__module__}.{base.__name__}; repair or uninstall that package"
        )
    try:
        instance: Backend = cls()
    except Exception as error:  # whatever a stranger's constructor raises
        raise BackendError(
            f"{registry.package(name)}: its {registry.kind} {name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return instance
