"""Reserves the GPUs of a placement as one Ray placement group, in the placement's order."""

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
from slimectl.executors.ray.cluster import ray
from slimectl.executors.ray.failures import is_alive
from slimectl.planner.placement import Placement

WAIT_S = 60.0
"""Seconds to wait for resources that others use, or that are missing after the loss of a machine."""
GROUPS = 4
"""Number of rank groups that may share GPUs: policy, reference, critic, and one that is being replaced."""

Spot = tuple[str, str]
"""Ray's id of a node, and the number of one of its GPUs ("" on a CPU)."""


class PlacedBundles:
    """Placement group of one-GPU bundles (one-CPU without GPUs). PACK keeps engines and ranks together.

    Place i is bundle i of the placement. Ray chooses the machines and GPUs. Places are then assigned in order: machines
    with more bundles first, GPUs by number.
    """

    def __init__(self, placement: Placement, *, wait_s: float = WAIT_S) -> None:
        self.placement = placement
        self._wait_s = wait_s
        for problem in placement.problems():
            raise BackendError(problem)
        resource = {"GPU" if placement.on_gpu else "CPU": 1.0}
        self._group = ray.util.placement_group([dict(resource) for _ in placement.bundles], strategy="PACK")
        self._settle_lock = threading.Lock()
        self._order: list[int] = []
        self._bundle_spots: list[Spot] = [("", "")] * len(placement.bundles)
        try:
            self.settle()
        except BaseException:
            self.release()
            raise

    def settle(self) -> None:
        """Wait until every bundle is on a live machine, and locate them.

        After the loss of a machine Ray moves its bundles, if there is room. Places on other machines stay. Raises
        BackendError if the bundles find no room.
        """
        with self._settle_lock:
            self._locate(self._wait_for_nodes())
            self._check_engines()

    def _wait_for_nodes(self) -> list[str]:
        """Wait for a live node of every bundle, in Ray's order. Raises BackendError on a timeout."""
        deadline = time.monotonic() + self._wait_s
        while not (nodes := self._nodes()):
            if time.monotonic() > deadline:
                raise BackendError(self._shortage())
            time.sleep(0.1)
        return nodes

    def _locate(self, nodes: list[str]) -> None:
        """Locate the bundles, and assign them to places."""
        # Ask only moved bundles for their GPU: a probe needs a fraction of it, which others may have taken.
        moved = [bundle for bundle, node in enumerate(nodes) if node != self._bundle_spots[bundle][0]]
        if self.placement.on_gpu:
            by_node = [[bundle for bundle in moved if nodes[bundle] == node] for node in sorted(set(nodes))]
            # One per machine at a time, so that one process answers for all bundles of its machine.
            for bundles in map(_without_none, zip_longest(*by_node)):
                for bundle, spot in zip(
                    bundles, ray.get([_locate_bundle(self._group, i) for i in bundles]), strict=True
                ):
                    self._bundle_spots[bundle] = spot
        else:
            self._bundle_spots = [(node, "") for node in nodes]
        if not self._order:
            self._order = self._bundle_order()

    @property
    def spots(self) -> list[Spot]:
        """Node and GPU of each place of the placement."""
        return [self._bundle_spots[bundle] for bundle in self._order]

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the Ray options of a rank's actor."""
        return self._options(rank, GROUPS)

    def of_part(self, part: int) -> dict[str, Any]:
        """Return the Ray options of an engine part's actor, which runs in the first of its places and may use all."""
        return self._options(self.placement.of_part(part)[0], 1)

    def gpus_of_part(self, part: int) -> list[str]:
        return [self.spots[place][1] for place in self.placement.of_part(part)]

    def release(self) -> None:
        """Remove the placement group. Its actors end."""
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)

    def _options(self, place: int, sharing: int) -> dict[str, Any]:
        share = self.placement.bundles[place].share / sharing if self.placement.on_gpu else 0
        return {"num_gpus": share, "scheduling_strategy": _strategy(self._group, self._order[place])}

    def _nodes(self) -> list[str]:
        """Return the node of every bundle, in Ray's order, or [] while some have no live node."""
        table = ray.util.placement_group_table(self._group)
        if table.get("state") != "CREATED":
            return []
        nodes = [table["bundles_to_node_id"][i] for i in range(len(self.placement.bundles))]
        return nodes if all(map(is_alive, set(nodes))) else []

    def _bundle_order(self) -> list[int]:
        """Return Ray's bundles in the order of places."""
        count = Counter(node for node, _ in self._bundle_spots)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

        def key(bundle: int) -> tuple[int, int, str, int]:
            node, gpu = self._bundle_spots[bundle]
            return -count[node], int(ipaddress.ip_address(addresses[node])), node, int(gpu or bundle)

        return sorted(range(len(self._bundle_spots)), key=key)

    def _check_engines(self) -> None:
        for index, part in enumerate(self.placement.parts if self.placement.on_gpu else ()):
            nodes = {self.spots[place][0] for place in self.placement.of_part(index)}
            if len(nodes) > 1:
                raise BackendError(
                    f"the cluster has no machine with {part.gpus} free GPUs for engine {part.engine}. "
                    "Free some, or lower cluster.rollout_num_gpus_per_engine."
                )

    def _shortage(self) -> str:
        kind = "GPU" if self.placement.on_gpu else "CPU"
        counts = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources().get(kind, 0)
        needed = len(self.placement.bundles)
        return (
            f"the Ray cluster has {sum(counts):g} {kind}s on {sum(n > 0 for n in counts)} machines, {free:g} of them"
            f" free, but the run needs {needed} (waited {self._wait_s:g} s). Add machines, or request less. `slimectl"
            " plan --placement` shows what the run requests."
        )


class ExtraPlace:
    """Placement group of an engine that joins later: `gpus` GPUs of one machine, outside of the run's placement.

    Raises BackendError if they are not free within `wait_s`.
    """

    def __init__(self, name: str, gpus: float, *, wait_s: float) -> None:
        self._group = ray.util.placement_group([{"GPU": gpus}], strategy="STRICT_PACK")
        if not self._group.wait(wait_s):
            self.release()
            free = ray.available_resources().get("GPU", 0)
            raise BackendError(
                f"{name} needs {gpus:g} free GPUs on one machine, but the Ray cluster has only {free:g} free (waited "
                f"{wait_s:g} s). Add a machine, or remove another engine."
            )
        self.options: dict[str, Any] = {"num_gpus": gpus, "scheduling_strategy": _strategy(self._group, 0)}

    def release(self) -> None:
        """Remove the placement group. Its actors end."""
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)


def _without_none(bundles: Iterable[int | None]) -> list[int]:
    return [bundle for bundle in bundles if bundle is not None]


def _strategy(group: Any, bundle: int) -> Any:
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)


def _locate_bundle(group: Any, bundle: int) -> Any:
    """Start a task that returns the node and GPU of a bundle. Ray reports them only inside the bundle."""
    options = {"num_cpus": 0, "num_gpus": 1 / 64, "scheduling_strategy": _strategy(group, bundle)}
    return ray.remote(_own_spot).options(**options).remote()


def _own_spot() -> Spot:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]
