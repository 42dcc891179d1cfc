"""Arguments and results of functions written for slime, converted from and to slimectl's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from slimectl.data.json_values import plain_sample, plain_value
from slimectl.errors import HookError
from slimectl.plugins.callables import Hook
from slimectl.types import PrefixCacheCounts, Sample, SamplingParams, SpeculationCounts

PARAMETERS = {
    "rollout.function_path": {"data_buffer": "data_source"},
    "rollout.sample_filter_path": {"groups": "data", "samples": "data"},
    "rollout.all_samples_process_path": {"samples": "all_samples"},
    "megatron.custom_before_train_step_hook_path": {"opt_param_scheduler": "scheduler"},
}
"""Setting -> slime's name of a parameter -> the name here."""

# --- sampling parameters ----------------------------------------------------------------------------------------------

SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Fields of SamplingParams that have another name in SGLang's requests."""
WITHOUT_EFFECT = frozenset({"no_stop_trim", "spaces_between_special_tokens", "custom_params", "n", "return_logprob"})
"""Keys that slime's functions set and that do not change any token here."""
_FIELDS = {field.name: SGLANG_NAMES.get(field.name, field.name) for field in dataclasses.fields(SamplingParams)}


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
ALWAYS = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids")
"""Fields that slime's dict always has. The others are keys only if they are not at their defaults."""


class SamplingDict(dict[str, Any]):
    """Sampling parameters as a function gets them. Keys have SGLang's names, attributes the names of SamplingParams.

    >>> params = SamplingDict.of(SamplingParams(max_tokens=8, seed=1))
    >>> params["max_new_tokens"] -= 3
    >>> params.max_tokens, params.seed, dataclasses.replace(params, seed=2)["sampling_seed"]
    (5, 1, 2)

    An unset seed is not a key: two requests with the same seed would get the same response.
    """

    __dataclass_fields__ = SamplingParams.__dataclass_fields__  # dataclasses.replace makes changed copies

    attempt_seed: int | None = None
    """Seed of the attempt."""

    def __init__(self, **values: Any) -> None:
        entries = {name: value for name, value in values.items() if name in ALWAYS or value != _DEFAULTS[name]}
        super().__init__({_FIELDS[name]: _as_json(name, value) for name, value in entries.items()})

    @classmethod
    def of(cls, params: SamplingParams) -> SamplingDict:
        """Return the parameters of one attempt."""
        values = {name: getattr(params, name) for name in _FIELDS if name != "seed"}
        result = cls(**values)
        result.attempt_seed = params.seed
        return result

    def __getattr__(self, name: str) -> Any:
        if name == "seed":
            return self.get("sampling_seed", self.attempt_seed)
        if name not in _FIELDS:
            raise AttributeError(name)
        return _as_field(name, self[_FIELDS[name]]) if _FIELDS[name] in self else _DEFAULTS[name]


def _as_json(name: str, value: Any) -> Any:
    """Return the value of a field as it is in a request."""
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    return list(value) if isinstance(value, tuple) else value


def _as_field(name: str, value: Any) -> Any:
    """Return a value of a request as the value of the field."""
    value = plain_value(value)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple((int(token), float(bias)) for token, bias in value.items())
    if isinstance(_DEFAULTS[name], tuple):
        return (value,) if isinstance(value, str | int) else tuple(value or ())
    return value


def sampling_params(values: Mapping[str, Any] | SamplingParams | None, base: SamplingParams) -> SamplingParams | None:
    """Return the parameters that a function passed to `generate`. Missing keys come from `base`.

    Raises ValueError for a key that no engine here knows, because it would be ignored silently.
    """
    if values is None or isinstance(values, SamplingParams):
        return values
    if isinstance(values, SamplingDict):  # missing keys are at their defaults
        base = SamplingParams(seed=base.seed)
    ours = {theirs: name for name, theirs in _FIELDS.items()} | {name: name for name in _FIELDS}
    unknown = sorted(values.keys() - ours.keys() - WITHOUT_EFFECT)
    if unknown:
        raise ValueError(f"sampling_params: unknown key {unknown[0]!r}. Known keys: {', '.join(_FIELDS.values())}")
    fields = {ours[name]: _as_field(ours[name], value) for name, value in values.items() if name in ours}
    return dataclasses.replace(base, **fields)


# --- results ----------------------------------------------------------------------------------------------------------


