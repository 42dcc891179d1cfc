"""User functions that filter and change a round's samples, rewards and rows before training.

R response tokens of a sample
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slimectl.data.json_values import kind_of, plain_numbers, plain_value
from slimectl.errors import HookError
from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import required_hook
from slimectl.migrate.slime_shapes import sample_groups
from slimectl.plugins.callables import Hook
from slimectl.rewards.base import is_number
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.types import Sample, Status, TrainingSample

FILTER, POSTPROCESS = "rollout.sample_filter_path", "rollout.data_postprocess_path"
REWARDS, CONVERT = "score.custom_reward_post_process_path", "train.custom_convert_samples_to_train_data_path"
ADVANTAGE, LOSS = "train.custom_advantage_function_path", "train.custom_loss_function_path"
TIS, REDUCER = "train.custom_tis_function_path", "train.custom_pg_loss_reducer_function_path"

ROW_FIELDS = {
    "loss_masks": "loss_weights",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""Entries of rollout_data with a number per response token, mapped to the fields of a Row."""

SAMPLE_FIELDS = {
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
}
"""Entries of train data with a number per response token, mapped to the fields of a Sample."""


def apply_sample_filter(samples: Sequence[Sample], *, settings: Settings) -> None:
    """Call rollout.sample_filter_path on the groups, which sets `remove_sample`. A second call changes nothing.

    Raises HookError if the function returns a value, because then it is not such a filter.
    """
    function, args = required_hook(settings, FILTER), FlatSettings(settings)
    groups = sample_groups(samples)
    result = function({"args": args, "settings": args, "data": groups})
    if result is not None:
        raise function.returned(result, "nothing; set sample.remove_sample of samples to skip")
    for sample in samples:
        sample.remove_sample = plain_value(sample.remove_sample)
        if not isinstance(sample.remove_sample, bool):
            value = kind_of(sample.remove_sample)
            raise HookError(
                f"{FILTER}: {function.path} set remove_sample of sample {sample.index} to {value}. Set True or False"
            )


def post_process_rewards(samples: Sequence[Sample], *, settings: Settings) -> tuple[list[float], list[float]]:
    """Return (rewards to log, rewards to train on) from score.custom_reward_post_process_path."""
    function, args = required_hook(settings, REWARDS), FlatSettings(settings)
    result = function({"args": args, "settings": args, "samples": list(samples)})
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise function.returned(result, "(raw_rewards, rewards), one number per sample in each")
    count = len(samples)
    return _check_rewards(function, "raw_rewards", result[0], count), _check_rewards(
        function, "rewards", result[1], count
    )


def _check_rewards(function: Hook, name: str, values: Any, count: int) -> list[float]:
    numbers = plain_numbers(values)
    if len(numbers) != count:
        raise HookError(
            f"{function.setting}: {function.path} returned {len(numbers)} {name} for {count} samples. Return one each"
        )
    for i, number in enumerate(numbers):
        if not is_number(number):
            raise HookError(
                f"{function.setting}: {function.path}: {name} of sample {i} is {kind_of(number)}, not a finite number"
            )
    return [float(number) for number in numbers]


def convert_samples(samples: list[Sample], *, settings: Settings) -> list[Sample]:
    """Return the samples converted by train.custom_convert_samples_to_train_data_path.

    The function returns a dict of lists: "tokens", "response_lengths" and "rewards". It may also have "loss_masks",
    log-probabilities by the names of `SAMPLE_FIELDS`, and "group_indices" and "rollout_ids". The last two are required
    unless there is one row per sample, in order. Other entries are ignored.
    """
    function, args = required_hook(settings, CONVERT), FlatSettings(settings)
    data = function({"args": args, "settings": args, "samples": list(samples)})
    if not isinstance(data, dict) or not all(name in data for name in ("tokens", "response_lengths", "rewards")):
        raise function.returned(data, 'a dict with the lists "tokens", "response_lengths" and "rewards"')
    count = len(data["tokens"])
    if count != len(samples) and not {"group_indices", "rollout_ids"} <= data.keys():
        raise HookError(
            f"{CONVERT}: {function.path} made {count} rows of {len(samples)} samples. Give group_indices and "
            f"rollout_ids to show which rows belong together"
        )
    for name, column in data.items():
        if name in {"tokens", "response_lengths", "rewards", "group_indices", "rollout_ids", *SAMPLE_FIELDS} and (
            len(column) != count
        ):
            raise HookError(
                f"{CONVERT}: {function.path}: {len(column)} {name} for {count} tokens. Return one for each row"
            )
    _check_rewards(function, "rewards", data["rewards"], count)
    bases = samples if count == len(samples) else [Sample(index=i, status=Status.COMPLETED) for i in range(count)]
    return [_to_sample(function, data, i, base) for i, base in enumerate(bases)]


