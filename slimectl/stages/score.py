"""Samples in, rewarded samples out."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimectl.errors import HookError, SettingsError, SlimectlError
from slimectl.hooks import Args, Hook
from slimectl.ports import Executor, Policy
from slimectl.rewards import Verdict, Verifier, known_types, verifier, weighted
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.streams import batched
from slimectl.types import Row, Sample, Status

REFERENCE_BATCH = 64
"""Samples whose reference log-probabilities are computed together."""


class Grader:
    """Dispatches a sample to its reward: the sample's custom_rm_path, the run's, metadata.rm_type, rm_type.

    Pickles by its settings, so that worker processes make verifiers of their own. Raises SettingsError or HookError
    at once if what the settings name does not exist.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._args = Args(settings)
        self._hooks: dict[str, Hook] = {}
        self._verifiers: dict[str, Verifier] = {}
        self._sum = weighted(settings.score.rm) if settings.score.rm else None
        if settings.score.rm and settings.score.rm_type:
            raise SettingsError("score.rm and score.rm_type exclude each other; make the type a part of the sum")
        if settings.score.custom_rm_path:
            self._hook(settings.score.custom_rm_path)
        elif settings.score.rm_type:
            self._verifier(settings.score.rm_type)

    def __reduce__(self) -> tuple[type[Grader], tuple[Settings]]:
        return Grader, (self.settings,)

    def __call__(self, sample: Sample) -> Any:
        if self.settings.score.explain:
            return self.explain(sample)
        path = sample.custom_rm_path or self.settings.score.custom_rm_path
        return self._asked(path, sample) if path else self.verifier_of(sample)(sample)

    def explain(self, sample: Sample) -> Verdict:
        """The reward and how it came about; of a function of the user's, only what it returned."""
        path = sample.custom_rm_path or self.settings.score.custom_rm_path
        if path is None:
            return self.verifier_of(sample).explain(sample)
        reward = self._asked(path, sample)
        return Verdict(reward, "whole sample", f"{path} returned {reward!r}")

    def bounds(self, sample: Sample) -> tuple[float, float] | None:
        """Between which numbers the verifier says the reward lies; None for another key of a dict, or no verifier."""
        given = self.settings.score
        if sample.custom_rm_path or given.custom_rm_path or given.reward_key not in (None, "score"):
            return None
        return self.verifier_of(sample).bounds

    def verifier_of(self, sample: Sample) -> Verifier:
        """The verifier that is meant where no function of the user's is. Raises SettingsError if none is named."""
        rm_type = sample.metadata.get("rm_type") or self.settings.score.rm_type
        if rm_type:
            return self._verifier(str(rm_type))
        if self._sum is None:
            raise SettingsError(
                f"sample {sample.index}: no reward is named; give score.rm_type ({', '.join(known_types())}), "
                f"score.rm or score.custom_rm_path"
            )
        return self._sum

    def _asked(self, path: str, sample: Sample) -> Any:
        result = self._hook(path)({"args": self._args, "settings": self._args, "sample": sample})
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def _hook(self, path: str) -> Hook:
        if path not in self._hooks:
            self._hooks[path] = Hook(path, setting="score.custom_rm_path", offers=("args", "settings", "sample"))
        return self._hooks[path]

    def _verifier(self, rm_type: str) -> Verifier:
        if rm_type not in self._verifiers:
            own = rm_type == self.settings.score.rm_type
            self._verifiers[rm_type] = verifier(rm_type, **(self.settings.score.rm_options if own else {}))
        return self._verifiers[rm_type]


def score(
    samples: Iterable[Sample],
    reward: Callable[[Sample], Any],
    settings: ScoreSettings,
    *,
    executor: Executor,
    reference: Policy | None = None,
) -> Iterator[Sample]:
    """Grade every sample, in order; with a `reference` its log-probabilities are attached too.

    `reward` returns a number, a dict of which settings.reward_key picks one, or a Verdict: that is a reward which also
    goes into metadata.explanation.

    A sample that overran the time limit gets reward 0 and the reason in metadata.reward_error; so does one whose
    attempt failed. Raises HookError if the reward is no finite number, or no dict that has one under
    `settings.reward_key`.
    """
    graded = _graded(samples, reward, settings, executor)
    yield from graded if reference is None else referenced(graded, reference)


def referenced(samples: Iterable[Sample], reference: Policy) -> Iterator[Sample]:
    """Every sample with the log-probabilities that `reference` gives its response."""
    for batch in batched(samples, REFERENCE_BATCH):
        rows = [Row(s.tokens, s.response_length, [0.0] * s.response_length, group=s.group_index) for s in batch]
        for sample, log_probs in zip(batch, reference.log_probs(rows), strict=True):
            sample.ref_log_probs = log_probs
        yield from batch


def _graded(
    samples: Iterable[Sample], reward: Callable[[Sample], Any], settings: ScoreSettings, executor: Executor
) -> Iterator[Sample]:
    waiting: deque[Sample] = deque()

    def handed_out() -> Iterator[Sample]:
        for sample in samples:
            waiting.append(sample)
            yield sample

    workers = settings.processes
    timeout_s = settings.timeout_s if workers else None
    for result in executor.map(reward, handed_out(), workers=workers, timeout_s=timeout_s):
        sample = waiting.popleft()
        if sample.status is Status.FAILED:
            sample.reward = 0.0
        elif isinstance(result, TimeoutError):
            sample.reward = 0.0
            sample.metadata["reward_error"] = str(result)
        elif isinstance(result, SlimectlError):
            raise result
        elif isinstance(result, BaseException):
            raise HookError(f"reward of sample {sample.index}: {type(result).__name__}: {result}") from result
        else:
            if isinstance(result, Verdict):
                sample.metadata["explanation"] = result.to_json()
                result = result.reward
            sample.reward = result
            reward_number(sample, settings.reward_key)
        yield sample


def reward_number(sample: Sample, reward_key: str | None) -> float:
    """The number that is trained on. Raises HookError, naming the sample and what came instead."""
    value: Any = sample.reward
    if isinstance(value, dict):
        if reward_key is None:
            reward_key = "score" if "score" in value else None
        if reward_key not in value:
            known = ", ".join(map(str, value)) or "nothing"
            raise HookError(f"score.reward_key: {reward_key!r} is not in the reward of sample {sample.index} ({known})")
        value = value[reward_key]
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise HookError(
            f"reward of sample {sample.index} is {value!r}, not a finite number; mend the reward function"
            + ("" if not isinstance(sample.reward, dict) else f" (key {reward_key!r})")
        )
    return float(value)
