"""Settings of the cluster: this machine or Ray, and the number of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimectl.settings.base import Section

PositiveInt = Annotated[int, Field(ge=1)]


class ClusterSettings(Section):
    """Executor of the work, and its number of GPUs (on a CPU: processes)."""

    executor: Literal["local", "ray"] = "local"
    """local: threads and processes of this machine; ray: a Ray cluster."""

    ray_address: str | None = None
    """A running Ray cluster: host:port or auto; a local one is started where not given."""

    actor_num_nodes: PositiveInt = 1
    """Machines that train."""

    actor_num_gpus_per_node: PositiveInt = 1
    """Training ranks on each; on a CPU, processes."""

    rollout_num_gpus: PositiveInt | None = None
    """GPUs of all engines; as many as engine.num_engines need where not given."""

    rollout_num_gpus_per_engine: PositiveInt = 1
    """Tensor-parallel size of an engine."""

    num_gpus_per_node: PositiveInt = 8
    """GPUs of a machine."""

    colocate: bool = False
    """Engines and trainer share the same GPUs, in turns."""

    @property
    def ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node
