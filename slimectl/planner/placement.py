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
    nodes_per_engine: int = 1
    """Machines of one engine; of several it takes all GPUs."""

    @property
    def parts(self) -> int:
        """Number of engines' parts: an engine has a part on each of its machines."""
        return self.engines * self.nodes_per_engine

    @property
    def gpus_per_part(self) -> int:
        return self.gpus_per_engine // self.nodes_per_engine

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

    def of_part(self, part: int) -> list[int]:
        """Return the bundle indices of a part, counted over all engines."""
        engine, node = divmod(part, self.nodes_per_engine)
        return self.of_engine(engine)[node * self.gpus_per_part : (node + 1) * self.gpus_per_part]

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
        if self.engines and self.gpus_per_part > machine:
            whole = nearest_valid(engine_gpus, range(machine, 2 * engine_gpus + 1), lambda size: size % machine == 0)
            yield (
                f"cluster.rollout_num_gpus_per_engine: {engine_gpus}, but a machine has {machine} GPUs"
                f" (cluster.num_gpus_per_node), and a larger engine takes whole ones; give"
                f" {' or '.join(map(str, whole))}"
            )
        elif spanning := self._first_spanning_part(self.ranks, self.gpus_per_part):
            legal = nearest_valid(
                engine_gpus, range(1, machine + 1), lambda size: not self._first_spanning_part(self.ranks, size)
            )
            pieces = "two" if self.nodes_per_engine == 1 else str(1 + self.nodes_per_engine)
            yield (
                f"cluster.rollout_num_gpus_per_engine: {engine_gpus} cuts engine"
                f" {(spanning - 1) // self.nodes_per_engine} in {pieces} machines of {machine} GPUs;"
                f" give {' or '.join(map(str, legal))}{self._suggest_ranks()}"
            )

    @property
    def _first_engine(self) -> int:
        return 0 if self.colocate else self.ranks

    def _first_spanning_part(self, ranks: int, part_gpus: int) -> int:
        """Return the first part of an engine that would span two machines, counted from 1; 0 if none would."""
        offset, machine = 0 if self.colocate else ranks, self.gpus_per_node
        for part in range(self.parts):
            first_gpu = offset + part * part_gpus
            if first_gpu // machine != (first_gpu + part_gpus - 1) // machine:
                return part + 1
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
            lambda n: not self._first_spanning_part(n, self.gpus_per_part),
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
