"""The GPUs that a placement asks for, held as one placement group, in the placement's order."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from slimectl.errors import BackendError
from slimectl.executors.ray.deaths import is_alive
from slimectl.executors.ray.library import ray
from slimectl.placement import Placement

WAIT_S = 60.0
"""How long resources may be taken by others, or missing after a machine was lost."""
GROUPS = 4
"""Groups of ranks that may share their GPUs: policy, reference, critic, and one that is being replaced."""

Spot = tuple[str, str]
"""Ray's id of a node, and a GPU of it by number; "" on a CPU."""


class Places:
    """Bundles of one GPU each (of one CPU where there is no GPU), PACKed, so that engines and ranks lie together.

    Place i is bundle i of the placement. Ray chooses machines and GPUs, so places are dealt out in the order of what it
    chose: machines with more of them first, GPUs by number.
    """

    def __init__(self, placement: Placement, *, wait_s: float = WAIT_S) -> None:
        self.placement = placement
        self._wait_s = wait_s
        for problem in placement.problems():
            raise BackendError(problem)
        resource = {"GPU" if placement.on_gpu else "CPU": 1.0}
        self._group = ray.util.placement_group([dict(resource) for _ in placement.bundles], strategy="PACK")
        self._settling = threading.Lock()
        self._order: list[int] = []
        self._found: list[Spot] = [("", "")] * len(placement.bundles)
        try:
            self.settle()
        except BaseException:
            self.release()
            raise

    def settle(self) -> None:
        """Wait until every bundle is on a machine that lives, and find out where they are.

        After the loss of a machine Ray finds other places for its bundles, if there are any; places on other machines
        stay. Raises BackendError if they do not come.
        """
        with self._settling:
            self._find(self._settled())
            self._check_engines()

    def _settled(self) -> list[str]:
        """The node of every bundle, in Ray's order."""
        deadline = time.monotonic() + self._wait_s
        while not (nodes := self._nodes()):
            if time.monotonic() > deadline:
                raise BackendError(self._shortage())
            time.sleep(0.1)
        return nodes

    def _find(self, nodes: list[str]) -> None:
        """Where the bundles are, and which place is which of them."""
        # Only those that have moved are asked for their GPU: to ask takes a bit of it, which others may have taken.
        moved = [bundle for bundle, node in enumerate(nodes) if node != self._found[bundle][0]]
        if self.placement.on_gpu:
            by_node = [[bundle for bundle in moved if nodes[bundle] == node] for node in sorted(set(nodes))]
            # One a machine at a time, so that one process of each answers for all of its bundles.
            for asked in map(_present, zip_longest(*by_node)):
                for bundle, spot in zip(asked, ray.get([_probe(self._group, i) for i in asked]), strict=True):
                    self._found[bundle] = spot
        else:
            self._found = [(node, "") for node in nodes]
        if not self._order:
            self._order = self._dealt()

    @property
    def spots(self) -> list[Spot]:
        """Where each place of the placement is."""
        return [self._found[bundle] for bundle in self._order]

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Options of the actor of a rank."""
        return self._options(rank, GROUPS)

    def of_engine(self, engine: int) -> dict[str, Any]:
        """Options of the actor of an engine: it is in the first of its places, and may use all of them."""
        return self._options(self.placement.of_engine(engine)[0], 1)

    def gpus_of_engine(self, engine: int) -> list[str]:
        return [self.spots[place][1] for place in self.placement.of_engine(engine)]

    def release(self) -> None:
        """Give everything back; actors in it end."""
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)

    def _options(self, place: int, sharing: int) -> dict[str, Any]:
        share = self.placement.bundles[place].share / sharing if self.placement.on_gpu else 0
        return {"num_gpus": share, "scheduling_strategy": _strategy(self._group, self._order[place])}

    def _nodes(self) -> list[str]:
        """The node of every bundle, in Ray's order; empty while some have none that lives."""
        table = ray.util.placement_group_table(self._group)
        if table.get("state") != "CREATED":
            return []
        nodes = [table["bundles_to_node_id"][i] for i in range(len(self.placement.bundles))]
        return nodes if all(map(is_alive, set(nodes))) else []

    def _dealt(self) -> list[int]:
        """Ray's bundles in the order of places."""
        count = Counter(node for node, _ in self._found)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        def key(bundle: int) -> tuple[int, int, str, int]:
            node, gpu = self._found[bundle]
            return -count[node], int(ipaddress.ip_address(addresses[node])), node, int(gpu or bundle)

        return sorted(range(len(self._found)), key=key)

    def _check_engines(self) -> None:
        for engine in range(self.placement.engines if self.placement.on_gpu else 0):
            nodes = {self.spots[place][0] for place in self.placement.of_engine(engine)}
            if len(nodes) > 1:
                raise BackendError(
                    f"the cluster has no machine with {self.placement.gpus_per_engine} free GPUs for engine {engine}; "
                    "free some, or lower cluster.rollout_num_gpus_per_engine"
                )

    def _shortage(self) -> str:
        kind = "GPU" if self.placement.on_gpu else "CPU"
        there = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources().get(kind, 0)
        asked = len(self.placement.bundles)
        return (
            f"the Ray cluster has {sum(there):g} {kind}s on {sum(n > 0 for n in there)} machines, {free:g} of them"
            f" free, and {asked} are asked for (waited {self._wait_s:g} s); add machines, or ask for less: `slimectl"
            " plan --placement` shows for what"
        )


def _present(bundles: Iterable[int | None]) -> list[int]:
    return [bundle for bundle in bundles if bundle is not None]


def _strategy(group: Any, bundle: int) -> Any:
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)


def _probe(group: Any, bundle: int) -> Any:
    """Which GPU of which node a bundle is; Ray knows it only from inside."""
    options = {"num_cpus": 0, "num_gpus": 1 / 64, "scheduling_strategy": _strategy(group, bundle)}
    return ray.remote(_spot).options(**options).remote()


def _spot() -> Spot:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]
