"""Old names of settings, which every layer still accepts: sections, keys and values."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

SECTIONS = {"warmup": "sft_warmup"}
"""Old section -> section."""

KEYS = {
    "engine": {"kind": "backend"},
    "eval": {"skip_before_train": "before_train"},
    "run": {
        "ahead": "async_level",
        "max_logprob_abs_diff": "max_logprob_mismatch",
        "on_disagreement": "on_logprob_mismatch",
    },
    "sft_warmup": {"until_accuracy": "target_accuracy"},
    "sglang": {"groups": "server_groups"},
    "train": {"policy": "backend", "share_prompts": "share_prompt_prefix"},
}
"""Section -> old key -> key."""

INVERTED = ("eval.skip_before_train",)
"""Old switches that mean the opposite of the new ones."""

VALUES: dict[str, dict[Any, str]] = {
    "algorithm.critic": {"own": "separate"},
    "algorithm.pairs": {"extremes": "best_worst"},
}
"""Setting -> old value -> value."""


def current_section(section: str) -> str:
    return SECTIONS.get(section, section)


def current_name(name: str) -> str:
    """The present name of a dotted key or a section.

    >>> current_name("warmup.until_accuracy"), current_name("run.ahead"), current_name("train.lr")
    ('sft_warmup.target_accuracy', 'run.async_level', 'train.lr')
    """
    section, dot, key = name.partition(".")
    section = current_section(section)
    return f"{section}{dot}{KEYS.get(section, {}).get(key, key)}"


def current_value(section: str, key: str, value: Any) -> Any:
    """The value under the present name of `section.key`; a value that cannot be converted is returned unchanged.

    >>> current_value("eval", "skip_before_train", True), current_value("algorithm", "critic", "own")
    (False, 'separate')
    """
    if f"{section}.{key}" in INVERTED:
        try:
            return not TypeAdapter(bool).validate_python(value)
        except ValidationError:
            return value  # refused under the present name
    renamed = VALUES.get(f"{section}.{key}", {})
    return renamed.get(value, value) if isinstance(value, str) else value


def old_names(sections: dict[str, list[str]]) -> list[str]:
    """Every old dotted name of the keys in `sections`."""
    by_key = [f"{section}.{old}" for section in sections for old in KEYS.get(section, {})]
    by_section = [f"{old}.{key}" for old, section in SECTIONS.items() for key in sections.get(section, [])]
    both = [f"{old}.{key}" for old, section in SECTIONS.items() if section in sections for key in KEYS.get(section, {})]
    return [*by_key, *by_section, *both]
