"""Where the groups of a round come from: prompts, or a data source of the user's. Both have the shape of DataSource."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimectl.data.buffer import SamplingState
from slimectl.data.plain import kind_of
from slimectl.errors import HookError
from slimectl.hooks import converted
from slimectl.stages.attempt import Attempts
from slimectl.stages.long_prompts import MOST_IN_A_ROW, all_too_long, name_dropped, prompt_excess
from slimectl.stages.underway import Group, Underway
from slimectl.types import Prompt, Sample, Status

SOURCE = "rollout.data_source_path"


class PromptGroups:
    """New groups from prompts; those that wait in the run's buffer come first where a function of the user's asks."""

    def __init__(
        self,
        prompts: Iterator[Prompt],
        attempts: Attempts,
        state: SamplingState,
        *,
        count: Callable[[], int] | None = None,
    ) -> None:
        """`count` tells the prompts of one epoch when they are asked for."""
        self._prompts, self._attempts, self._state, self._count = prompts, attempts, state, count

    def begin(self, going: Underway) -> bool:
        """Have one more group under way; False where there is none."""
        prompt = self._next()
        if prompt is not None:
            going.begin(prompt)
        return prompt is not None

    def get_samples(self, n: int) -> list[Group]:
        groups = self._state.buffer[:n]
        del self._state.buffer[:n]
        while len(groups) < n and (prompt := self._next()) is not None:
            groups.append(self._attempts.begun(prompt))
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        self._state.buffer += groups

    def save(self, rollout_id: int) -> None:
        """Nothing to do: a run keeps position and buffer by itself."""

    def load(self, rollout_id: int, state: Any = None) -> None:
        """Nothing to do: they are where they were."""

    def __len__(self) -> int:
        if self._count is None:
            raise HookError("len(data_source): these prompts are read once, and their number is known at the end only")
        return self._count()

    def _next(self) -> Prompt | None:
        prompt = next(self._prompts, None)
        if prompt is not None:
            self._state.position = prompt.index + 1
        return prompt


class OwnGroups:
    """New groups from the user's data source, checked, numbered through and given the tokens of their prompts.

    What else the source has can be reached through it. Raises HookError for what is no group.
    """

    def __init__(
        self,
        source: Any,
        attempts: Attempts,
        state: SamplingState,
        *,
        epochs: int | None = None,
        left_out: Callable[[Prompt], Any] = lambda prompt: None,
    ) -> None:
        """`epochs` times len(source) groups are drawn; None is without end, but for the source's own."""
        self._source, self._attempts, self._state = source, attempts, state
        self._last = None if epochs is None else epochs * self._length()
        self._left_out = left_out
        self._dropped = 0
        if state.rounds:
            self.load(state.rounds, state.source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return self._length()

    def _length(self) -> int:
        with converted(f"{SOURCE}: len({self._name})"):
            return len(self._source)

    def begin(self, going: Underway) -> bool:
        group = self._drawn()
        if group is not None:
            going.go_on(group)
        return group is not None

    def get_samples(self, n: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < n and (group := self._drawn()) is not None:
            groups.append(group)
        return groups

    def add_samples(self, groups: list[Group]) -> None:
        self._called("add_samples", groups)

    def save(self, rollout_id: int) -> None:
        """Where the source stands, into the state of sampling. Raises HookError for what is not JSON."""
        told = self._called("save", rollout_id)
        try:
            self._state.source = json.loads(json.dumps(told, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise HookError(
                f"{SOURCE}: {self._name}.save returned what is not JSON ({error}); return numbers, texts, lists and "
                f"dicts of them, or None"
            ) from None

    def load(self, rollout_id: int, state: Any) -> None:
        takes = inspect.signature(self._source.load).parameters
        both = "state" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
        self._called("load", rollout_id, **({"state": copy.deepcopy(state)} if both else {}))

    def _drawn(self) -> Group | None:
        """One group, ready to be sampled; None at the end."""
        while self._last is None or self._state.position < self._last:
            given = self._called("get_samples", 1)
            if not isinstance(given, list) or not all(map(_is_group, given)) or len(given) > 1:
                raise HookError(
                    f"{SOURCE}: {self._name}.get_samples(1) returned {kind_of(given)}; return a list of one group, a "
                    f"list of Samples, or an empty list at the end"
                )
            if not given:
                return None
            group = given[0] if any(sample.response_length for sample in given[0]) else self._numbered(given[0])
            tokens = group[0].prompt_length
            attempts = self._attempts
            excess = prompt_excess(tokens, attempts.settings, attempts.context, evaluation=attempts.evaluation)
            if not excess:
                self._dropped = 0
                return group
            self._left_out(_prompt(group[0]))
            self._drop(_prompt(group[0]), excess)
        return None

    def _drop(self, prompt: Prompt, excess: str) -> None:
        """Name a prompt that is too long. Raises RecordError where a source gives nothing else."""
        name_dropped(prompt, excess)
        self._dropped += 1
        if self._dropped == MOST_IN_A_ROW:
            raise all_too_long(self._dropped, excess)

    def _numbered(self, given: Group) -> Group:
        """A new group under the next number. Copies: a source may give one sample several times, and keeps its own."""
        n, place = self._attempts.settings.n_samples_per_prompt, self._state.position
        if len(given) != n:
            raise HookError(
                f"{SOURCE}: {self._name}.get_samples gave a group of {len(given)}; rollout.n_samples_per_prompt is {n}"
            )
        self._state.position += 1
        group = [copy.deepcopy(sample) for sample in given]
        for i, sample in enumerate(group):
            sample.group_index, sample.index, sample.status = place, place * n + i, Status.PENDING
            sample.tokens = list(sample.tokens) or self._attempts.prompt_tokens(_prompt(sample))
        return group

    @property
    def _name(self) -> str:
        return type(self._source).__name__

    def _called(self, method: str, *values: Any, **named: Any) -> Any:
        with converted(f"{SOURCE}: {self._name}.{method}"):
            return getattr(self._source, method)(*values, **named)


def _prompt(sample: Sample) -> Prompt:
    return Prompt(sample.prompt, label=sample.label, index=sample.group_index, tools=sample.metadata.get("tools"))


def _is_group(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(sample, Sample) for sample in given)


def flattened(groups: Iterable[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]
