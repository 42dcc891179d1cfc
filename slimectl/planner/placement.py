"""Places training ranks and engines on GPUs and machines, with plain integers and no library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

SHARED = 0.5
"""Fraction of a GPU that a rank and an engine each reserve if they share it."""
ENGINE_SIZE = "cluster.rollout_num_gpus_per_engine"
"""Setting for an engine's GPUs. `num_gpus_per_engine` of sglang.server_groups overrides it."""


@dataclass(frozen=True)
class Bundle:
    """One GPU, or on a CPU one process slot: machine, GPU of that machine, and the rank and engine on it."""

    node: int
    gpu: int
    rank: int | None = None
    engine: int | None = None

    @property
    def share(self) -> float:
        """Fraction of the GPU that each of its rank and engine reserves."""
        return 1.0 if self.rank is None or self.engine is None else SHARED


class EnginePart(NamedTuple):
    """Part of an engine on one machine: `gpus` GPUs, starting at the bundle `first`."""

    engine: int
    first: int
    gpus: int


@dataclass(frozen=True)
class Placement:
    """Placement of training ranks, then engines, on machines of `gpus_per_node` GPUs, without gaps.

    There are `actor_gpus_per_node` ranks on each of `actor_nodes` machines. Engines of `engine_gpus` GPUs each use
    separate GPUs, or if colocated, the GPUs of the ranks. On a CPU, only ranks have bundles, and engines run anywhere.

    >>> placement = Placement(actor_nodes=1, actor_gpus_per_node=2, engine_gpus=(2,))
    >>> [(bundle.gpu, bundle.rank, bundle.engine) for bundle in placement.bundles]
    [(0, 0, None), (1, 1, None), (2, None, 0), (3, None, 0)]
    """

    actor_nodes: int = 1
    actor_gpus_per_node: int = 1
    engine_gpus: tuple[int, ...] = ()
    """GPUs of each engine. One that fills several machines has a part on each."""

    gpus_per_node: int = 8
    colocate: bool = False
    on_gpu: bool = True

    @cached_property
    def parts(self) -> list[EnginePart]:
        """The parts of all engines, in the order of their GPUs."""
        from slimectl.settings.cluster import nodes_of  # `plan` with a card does not import settings

        parts: list[EnginePart] = []
        first = 0 if self.colocate else self.ranks
        for engine, gpus in enumerate(self.engine_gpus):
            machines = nodes_of(gpus, self.gpus_per_node)
            parts += [EnginePart(engine, first + i * (gpus // machines), gpus // machines) for i in range(machines)]
            first += gpus
        return parts

    @property
    def ranks(self) -> int:
        return self.actor_nodes * self.actor_gpus_per_node

    @cached_property
    def bundles(self) -> list[Bundle]:
        """All used GPUs, in the order of machines and GPUs."""
        if not self.on_gpu:
            ranks_per_node = self.actor_gpus_per_node
            return [Bundle(rank // ranks_per_node, rank % ranks_per_node, rank=rank) for rank in range(self.ranks)]
        engines = {gpu: part.engine for part in self.parts for gpu in range(part.first, part.first + part.gpus)}
        return [
            Bundle(*divmod(gpu, self.gpus_per_node), rank=gpu if gpu < self.ranks else None, engine=engines.get(gpu))
            for gpu in range(max(self.ranks, 1 + max(engines, default=-1)))
        ]

    @property
    def nodes(self) -> int:
        """Number of machines in use."""
        return 1 + max((bundle.node for bundle in self.bundles), default=0)

    def of_part(self, part: int) -> list[int]:
        """Return the bundle indices of a part, counted over all engines."""
        _, first, gpus = self.parts[part]
        return list(range(first, first + gpus))

    def problems(self) -> Iterator[str]:
        """Yield each error of the placement as one line, with the setting to change and the nearest valid sizes."""
        if not self.on_gpu:
            return
        actor, machine = self.actor_gpus_per_node, self.gpus_per_node
        if actor > machine or (self.actor_nodes > 1 and actor != machine):
            yield (
                f"cluster.actor_num_gpus_per_node: {actor} x cluster.actor_num_nodes: {self.actor_nodes} do not fill"
                f" machines of {machine} GPUs (cluster.num_gpus_per_node) one after the other. {self._suggest_actors()}"
            )
        if (large := next((part.gpus for part in self.parts if part.gpus > machine), None)) is not None:
            sizes = nearest_valid(large, range(machine, 2 * large + 1), lambda size: size % machine == 0)
            yield (
                f"{ENGINE_SIZE}: {large}, but a machine has {machine} GPUs (cluster.num_gpus_per_node), and a larger "
                f"engine needs whole machines. Use {' or '.join(map(str, sizes))}."
            )
        elif (engine := self._first_spanning_engine()) is not None:
            size = self.engine_gpus[engine]
            legal = nearest_valid(size, range(1, machine + 1), lambda other: self._fits_with(size, other))
            machines = sum(part.engine == engine for part in self.parts)
            pieces = "two" if machines == 1 else str(1 + machines)
            yield (
                f"{ENGINE_SIZE}: {size} splits engine {engine} over {pieces} machines of {machine} GPUs."
                f" Use {' or '.join(map(str, legal))}{self._suggest_ranks()}"
            )

    def _first_spanning_engine(self) -> int | None:
        """Return the first engine with a part that would span two machines."""
        machine = self.gpus_per_node
        spanning = (p.engine for p in self.parts if p.first // machine != (p.first + p.gpus - 1) // machine)
        return next(spanning, None)

    def _fits_with(self, size: int, other: int) -> bool:
        """Return whether no engine would span machines if engines of `size` GPUs had `other` GPUs."""
        sizes = tuple(other if gpus == size else gpus for gpus in self.engine_gpus)
        return replace(self, engine_gpus=sizes)._first_spanning_engine() is None

    def _suggest_actors(self) -> str:
        machine, ranks = self.gpus_per_node, self.ranks
        sizes = nearest_valid(ranks, range(1, ranks + 2 * machine), lambda n: n <= machine or n % machine == 0)
        pairs = [(1, n) if n <= machine else (n // machine, machine) for n in sizes]
        return "Use " + " or ".join(f"{ranks_per_node} on {nodes}" for nodes, ranks_per_node in pairs)

    def _suggest_ranks(self) -> str:
        """Suggest numbers of ranks, on one machine, for which no engine of this size spans machines."""
        if self.colocate or self.actor_nodes > 1:
            return ""
        sizes = nearest_valid(
            self.ranks,
            range(1, self.gpus_per_node + 1),
            lambda n: replace(self, actor_gpus_per_node=n)._first_spanning_engine() is None,
        )
        return f", or train on {' or '.join(map(str, sizes))}" if sizes else ""


class PartTable:
    """The engine parts of a placement, each with the name of the host that uses it. Thread-safe."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._part_of: dict[str, int] = {}
        self._lock = threading.Lock()

    def assign(self, name: str, gpus: float) -> int | None:
        """Return the part of `gpus` GPUs for a host: the one it had before, or the first free one, if there is one."""
        parts = self.placement.parts
        with self._lock:
            sized = [index for index, part in enumerate(parts) if part.gpus == gpus]
            if self._part_of.get(name) not in sized:
                free = [index for index in sized if index not in self._part_of.values()]
                if not free:
                    return None
                self._part_of[name] = free[0]
            return self._part_of[name]

    def release(self, name: str) -> None:
        """Free the part of a host for others."""
        with self._lock:
            self._part_of.pop(name, None)

    def rank_beside(self, name: str) -> int | None:
        """Return the rank that shares the first GPU of a host, or None."""
        part = self._part_of.get(name)
        return None if part is None else self.placement.bundles[self.placement.of_part(part)[0]].rank


def divisibility_warnings(rollouts_per_round: int, rollouts_per_step: int, data: int) -> Iterator[str]:
    """Yield a warning for each batch size that does not divide evenly: its effect, and the nearest sizes that do.

    `data` is the data-parallel size: the number of model copies that share a step.
    """
    if rollouts_per_round % rollouts_per_step:
        sizes = nearest_valid(
            rollouts_per_step, range(1, rollouts_per_round + 1), lambda size: rollouts_per_round % size == 0
        )
        yield (
            f"train.global_batch_size: {rollouts_per_step} does not divide the {rollouts_per_round} rollouts of a "
            f"round, so {rollouts_per_round % rollouts_per_step} wait for the next. Use {' or '.join(map(str, sizes))}."
        )
    if rollouts_per_step % data:
        sizes = nearest_valid(
            rollouts_per_step, range(data, rollouts_per_step + data + 1), lambda size: size % data == 0
        )
        yield (
            f"train.global_batch_size: {rollouts_per_step} rollouts per step are not a multiple of {data} data-parallel"
            f" ranks, so some ranks wait. Use {' or '.join(map(str, sizes))}."
        )


def nearest_valid(size: int, among: range, legal: Callable[[int], bool]) -> list[int]:
    """Return the nearest legal sizes below and above an illegal one."""
    below = [n for n in among if n < size and legal(n)][-1:]
    return below + [n for n in among if n > size and legal(n)][:1]
