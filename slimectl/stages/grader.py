"""Selects the reward of each sample and batches samples that are graded in one call."""

from __future__ import annotations

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
from slimectl.rewards import (
    Grade,
    RewardFunction,
    UserFunction,
    Verifier,
    WeightedSum,
    known_types,
    takes_url,
    verifier,
    weighted,
)
from slimectl.settings import Settings
from slimectl.settings.score import ScoreSettings
from slimectl.settings.secret import revealed_score
from slimectl.system.client import HttpClient
from slimectl.types import Sample, Status


class BatchedReward(Protocol):
    """A reward in batched form: samples are split into calls, each of which returns a reward per sample.

    Failed samples are not graded, unless siblings that did not fail are graded with them.
    """

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]: ...

    def grade(self, samples: list[Sample]) -> list[Any]: ...

    def is_async(self, samples: list[Sample]) -> bool:
        """Whether the call mostly waits for I/O, so that `grade_async` can run concurrently with others."""
        ...

    async def grade_async(self, samples: list[Sample], client: HttpClient) -> list[Any]: ...

    @property
    def slow(self) -> bool:
        """Whether the settings name a grader that can be slow."""
        ...

    def is_slow(self, samples: list[Sample]) -> bool:
        """Whether the call can take seconds, so that it is graded in a worker process by default."""
        ...

    def prepare(self, samples: list[Sample]) -> None:
        """Import what grading the call needs, so that it does not count towards the time of its samples."""
        ...

    @property
    def patience_s(self) -> float:
        """Maximum seconds of waiting for servers or rate limits, which do not count towards the sample's time."""
        ...


LoadRewardFunction = Callable[[str | Callable[..., Any], Settings, str], RewardFunction]
"""Loads a function or a path for the setting that names it. Raises HookError if the function does not fit."""
CUSTOM = "score.custom_rm_path"
ARGUMENT = "reward"
"""Name in errors for a function that was passed in from Python."""


class PerSampleReward:
    """Adapts a per-sample function to BatchedReward: one sample per call, never asynchronous."""

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

    async def grade_async(self, samples: list[Sample], client: HttpClient) -> list[Any]:
        return self.grade(samples)


def failed(samples: Sequence[Sample]) -> bool:
    """Return whether all samples have failed."""
    for sample in samples:  # noqa: SIM110  a generator costs more than its comparisons
        if sample.status is not Status.FAILED:
            return False
    return True


def _zero_rewards(samples: Sequence[Sample]) -> list[Any]:
    return [0.0] * len(samples)


def worker_count(settings: ScoreSettings, grader: BatchedReward) -> int:
    """Return the number of worker processes for grading. 0 means this process."""
    if settings.workers is not None:
        return settings.workers
    return default_workers() if grader.slow else 0


def default_workers() -> int:
    """Return the number of worker processes if no setting gives one."""
    return min(4, os.cpu_count() or 1)


def as_batched(reward: Callable[[Sample], Any]) -> BatchedReward:
    return reward if isinstance(reward, Grader) else PerSampleReward(reward)


