"""Who grades a sample, and which samples are graded in one call."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Protocol

from slimectl.data.records import refused_path
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import Args
from slimectl.rewards import Verdict, Verifier, known_types, verifier, weighted
from slimectl.rewards.asking import Asker, finished
from slimectl.settings import Settings
from slimectl.settings.secret import revealed_score
from slimectl.stages.own_reward import Own
from slimectl.streams import batched
from slimectl.types import Sample, Status

ASKS_SERVERS = ("judge", "remote_rm")


class Calls(Protocol):
    """A reward as the stage uses it: samples are cut into calls, each of which gives as many rewards.

    Nobody is asked about attempts that failed, unless siblings that did not are graded with them.
    """

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]: ...

    def many(self, samples: list[Sample]) -> list[Any]: ...

    def waits(self, samples: list[Sample]) -> bool:
        """Whether the call is mostly waiting for somebody else; then `asked` may run beside others."""
        ...

    async def asked(self, samples: list[Sample], asker: Asker) -> list[Any]: ...

    @property
    def patience_s(self) -> float:
        """Seconds of waiting that are no fault of the sample's."""
        ...


class OneByOne:
    """Any callable as Calls: a sample a call, never waiting."""

    patience_s = 0.0

    def __init__(self, reward: Callable[[Sample], Any]) -> None:
        self._reward = reward

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        return ([sample] for sample in samples)

    def many(self, samples: list[Sample]) -> list[Any]:
        return _nothing(samples) if failed(samples) else [self._reward(sample) for sample in samples]

    def waits(self, samples: list[Sample]) -> bool:
        return False

    async def asked(self, samples: list[Sample], asker: Asker) -> list[Any]:
        return self.many(samples)


def failed(samples: Sequence[Sample]) -> bool:
    """Whether none of them is an answer."""
    return all(sample.status is Status.FAILED for sample in samples)


def _nothing(samples: Sequence[Sample]) -> list[Any]:
    return [0.0] * len(samples)


def as_calls(reward: Callable[[Sample], Any]) -> Calls:
    return reward if isinstance(reward, Grader) else OneByOne(reward)