def _to_sample(function: Hook, data: Mapping[str, Any], i: int, base: Sample) -> Sample:
    """Return row `i` of the train data as a sample."""
    tokens, length = [int(token) for token in plain_numbers(data["tokens"][i])], int(data["response_lengths"][i])
    if not 0 <= length <= len(tokens):
        raise HookError(f"{CONVERT}: {function.path}: row {i}: {length} response tokens of {len(tokens)} tokens")
    fields: dict[str, Any] = dict.fromkeys(SAMPLE_FIELDS.values())
    for name, field in SAMPLE_FIELDS.items():
        if name in data and data[name][i] is not None:
            numbers = checked_numbers(function, name, data[name][i], i, length)
            fields[field] = [int(bit) for bit in numbers] if field == "loss_mask" else numbers
    for name, field in (("group_indices", "group_index"), ("rollout_ids", "rollout_id")):
        if name in data:
            fields[field] = int(data[name][i])
    reward = float(plain_numbers(data["rewards"])[i])
    return replace(base, tokens=tokens, response_length=length, reward=reward, **fields)


def round_data(rows: Sequence[TrainingSample], samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, Any]:
    """Return a round as a dict of lists with an entry per trained sample: R numbers each, or None."""
    data: dict[str, Any] = {
        name: [getattr(row, field) or None for row in rows]
        for name, field in ROW_FIELDS.items()
        if name != "loss_masks"
    }
    return data | {
        "tokens": [row.tokens for row in rows],
        "response_lengths": [row.response_length for row in rows],
        "loss_masks": [[int(weight != 0) for weight in row.loss_weights] for row in rows],
        "rewards": list(rewards),
        "group_indices": [sample.group_index for sample in samples],
        "teacher_log_probs": [sample.teacher_log_probs for sample in samples],
        "samples": list(samples),
    }


def postprocess(
    rows: Sequence[TrainingSample],
    samples: Sequence[Sample],
    rewards: Sequence[float],
    rollout_id: int,
    *,
    settings: Settings,
) -> None:
    """Call rollout.data_postprocess_path, which may change the entries of `ROW_FIELDS` before training."""
    if not rows:
        return
    function, args = required_hook(settings, POSTPROCESS), FlatSettings(settings)
    if "samples" in function.wanted:
        _postprocess_groups(function, rows, samples, {"args": args, "settings": args, "rollout_id": rollout_id})
        return
    data = round_data(rows, samples, rewards)
    result = function({"args": args, "settings": args, "rollout_id": rollout_id, "rollout_data": data})
    if result is not None:
        raise function.returned(result, "nothing; change rollout_data in place")
    for name, field in ROW_FIELDS.items():
        column = data.get(name)
        if column is None or len(column) != len(rows):
            raise HookError(f"{POSTPROCESS}: {function.path} left no {name} for each of {len(rows)} samples")
        for i, (row, numbers) in enumerate(zip(rows, column, strict=True)):
            if numbers is not None:
                setattr(row, field, checked_numbers(function, name, numbers, i, row.response_length))


def _postprocess_groups(
    function: Hook, rows: Sequence[TrainingSample], samples: Sequence[Sample], arguments: Mapping[str, Any]
) -> None:
    """Call a function with the groups of a round, and apply the loss masks that it wrote to their samples."""
    groups = sample_groups(samples)
    result = function({**arguments, "samples": groups})
    if result is not None:
        raise function.returned(result, "nothing; change the samples in place")
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        mask = checked_numbers(function, "loss_mask", sample.mask(), i, row.response_length)
        row.loss_weights = [weight if bit else 0.0 for weight, bit in zip(row.loss_weights, mask, strict=True)]


def custom_advantages(
    rows: Sequence[TrainingSample], samples: Sequence[Sample], rewards: Sequence[float], *, settings: Settings
) -> None:
    """Call the user's advantage function and write `TrainingSample.advantages` (and `TrainingSample.returns`).

    The function gets `rollout_data`, a dict of lists with an entry per sample, and adds "advantages" to it, and
    optionally "returns": R numbers or a tensor [R] per sample. Raises HookError for anything else.
    """
    function, args = required_hook(settings, ADVANTAGE), FlatSettings(settings)
    data = round_data(rows, samples, rewards)
    del data["advantages"], data["returns"]
    function({"args": args, "settings": args, "rollout_data": data})
    location = f"{ADVANTAGE}: {function.path}"
    if "advantages" not in data:
        raise HookError(f'{location} wrote no rollout_data["advantages"]. Write a list of R numbers per sample')
    if Need.CRITIC in settings.algorithm.needs and "returns" not in data:
        raise HookError(f'{location} wrote no rollout_data["returns"], which the critic of ppo is trained on')
    for name in ("advantages", "returns"):
        if name not in data:
            continue
        if len(data[name]) != len(rows):
            raise HookError(
                f"{location} wrote {len(data[name])} {name} for {len(rows)} samples. Write one list per sample"
            )
        for i, (row, raw_values) in enumerate(zip(rows, data[name], strict=True)):
            setattr(row, name, checked_numbers(function, name, raw_values, i, row.response_length))


def checked_numbers(function: Hook, name: str, values: Any, i: int, length: int) -> list[float]:
    """Return the values of sample `i` as R finite numbers. Raises HookError for anything else."""
    numbers = plain_numbers(values)
    if len(numbers) != length or not all(map(is_number, numbers)):
        raise HookError(
            f"{function.setting}: {function.path}: {name} of sample {i}: must be {length} finite numbers, one per "
            "response token"
        )
    return [float(number) for number in numbers]
