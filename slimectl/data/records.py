"""Converts samples from and to JSON objects, with validation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

from slimectl.data.checks import (
    Check,
    a_bool,
    a_chat,
    a_count,
    a_label,
    a_mapping,
    a_number,
    a_reward,
    a_status,
    a_text,
    float32_numbers,
    floats,
    mask_values,
    optional,
    shown,
    texts,
    token_ids,
    top_tokens,
    warn_near_miss,
)
from slimectl.data.json_values import jsonable
from slimectl.data.routed_experts import a_routing, routed_tokens
from slimectl.data.turn_rewards import checked_turn_rewards, last_token
from slimectl.errors import RecordError
from slimectl.types import PrefixCacheCounts, Sample, SamplerState, SpeculationCounts, Status

# In the order of docs/records.md, which is also the key order of written lines.
CHECKS: dict[str, Check] = {
    "group_index": a_count,
    "index": a_count,
    "rollout_id": optional(a_count),
    "prompt": a_chat,
    "tokens": token_ids,
    "response": a_text,
    "response_length": a_count,
    "label": optional(a_label),
    "reward": optional(a_reward),
    "loss_mask": optional(mask_values),
    "rollout_log_probs": optional(floats),
    "status": a_status,
    "weight_versions": texts,
    "rollout_temperature": optional(a_number),
    "rollout_routed_experts": optional(a_routing),
    "multimodal_inputs": optional(a_mapping),
    "multimodal_train_inputs": optional(a_mapping),
    "teacher_log_probs": optional(floats),
    "teacher_top_log_probs": optional(top_tokens),
    "ref_log_probs": optional(floats),
    "ref_temperature": optional(a_number),
    "turn_rewards": optional(checked_turn_rewards),
    "remove_sample": a_bool,
    "generate_function_path": optional(a_text),
    "custom_rm_path": optional(a_text),
    "train_metadata": optional(a_mapping),
    "metadata": a_mapping,
    "non_generation_time": a_number,
    "spec_info": lambda value: SpeculationCounts(a_mapping(value)),
    "prefix_cache_info": lambda value: PrefixCacheCounts(a_mapping(value)),
}
PER_TOKEN = ("loss_mask", "rollout_log_probs", "teacher_log_probs", "teacher_top_log_probs", "ref_log_probs")
ALWAYS_WRITTEN = frozenset(list(CHECKS)[:12]) - {"rollout_id"}
RECORD_VERSION = "record_version"
"""Key of a line's version. Without it the line has version 1, whose log-probabilities are doubles."""
VERSION = 2
"""Newest version. Log-probabilities are float32 numbers in their shortest decimal form."""
FLOAT32_LISTS = ("rollout_log_probs", "teacher_log_probs", "ref_log_probs")
CHECKS_BY_VERSION: dict[object, dict[str, Check]] = {
    1: CHECKS,
    VERSION: {**CHECKS, **dict.fromkeys(FLOAT32_LISTS, optional(float32_numbers))},
}
# Null means "absent" for these: other programs write every key of their schema.
EMPTY_WHEN_NULL = frozenset({"weight_versions", "metadata", "spec_info", "prefix_cache_info"})

assert [*CHECKS, "extra"] == [field.name for field in fields(Sample)], "CHECKS must list the fields of Sample in order"


PATHS = {"custom_rm_path": "score", "generate_function_path": "rollout"}
"""Keys of a sample that refer to code, and the section whose `allow_paths_in_records` permits them."""


def refused_path(key: str, path: object) -> str:
    """Return the error message for a record that refers to code, with the remedy."""
    return (
        f"{key}: {shown(path)} refers to code, and records may not choose the code to run. Remove the key, or set "
        f"{PATHS[key]}.allow_paths_in_records = true if you trust the file."
    )


