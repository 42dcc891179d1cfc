"""Lists the keys of all settings, and those that differ from their defaults; writes settings as TOML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from slimectl.redaction import redact
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.parts import section_class
from slimectl.settings.rollout_algorithms import Grpo
from slimectl.settings.root import Settings

DEFAULT_ALGORITHM: str = Grpo.model_fields["name"].default


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value, in the order of the reference."""
    for section, keys in settings.model_dump(by_alias=True).items():
        for key, value in keys.items():
            yield f"{section}.{key}", value


def changed(settings: Settings) -> Iterator[str]:
    """Yield the dotted keys whose values differ from their defaults, which are those of the algorithm."""
    algorithm = type(settings.algorithm)()
    defaults = dict(flat(Settings(algorithm=algorithm))) | {"algorithm.name": DEFAULT_ALGORITHM}
    for section in settings.__pydantic_extra__ or ():
        if cls := section_class(section):
            defaults |= {f"{section}.{key}": value for key, value in cls().model_dump(by_alias=True).items()}
    for name, value in flat(settings):
        if name not in defaults or value != defaults[name]:
            yield name


def keys_of(section: str, algorithm: str | None = None) -> list[str]:
    """The keys of a section; for [algorithm], of one algorithm or of all."""
    if section == "algorithm":
        classes: list[type[BaseModel]] = [ALGORITHMS[algorithm]] if algorithm in ALGORITHMS else [*ALGORITHMS.values()]
    elif section in Settings.model_fields:
        annotation = Settings.model_fields[section].annotation
        classes = [annotation] if isinstance(annotation, type) else list(get_args(annotation))
    else:
        cls = section_class(section)
        classes = [] if cls is None else [cls]
    names = [field.alias or name for cls in classes for name, field in cls.model_fields.items()]
    return list(dict.fromkeys(names))


def sections() -> dict[str, list[str]]:
    """Every section with its keys, of all algorithms."""
    return {section: keys_of(section) for section in Settings.model_fields}


def setting_names() -> list[str]:
    """Every dotted key, of all algorithms."""
    return [f"{section}.{key}" for section, keys in sections().items() for key in keys]


def settings_toml(settings: Settings) -> str:
    """Serialise all settings to TOML, defaults included, except values of None where that is the default.

    Secrets are masked and must be supplied again with the file. TOML has no null: None where the default is not None
    is written as the string "none", which the loader reads back.
    """
    import tomli_w

    sections: dict[str, dict[str, Any]] = {}
    for section, keys in redact(settings.model_dump(by_alias=True)).items():
        for key, value in keys.items():
            if value is not None:
                sections.setdefault(section, {})[key] = _without_none(value) if section == "custom" else value
            elif section == "custom" or _default(getattr(settings, section), key) is not None:
                sections.setdefault(section, {})[key] = "none"
    return tomli_w.dumps(sections)


def _without_none(value: Any) -> Any:
    """Drop None inside tables and lists of the user's, for which TOML has no form."""
    if isinstance(value, dict):
        return {key: _without_none(member) for key, member in value.items() if member is not None}
    return [_without_none(member) for member in value if member is not None] if isinstance(value, list) else value


def _default(section: BaseModel, key: str) -> Any:
    """The default of a key, by its name in files."""
    fields = type(section).model_fields
    field = fields.get(key) or next((field for field in fields.values() if field.alias == key), None)
    return field.get_default(call_default_factory=True) if field else None
