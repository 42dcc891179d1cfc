"""Collectives that ranks record, and whether the members of a group make the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """A call of a collective: its group's ranks, and every tensor as "dtype [sizes]".

    `peer` is the root, or the other side of a message, as a rank of the group. `sent` and `received` are the rows to
    and from every member of the group, of an all-to-all of uneven parts.
    """

    name: str
    group: tuple[int, ...]
    tensors: tuple[str, ...]
    peer: int | None = None
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Collective:
        """Build a collective from its fields as JSON has them, with lists for tuples."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.tensors)})"


SEND, RECEIVE = "send", "recv_"


def mismatches(calls: Mapping[int, Sequence[Collective]]) -> Iterator[str]:
    """Yield a line for the first difference between any two ranks, of the calls in every group that both are in.

    >>> gather = Collective("allgather_", (0, 1), ("bfloat16 [8]",))
    >>> list(mismatches({0: [gather, gather], 1: [gather]}))
    ['ranks 0 and 1, group 0-1: call 2 is allgather_(bfloat16 [8]) on rank 0, nothing on rank 1']
    """
    for first, second in itertools.combinations(sorted(calls), 2):
        groups = {call.group for rank in (first, second) for call in calls[rank]}
        for group in sorted(groups, key=lambda group: (len(group), group)):
            if first in group and second in group:
                yield from _of_pair(group, first, calls[first], second, calls[second])


def _of_pair(
    group: tuple[int, ...], first: int, ours: Sequence[Collective], second: int, theirs: Sequence[Collective]
) -> Iterator[str]:
    """Yield the first difference of calls of all members, and of messages in each direction, which do not wait."""
    here, there = group.index(first), group.index(second)
    local = [call for call in ours if call.group == group]
    remote = [call for call in theirs if call.group == group]
    kinds = (
        [[call for call in calls if call.name not in (SEND, RECEIVE)] for calls in (local, remote)],
        [_messages(local, SEND, there), _messages(remote, RECEIVE, here)],
        [_messages(local, RECEIVE, there), _messages(remote, SEND, here)],
    )
    for pair in kinds:
        for number, (a, b) in enumerate(itertools.zip_longest(*pair), 1):
            if a is None or b is None or not _agree(a, b, here, there):
                where = f"ranks {first} and {second}, group {group[0]}-{group[-1]}"
                texts = f"{a or 'nothing'} on rank {first}, {b or 'nothing'} on rank {second}"
                yield f"{where}: call {number} is {texts}"
                return


def _messages(calls: Sequence[Collective], name: str, peer: int) -> list[Collective]:
    return [call for call in calls if call.name == name and call.peer == peer]


def _agree(a: Collective, b: Collective, first: int, second: int) -> bool:
    if {a.name, b.name} == {SEND, RECEIVE}:
        return a.tensors == b.tensors
    if a.sent or b.sent:
        if a.name != b.name or not (a.sent and b.sent):
            return False
        return a.sent[second] == b.received[first] and b.sent[first] == a.received[second]
    return a.name == b.name and a.tensors == b.tensors and a.peer == b.peer
