"""Records that slime's functions accept and return: samples, and results of rollouts and filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from slimectl.types import Sample

__all__ = ["RolloutBatch", "Sample"]

RolloutBatch = dict[str, Any]
"""Training data by name: a list with an entry per sample."""


@dataclass(frozen=True)
class MultimodalType:
    """A kind of media: its name in messages, and its placeholder in a text."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The kinds of media that messages can have."""

    IMAGE: ClassVar = MultimodalType("image", "<image>")
    VIDEO: ClassVar = MultimodalType("video", "<video>")
    AUDIO: ClassVar = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """Return the kind of this name, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)


@dataclass
class RolloutFnTrainOutput:
    """The groups of a round, and metrics."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Samples and rewards by dataset, and metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function and return its result as one of the two classes above."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept, and why not. With `keep_when_insufficient` it is kept if too few groups remain."""

    keep: Any
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter, which may return a bool. Without a filter every group is kept."""
    output = True if fn is None else fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(output)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return whether to drop a group, given the numbers of groups that are collected, running and needed."""
    is_needed = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not is_needed


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one dropped group under its reason."""
        if reason:
            self._reasons[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return the counts as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._reasons.items()}


def check_reward_nonzero_std(args: Any, samples: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ. This is the filter that most of slime's scripts use.

    The parts of one trajectory are a list among the samples, and share their reward.
    """
    from slimectl.stages.filters import nonzero_std  # needs torch, but the records must import without it

    trajectories = [part[0] if isinstance(part, list) else part for part in samples]
    keep, reason = nonzero_std(args, trajectories)
    return DynamicFilterOutput(keep, reason or None)


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Prefer groups whose rewards differ. Keep others if too few groups remain to fill the round."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output
