"""Base class of all sections of settings, names of registered parts, and the sections that parts of packages bring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from slimectl.errors import BackendError
from slimectl.redaction import redact
from slimectl.registry import ENGINES, EXECUTORS, POLICIES, TRACKERS, Registry
from slimectl.settings import aliases

PositiveInt = Annotated[int, Field(ge=1)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=2)]
AdditivePenalty = Annotated[float, Field(ge=-2, le=2)]
ListOfTexts = BeforeValidator(lambda value: [value] * bool(value) if isinstance(value, str) else value)
Texts = Annotated[list[str], ListOfTexts]
"""A list of strings; a single string means a list of one, an empty string an empty list: `-s sft_warmup.data=`."""


class Section(BaseModel):
    """An immutable section that rejects unknown keys; the docstring under each field documents it.

    Docstrings are read when the reference is asked for (`settings/reference.py`), and validators are built when they
    are first used: every command pays for what it needs of the classes.
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
    """Name of the section, if keys of it were renamed: hooks may still read the old attributes."""

    if not TYPE_CHECKING:  # the code of slimectl itself uses the present names, which mypy checks

        def __getattr__(self, name: str) -> Any:
            """The value of an old key, as scripts of users read it."""
            new = aliases.KEYS.get(type(self).section_name, {}).get(name)
            if new is None:
                return super().__getattr__(name)
            field = new if new in type(self).model_fields else f"{new}_"  # `with` is a word of Python
            return aliases.current_value(self.section_name, name, getattr(self, field))  # an inversion inverts itself

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Names and values for the repr, with secrets masked: tracebacks and test reports print settings."""
        for name, value in super().__repr_args__():
            yield name, redact(value)


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

    choices = {"enum": sorted(registry.parts)}
    return AfterValidator(check), WithJsonSchema(
        {"anyOf": [choices, {"type": "string", "description": f"{registry.kind} of another package"}]}
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
                    f"model. Derive it from slimectl.settings.base.Section."
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
