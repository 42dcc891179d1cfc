"""Base class of all settings sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from slimectl.redaction import redact
from slimectl.settings import aliases

PositiveInt = Annotated[int, Field(ge=1)]
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
