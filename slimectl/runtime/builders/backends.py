"""Creates the backend that a setting selects, from slimectl or a third-party package."""

from __future__ import annotations

from typing import Any, TypeVar

from slimectl.errors import BackendError
from slimectl.plugins.registry import Registry

Backend = TypeVar("Backend")


def backend(registry: Registry, name: str, base: type[Backend]) -> Backend:
    """Load and create a backend. Raises BackendError, with the package's name, if it does not derive from `base`."""
    cls: Any = registry.load(name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise BackendError(
            f"{registry.package(name)}: its {registry.kind} {name} does not derive from "
            f"{base.__module__}.{base.__name__}. Fix or uninstall that package."
        )
    try:
        instance: Backend = cls()
    except Exception as error:  # a third-party constructor may raise anything
        raise BackendError(
            f"{registry.package(name)}: its {registry.kind} {name} cannot be created: {type(error).__name__}: {error}"
        ) from error
    return instance
