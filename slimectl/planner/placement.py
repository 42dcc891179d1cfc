"""Placement of training ranks and engines on GPUs and machines; plain integers, no library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

SHARED = 0.5
"""Fraction of a GPU that a rank and an engine each reserve if they share it."""


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


@dataclass(frozen=True)
class Placement:
    """Placement of training ranks, then engines, on machines of `gpus_per_node` GPUs, without gaps.

    `actor_gpus_per_node` ranks on each of `actor_nodes` machines; `engines` of `gpus_per_engine` GPUs each, on separate
    GPUs or, colocated, on those of the ranks from the first on. On a CPU only ranks have bundles; engines run anywhere.

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
        """All used GPUs, in the order of machines and GPUs."""
        if not self.on_gpu:
            ranks_per_node = self.actor_gpus_per_node
            return [Bundle(rank // ranks_per_node, rank % ranks_per_node, rank=rank) for rank in range(self.ranks)]
        first_gpu, engine_gpus = self._first_engine, self.engines * self.gpus_per_engine
        return [
            Bundle(
                *divmod(gpu, self.gpus_per_node),
                rank=gpu if gpu < self.ranks else None,
                engine=(gpu - first_gpu) // self.gpus_per_engine if 0 <= gpu - first_gpu < engine_gpus else None,
            )
            for gpu in range(max(self.ranks, first_gpu + engine_gpus))
        ]

    @property
    def nodes(self) -> int:
        """Number of machines in use."""
        return 1 + max((bundle.node for bundle in self.bundles), default=0)

    def of_engine(self, engine: int) -> list[int]:
        """Return the bundle indices of an engine."""
        return [index for index, bundle in enumerate(self.bundles) if bundle.engine == engine]

    def problems(self) -> Iterator[str]:
        """Yield why the placement is invalid, a line each, with the setting to change and the nearest valid sizes."""
        if not self.on_gpu:
            return
        actor, machine, engine_gpus = self.actor_gpus_per_node, self.gpus_per_node, self.gpus_per_engine
        if actor > machine or (self.actor_nodes > 1 and actor != machine):
            yield (
                f"cluster.actor_num_gpus_per_node: {actor} x cluster.actor_num_nodes: {self.actor_nodes} do not fill"
                f" machines of {machine} GPUs (cluster.num_gpus_per_node) one after the other; {self._suggest_actors()}"
            )
        if self.engines and engine_gpus > machine:
            yield (
                f"cluster.rollout_num_gpus_per_engine: {engine_gpus}, but a machine has {machine} GPUs, and an"
                f" engine lives on one; give {machine} or raise cluster.num_gpus_per_node"
            )
        elif spanning := self._first_spanning_engine(self.ranks, engine_gpus):
            legal = nearest_valid(
                engine_gpus, range(1, machine + 1), lambda size: not self._first_spanning_engine(self.ranks, size)
            )
            yield (
                f"cluster.rollout_num_gpus_per_engine: {engine_gpus} cuts engine {spanning - 1} in two machines of"
                f" {machine} GPUs; give {' or '.join(map(str, legal))}{self._suggest_ranks()}"
            )

    @property
    def _first_engine(self) -> int:
        return 0 if self.colocate else self.ranks

    def _first_spanning_engine(self, ranks: int, engine_gpus: int) -> int:
        """Return the first engine that would span two machines, counted from 1; 0 if none would."""
        offset, machine = 0 if self.colocate else ranks, self.gpus_per_node
        for engine in range(self.engines):
            first_gpu = offset + engine * engine_gpus
            if first_gpu // machine != (first_gpu + engine_gpus - 1) // machine:
                return engine + 1
        return 0

    def _suggest_actors(self) -> str:
        machine, ranks = self.gpus_per_node, self.ranks
        sizes = nearest_valid(ranks, range(1, ranks + 2 * machine), lambda n: n <= machine or n % machine == 0)
        pairs = [(1, n) if n <= machine else (n // machine, machine) for n in sizes]
        return "give " + " or ".join(f"{ranks_per_node} on {nodes}" for nodes, ranks_per_node in pairs)

    def _suggest_ranks(self) -> str:
        """Suggest numbers of ranks, on one machine, for which no engine of this size spans machines."""
        if self.colocate or self.actor_nodes > 1:
            return ""
        sizes = nearest_valid(
            self.ranks,
            range(1, self.gpus_per_node + 1),
            lambda n: not self._first_spanning_engine(n, self.gpus_per_engine),
        )
        return f", or train on {' or '.join(map(str, sizes))}" if sizes else ""


def divisibility_warnings(rollouts_per_round: int, rollouts_per_step: int, data: int) -> Iterator[str]:
    """Yield a warning for each batch size that does not divide evenly: its effect, and the nearest sizes that do.

    `data` is the data-parallel size: the number of model copies that share a step.
    """
    if rollouts_per_round % rollouts_per_step:
        sizes = nearest_valid(
            rollouts_per_step, range(1, rollouts_per_round + 1), lambda size: rollouts_per_round % size == 0
        )
        yield (
            f"train.global_batch_size: {rollouts_per_step} does not divide the {rollouts_per_round} rollouts of a"
            f" round; its last takes {rollouts_per_round % rollouts_per_step}; {' or '.join(map(str, sizes))} would"
        )
    if rollouts_per_step % data:
        sizes = nearest_valid(
            rollouts_per_step, range(data, rollouts_per_step + data + 1), lambda size: size % data == 0
        )
        yield (
            f"train.global_batch_size: {rollouts_per_step} rollouts a step are no multiple of {data} data-parallel"
            f" ranks, of which some wait for others; {' or '.join(map(str, sizes))} would be"
        )


def nearest_valid(size: int, among: range, legal: Callable[[int], bool]) -> list[int]:
    """Return the nearest legal sizes below and above an illegal one."""
    below = [n for n in among if n < size and legal(n)][-1:]
    return below + [n for n in among if n > size and legal(n)][:1]
