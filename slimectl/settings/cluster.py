"""Settings of the cluster: this machine or Ray, and the number of processes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slimectl.plugins.registry import EXECUTORS
from slimectl.settings.base import PositiveInt, Section, registered_in


class ClusterSettings(Section):
    """Executor, and its number of GPUs (on a CPU: processes)."""

    executor: Annotated[str, *registered_in(EXECUTORS)] = "local"
    """local (threads and processes of this machine) or ray (a Ray cluster)."""

    ray_address: str | None = None
    """Address of a running Ray cluster: host:port or auto. Default: start a local one."""

    actor_num_nodes: PositiveInt = 1
    """Machines for training."""

    actor_num_gpus_per_node: PositiveInt = 1
    """Training ranks per machine. On a CPU these are processes."""

    rollout_num_gpus: PositiveInt | None = None
    """GPUs of all engines together. Default: as many as engine.num_engines needs."""

    rollout_num_gpus_per_engine: PositiveInt = 1
    """GPUs per engine: tensor-parallel size times pipeline stages. A multiple of cluster.num_gpus_per_node spreads an
    SGLang engine over several machines."""

    num_gpus_per_node: PositiveInt = 8
    """GPUs per machine."""

    colocate: bool = False
    """Engines and trainer share the same GPUs and alternate."""

    offload_train: bool = True
    """With colocate: move the trainer's weights, gradients and optimizer to host memory while engines sample."""

    @property
    def ranks(self) -> int:
        return self.actor_num_nodes * self.actor_num_gpus_per_node


def nodes_of(gpus: int, gpus_per_node: int) -> int:
    """Return the number of machines that an engine of `gpus` GPUs fills, or 1 if it does not fill whole ones."""
    return gpus // gpus_per_node if gpus % gpus_per_node == 0 else 1


class SyncSettings(Section):
    """Weight updates from the policy to the engines, after the last step of a round."""

    transport: Literal["auto", "in_process", "disk", "tensor", "distributed", "delta"] = "auto"
    """How weights reach the engines. in_process: an engine in the trainer's process. disk: a checkpoint that servers
    read. tensor: shared memory on one machine, or CUDA IPC to SGLang on the trainer's GPUs. distributed: broadcast by
    gloo or nccl. delta: changed bytes over disk. auto: in_process, else tensor on the trainer's GPUs or through shared
    memory, else distributed."""

    lora: Literal["auto", "adapter", "merged"] = "auto"
    """How LoRA updates reach the servers. adapter: servers merge it into their base model. merged: the trainer sends
    all weights. auto: the adapter, if servers and transport support it (docs/guides/lora.md)."""

    update_weights_interval: PositiveInt = 1
    """Rounds between weight updates. Above 1, samples are staler."""

    update_weight_buffer_size: PositiveInt = 512
    """Size of a message in MiB."""

    update_weight_disk_dir: str | None = None
    """Folder for the disk and delta transports. Every engine must see it. Default: the run's folder."""

    update_weight_disk_keep_files: bool = False
    """Keep the files of every update."""

    update_weight_delta_encoding: Literal["xor", "overwrite"] = "xor"
    """Accepted for older settings files. Both values mean xor: a delta has the XOR of old and new bits, which takes
    less space than the new bits."""

    update_weight_delta_checksum: Literal["xxh3-128", "blake2b", "adler32"] = "xxh3-128"
    """Accepted for older settings files. All values mean xxh3-128, the fastest checksum of a delta's tensors."""

    custom_post_write_path: str | None = None
    """Path of a function (args, version_dir, rollout_engines) that is called after disk or delta has written an update
    and before engines read it."""

    check_weight_update_equal: bool = False
    """Compare checksums of every tensor on both sides after each update."""

    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests during an update. retract: recompute their keys and values. in_place: continue
    with the old ones, which SGLang may then reuse for new requests. abort: end the requests."""

    timeout_s: Annotated[float, Field(gt=0)] = 600
    """Time limit of an update in seconds."""
