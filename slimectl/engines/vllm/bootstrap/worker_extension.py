"""Extends every worker of a vLLM server (--worker-extension-cls): weight updates and log-probabilities.

Registers the weight transfer engine "slimectl" (vllm.distributed.weight_transfer, checked in 0.32.0), which reads
tensors from shared memory or receives them by gloo or nccl broadcast, also on a CPU. vLLM's own engines need CUDA.
"""

from __future__ import annotations

import datetime
import functools
import mmap
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from merged_adapter import Merger
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, inplace

NAME = "slimectl"
KEEP_WEIGHTS = "SLIMECTL_VLLM_KEEP_WEIGHTS"
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily."""

Tensors = list[tuple[str, torch.Tensor]]
_MERGERS: WeakKeyDictionary[torch.nn.Module, Merger] = WeakKeyDictionary()


class Extension:
    """Base class that vLLM adds to its worker for /collective_rpc."""

    def end_update(self: Any) -> None:
        """End the current weight update, if any. /finish_weight_update would fail without one."""
        if self._weight_update_active:
            self.finish_weight_update()


@dataclass
class EngineGroup(WeightTransferInitInfo):
    """A process group to join. The trainer is rank 0 and hosts the store."""

    master_address: str
    master_port: int
    world_size: int
    group_name: str
    backend: str
    rank_offset: int
    timeout_s: float = 600.0


@dataclass
class Message(WeightTransferUpdateInfo):
    """Tensors in the shared-memory block `name` or, without it, as one broadcast in the group `group_name`.

    A row has the name, dtype, shape and byte offset of a tensor. With `adapter`, the tensors are parts of this LoRA
    adapter (merged_adapter.py), which is merged into its base model after the `last` message.
    """

    tensors: list[list[Any]] = field(default_factory=list)
    name: str | None = None
    group_name: str | None = None
    adapter: dict[str, Any] | None = None
    last: bool = True


class SlimectlTransfer(WeightTransferEngine[EngineGroup, Message]):
    """Receives messages of whole tensors under their Hugging Face names."""

    init_info_cls = EngineGroup
    update_info_cls = Message

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._groups: dict[str, tuple[Any, Any]] = {}
        self._merger = _MERGERS[self.model] = Merger(Path(self.model_config.model), whole=True)

    def init_transfer_engine(self, init_info: EngineGroup) -> None:
        self.shutdown()
        timeout = datetime.timedelta(seconds=init_info.timeout_s)
        name, host = init_info.group_name, init_info.master_address
        store = dist.TCPStore(host, init_info.master_port, init_info.world_size, is_master=False, timeout=timeout)
        prefixed = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
        rank = init_info.rank_offset + self.parallel_config.rank
        self._groups[name] = store, _backend(init_info.backend, prefixed, rank, init_info.world_size, timeout, host)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        self._merger.forget()

    def finish_weight_update(self) -> None:
        finish_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one message. The base class would synchronize an accelerator, which a CPU machine does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Message) -> None:
        try:
            received = self._mapped(update_info) if update_info.name else self._broadcast(update_info)
            if update_info.adapter is None:
                self._merger.whole = False
                self.model.load_weights(received)
                return
            merged = self._merger.add(update_info.adapter, received, last=update_info.last)
            if update_info.last:
                self.model.load_weights(merged)
                self._merger.loaded()
        except BaseException:
            # Otherwise the next update would begin with half-loaded layers.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def shutdown(self) -> None:
        self._groups.clear()

    def _mapped(self, message: Message) -> Tensors:
        """Copy tensors out of shared memory, because vLLM keeps them until a layer is complete."""
        path = Path("/dev/shm", Path(str(message.name)).name)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            return [(name, view.to(self.device, copy=True)) for name, view in _views(memory, message.tensors)]

    def _broadcast(self, message: Message) -> Tensors:
        if message.group_name not in self._groups:
            raise ValueError(f"group {message.group_name} is unknown to this worker")
        end = max(start + _size(dtype, shape) for _, dtype, shape, start in message.tensors)
        flat = torch.empty(end, dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._groups[message.group_name][1].broadcast([flat], options).wait()
        return [
            (name, flat[start : start + _size(dtype, shape)].view(getattr(torch, dtype)).view(shape))
            for name, dtype, shape, start in message.tensors
        ]


def finish_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Finish a reload, and pack tied weights for every layer that has them.

    vLLM 0.32.0 packs them for only one of the layers, so that a tied LM head on a CPU would keep its old copy. Delete
    when vllm.model_executor.model_loader.reload no longer lists "tied parameters" as a limitation.
    """
    finalize_layerwise_reload(model, model_config)
    layers: list[Any] = [layer for layer in model.modules() if layer._parameters.get("weight") is not None]
    owners = Counter(id(layer.weight) for layer in layers)
    for layer in layers:
        if owners[id(layer.weight)] > 1 and hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)


def finish_folder_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Finish reload_weights, which reads a folder. The next adapter then loads its whole base model."""
    finish_reload(model, model_config)
    if (merger := _MERGERS.get(model)) is not None:
        merger.whole = False


def _views(memory: mmap.mmap, rows: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype, shape, start in rows:
        count = _size(dtype, shape) // getattr(torch, dtype).itemsize
        if count:
            yield name, torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=start).view(shape)
        else:
            yield name, torch.empty(shape, dtype=getattr(torch, dtype))


def _size(dtype: str, shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count * int(getattr(torch, dtype).itemsize)


def _backend(kind: str, store: Any, rank: int, world: int, timeout: datetime.timedelta, host: str) -> Any:
    if kind == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(host))]
    return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, world, gloo)


def _address_towards(host: str) -> str:
    """Return the address where the trainer reaches this machine. By default, gloo resolves the machine's own name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _temper_log_probs() -> None:
    """Return log-probabilities of the tempered, unfiltered distribution, or untempered ones for greedy sampling.

    vLLM 0.32.0 offers log-probabilities before temperature (raw_logprobs) or after top-k, top-p and min-p
    (processed_logprobs). The trainer computes neither. Delete when there is a mode in between.
    """
    from vllm.v1.sample.sampler import Sampler

    sample = Sampler.forward

    @functools.wraps(sample)
    def forward(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **options: Any) -> Any:
        temperature = sampling_metadata.temperature
        if temperature is None or sampling_metadata.max_num_logprobs is None or len(temperature) != len(logits):
            return sample(self, logits, sampling_metadata, *args, **options)
        divisor = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        self.compute_logprobs = lambda raw: (raw.float() / divisor).log_softmax(-1)
        try:
            return sample(self, logits, sampling_metadata, *args, **options)
        finally:
            del self.compute_logprobs

    Sampler.forward = forward


def _keep_weights() -> None:
    """Keep weights in addition to their packed copies on a CPU, so that checksums cover them. Doubles the memory.

    vLLM 0.32.0 removes a weight after packing it, and hashes an empty tensor instead. Delete when it hashes the packed
    weight.
    """
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: dispatch(layer, remove_weight=False)


inplace.finalize_layerwise_reload = finish_folder_reload
WeightTransferEngineFactory.register_engine(NAME, SlimectlTransfer)
_temper_log_probs()
if os.environ.get(KEEP_WEIGHTS) == "1":
    _keep_weights()
