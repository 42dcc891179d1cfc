"""Sources of groups for a round: prompts, or a user's data source. Both implement DataSource."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slimectl.data.difficulty_pools import DifficultyPools
from slimectl.data.json_values import kind_of, plain_sample, plain_value
from slimectl.data.prompt_dataset import restored
from slimectl.errors import HookError
from slimectl.plugins.callables import Hook
from slimectl.plugins.containment import converted
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.in_flight import Group
from slimectl.stages.long_prompts import MOST_IN_A_ROW, all_too_long, name_dropped, prompt_excess
from slimectl.stages.text_responses import prompt_of
from slimectl.system.stdio import logger
from slimectl.types import Prompt, Sample, SamplerState, Status

SOURCE = "rollout.data_source_path"


class PromptSource:
    """Creates groups from the prompts that fit. `get_samples`, for user functions, takes buffered groups first."""

    def __init__(
        self,
        prompts: Iterable[Prompt],
        generator: GroupGenerator,
        state: SamplerState | None = None,
        *,
        count: Callable[[], int] | None = None,
        pools: DifficultyPools | None = None,
    ) -> None:
        """`count` returns the number of prompts per epoch, and is called on demand. `pools` draws the prompts."""
        self.generator, self.state = generator, state or SamplerState()
        self._prompts, self._count, self._pools = generator.fitting(prompts), count, pools
        self._next = self.state.position

    def next_group(self) -> Group | None:
        """Return the samples of the next prompt, ready to be generated, or None at the end."""
        prompt = next(self._prompts, None)
        if prompt is None:
            return None
        if self._pools is not None:
            for number in range(self._next, prompt.index):  # the prompts that do not fit
                self._pools.skip(number)
        self._next = self.state.position = prompt.index + 1
        return self.generator.new_group(prompt)

    def get_samples(self, n: int) -> list[Group]:
        groups = self.state.buffer[:n]
        del self.state.buffer[:n]
        while len(groups) < n and (group := self.next_group()) is not None:
            groups.append(group)
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        self.state.buffer += groups

    def read_all(self) -> None:
        """Read all prompts, so that their number is known."""
        prompts = list(self._prompts)
        self._prompts, self._count = iter(prompts), lambda: len(prompts)

    def add_results(self, group: Group, successes: Sequence[bool]) -> None:
        """Tell the pools which responses of a graded group succeeded."""
        if self._pools is not None:
            self._pools.record(group[0].group_index, successes)

    def pool_counts(self) -> dict[str, int]:
        """Return the number of prompts in each pool, or nothing without pools."""
        return {} if self._pools is None else self._pools.counts()

    def save(self, rollout_id: int) -> None:
        """Store the state of the pools. A run saves position and buffer itself."""
        if self._pools is not None:
            self.state.source = self._pools.to_json()

    def load(self, rollout_id: int, state: Any = None) -> None:
        """Do nothing, because a run restores position and buffer itself."""

    def __len__(self) -> int:
        if self._count is None:
            raise HookError(
                "len(data_source): these prompts are read only once, so their number is unknown until the end"
            )
        return self._count()


class UserDataSource:
    """Creates groups from the user's data source: validates them, numbers them and tokenizes their prompts.

    Other attributes are forwarded to the source. Raises HookError for anything that is not a group.
    """

    def __init__(
        self,
        source: Any,
        generator: GroupGenerator,
        state: SamplerState | None = None,
        *,
        max_groups: int | None = None,
    ) -> None:
        """At most `max_groups` groups are drawn. With None, groups are drawn until the source ends."""
        self._source, self.generator, self.state = source, generator, state or SamplerState()
        self._last = max_groups
        self._dropped = 0
        if self.state.rounds:
            self.load(self.state.rounds, self.state.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return source_length(self._source)

    def add_results(self, group: Group, successes: Sequence[bool]) -> None:
        """Do nothing: a user's source decides by itself what comes next."""

    def pool_counts(self) -> dict[str, int]:
        return {}

    def get_samples(self, n: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < n and (group := self.next_group()) is not None:
            groups.append(group)
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        """Return groups to the source. Raises HookError if it has no `add_samples`."""
        if not hasattr(self._source, "add_samples"):
            raise HookError(
                f"{SOURCE}: {self._name} has no add_samples, but groups were returned to it. Add the method"
            )
        self._call("add_samples", list(map(SampleGroup, groups)))

    def save(self, rollout_id: int) -> None:
        """Store the state of the source in the sampling state. Raises HookError if it is not JSON.

        For a source without `save`, the state is the position in the dataset that it was given.
        """
        if hasattr(self._source, "save"):
            source_state = self._call("save", rollout_id)
        else:
            drawn = getattr(getattr(self._source, "dataset", None), "drawn", None)
            source_state = None if drawn is None else {"drawn": drawn}
        try:
            self.state.source = json.loads(json.dumps(plain_value(source_state), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise HookError(
                f"{SOURCE}: {self._name}.save did not return JSON ({error}). Return numbers, strings, lists and "
                f"dicts of them, or None"
            ) from None

    def load(self, rollout_id: int, state: Any) -> None:
        """Restore the state of the source. Without `load`, it starts again, except for the dataset's position."""
        if not hasattr(self._source, "load"):
            dataset: Any = getattr(self._source, "dataset", None)
            if isinstance(state, dict) and hasattr(dataset, "drawn"):
                dataset.drawn = state.get("drawn", 0)
            logger.warning(
                f"{SOURCE}: {self._name} has no load, so its own state starts again. Add save and load to restore it"
            )
            return
        parameters = inspect.signature(self._source.load).parameters
        takes_state = "state" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._call("load", rollout_id, **({"state": copy.deepcopy(state)} if takes_state else {}))

    def next_group(self) -> Group | None:
        """Return the next group, ready to be sampled, or None at the end."""
        while self._last is None or self.state.position < self._last:
            groups = self._from_buffer() or self._call("get_samples", 1)
            if isinstance(groups, list):
                groups = [self._copies(part) if isinstance(part, Sample) else part for part in groups]
            if not isinstance(groups, list) or not all(map(_is_group, groups)) or len(groups) > 1:
                raise HookError(
                    f"{SOURCE}: {self._name}.get_samples(1) returned {kind_of(groups)}. Return a list of one group (a "
                    f"list of Samples), a list of one Sample, or an empty list at the end"
                )
            if not groups:
                return None
            group = groups[0] if any(sample.response_length for sample in groups[0]) else self._number_group(groups[0])
            tokens = group[0].prompt_length
            excess = prompt_excess(
                tokens, self.generator.settings, self.generator.context, evaluation=self.generator.evaluation
            )
            if not excess:
                self._dropped = 0
                return group
            self.generator.on_skipped(prompt_of(group[0]))
            self._drop(prompt_of(group[0]), excess)
        return None

    def _copies(self, sample: Sample) -> Group:
        """Return a group made of a single sample that represents a prompt."""
        return [sample] * self.generator.settings.n_samples_per_prompt

    def _from_buffer(self) -> list[Group] | None:
        """Return a group that the source's `buffer_filter` takes from its `buffer`, or None if it lacks either."""
        buffer = getattr(self._source, "buffer", None)
        if not isinstance(buffer, list) or not buffer or not callable(getattr(self._source, "buffer_filter", None)):
            return None
        function = Hook(
            f"{self._name}.buffer_filter",
            setting=SOURCE,
            offers=("args", "rollout_id", "buffer", "num_samples"),
            function=self._source.buffer_filter,
        )
        arguments = {"args": getattr(self._source, "args", None), "rollout_id": self.state.rounds + 1}
        groups = function({**arguments, "buffer": buffer, "num_samples": 1})
        if not isinstance(groups, list):
            raise function.returned(groups, "a list of groups of the buffer")
        taken = set(map(id, groups))
        buffer[:] = [group for group in buffer if id(group) not in taken]
        return groups

    def _drop(self, prompt: Prompt, excess: str) -> None:
        """Log and count a prompt that is too long. Raises RecordError after MOST_IN_A_ROW of them in a row."""
        name_dropped(prompt, excess)
        self._dropped += 1
        if self._dropped == MOST_IN_A_ROW:
            raise all_too_long(self._dropped, excess)

    def _number_group(self, source_group: Group) -> Group:
        """Return a copy of a new group with the next group index, or with its own if the source `keeps_numbers`.

        It is a copy because a source may return the same sample several times, and keeps it.
        """
        n, index = self.generator.settings.n_samples_per_prompt, self.state.position
        if len(source_group) != n:
            raise HookError(
                f"{SOURCE}: {self._name}.get_samples returned a group of {len(source_group)}, but "
                f"rollout.n_samples_per_prompt is {n}"
            )
        self.state.position += 1
        group = [plain_sample(restored(copy.deepcopy(sample))) for sample in source_group]
        for i, sample in enumerate(group):
            if not getattr(self._source, "keeps_numbers", False):
                sample.group_index, sample.index = index, index * n + i
            sample.status = Status.PENDING
            sample.tokens = list(sample.tokens) or self.generator.prompt_tokens(prompt_of(sample))
        return group

    @property
    def _name(self) -> str:
        return type(self._source).__name__

    def _call(self, method: str, *values: Any, **keywords: Any) -> Any:
        with converted(f"{SOURCE}: {self._name}.{method}"):
            return getattr(self._source, method)(*values, **keywords)


class SampleGroup(list[Sample]):
    """A group that is returned to a data source. It has the attributes of its first sample."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self[0], name)


def source_length(source: Any) -> int:
    """Return the number of prompts per epoch of a user's data source. Raises HookError if it has none."""
    name = type(source).__name__
    if not hasattr(source, "__len__"):
        raise HookError(f"{SOURCE}: {name} has no __len__, so its epochs cannot be counted. Set run.num_rollout")
    with converted(f"{SOURCE}: len({name})"):
        return len(source)


def _is_group(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(sample, Sample) for sample in value)


def flatten(groups: Iterable[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]