class Grader:
    """Dispatches a sample to its reward: the sample's custom_rm_path, the run's, metadata.rm_type, rm_type.

    A `function` that is passed in replaces all of these. The grader is pickled as its settings, so worker processes
    create their own verifiers. Raises SettingsError or HookError immediately if a verifier or function of the settings
    does not exist. `load_function` loads functions and must be picklable.
    """

    def __init__(
        self,
        settings: Settings,
        load_function: LoadRewardFunction | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        # Resolve the secrets now, because worker processes and other machines have another environment.
        self.settings = settings = settings.model_copy(update={"score": revealed_score(settings.score)})
        self._load_function = load_function
        self._user_rewards: dict[str, UserFunction] = {}
        self._verifiers: dict[str, Verifier] = {}
        self._prepared: set[int] = set()
        self._agent_may_grade = function is None and settings.has_agent and not settings.names_verifier
        self._function, self._sum = function, None
        self._passed = self._load(function, ARGUMENT) if function is not None else None
        score = settings.score
        if self._passed is None:
            self._sum = self._settings_sum()
            if score.custom_rm_path:
                self._user_reward_at(score.custom_rm_path)
            elif score.rm_type:
                self._verifier(score.rm_type)
        named = [self._sum] if self._sum else [*self._verifiers.values(), *self._user_rewards.values()]
        # Only the settings' verifiers count, because verifiers that prompts name are not known yet.
        self.slow = any(verifier.slow for verifier in named)

    def _settings_sum(self) -> WeightedSum | None:
        """Return the sum that score.rm describes, or None."""
        score = self.settings.score
        if score.rm and score.rm_type:
            raise SettingsError("score.rm and score.rm_type cannot be combined. Make the type a part of the sum.")
        parts = [self._with_server_url(part, str(part.get("type"))) for part in score.rm]
        if not parts:
            return None
        reward = weighted(parts, load=self._load, skip_none=score.none_reward == "skip")
        names = [part.name for part in reward.parts]
        if unknown := set(getattr(self.settings.algorithm, "gdpo_weights", {})) - set(names):
            raise SettingsError(
                f"algorithm.gdpo_weights.{min(unknown)}: no part of score.rm has this name ({', '.join(names)}). "
                f"Use one of them, or drop algorithm.gdpo_weights"
            )
        return reward

    def __reduce__(self) -> tuple[Callable[[bytes], Grader], tuple[bytes]]:
        return _grader, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        """Pickled arguments of this grader, which are sent with every call to a worker process."""
        return pickle.dumps((self.settings, self._load_function, self._function))

    def __call__(self, sample: Sample) -> Any:
        return self.grade([sample])[0]

    def explain(self, sample: Sample) -> Grade:
        """Return the reward with its explanation. For a user's function, there is only its return value."""
        return self.verifier_of(sample).explain(sample)

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        """Yield the samples of each call: a whole group, or up to the batch size of the grader, or a single sample.

        Raises RecordError if the samples of a group are not adjacent.
        """
        ended: set[tuple[str, int]] = set()
        for (name, batch_size, group), batch in groupby(samples, key=self._batch_key):
            if group is None:
                yield from batched(batch, batch_size)
                continue
            siblings = list(batch)
            if (name, group) in ended:
                raise RecordError(
                    f"sample {siblings[0].index}: group_index: group {group} has already been graded. "
                    f"score.group_rm needs the samples of a group to be adjacent. Sort them by group_index"
                )
            ended.add((name, group))
            yield siblings

    def grade(self, samples: list[Sample]) -> list[Any]:
        """Return the rewards of one call, or grades if score.explain is set."""
        if failed(samples):
            return _zero_rewards(samples)
        if self.has_agent_rewards(samples):
            return [sample.reward for sample in samples]
        return self._results(self.verifier_of(samples[0]).grade_all(samples))

    def _results(self, grades: Sequence[Grade]) -> list[Any]:
        """Return the grades if score.explain is set, else only their rewards."""
        for grade in grades:
            if not isinstance(grade, Grade):
                raise TypeError(f"explain returned {type(grade).__name__}, not a Grade")
        return list(grades) if self.settings.score.explain else [grade.reward for grade in grades]

    def has_agent_rewards(self, samples: Sequence[Sample]) -> bool:
        """Return whether the agent has set these rewards, and neither settings nor prompts name a verifier."""
        if not self._agent_may_grade:
            return False
        return all(
            sample.reward is not None and not sample.custom_rm_path and not sample.metadata.get("rm_type")
            for sample in samples
        )

    def is_async(self, samples: list[Sample]) -> bool:
        call_verifier = self._verifier_of_call(samples)
        return call_verifier is not None and call_verifier.is_async

    def is_slow(self, samples: list[Sample]) -> bool:
        """Return whether a verifier that can take seconds grades the call, even if only its prompt names it."""
        call_verifier = self._verifier_of_call(samples)
        return call_verifier is not None and call_verifier.slow

    def prepare(self, samples: list[Sample]) -> None:
        """Prepare this process for the verifier or function of the call, once per verifier."""
        with suppress(SlimectlError):  # `grade` raises it again
            call_verifier = self._verifier_of_call(samples)
            if call_verifier is not None and id(call_verifier) not in self._prepared:
                call_verifier.prepare()
                self._prepared.add(id(call_verifier))

    def _verifier_of_call(self, samples: list[Sample]) -> Verifier | None:
        """Return the verifier that grades the call, or None if none does, or if `grade` will raise RecordError."""
        if failed(samples) or self.has_agent_rewards(samples):
            return None
        with suppress(RecordError):
            return self.verifier_of(samples[0])
        return None

    async def grade_async(self, samples: list[Sample], client: HttpClient) -> list[Any]:
        """Grade like `grade`, asynchronously."""
        return self._results(await self.verifier_of(samples[0]).grade_async(samples, client))

    @property
    def patience_s(self) -> float:
        """Sum over the verifiers that the settings name."""
        if self._sum:
            return self._sum.patience_s
        return sum(grade.patience_s for grade in self._verifiers.values())

    def runs_user_code(self, sample: Sample) -> bool:
        """Return whether a user's function grades the sample, or is part of the sum that does."""
        return self.verifier_of(sample).runs_user_code

    def name_of(self, sample: Sample) -> str:
        """Return the setting and the name of the sample's grader, for errors."""
        if self._passed is not None:
            return self._passed.function.name
        if path := self._path_of(sample):
            return f"{CUSTOM}: {path}"
        if named := sample.metadata.get("rm_type"):
            return f"metadata.rm_type: {named}"
        return f"score.rm_type: {self.settings.score.rm_type}" if self.settings.score.rm_type else "score.rm"

    def bounds(self, sample: Sample) -> tuple[float, float] | None:
        """Return the verifier's (lowest, highest) reward, or None for another key of a dict."""
        return self.verifier_of(sample).bounds if self.settings.score.reward_key in (None, "score") else None

    def verifier_of(self, sample: Sample) -> Verifier:
        """Return the verifier of a sample.

        Raises SettingsError if no reward is set. Raises RecordError if the sample names an invalid verifier, or a
        function without permission.
        """
        if self._passed is not None:
            return self._passed
        if path := self._path_of(sample):
            return self._user_reward_at(path)
        if named := sample.metadata.get("rm_type"):
            try:
                return self._verifier(str(named))
            except SettingsError as error:
                raise RecordError(f"sample {sample.index}: metadata.rm_type: {error}") from None
        if self.settings.score.rm_type:
            return self._verifier(self.settings.score.rm_type)
        if self._sum is None:
            raise SettingsError(
                f"sample {sample.index}: no reward is set. Set score.rm_type ({', '.join(known_types())}), "
                f"score.rm or score.custom_rm_path"
            )
        return self._sum

    def _batch_key(self, sample: Sample) -> tuple[str, int, int | None]:
        """Return (grader, maximum batch size, group index if the group is graded in one call, else None)."""
        if (failed([sample]) and not self.settings.score.group_rm) or self.has_agent_rewards([sample]):
            return "", 1, None
        try:
            sample_verifier = self.verifier_of(sample)
            name = "" if self._passed else self._path_of(sample) or str(sample.metadata.get("rm_type") or "")
        except RecordError:  # `grade` raises it again, as the result of only this sample
            return "", 1, None
        takes_group = sample_verifier.takes_groups and self.settings.score.group_rm
        return name, sample_verifier.together, sample.group_index if takes_group else None

    def _path_of(self, sample: Sample) -> str | None:
        """Return the path of the user's function. Raises RecordError if a sample names one without permission."""
        if sample.custom_rm_path and not self.settings.score.allow_paths_in_records:
            raise RecordError(f"sample {sample.index}: {refused_path('custom_rm_path', sample.custom_rm_path)}")
        return sample.custom_rm_path or self.settings.score.custom_rm_path

    def _user_reward_at(self, path: str) -> UserFunction:
        if path not in self._user_rewards:
            self._user_rewards[path] = self._load(path, CUSTOM)
        return self._user_rewards[path]

    def _load(self, source: str | Callable[..., Any], setting: str) -> UserFunction:
        if self._load_function is None:
            raise SettingsError(f"{source}: this grader cannot load your functions. Build it with builders.reward.")
        score = self.settings.score
        function = self._load_function(source, self.settings, setting)
        limited = score.limits_calls and setting != ARGUMENT
        return UserFunction(function, batch_size=score.batch_size, group_rm=score.group_rm, limited=limited)

    def _verifier(self, rm_type: str) -> Verifier:
        if rm_type not in self._verifiers:
            options = self.settings.score.rm_options if rm_type == self.settings.score.rm_type else {}
            if rm_type == "by_column" and isinstance(types := options.get("types"), dict):
                options = {**options, "types": {value: self._grader_of(value, types[value]) for value in types}}
            self._verifiers[rm_type] = verifier(rm_type, **self._with_server_url(options, rm_type))
        return self._verifiers[rm_type]

    def _grader_of(self, value: str, entry: Any) -> Any:
        """Return an entry of by_column with the server's address. Sums and functions are built, as verifiers."""
        setting = f"score.rm_options.types.{value}"
        if isinstance(entry, list):
            parts = [
                self._with_server_url(part, str(part.get("type"))) if isinstance(part, dict) else part for part in entry
            ]
            return weighted(
                parts, load=self._load, skip_none=self.settings.score.none_reward == "skip", setting=setting
            )
        if isinstance(entry, dict) and "path" in entry and "type" not in entry:
            if len(entry) > 1:
                raise SettingsError(f"{setting}: a function has no options. Give only its path, or a list of parts.")
            return self._load(str(entry["path"]), f"{setting}.path")
        rm_type = entry.get("type") if isinstance(entry, dict) else entry
        options = entry if isinstance(entry, dict) else {"type": entry}
        return self._with_server_url(options, rm_type) if isinstance(rm_type, str) and takes_url(rm_type) else entry

    def _with_server_url(self, options: dict[str, Any], rm_type: str) -> dict[str, Any]:
        """Return the options, with score.rm_url added for verifiers that need a server address."""
        url = self.settings.score.rm_url
        return {"url": url, **options} if url and takes_url(rm_type) else options


@lru_cache(maxsize=4)
def _grader(arguments: bytes) -> Grader:
    """Return the grader of a worker process, cached per settings."""
    return Grader(*pickle.loads(arguments))
