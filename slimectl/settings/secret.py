"""Secrets in settings: literal, or a reference to their location (`env:NAME`, `file:PATH`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, SecretStr

from slimectl.errors import SettingsError
from slimectl.system.redaction import MASK, is_reference, masked_names, remember

if TYPE_CHECKING:
    from slimectl.settings.score import ScoreSettings


def _is_key(value: SecretStr) -> SecretStr:
    key = value.get_secret_value()
    fits = key.isascii() and key.isprintable() and key != "" and " " not in key
    if not fits and not is_reference(key):
        raise ValueError("a key must be printable ASCII without spaces, and not empty")
    return value


Key = Annotated[
    SecretStr,
    BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value),
    AfterValidator(_is_key),
]
"""A key for an HTTP header, or a reference to one. It is never printed or written."""


def reveal(value: Any, *, setting: str) -> Any:
    """Return the value with every reference resolved. Resolved secrets are masked from now on.

    Raises SettingsError for a missing secret, or for the mask of a secret that was not written to the file.
    """
    if hasattr(value, "get_secret_value"):
        return remember(reveal(value.get_secret_value(), setting=setting))
    if isinstance(value, dict):
        return {key: reveal(item, setting=f"{setting}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [reveal(item, setting=setting) for item in value]
    if isinstance(value, str) and MASK in value:
        raise SettingsError(lacking(setting))
    if not is_reference(value):
        return value
    kind, _, place = value.partition(":")
    return remember(_from_environment(place, setting) if kind == "env" else _from_file(Path(place), setting))


def revealed_score(score: ScoreSettings) -> ScoreSettings:
    """Return [score] with resolved secrets in the addresses and options of servers."""
    keys = ("rm_url", "rm_options", "rm")
    return score.model_copy(update={key: reveal(getattr(score, key), setting=f"score.{key}") for key in keys})


def check_complete(values: dict[str, Any]) -> None:
    """Raise SettingsError, with one line for each masked secret that was not supplied again."""
    names = list(masked_names(values))
    if names:
        raise SettingsError("\n".join(map(lacking, names)))


def lacking(setting: str) -> str:
    """Return the error line for a masked secret that must be supplied again."""
    ways = list(_ways(setting))
    return f"{setting}: secrets are never written to files. Supply it again with {' or '.join(ways)}"


def _ways(setting: str) -> Iterator[str]:
    section, _, key = setting.partition(".")
    yield f"-s {setting}=env:VARIABLE"
    if "." not in key:
        yield f"SLIMECTL_{section}_{key}".upper() + " in the environment"


def _from_environment(name: str, setting: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise SettingsError(f"{setting}: env:{name}: the variable is not set. Set it, or use another one.")
    return value


def _from_file(path: Path, setting: str) -> str:
    try:
        value = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise SettingsError(f"{setting}: file:{path}: {reason}. Use a file that contains only the secret.") from None
    if not value:
        raise SettingsError(f"{setting}: file:{path}: empty. Use a file that contains only the secret.")
    return value
