"""Selects the reward of each sample and batches samples that are graded in one call."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Protocol

from slimectl.data.records import refused_path
from slimectl.data.streams import batched
from slimectl.errors import RecordError, SettingsError, SlimectlError
from slimectl.rewards import Grade, Verifier, known_types, takes_url, verifier, weighted
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.settings.secret import revealed_score
from slimectl.transport.client import HttpClient, run_sync
from slimectl.types import Sample, Status


class BatchedReward(Protocol):
    """A reward in batched form: samples are split into calls, each of which returns a reward per sample.

    Failed samples are not graded, unless siblings that did not fail are graded with them.
    """

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]: ...

    def grade(self, samples: list[Sample]) -> list[Any]: ...

    def is_async(self, samples: list[Sample]) -> bool:
        """Whether the call mostly waits for I/O; then `grade_async` may run concurrently with others."""
        ...

    async def grade_async(self, samples: list[Sample], asker: HttpClient) -> list[Any]: ...

    @property
    def slow(self) -> bool:
        """Whether the settings name a grader that can be slow."""
        ...

    def is_slow(self, samples: list[Sample]) -> bool:
        """Whether the call can take seconds; then it is graded in a worker process by default."""
        ...

    def prepare(self, samples: list[Sample]) -> None:
        """Import what grading the call needs, so that it does not count as time of its samples."""
        ...

    @property
    def patience_s(self) -> float:
        """Maximum seconds of waiting for others (servers, rate limits) that do not count against the sample."""
        ...


class RewardFunction(Protocol):
    """A reward function of the user, called with one sample or with many."""

    @property
    def path(self) -> str: ...

    @property
    def takes_many(self) -> bool:
        """Whether it is called with many samples."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether it is async."""
        ...

    def called(self, samples: Sequence[Sample]) -> Any:
        """Return the function's result, or an awaitable of it."""
        ...

    def rewards(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """Return one reward per sample. Raises HookError if the result has no such rewards."""
        ...


LoadRewardFunction = Callable[[str, Settings], RewardFunction]
"""Loads the function at a path. Raises HookError if it does not fit."""


class PerSampleReward:
    """Adapts any callable to Calls: one sample per call, never asynchronous."""

    slow = False
    patience_s = 0.0

    def __init__(self, reward: Callable[[Sample], Any]) -> None:
        self._reward = reward

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        return ([sample] for sample in samples)

    def grade(self, samples: list[Sample]) -> list[Any]:
        return _zero_rewards(samples) if failed(samples) else [self._reward(sample) for sample in samples]

    def is_async(self, samples: list[Sample]) -> bool:
        return False

    def is_slow(self, samples: list[Sample]) -> bool:
        return False

    def prepare(self, samples: list[Sample]) -> None:
        pass

    async def grade_async(self, samples: list[Sample], asker: HttpClient) -> list[Any]:
        return self.grade(samples)


def failed(samples: Sequence[Sample]) -> bool:
    """Whether all samples have failed."""
    for sample in samples:  # noqa: SIM110  a generator costs more than its comparisons
        if sample.status is not Status.FAILED:
            return False
    return True


def _zero_rewards(samples: Sequence[Sample]) -> list[Any]:
    return [0.0] * len(samples)


def worker_count(settings: ScoreSettings, grader: BatchedReward) -> int:
    """Return the number of worker processes that grade; 0 is this process."""
    if settings.workers is not None:
        return settings.workers
    return default_workers() if grader.slow else 0


def default_workers() -> int:
    """Return the number of worker processes where no setting gives one."""
    return min(4, os.cpu_count() or 1)


def as_batched(reward: Callable[[Sample], Any]) -> BatchedReward:
    return reward if isinstance(reward, Grader) else PerSampleReward(reward)


class Grader:
    """Dispatches a sample to its reward: the sample's custom_rm_path, the run's, metadata.rm_type, rm_type.

    Pickled as its settings, so that worker processes create verifiers of their own. Raises SettingsError or HookError
    at once if a verifier or function named in the settings does not exist. `load_function` loads functions by path; it
    is picklable.
    """

    def __init__(self, settings: Settings, load_function: LoadRewardFunction | None = None) -> None:
        # With the secrets at hand: worker processes, and other machines, have another environment.
        self.settings = settings = settings.model_copy(update={"score": revealed_score(settings.score)})
        self._load_function = load_function
        self._user_rewards: dict[str, RewardFunction] = {}
        self._verifiers: dict[str, Verifier] = {}
        self._prepared: set[str] = set()
        self._agent_may_grade = settings.has_agent and not settings.names_verifier
        score = settings.score
        if score.rm and score.rm_type:
            raise SettingsError("score.rm and score.rm_type exclude each other; make the type a part of the sum")
        self._sum = (
            weighted([self._with_server_url(part, str(part.get("type"))) for part in score.rm]) if score.rm else None
        )
        if score.custom_rm_path:
            self._user_reward_at(score.custom_rm_path)
        elif score.rm_type:
            self._verifier(score.rm_type)
        named = [self._sum] if self._sum else self._verifiers.values()
        # Of the settings' verifiers only: those that prompts name are not known yet.
        self.slow = not score.custom_rm_path and any(verifier.slow for verifier in named)

    def __reduce__(self) -> tuple[Callable[[bytes], Grader], tuple[bytes]]:
        return _grader, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        """Arguments of this grader, pickled; sent with every call to a worker process."""
        return pickle.dumps((self.settings, self._load_function))

    def __call__(self, sample: Sample) -> Any:
        return self.grade([sample])[0]

    def explain(self, sample: Sample) -> Grade:
        """Return the reward with its explanation; for a user's function, only its return value."""
        if user_reward := self._user_reward_for(sample):
            return self._as_grades(user_reward, self._call_user_reward(user_reward, [sample]))[0]
        return self.verifier_of(sample).explain(sample)

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        """Yield the samples of each call: siblings, or up to the batch size of the grader; else single samples.

        Raises RecordError for siblings that do not stand together.
        """
        ended: set[tuple[str, int]] = set()
        for (name, batch_size, group), batch in groupby(samples, key=self._batch_key):
            if group is None:
                yield from batched(batch, batch_size)
                continue
            siblings = list(batch)
            if (name, group) in ended:
                raise RecordError(
                    f"sample {siblings[0].index}: group_index: group {group} has been graded already; "
                    f"with score.group_rm siblings stand together: sort the samples by group_index"
                )
            ended.add((name, group))
            yield siblings

    def grade(self, samples: list[Sample]) -> list[Any]:
        """Return the rewards of one call, or verdicts if score.explain is set."""
        if failed(samples):
            return _zero_rewards(samples)
        if self.has_agent_rewards(samples):
            return [sample.reward for sample in samples]
        user_reward, explains = self._user_reward_for(samples[0]), self.settings.score.explain
        if user_reward:
            rewards = self._call_user_reward(user_reward, samples)
            return list(self._as_grades(user_reward, rewards)) if explains else rewards
        sample_verifier = self.verifier_of(samples[0])
        if len(samples) > 1:
            verdicts = run_sync(lambda asker: sample_verifier.grade_async(samples, asker))
            return verdicts if explains else [verdict.reward for verdict in verdicts]
        return [sample_verifier.explain(samples[0]) if explains else sample_verifier(samples[0])]

    def has_agent_rewards(self, samples: Sequence[Sample]) -> bool:
        """Return whether these rewards are the agent's: it gave them, and neither settings nor prompts name another."""
        if not self._agent_may_grade:
            return False
        return all(
            sample.reward is not None and not sample.custom_rm_path and not sample.metadata.get("rm_type")
            for sample in samples
        )

    def is_async(self, samples: list[Sample]) -> bool:
        if failed(samples) or self.has_agent_rewards(samples):
            return False
        try:
            user_reward = self._user_reward_for(samples[0])
            return user_reward.is_async if user_reward else self.verifier_of(samples[0]).is_async
        except RecordError:  # `grade` raises it again
            return False

    def is_slow(self, samples: list[Sample]) -> bool:
        """Whether a verifier that can take seconds grades the call, also one that only its prompt names."""
        if failed(samples) or self.has_agent_rewards(samples):
            return False
        try:
            return not self._path_of(samples[0]) and self.verifier_of(samples[0]).slow
        except RecordError:  # `grade` raises it again
            return False

    def prepare(self, samples: list[Sample]) -> None:
        """Prepare this process for the verifier or the function of the call, once for each."""
        rm_type = str(samples[0].metadata.get("rm_type") or "")
        if failed(samples) or rm_type in self._prepared or self.has_agent_rewards(samples):
            return
        with suppress(SlimectlError):  # `grade` raises it again
            if not self._user_reward_for(samples[0]):
                self.verifier_of(samples[0]).prepare()
                self._prepared.add(rm_type)

    async def grade_async(self, samples: list[Sample], asker: HttpClient) -> list[Any]:
        """Asynchronous form of `grade`."""
        explains = self.settings.score.explain
        if user_reward := self._user_reward_for(samples[0]):
            rewards = user_reward.rewards(await user_reward.called(samples), samples)
            return list(self._as_grades(user_reward, rewards)) if explains else rewards
        verdicts = await self.verifier_of(samples[0]).grade_async(samples, asker)
        return verdicts if explains else [verdict.reward for verdict in verdicts]

    @property
    def patience_s(self) -> float:
        """Sum over the verifiers that the settings name."""
        if self._sum:
            return self._sum.patience_s
        return sum(grade.patience_s for grade in self._verifiers.values())

    def is_custom(self, sample: Sample) -> bool:
        """Return whether a function of the user's grades the sample."""
        return self._user_reward_for(sample) is not None

    def name_of(self, sample: Sample) -> str:
        """Return the setting and the name of what grades the sample, as errors name it."""
        if path := self._path_of(sample):
            return f"score.custom_rm_path: {path}"
        if named := sample.metadata.get("rm_type"):
            return f"metadata.rm_type: {named}"
        return f"score.rm_type: {self.settings.score.rm_type}" if self.settings.score.rm_type else "score.rm"

    def bounds(self, sample: Sample) -> tuple[float, float] | None:
        """Return the verifier's (lowest, highest) reward; None for another key of a dict, or without a verifier."""
        if self._user_reward_for(sample) or self.settings.score.reward_key not in (None, "score"):
            return None
        return self.verifier_of(sample).bounds

    def verifier_of(self, sample: Sample) -> Verifier:
        """Return the verifier of a sample that has no user function.

        Raises SettingsError if none is named, RecordError if the sample names an invalid one.
        """
        if named := sample.metadata.get("rm_type"):
            try:
                return self._verifier(str(named))
            except SettingsError as error:
                raise RecordError(f"sample {sample.index}: metadata.rm_type: {error}") from None
        if self.settings.score.rm_type:
            return self._verifier(self.settings.score.rm_type)
        if self._sum is None:
            raise SettingsError(
                f"sample {sample.index}: no reward is named; give score.rm_type ({', '.join(known_types())}), "
                f"score.rm or score.custom_rm_path"
            )
        return self._sum

    def _batch_key(self, sample: Sample) -> tuple[str, int, int | None]:
        """Return (grader, maximum batch size, group index if the group is graded in one call, else None)."""
        if (failed([sample]) and not self.settings.score.group_rm) or self.has_agent_rewards([sample]):
            return "", 1, None
        try:
            path = self._path_of(sample)
            name = path or str(sample.metadata.get("rm_type") or "")
            if path:
                takes_groups = self._user_reward_at(path).takes_many
                batch_size = self.settings.score.batch_size if takes_groups else 1
            else:
                sample_verifier = self.verifier_of(sample)
                takes_groups, batch_size = sample_verifier.takes_groups, sample_verifier.together
        except RecordError:  # raised again where it is graded, as the result of this sample alone
            return "", 1, None
        return name, batch_size, sample.group_index if takes_groups and self.settings.score.group_rm else None

    def _user_reward_for(self, sample: Sample) -> RewardFunction | None:
        path = self._path_of(sample)
        return self._user_reward_at(path) if path else None

    def _path_of(self, sample: Sample) -> str | None:
        """Return the path of the user's function. Raises RecordError if a sample names one and may not."""
        if sample.custom_rm_path and not self.settings.score.allow_paths_in_records:
            raise RecordError(f"sample {sample.index}: {refused_path('custom_rm_path', sample.custom_rm_path)}")
        return sample.custom_rm_path or self.settings.score.custom_rm_path

    def _user_reward_at(self, path: str) -> RewardFunction:
        if path not in self._user_rewards:
            if self._load_function is None:
                raise SettingsError(f"{path}: this grader was built without functions of the user; see builders.reward")
            self._user_rewards[path] = self._load_function(path, self.settings)
        return self._user_rewards[path]

    def _call_user_reward(self, user_reward: RewardFunction, samples: Sequence[Sample]) -> list[Any]:
        result = user_reward.called(samples)
        if inspect.isawaitable(result):
            awaitable = result
            result = run_sync(lambda asker: awaitable)
        return user_reward.rewards(result, samples)

    def _as_grades(self, user_reward: RewardFunction, rewards: Iterable[Any]) -> list[Grade]:
        return [Grade(reward, "whole sample", f"{user_reward.path} returned {reward!r}") for reward in rewards]

    def _verifier(self, rm_type: str) -> Verifier:
        if rm_type not in self._verifiers:
            options = self.settings.score.rm_options if rm_type == self.settings.score.rm_type else {}
            self._verifiers[rm_type] = verifier(rm_type, **self._with_server_url(options, rm_type))
        return self._verifiers[rm_type]

    def _with_server_url(self, options: dict[str, Any], rm_type: str) -> dict[str, Any]:
        """Return the options, with score.rm_url added for verifiers that need a server address."""
        url = self.settings.score.rm_url
        return {"url": url, **options} if url and takes_url(rm_type) else options


@lru_cache(maxsize=4)
def _grader(arguments: bytes) -> Grader:
    """Return the grader of a worker process, cached per settings."""
    return Grader(*pickle.loads(arguments))
