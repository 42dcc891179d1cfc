"""What a user's functions make of a round before it is trained on: whom they leave out, what they make of the rest.

R response tokens of a sample
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import fmean
from typing import Any

from torch import Tensor

from slimectl.data.plain import kind_of
from slimectl.errors import HookError
from slimectl.hooks import Args, Hook, hook
from slimectl.rewards.verdict import is_number
from slimectl.settings import Settings
from slimectl.settings.algorithm import PolicyGradient
from slimectl.types import Metrics, Row, Sample, Status

FILTER, POSTPROCESS = "rollout.sample_filter_path", "rollout.data_postprocess_path"
REWARDS, CONVERT = "score.custom_reward_post_process_path", "train.custom_convert_samples_to_train_data_path"

ROW_FIELDS = {
    "loss_masks": "weights",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
}
"""Entries of rollout_data with a number a response token, and the field of a row that each is."""

SAMPLE_FIELDS = {
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
}
"""Entries of train data with a number a response token, and the field of a sample that each is."""


def reshaped(samples: list[Sample], settings: Settings) -> tuple[list[Sample], tuple[list[float], list[float]] | None]:
    """The samples to train on and their rewards as a user's functions want them; None for rewards as they are.

    Losses that are no policy gradient (also of a warm-up) take samples as they come.
    """
    if not isinstance(settings.algorithm, PolicyGradient):
        return samples, None
    flag_removed(samples, settings)
    given = converted(samples, settings)
    return given, shaped_rewards(given, settings)


def flag_removed(samples: Sequence[Sample], settings: Settings) -> None:
    """Let rollout.sample_filter_path set `remove_sample`, of whole groups; again where it has already makes no change.

    Raises HookError if it returns something: then it is not such a filter.
    """
    found = hook(settings, FILTER)
    if found is None:
        return
    args = Args(settings)
    groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]
    made = found({"args": args, "settings": args, "data": groups})
    if made is not None:
        raise found.returned(made, "nothing; set sample.remove_sample of those that are to be left out")
    for sample in samples:
        if not isinstance(sample.remove_sample, bool):
            value = kind_of(sample.remove_sample)
            raise HookError(
                f"{FILTER}: {found.path} set remove_sample of sample {sample.index} to {value}; set True or False"
            )


def shaped_rewards(samples: Sequence[Sample], settings: Settings) -> tuple[list[float], list[float]] | None:
    """(as logged, as they become advantages), of score.custom_reward_post_process_path where there is one."""
    found = hook(settings, REWARDS)
    if found is None:
        return None
    args = Args(settings)
    made = found({"args": args, "settings": args, "samples": list(samples)})
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise found.returned(made, "(raw_rewards, rewards), a number a sample each")
    count = len(samples)
    return _rewards(found, "raw_rewards", made[0], count), _rewards(found, "rewards", made[1], count)


def _rewards(found: Hook, name: str, given: Any, count: int) -> list[float]:
    numbers = listed(given)
    if len(numbers) != count:
        raise HookError(f"{found.setting}: {found.path} returned {len(numbers)} {name} for {count} samples; one each")
    for i, number in enumerate(numbers):
        if not is_number(number):
            raise HookError(
                f"{found.setting}: {found.path}: {name} of sample {i} is {kind_of(number)}, not a finite number"
            )
    return [float(number) for number in numbers]


def reward_metrics(rewards: Sequence[float]) -> Metrics:
    """As `compared_rewards` would report those of an algorithm."""
    return {"rollout/rewards": fmean(rewards), "rollout/rewards/max": max(rewards), "rollout/rewards/min": min(rewards)}


def converted(samples: list[Sample], settings: Settings) -> list[Sample]:
    """What is trained on instead of the samples, of train.custom_convert_samples_to_train_data_path where there is one.

    The function returns a dict of lists: "tokens", "response_lengths" and "rewards"; "loss_masks" and log-probabilities
    by the names of `SAMPLE_FIELDS`; "group_indices" and "rollout_ids" where rows are not one for each sample in order.
    Other entries are not looked at.
    """
    found = hook(settings, CONVERT)
    if found is None:
        return samples
    args = Args(settings)
    data = found({"args": args, "settings": args, "samples": list(samples)})
    if not isinstance(data, dict) or not all(name in data for name in ("tokens", "response_lengths", "rewards")):
        raise found.returned(data, 'a dict with "tokens", "response_lengths" and "rewards", a list each')
    count = len(data["tokens"])
    if count != len(samples) and not {"group_indices", "rollout_ids"} <= data.keys():
        raise HookError(
            f"{CONVERT}: {found.path} made {count} rows of {len(samples)} samples; give group_indices and rollout_ids, "
            f"that say which belong together"
        )
    for name, column in data.items():
        if name in {"tokens", "response_lengths", "rewards", "group_indices", "rollout_ids", *SAMPLE_FIELDS} and (
            len(column) != count
        ):
            raise HookError(f"{CONVERT}: {found.path}: {len(column)} {name} for {count} tokens; one for each row")
    _rewards(found, "rewards", data["rewards"], count)
    bases = samples if count == len(samples) else [Sample(index=i, status=Status.COMPLETED) for i in range(count)]
    return [_sample(found, data, i, base) for i, base in enumerate(bases)]


def _sample(found: Hook, data: Mapping[str, Any], i: int, base: Sample) -> Sample:
    """Row `i` of the train data as a sample."""
    tokens, length = [int(token) for token in listed(data["tokens"][i])], int(data["response_lengths"][i])
    if not 0 <= length <= len(tokens):
        raise HookError(f"{CONVERT}: {found.path}: row {i}: {length} response tokens of {len(tokens)} tokens")
    fields: dict[str, Any] = dict.fromkeys(SAMPLE_FIELDS.values())
    for name, field in SAMPLE_FIELDS.items():
        if name in data and data[name][i] is not None:
            numbers = checked_numbers(found, name, data[name][i], i, length)
            fields[field] = [int(bit) for bit in numbers] if field == "loss_mask" else numbers
    for name, field in (("group_indices", "group_index"), ("rollout_ids", "rollout_id")):
        if name in data:
            fields[field] = int(data[name][i])
    reward = float(listed(data["rewards"])[i])
    return replace(base, tokens=tokens, response_length=length, reward=reward, **fields)


def round_data(rows: Sequence[Row], samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, Any]:
    """A round as a dict of lists, with an entry for every sample that is trained on; lists of R numbers, or None."""
    data: dict[str, Any] = {
        name: [getattr(row, field) or None for row in rows]
        for name, field in ROW_FIELDS.items()
        if name != "loss_masks"
    }
    return data | {
        "tokens": [row.tokens for row in rows],
        "response_lengths": [row.response_length for row in rows],
        "loss_masks": [[int(weight != 0) for weight in row.weights] for row in rows],
        "rewards": list(rewards),
        "group_indices": [sample.group_index for sample in samples],
        "teacher_log_probs": [sample.teacher_log_probs for sample in samples],
        "samples": list(samples),
    }


def postprocess(
    rows: Sequence[Row], samples: Sequence[Sample], rewards: Sequence[float], settings: Settings, rollout_id: int
) -> None:
    """Let rollout.data_postprocess_path change what of a round is trained on: the entries of `ROW_FIELDS`."""
    found = hook(settings, POSTPROCESS)
    if found is None or not rows:
        return
    args, data = Args(settings), round_data(rows, samples, rewards)
    made = found({"args": args, "settings": args, "rollout_id": rollout_id, "rollout_data": data})
    if made is not None:
        raise found.returned(made, "nothing; change rollout_data in place")
    for name, field in ROW_FIELDS.items():
        column = data.get(name)
        if column is None or len(column) != len(rows):
            raise HookError(f"{POSTPROCESS}: {found.path} left no {name} for each of {len(rows)} samples")
        for i, (row, numbers) in enumerate(zip(rows, column, strict=True)):
            if numbers is not None:
                setattr(row, field, checked_numbers(found, name, numbers, i, row.response_length))


def checked_numbers(found: Hook, name: str, given: Any, i: int, length: int) -> list[float]:
    """R finite numbers of sample `i`. Raises HookError."""
    numbers = listed(given)
    if len(numbers) != length or not all(map(is_number, numbers)):
        raise HookError(
            f"{found.setting}: {found.path}: {name} of sample {i}: must be {length} finite numbers, one a response "
            "token"
        )
    return [float(number) for number in numbers]


def listed(given: Any) -> list[Any]:
    """A tensor, an array or a sequence as a list."""
    if isinstance(given, Tensor) or hasattr(given, "tolist"):
        given = given.tolist()
    return list(given) if isinstance(given, list | tuple) else [given]
