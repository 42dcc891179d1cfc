"""Who works on which GPU of which machine, before anything starts; plain integers, no library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

SHARED = 0.5
"""The part of a GPU that a rank and an engine each count for where they share it."""


@dataclass(frozen=True)
class Bundle:
    """One GPU, or on a CPU one process's place: machine, GPU of that machine, and who is there."""

    node: int
    gpu: int
    rank: int | None = None
    engine: int | None = None

    @property
    def share(self) -> float:
        """The part of the GPU that each of those who are there counts for."""
        return 1.0 if self.rank is None or self.engine is None else SHARED


@dataclass(frozen=True)
class Placement:
    """Training ranks first, then engines, over machines of `gpus_per_node` GPUs, without holes.

    `actor_gpus_per_node` ranks on each of `actor_nodes` machines; `engines` of `gpus_per_engine` GPUs each, on GPUs of
    their own or, colocated, on those of the ranks from the first on. On a CPU only ranks have places; engines live
    where there is room.

    >>> placement = Placement(actor_nodes=1, actor_gpus_per_node=2, engines=1, gpus_per_engine=2)
    >>> [(bundle.gpu, bundle.rank, bundle.engine) for bundle in placement.bundles]
    [(0, 0, None), (1, 1, None), (2, None, 0), (3, None, 0)]
    """

    actor_nodes: int = 1
    actor_gpus_per_node: int = 1
    engines: int = 0
    gpus_per_engine: int = 1
    gpus_per_node: int = 8
    colocate: bool = False
    on_gpu: bool = True

    @property
    def ranks(self) -> int:
        return self.actor_nodes * self.actor_gpus_per_node

    @cached_property
    def bundles(self) -> list[Bundle]:
        """Every place that is taken, in the order of machines and GPUs."""
        if not self.on_gpu:
            each = self.actor_gpus_per_node
            return [Bundle(rank // each, rank % each, rank=rank) for rank in range(self.ranks)]
        begin, sampling = self._first_engine, self.engines * self.gpus_per_engine
        return [
            Bundle(
                *divmod(place, self.gpus_per_node),
                rank=place if place < self.ranks else None,
                engine=(place - begin) // self.gpus_per_engine if 0 <= place - begin < sampling else None,
            )
            for place in range(max(self.ranks, begin + sampling))
        ]

    @property
    def nodes(self) -> int:
        """Machines that it takes."""
        return 1 + max((bundle.node for bundle in self.bundles), default=0)

    def of_engine(self, engine: int) -> list[int]:
        """The bundles of an engine."""
        return [place for place, bundle in enumerate(self.bundles) if bundle.engine == engine]

    def problems(self) -> Iterator[str]:
        """Why it cannot be, a line each with the setting to change and the nearest sizes that can."""
        if not self.on_gpu:
            return
        actor, machine, each = self.actor_gpus_per_node, self.gpus_per_node, self.gpus_per_engine
        if actor > machine or (self.actor_nodes > 1 and actor != machine):
            yield (
                f"cluster.actor_num_gpus_per_node: {actor} x cluster.actor_num_nodes: {self.actor_nodes} do not fill"
                f" machines of {machine} GPUs (cluster.num_gpus_per_node) one after the other; {self._legal_actors()}"
            )
        if self.engines and each > machine:
            yield (
                f"cluster.rollout_num_gpus_per_engine: {each}, but a machine has {machine} GPUs, and an engine lives on"
                f" one; give {machine} or raise cluster.num_gpus_per_node"
            )
        elif spanning := self._spanning(self.ranks, each):
            legal = nearest(each, range(1, machine + 1), lambda size: not self._spanning(self.ranks, size))
            yield (
                f"cluster.rollout_num_gpus_per_engine: {each} cuts engine {spanning - 1} in two machines of {machine}"
                f" GPUs; give {' or '.join(map(str, legal))}{self._legal_ranks()}"
            )

    @property
    def _first_engine(self) -> int:
        return 0 if self.colocate else self.ranks

    def _spanning(self, ranks: int, each: int) -> int:
        """The first engine that would lie on two machines, counted from 1; 0 if none would."""
        begin, machine = 0 if self.colocate else ranks, self.gpus_per_node
        for engine in range(self.engines):
            first = begin + engine * each
            if first // machine != (first + each - 1) // machine:
                return engine + 1
        return 0

    def _legal_actors(self) -> str:
        machine, ranks = self.gpus_per_node, self.ranks
        sizes = nearest(ranks, range(1, ranks + 2 * machine), lambda n: n <= machine or n % machine == 0)
        pairs = [(1, n) if n <= machine else (n // machine, machine) for n in sizes]
        return "give " + " or ".join(f"{each} on {nodes}" for nodes, each in pairs)

    def _legal_ranks(self) -> str:
        """Numbers of ranks, on one machine, that leave engines of this size whole."""
        if self.colocate or self.actor_nodes > 1:
            return ""
        sizes = nearest(
            self.ranks, range(1, self.gpus_per_node + 1), lambda n: not self._spanning(n, self.gpus_per_engine)
        )
        return f", or train on {' or '.join(map(str, sizes))}" if sizes else ""


def uneven(rollouts_per_round: int, rollouts_per_step: int, data: int) -> Iterator[str]:
    """Where a batch does not divide, though it works: what then happens, and the nearest sizes that do.

    `data` is the data-parallel size: how many copies of the model share a step.
    """
    if rollouts_per_round % rollouts_per_step:
        sizes = nearest(
            rollouts_per_step, range(1, rollouts_per_round + 1), lambda size: rollouts_per_round % size == 0
        )
        yield (
            f"train.global_batch_size: {rollouts_per_step} does not divide the {rollouts_per_round} rollouts of a"
            f" round; its last takes {rollouts_per_round % rollouts_per_step}; {' or '.join(map(str, sizes))} would"
        )
    if rollouts_per_step % data:
        sizes = nearest(rollouts_per_step, range(data, rollouts_per_step + data + 1), lambda size: size % data == 0)
        yield (
            f"train.global_batch_size: {rollouts_per_step} rollouts a step are no multiple of {data} data-parallel"
            f" ranks, of which some wait for others; {' or '.join(map(str, sizes))} would be"
        )


def nearest(size: int, among: range, legal: Callable[[int], bool]) -> list[int]:
    """The nearest legal size on either side of one that is not."""
    below = [n for n in among if n < size and legal(n)][-1:]
    return below + [n for n in among if n > size and legal(n)][:1]
