"""Base class of all settings sections, types for the names of registered parts, and sections of third-party parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from slimectl.errors import BackendError
from slimectl.plugins.registry import ENGINES, EXECUTORS, POLICIES, TRACKERS, Registry
from slimectl.settings import aliases
from slimectl.system.redaction import redact

PositiveInt = Annotated[int, Field(ge=1)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=2)]
AdditivePenalty = Annotated[float, Field(ge=-2, le=2)]
ListOfTexts = BeforeValidator(lambda value: [value] * bool(value) if isinstance(value, str) else value)
Texts = Annotated[list[str], ListOfTexts]
"""A list of strings. A single string is a list of one. An empty string is an empty list: `-s sft_warmup.data=`."""


class Section(BaseModel):
    """An immutable section that rejects unknown keys. The docstring under each field documents it.

    Docstrings are read only for the reference (`settings/reference.py`). Validators are built at first use, which keeps
    commands fast.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        coerce_numbers_to_str=True,
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    section_name: ClassVar[str] = ""
    """Name of the section, if some of its keys were renamed. Hooks may still read the old attributes."""

    if not TYPE_CHECKING:  # the code of slimectl itself uses the present names, which mypy checks

        def __getattr__(self, name: str) -> Any:
            """Return the value of an old key, for scripts that still read it."""
            new = aliases.KEYS.get(type(self).section_name, {}).get(name)
            if new is None:
                return super().__getattr__(name)
            field = new if new in type(self).model_fields else f"{new}_"  # `with` is a Python keyword
            return aliases.current_value(self.section_name, name, getattr(self, field))  # for an inverted key, too

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Names and values for the repr, with secrets masked: tracebacks and test reports print settings."""
        for name, value in super().__repr_args__():
            yield name, redact(value)


UNKNOWN_PART = "unknown_part"
"""Type of the pydantic error for an unregistered name. Its message already quotes the value."""

SETTINGS = {
    ("engine", "backend"): ENGINES,
    ("train", "backend"): POLICIES,
    ("cluster", "executor"): EXECUTORS,
    ("track", "with"): TRACKERS,
}
"""Settings that select parts, which may have a section of their own, and the registries of these parts."""


def registered_in(registry: Registry) -> tuple[AfterValidator, WithJsonSchema]:
    """Return the validation of a string that names a part, to unpack into an Annotated."""

    def check(name: str) -> str:
        if name not in registry:
            raise PydanticCustomError(UNKNOWN_PART, "{message}", {"message": registry.unknown(name)})
        return name

    choices = {"enum": sorted(registry.parts)}
    return AfterValidator(check), WithJsonSchema(
        {"anyOf": [choices, {"type": "string", "description": f"{registry.kind} of another package"}]}
    )


def section_class(section: str) -> type[BaseModel] | None:
    """Return the settings class of the third-party part with this name, or None if it has none.

    Raises BackendError if the package cannot be imported, or if its `settings_class` is not a pydantic model.
    """
    for registry in SETTINGS.values():
        if registry.is_third_party(section) and (cls := registry.fact(section, "settings_class")) is not None:
            if not (isinstance(cls, type) and issubclass(cls, BaseModel)):
                raise BackendError(
                    f"{registry.package(section)}: settings_class of its {registry.kind} {section} is not a pydantic "
                    f"model. Derive it from slimectl.settings.base.Section."
                )
            return cls
    return None


def section_names() -> list[str]:
    """Return the names of all third-party parts. Each may have a section."""
    return sorted({name for registry in SETTINGS.values() for name in registry.names() if name not in registry.parts})


def selected_parts(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the names of the third-party parts that the values select."""
    for (section, key), registry in SETTINGS.items():
        names = values.get(section, {}).get(key)
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str) and registry.is_third_party(name):
                yield name
