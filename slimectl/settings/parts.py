"""Settings that name a registered part, and the sections that parts of other packages bring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import AfterValidator, BaseModel, WithJsonSchema
from pydantic_core import PydanticCustomError

from slimectl.errors import BackendError
from slimectl.registry import ENGINES, EXECUTORS, POLICIES, TRACKERS, Registry

UNKNOWN_PART = "unknown_part"
"""Type of pydantic's error for a name that no registry has; its message quotes the value itself."""

SETTINGS = {
    ("engine", "backend"): ENGINES,
    ("train", "backend"): POLICIES,
    ("cluster", "executor"): EXECUTORS,
    ("track", "with"): TRACKERS,
}
"""Settings that name parts which may bring a section of their own, and where the parts are registered."""


def registered_in(registry: Registry) -> tuple[AfterValidator, WithJsonSchema]:
    """The validation of a string that names a part: unpack it into an Annotated."""

    def check(name: str) -> str:
        if name not in registry:
            raise PydanticCustomError(UNKNOWN_PART, "{message}", {"message": registry.unknown(name)})
        return name

    own = {"enum": sorted(registry.parts)}
    return AfterValidator(check), WithJsonSchema(
        {"anyOf": [own, {"type": "string", "description": f"{registry.kind} of another package"}]}
    )


def section_class(section: str) -> type[BaseModel] | None:
    """The settings class of the part of another package that has this name; None if there is none.

    Raises BackendError for a package that cannot be imported, or whose `settings_class` is none.
    """
    for registry in SETTINGS.values():
        if registry.is_third_party(section) and (cls := registry.fact(section, "settings_class")) is not None:
            if not (isinstance(cls, type) and issubclass(cls, BaseModel)):
                raise BackendError(
                    f"{registry.package(section)}: settings_class of its {registry.kind} {section} is no pydantic "
                    f"model; derive it from slimectl.settings.base.Section"
                )
            return cls
    return None


def section_names() -> list[str]:
    """Names of all parts of other packages, each of which may bring a section."""
    return sorted({name for registry in SETTINGS.values() for name in registry.names() if name not in registry.parts})


def selected_parts(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Names of the parts of other packages that the values select."""
    for (section, key), registry in SETTINGS.items():
        names = values.get(section, {}).get(key)
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str) and registry.is_third_party(name):
                yield name