def sample_from_json(obj: Mapping[str, Any], *, position: int = 0) -> Sample:
    """Build a sample from its JSON object.

    >>> sample_from_json({"index": 3, "prompt": "1+1=", "tokens": [5, 6], "response_length": 1, "note": "mine"}).extra
    {'note': 'mine'}

    Without an `index` it gets `position` (its place in the file). Without a `group_index` it forms a group of one,
    because unrelated samples must never share group statistics. Raises RecordError with the name of the field.
    """
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    checks = CHECKS if (version := obj.get(RECORD_VERSION)) is None else _checks_of(version)
    for key, value in obj.items():
        check = checks.get(key)
        if check is None:
            if key != RECORD_VERSION:
                warn_near_miss("Sample", key, CHECKS)
                extra[key] = value
        elif value is not None or key not in EMPTY_WHEN_NULL:
            try:
                values[key] = check(value)
            except ValueError as error:
                raise RecordError(f"Sample.{key}: {error}") from None
    values.setdefault("index", position)
    values.setdefault("group_index", values["index"])
    sample = Sample(**values, extra=extra)
    _check_lengths(sample)
    return sample


def _checks_of(version: Any) -> dict[str, Check]:
    """Return the checks for a line of that version. Raises RecordError for an unknown version."""
    if type(version) is not int or version < 1:
        raise RecordError(f"Sample.{RECORD_VERSION}: expected a whole number of at least 1, got {shown(version)}")
    if version > VERSION:
        raise RecordError(
            f"Sample.{RECORD_VERSION}: {shown(version)} is newer than this slimectl supports ({VERSION}). Update "
            f"slimectl."
        )
    return CHECKS_BY_VERSION[version]


def with_float32(obj: dict[str, Any]) -> dict[str, Any]:
    """Convert the object of a line of any version to version 1, with log-probabilities as doubles.

    Values that are not lists of numbers are unchanged.
    """
    if obj.pop(RECORD_VERSION, None) == VERSION:
        for name in obj.keys() & set(FLOAT32_LISTS):
            with suppress(ValueError):
                obj[name] = CHECKS_BY_VERSION[VERSION][name](obj[name])
    return obj


def _check_lengths(sample: Sample) -> None:
    count = sample.response_length
    if sample.tokens and len(sample.tokens) < count:
        raise RecordError(f"Sample.tokens: {len(sample.tokens)} tokens are fewer than response_length {count}")
    for name in PER_TOKEN:
        values = getattr(sample, name)
        if values is not None and len(values) != count:
            raise RecordError(f"Sample.{name}: {len(values)} values for {count} response tokens")
    if sample.turn_rewards and (end := last_token(sample.turn_rewards)) > count:
        raise RecordError(f"Sample.turn_rewards: a turn ends at token {end}, but the response has {count} tokens")
    if routed_tokens(sample.rollout_routed_experts) > max(0, len(sample.tokens) - 1):
        raise RecordError(
            f"Sample.rollout_routed_experts: has experts for {routed_tokens(sample.rollout_routed_experts)} tokens, "
            f"but of {len(sample.tokens)} tokens all but the last one need them"
        )


PLAIN = frozenset({str, bool, int})
_DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Sample)
}


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """Return the JSON object of a sample: core fields always, others if not at their default, unknown keys last."""
    obj: dict[str, Any] = {}
    for key in CHECKS:
        value = getattr(sample, key)
        if key in ALWAYS_WRITTEN or value != _DEFAULTS[key]:
            obj[key] = value
    obj["status"] = Status(sample.status).value
    for key, value in sample.extra.items():  # attributes set by users may have any type
        if key != RECORD_VERSION:
            obj.setdefault(key, value if value is None or type(value) in PLAIN else jsonable(value))
    return obj


def sampler_state_to_json(state: SamplerState) -> dict[str, Any]:
    """Return the state of the sampling side as a checkpoint stores it."""
    return {
        "position": state.position,
        "rounds": state.rounds,
        "buffer": [[sample_to_json(sample) for sample in group] for group in state.buffer],
        "source": state.source,
        "long_prompts_until": state.long_prompts_until,
    }


def sampler_state_from_json(state: Mapping[str, Any]) -> SamplerState:
    """Read what `sampler_state_to_json` wrote, or an older version of it. Raises RecordError."""
    buffer = [[sample_from_json(sample) for sample in group] for group in state["buffer"]]
    long_prompts_until = state.get("long_prompts_until", 0)
    return SamplerState(state["position"], state["rounds"], buffer, state.get("source"), long_prompts_until)
