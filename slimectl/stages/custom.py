"""A user's own advantages and losses, called by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from slimectl.errors import HookError
from slimectl.hooks import Args, Hook
from slimectl.ports import TokenPack
from slimectl.settings import Settings
from slimectl.settings.algorithm import Ppo
from slimectl.types import Row, Sample

ADVANTAGE, LOSS = "train.custom_advantage_function_path", "train.custom_loss_function_path"
ADVANTAGE_OFFERS = ("args", "settings", "rollout_data")
LOSS_OFFERS = ("args", "settings", "batch", "log_probs", "entropy", "sum_of_sample_mean")


def check_custom(settings: Settings) -> None:
    """Raises HookError if a function of [train] cannot be called; before any model is loaded."""
    for path, setting, offers in (
        (settings.train.custom_advantage_function_path, ADVANTAGE, ADVANTAGE_OFFERS),
        (settings.train.custom_loss_function_path, LOSS, LOSS_OFFERS),
    ):
        if path is not None:
            Hook(path, setting=setting, offers=offers)


def custom_advantages(
    rows: Sequence[Row], samples: Sequence[Sample], rewards: Sequence[float], settings: Settings
) -> None:
    """Let the user's function write `Row.advantages` (and `Row.returns`).

    It gets `rollout_data`, a dict of lists with an entry for every sample, and adds "advantages" to it, and "returns"
    where it has them: R numbers or a tensor [R] each. Raises HookError for anything else.
    """
    path = settings.train.custom_advantage_function_path
    assert path is not None
    data: dict[str, Any] = {
        "tokens": [row.tokens for row in rows],
        "response_lengths": [row.response_length for row in rows],
        "loss_masks": [[int(weight != 0) for weight in row.weights] for row in rows],
        "rewards": list(rewards),
        "group_indices": [sample.group_index for sample in samples],
        "log_probs": [row.old_log_probs for row in rows],
        "ref_log_probs": [row.ref_log_probs for row in rows],
        "rollout_log_probs": [row.rollout_log_probs for row in rows],
        "teacher_log_probs": [sample.teacher_log_probs for sample in samples],
        "values": [row.values for row in rows],
        "samples": list(samples),
    }
    args = Args(settings)
    _advantage_hook(path)({"args": args, "settings": args, "rollout_data": data})
    if "advantages" not in data:
        raise HookError(f'{ADVANTAGE}: {path} left no rollout_data["advantages"]; write a list of R numbers a sample')
    for row, advantages in zip(rows, _numbers(path, "advantages", data, rows), strict=True):
        row.advantages = advantages
    if isinstance(settings.algorithm, Ppo) and "returns" not in data:
        raise HookError(f'{ADVANTAGE}: {path} left no rollout_data["returns"], which the critic of ppo learns')
    if "returns" in data:
        for row, returns in zip(rows, _numbers(path, "returns", data, rows), strict=True):
            row.returns = returns


def _numbers(path: str, name: str, data: Mapping[str, Any], rows: Sequence[Row]) -> list[list[float]]:
    given = [each.tolist() if isinstance(each, Tensor) else list(each) for each in data[name]]
    if len(given) != len(rows):
        raise HookError(f"{ADVANTAGE}: {path} wrote {len(given)} {name} for {len(rows)} samples; one list a sample")
    for i, (numbers, row) in enumerate(zip(given, rows, strict=True)):
        if len(numbers) != row.response_length or not all(map(_finite, numbers)):
            raise HookError(
                f"{ADVANTAGE}: {path}: {name} of sample {i}: must be {row.response_length} finite numbers, one a "
                "response token"
            )
    return [[float(number) for number in numbers] for numbers in given]


def _finite(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) < float("inf")


@dataclass(frozen=True)
class CustomLoss:
    """The user's loss of one pack: (loss, metrics), each a sum over the pack's tokens.

    It gets `batch` (ports.TokenPack: response tokens, flat), their `log_probs` [T], `entropy` [T] where
    algorithm.entropy_coef is not 0, and `sum_of_sample_mean`, which reduces a tensor [T] as the settings say: what it
    returns adds up over packs and ranks to the value of the step.
    """

    settings: Settings

    @property
    def needs_entropy(self) -> bool:
        return bool(getattr(self.settings.algorithm, "entropy_coef", 0.0))

    def __call__(self, pack: TokenPack) -> tuple[Tensor, dict[str, Tensor]]:
        path = self.settings.train.custom_loss_function_path
        assert path is not None
        args = Args(self.settings)

        def sum_of_sample_mean(values_T: Tensor) -> Tensor:
            return (pack.weights_T * values_T).sum()

        made = _loss_hook(path)(
            {
                "args": args,
                "settings": args,
                "batch": pack,
                "log_probs": pack.logprobs_T,
                "entropy": pack.entropy_T,
                "sum_of_sample_mean": sum_of_sample_mean,
            }
        )
        loss, metrics = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
        if not isinstance(loss, Tensor) or loss.ndim or not isinstance(metrics, dict):
            raise HookError(f"{LOSS}: {path} returned {type(made).__name__}; return (a scalar tensor, a dict of them)")
        return loss, {name: torch.as_tensor(value, device=loss.device).detach() for name, value in metrics.items()}


@cache
def _advantage_hook(path: str) -> Hook:
    return Hook(path, setting=ADVANTAGE, offers=ADVANTAGE_OFFERS)


@cache
def _loss_hook(path: str) -> Hook:
    return Hook(path, setting=LOSS, offers=LOSS_OFFERS)