class Grader:
    """Dispatches a sample to its reward: the sample's custom_rm_path, the run's, metadata.rm_type, rm_type.

    Pickles by its settings, so that worker processes make verifiers of their own. Raises SettingsError or HookError
    at once if what the settings name does not exist.
    """

    def __init__(self, settings: Settings) -> None:
        # With the secrets at hand: worker processes, and other machines, have another environment.
        self.settings = settings = settings.model_copy(update={"score": revealed_score(settings.score)})
        self._args = Args(settings)
        self._own: dict[str, Own] = {}
        self._verifiers: dict[str, Verifier] = {}
        given = settings.score
        if given.rm and given.rm_type:
            raise SettingsError("score.rm and score.rm_type exclude each other; make the type a part of the sum")
        self._sum = weighted([self._located(part, part.get("type")) for part in given.rm]) if given.rm else None
        if given.custom_rm_path:
            self._own_of(given.custom_rm_path)
        elif given.rm_type:
            self._verifier(given.rm_type)

    def __reduce__(self) -> tuple[Callable[[bytes], Grader], tuple[bytes]]:
        return _grader, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        """The settings, as they go along with every call to a worker process."""
        return pickle.dumps(self.settings)

    def __call__(self, sample: Sample) -> Any:
        return self.many([sample])[0]

    def explain(self, sample: Sample) -> Verdict:
        """The reward and how it came about; of a function of the user's, only what it returned."""
        if own := self._own_for(sample):
            return self._told(own, self._returned(own, [sample]))[0]
        return self.verifier_of(sample).explain(sample)

    def calls(self, samples: Iterable[Sample]) -> Iterator[list[Sample]]:
        """Samples that are graded in one call: siblings, or as many as whoever grades takes; else each alone.

        Raises RecordError for siblings that do not stand together.
        """
        ended: set[tuple[str, int]] = set()
        for (name, most, group), company in groupby(samples, key=self._company):
            if group is None:
                yield from batched(company, most)
                continue
            siblings = list(company)
            if (name, group) in ended:
                raise RecordError(
                    f"sample {siblings[0].index}: group_index: group {group} has been graded already; "
                    f"with score.group_rm siblings stand together: sort the samples by group_index"
                )
            ended.add((name, group))
            yield siblings

    def many(self, samples: list[Sample]) -> list[Any]:
        """The rewards of one call, or verdicts if the settings say explain."""
        if failed(samples):
            return _nothing(samples)
        own, explains = self._own_for(samples[0]), self.settings.score.explain
        if own:
            rewards = self._returned(own, samples)
            return list(self._told(own, rewards)) if explains else rewards
        grade = self.verifier_of(samples[0])
        if len(samples) > 1:
            verdicts = finished(lambda asker: grade.asked(samples, asker))
            return verdicts if explains else [verdict.reward for verdict in verdicts]
        return [grade.explain(samples[0]) if explains else grade(samples[0])]

    def waits(self, samples: list[Sample]) -> bool:
        if failed(samples):
            return False
        try:
            own = self._own_for(samples[0])
            return own.waits if own else self.verifier_of(samples[0]).waits
        except RecordError:  # `many` raises it again
            return False

    async def asked(self, samples: list[Sample], asker: Asker) -> list[Any]:
        """`many`, for a call that waits."""
        explains = self.settings.score.explain
        if own := self._own_for(samples[0]):
            rewards = own.rewards(await own.called(samples, self._args), samples)
            return list(self._told(own, rewards)) if explains else rewards
        verdicts = await self.verifier_of(samples[0]).asked(samples, asker)
        return verdicts if explains else [verdict.reward for verdict in verdicts]

    @property
    def patience_s(self) -> float:
        """Of what the settings name."""
        if self._sum:
            return self._sum.patience_s
        return sum(made.patience_s for made in self._verifiers.values())

    def bounds(self, sample: Sample) -> tuple[float, float] | None:
        """Between which numbers the verifier says the reward lies; None for another key of a dict, or no verifier."""
        if self._own_for(sample) or self.settings.score.reward_key not in (None, "score"):
            return None
        return self.verifier_of(sample).bounds

    def verifier_of(self, sample: Sample) -> Verifier:
        """The verifier that is meant where no function of the user's is.

        Raises SettingsError if none is named, RecordError if the sample names one that cannot be.
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

    def _company(self, sample: Sample) -> tuple[str, int, int | None]:
        """Who grades it; how many samples in one call, or else of which group it is that is graded whole."""
        if failed([sample]) and not self.settings.score.group_rm:
            return "", 1, None
        try:
            path = self._path_of(sample)
            name = path or str(sample.metadata.get("rm_type") or "")
            if path:
                together = self._own_of(path).together
                most = self.settings.score.batch_size if together else 1
            else:
                grade = self.verifier_of(sample)
                together, most = grade.takes_groups, grade.together
        except RecordError:  # raised again where it is graded, as the result of this sample alone
            return "", 1, None
        return name, most, sample.group_index if together and self.settings.score.group_rm else None

    def _own_for(self, sample: Sample) -> Own | None:
        path = self._path_of(sample)
        return self._own_of(path) if path else None

    def _path_of(self, sample: Sample) -> str | None:
        """The path of the user's function. Raises RecordError where a sample names one and may not."""
        if sample.custom_rm_path and not self.settings.score.allow_paths_in_records:
            raise RecordError(f"sample {sample.index}: {refused_path('custom_rm_path', sample.custom_rm_path)}")
        return sample.custom_rm_path or self.settings.score.custom_rm_path

    def _own_of(self, path: str) -> Own:
        if path not in self._own:
            self._own[path] = Own(path, group_rm=self.settings.score.group_rm)
        return self._own[path]

    def _returned(self, own: Own, samples: Sequence[Sample]) -> list[Any]:
        result = own.called(samples, self._args)
        if inspect.isawaitable(result):
            awaitable = result
            result = finished(lambda asker: awaitable)
        return own.rewards(result, samples)

    def _told(self, own: Own, rewards: Iterable[Any]) -> list[Verdict]:
        return [Verdict(reward, "whole sample", f"{own.path} returned {reward!r}") for reward in rewards]

    def _verifier(self, rm_type: str) -> Verifier:
        if rm_type not in self._verifiers:
            options = self.settings.score.rm_options if rm_type == self.settings.score.rm_type else {}
            self._verifiers[rm_type] = verifier(rm_type, **self._located(options, rm_type))
        return self._verifiers[rm_type]

    def _located(self, options: dict[str, Any], rm_type: object) -> dict[str, Any]:
        """The options, with the address where it is needed and not among them."""
        url = self.settings.score.rm_url
        asks = str(rm_type).removeprefix("boxed_") in ASKS_SERVERS
        return {"url": url, **options} if url and asks else options


@lru_cache(maxsize=4)
def _grader(settings: bytes) -> Grader:
    """One for all samples that come to a worker process."""
    return Grader(pickle.loads(settings))