def as_sample(value: Any) -> Any:
    """Return a sample with plain numbers, and convert an object that has its attributes. Others stay unchanged."""
    if isinstance(value, Sample):
        return plain_sample(value)
    if not all(hasattr(value, name) for name in ("tokens", "response_length", "status")):
        return value
    values = dict(value.to_dict() if hasattr(value, "to_dict") else vars(value))
    values["status"] = getattr(values["status"], "value", values["status"])
    for name, counters in (("spec_info", SpeculationCounts), ("prefix_cache_info", PrefixCacheCounts)):
        if values.get(name) is not None:  # these are objects
            values[name] = counters(values[name] if isinstance(values[name], dict) else vars(values[name]))
    return plain_sample(Sample.from_dict({name: value for name, value in values.items() if value is not None}))


def as_groups(groups: Any) -> Any:
    """Return groups whose members are Samples. Samples outside of a group are grouped by their group_index."""
    if not isinstance(groups, list):
        return groups
    if groups and not any(isinstance(group, list) for group in groups):
        samples = [as_sample(sample) for sample in groups]
        if all(isinstance(sample, Sample) for sample in samples):
            return sample_groups(samples)
    return [_flat(group) if isinstance(group, list) else group for group in groups]


def _flat(group: Sequence[Any]) -> list[Any]:
    """Return the samples of a group. A fan-out is a list among them."""
    parts = [part if isinstance(part, list) else [part] for part in group]
    return [as_sample(sample) for part in parts for sample in part]


def rollout_result(result: Any) -> tuple[Any, Any]:
    """Return (groups, metrics) from the result of a rollout function. Its attributes count, not its class."""
    if isinstance(result, tuple) and len(result) == 2:
        return as_groups(result[0]), result[1] or {}
    data = result if isinstance(result, dict) else getattr(result, "data", None)
    metrics = getattr(result, "metrics", None) or {}
    if isinstance(data, dict) and all(isinstance(part, dict) and "samples" in part for part in data.values()):
        return as_groups([sample for part in data.values() for sample in _graded(part)]), metrics
    return as_groups(getattr(result, "samples", result)), metrics


def _graded(dataset: Mapping[str, Any]) -> list[Any]:
    """Return the samples of an evaluated dataset with the rewards that are returned next to them."""
    samples = _flat(dataset["samples"])
    for sample, reward in zip(samples, dataset.get("rewards") or [], strict=False):
        sample.reward = reward if sample.reward is None else sample.reward
    return samples


def filter_result(result: Any) -> Any:
    """Return the result of a filter. An object with `keep` and `reason` becomes (keep, reason).

    With `keep_when_insufficient` the tuple has True as a third member.
    """
    if not hasattr(result, "keep"):
        return result
    reason = getattr(result, "reason", None)
    if getattr(result, "keep_when_insufficient", False):
        return result.keep, reason or "", True
    return result.keep if reason is None else (result.keep, reason)


# --- samples of log functions -----------------------------------------------------------------------------------------


class GroupsWanted(BaseException):  # not an Exception, so that `except Exception` in a function does not catch it
    """Raised in a log function that uses a sample like a list, because it expects groups."""


class LoggedSample(Sample):
    """A sample as a log function gets it at first."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int | slice):
            raise GroupsWanted
        raise TypeError(f"a Sample has attributes, not keys: sample.{key}")

    def __iter__(self) -> Any:
        raise GroupsWanted

    def __len__(self) -> int:
        raise GroupsWanted

    def __bool__(self) -> bool:
        return True


Arrange = Callable[[Sequence[Sample]], list[Any]]
_taking_groups: set[Hook] = set()
"""Log functions that expect groups."""


def call_with_samples(function: Hook, arguments: Callable[[Arrange], Mapping[str, Any]]) -> Any:
    """Call a log function with a flat list of samples, and again with groups if it uses a sample like a list.

    `arguments` builds the arguments of a call, with its samples arranged by the given function.
    """
    if function not in _taking_groups:
        try:
            return function(arguments(_logged))
        except HookError as error:
            if not isinstance(error.__cause__, GroupsWanted):
                raise
        _taking_groups.add(function)
    return function(arguments(sample_groups))


def _logged(samples: Sequence[Sample]) -> list[Any]:
    copies = list(map(copy.copy, samples))
    for sample in copies:
        sample.__class__ = LoggedSample
    return copies


def sample_groups(samples: Sequence[Sample]) -> list[Any]:
    """Return samples in groups. Samples of the same prompt are in the same group."""
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
