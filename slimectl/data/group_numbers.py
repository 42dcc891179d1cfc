"""Numbers the groups of joined rollouts consecutively, so that samples of different prompts never share a group."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from slimectl.data.checks import shown
from slimectl.data.json_codec import encode_json
from slimectl.errors import RecordError
from slimectl.types import Chat, Sample

REMEDY = "Join rollouts end to end (slimectl score FILE FILE), or give each prompt's samples their own group_index."
SHOWN_PROMPT = 40
"""Number of characters of a prompt that an error shows."""


@dataclass(slots=True)
class _Group:
    """What identifies a group: a hash of its prompt, the numbers of its executions, and where it starts."""

    prompt: int
    executions: bytes
    location: str

    def has(self, execution: int) -> bool:
        return execution in memoryview(self.executions).cast("q")


class GroupNumbers:
    """Shifts the group numbers of a rollout's samples past the numbers of earlier rollouts in the same input.

    Rollouts in different files both start at group 0. Where the numbers restart, rollouts are distinguished by their
    prompts and by the `index` (or `rollout_id`) of their samples. Later samples are shifted past the largest number so
    far. `report` gets one message, the first time that this happens.

    It needs about 300 bytes per group. Samples of one rollout keep their numbers, in any order.
    """

    def __init__(self, report: Callable[[str], None] = lambda message: None) -> None:
        self._report = report
        self._groups: dict[int, _Group] = {}
        """Groups of the current rollout, by their own numbers."""
        self._joined: dict[tuple[int, int], _Group] = {}
        """Groups of earlier rollouts, by their own numbers and prompts."""
        self._shift = self._end = 0
        self._last = (-1, -1)

    def renumber(self, sample: Sample, location: str) -> None:
        """Give a sample the numbers that it has in the joined input.

        Raises RecordError if its group has another prompt, or if the rollouts are interleaved instead of joined end to
        end.
        """
        number = sample.group_index
        execution = sample.index if sample.rollout_id is None else sample.rollout_id
        self._place(sample, execution, location)
        self._last = (number, execution)
        self._end = max(self._end, self._shift + 1 + max(number, sample.index, sample.rollout_id or 0))
        if self._shift:
            sample.group_index += self._shift
            sample.index += self._shift
            sample.rollout_id = None if sample.rollout_id is None else sample.rollout_id + self._shift

    def _place(self, sample: Sample, execution: int, location: str) -> None:
        """Add an execution to its group, which may be the first of another rollout."""
        number, prompt = sample.group_index, _fingerprint(sample.prompt)
        group = self._groups.get(number)
        if group is not None:
            is_repeated = group.has(execution)
            differs = prompt != group.prompt
            is_foreign = differs and sample.rollout_id is None  # parts of an execution may have different prompts
            if self._last == (number, execution) and not is_foreign:
                return
            if is_repeated and not differs and number == self._last[0]:
                name = "index" if sample.rollout_id is None else "rollout_id"
                raise RecordError(
                    f"{location}: {name} {execution} occurs twice in group {number}, with others in between. Number "
                    "the samples of a group, and keep the parts of one execution together."
                )
            if is_repeated or (is_foreign and number < self._last[0]):
                self._start_rollout(location)
                group = None
            elif is_foreign:
                raise RecordError(
                    f"{location}: group {number} has the prompt {_excerpt(sample.prompt)} here and another one in "
                    f"{group.location}. {REMEDY}"
                )
        if group is None:
            earlier = self._joined.get((number, prompt))
            if earlier is not None and not earlier.has(execution):
                raise RecordError(
                    f"{location}: group {number} starts in {earlier.location}, but samples of other rollouts come "
                    f"in between. {REMEDY}"
                )
            group = self._groups[number] = _Group(prompt, b"", location)
        group.executions += array("q", [execution]).tobytes()

    def _start_rollout(self, location: str) -> None:
        if not self._shift:
            self._report(f"{location}: group numbers restart. From here on, they are shifted by {self._end}.")
        self._joined |= {(number, group.prompt): group for number, group in self._groups.items()}
        self._groups = {}
        self._shift = self._end


def _fingerprint(prompt: str | Chat) -> int:
    return hash(prompt if isinstance(prompt, str) else encode_json(prompt))


def _excerpt(prompt: str | Chat) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content")) if prompt else ""
    return shown(text if len(text) <= SHOWN_PROMPT else f"{text[:SHOWN_PROMPT]}…")
