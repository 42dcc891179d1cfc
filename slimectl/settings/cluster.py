"""Settings of the cluster: this machine or Ray, and the number of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimectl.registry import EXECUTORS
from slimectl.settings.base import PositiveInt, Section, registered_in


class ClusterSettings(Section):
    """Executor of the work, and its number of GPUs (on a CPU: processes)."""

    executor: Annotated[str, *registered_in(EXECUTORS)] = "local"
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
    """GPUs of an engine: its tensor-parallel size times its pipeline stages; a multiple of cluster.num_gpus_per_node
    spreads an SGLang engine over as many machines."""

    num_gpus_per_node: PositiveInt = 8
    """GPUs of a machine."""

    colocate: bool = False
    """Engines and trainer share the same GPUs, in turns."""

    offload_train: bool = True
    """With colocate: weights, gradients and optimizer of the trainer are in host memory while engines sample."""

    @property
    def ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node


def nodes_of(gpus: int, gpus_per_node: int) -> int:
    """Return the machines that so many GPUs of an engine fill; 1 where they do not fill whole ones."""
    return gpus // gpus_per_node if gpus % gpus_per_node == 0 else 1


class SyncSettings(Section):
    """Weight updates from the policy to the engines, after the last step of a round."""

    transport: Literal["auto", "in_process", "disk", "tensor", "distributed", "delta"] = "auto"
    """in_process for an engine in the trainer's process; to servers: disk (a checkpoint they read), tensor (shared
    memory or CUDA IPC, same machine), distributed (broadcast by gloo or nccl), delta (changed bytes over disk). auto:
    in_process; tensor on one machine, except to SGLang on a CPU, which takes tensors as text; else distributed."""

    lora: Literal["auto", "adapter", "merged"] = "auto"
    """What servers get of train.lora_rank: the adapter, which they merge into the base model of their files, or all
    weights, merged by the trainer. auto: the adapter, where servers and transport take it (docs/clusters.md)."""

    update_weights_interval: PositiveInt = 1
    """Rounds between two pushes; above 1 answers are staler."""

    update_weight_buffer_size: PositiveInt = 512
    """MiB of weights in one message."""

    update_weight_disk_dir: str | None = None
    """Folder for the disk and delta transports, seen by every engine; the run's own where not given."""

    update_weight_disk_keep_files: bool = False
    """Keep the files of every push."""

    update_weight_delta_encoding: Literal["xor", "overwrite"] = "xor"
    """What a delta holds of a changed block: the xor with the old bytes (compresses better), or the new bytes."""

    update_weight_delta_checksum: Literal["xxh3-128", "blake2b", "adler32"] = "xxh3-128"
    """Checksum of every tensor that a delta changes."""

    custom_post_write_path: str | None = None
    """Function of (args, version_dir, rollout_engines), by path, when disk or delta have written a push, before engines
    read it."""

    check_weight_update_equal: bool = False
    """After every push compare checksums of every tensor on both sides."""

    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to answers in flight while weights change: their keys and values are computed anew (retract), they
    go on with those they have (in_place; SGLang then may give old ones to new answers too), or end (abort)."""

    timeout_s: Annotated[float, Field(gt=0)] = 600
    """How long a push may take."""
