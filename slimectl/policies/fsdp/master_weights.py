"""Float32 master weights and their shards, with gradient clipping."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.architectures.lora import is_adapter
from slimectl.checkpoints.module_tensors import ModuleTensors, Slot, TensorGroup, tied_names
from slimectl.checkpoints.name_conversions import persistent_buffers
from slimectl.policies.fsdp.model import TrainedModel, decoder_layers
from slimectl.policies.moments import ShardElements
from slimectl.policies.options import TrainerOptions
from slimectl.protocols import CheckpointFormat


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares, in float64 across tensors."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients)
    return torch.stack(norms).double().square().sum()


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale all gradients so that their global norm `norm` is at most `limit`."""
    if limit and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


def sharded_dimension(shape: torch.Size, ranks: int) -> int:
    """Return the dimension of a parameter that FSDP2 divides among ranks.

    It is the first dimension, except for fused experts whose number the ranks do not divide evenly. FSDP2 pads the
    first dimension to a multiple of the ranks and gathers the padding, which is four times the weights for 128 experts
    on 512 ranks. It divides any other dimension only evenly.
    """
    if len(shape) < 3 or shape[0] % ranks == 0:
        return 0
    return next((dimension for dimension in range(1, len(shape)) if shape[dimension] % ranks == 0), 0)


@dataclass(frozen=True)
class Shard:
    """The part of a parameter of `shape` that a rank holds: `length` entries of a dimension, starting at `start`."""

    shape: torch.Size
    dimension: int
    start: int
    length: int

    @classmethod
    def of_rank(cls, shape: torch.Size, rank: int, ranks: int) -> Shard:
        """Return the part that FSDP2 gives to a rank: pieces of equal size, as torch.chunk makes them."""
        dimension = sharded_dimension(shape, ranks)
        piece = -(-shape[dimension] // ranks)
        start = min(rank * piece, shape[dimension])
        return cls(shape, dimension, start, min(piece, shape[dimension] - start))

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size((*self.shape[: self.dimension], self.length, *self.shape[self.dimension + 1 :]))

    @property
    def elements(self) -> ShardElements:
        inner = self.shape[self.dimension + 1 :].numel()
        if self.dimension == 0:
            return ShardElements(self.start * inner)
        return ShardElements(self.start * inner, run=self.length * inner, stride=self.shape[self.dimension] * inner)

    def cut(self, full: Tensor) -> Tensor:
        """Return the view of the rank's part of the whole parameter."""
        return full.narrow(self.dimension, self.start, self.length)

    def assign_expert(self, matrix: Tensor, local: Tensor, expert: int, rows: slice) -> None:
        """Copy this rank's part of an expert's matrix, which is `full[expert, rows]`, into `local`."""
        if self.dimension == 0:
            if self.start <= expert < self.start + self.length:
                local[expert - self.start, rows].copy_(matrix)
        elif self.dimension == 1:
            first, last = max(rows.start, self.start), min(rows.stop, self.start + self.length)
            if first < last:
                part = matrix[first - rows.start : last - rows.start]
                local[expert, first - self.start : last - self.start].copy_(part)
        else:
            local[expert, rows].copy_(matrix.narrow(1, self.start, self.length))


class MasterWeights:
    """Float32 master weights that the optimizer updates, and their conversion from and to full tensors.

    In float32, and under FSDP2, the masters are the model's own parameters. In bfloat16 on one process the model holds
    a bfloat16 copy. On a CPU that is faster than autocast, which converts every weight in every forward. Frozen weights
    are held only in bfloat16, unless that rounds them. Then the original is also kept, so that it is saved unchanged.

    With `offload` "optimizer", masters, gradient sums and moments are in host memory, and copies of the masters on the
    device. With "parameters" everything is in host memory, and FSDP2 moves a layer to the device when it is computed.
    """

    def __init__(
        self,
        model: TrainedModel,
        options: TrainerOptions,
        *,
        device: torch.device,
        mesh: Any | None,
        names: ModuleTensors,
        added: Mapping[str, Tensor],
    ) -> None:
        """`added`: parameters that a checkpoint may lack, with their initial values."""
        dtype, offload = options.compute_dtype, options.offload
        self.mesh, self.names, self.added = mesh, names, list(added)
        self.shapes = {name: parameter.shape for name, parameter in model.hf.named_parameters()}
        offloads = offload == "parameters"
        self._sharded = [] if mesh is None else _shard(model, mesh, dtype, offloads=offloads)
        self.rounds = mesh is None and dtype != torch.float32
        """Whether the precision of the model's weights differs from the masters' precision."""
        self.copies = self.rounds or offload == "optimizer"
        """Whether the model holds copies of the masters instead of the masters themselves."""
        if self.rounds:
            exact = exact_pattern(model.hf)
            for name, parameter in model.hf.named_parameters():
                if not exact.search(name):
                    parameter.data = parameter.data.to(dtype)
        _materialise(model, device, parameters_on=torch.device("cpu") if offloads else device)
        self.parameters: dict[str, nn.Parameter] = dict(model.hf.named_parameters())
        self.tensors = {name: local_part(parameter.data) for name, parameter in self.parameters.items()}
        if self.copies:
            on_host = offload == "optimizer"
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    self.tensors[name] = torch.empty_like(
                        self.tensors[name], dtype=torch.float32, device="cpu" if on_host else device,
                        pin_memory=on_host and device.type == "cuda",
                    )  # fmt: skip
        self.buffers = persistent_buffers(model.hf)
        """Buffers that checkpoints contain. They are whole on every rank, in float32, and not trained."""
        self.tensors |= self.buffers
        self.trained = {name: self.tensors[name] for name, p in self.parameters.items() if p.requires_grad}
        """Master weights that the optimizer updates. The others are frozen."""
        self._gradient_sums: dict[str, Tensor] = {}
        """Float32 gradients of copies. The buffers are reused from step to step."""
        self.in_checkpoint: list[tuple[str, Slot | TensorGroup]] = []
        """(published name, slot) in checkpoint order, and a group for tensors that are computed together."""
        for name, tensor in added.items():
            self.assign(tensor, self.tensors[name])

    def read(self, checkpoint: CheckpointFormat, path: Path) -> None:
        """Fill the masters from a directory. Raises CheckpointError."""
        order: list[tuple[str, Slot | TensorGroup]] = []
        loaded: set[str] = set()
        for name, slot, tensor, group in self.names.placed(checkpoint.read(path), path):
            if self.rounds and slot.parameter not in self.trained and slot.parameter not in self.buffers:
                self._load_frozen(slot, tensor)
            else:
                self.assign(tensor, self.tensors[slot.parameter], slot)
            if name:
                order.append((name, slot))
            elif slot.parameter == group.parameters[0]:
                order.append((name, group))
            loaded.add(slot.parameter)
        self.in_checkpoint = order + [
            (name, Slot(name)) for name in self.added if name not in loaded and not is_adapter(name)
        ]
        self.copy_to_model()

    def _load_frozen(self, slot: Slot, full: Tensor) -> None:
        compute_copy = self.parameters[slot.parameter].data
        self.assign(full, compute_copy, slot)
        exact = torch.equal(compute_copy[slot.index].to(full.device, full.dtype), full)
        # Experts share a tensor: once one of them is rounded, the original is kept for all.
        original = compute_copy if slot.index is ... else self.tensors[slot.parameter]
        self.tensors[slot.parameter] = original if exact or original.dtype == torch.float32 else original.float()
        if not exact or slot.index is not ...:
            self.assign(full, self.tensors[slot.parameter], slot)

    def assign(self, full: Tensor, local: Tensor, slot: Slot | None = None) -> None:
        """Copy `full`, or this rank's shard of it, into `local`. An expert's tensor goes into its part of `local`."""
        with torch.no_grad():
            if slot is not None and isinstance(slot.index, tuple):
                self._shard(self.shapes[slot.parameter]).assign_expert(full, local, *slot.index)
            elif self.mesh is None or (slot is not None and slot.parameter in self.buffers):
                local.copy_(full)
            else:
                local.copy_(self._shard(full.shape).cut(full))

    def _shard(self, shape: torch.Size) -> Shard:
        """Return this rank's part of a parameter of that shape, which is all of it without a mesh."""
        if self.mesh is None:
            return Shard.of_rank(shape, 0, 1)
        return Shard.of_rank(shape, self.mesh.get_local_rank(), self.mesh.size())

    def shards(self) -> dict[Tensor, ShardElements]:
        """Return the elements of its parameter that each trained shard holds."""
        if self.mesh is None:
            return {}
        return {master: self._shard(self.shapes[name]).elements for name, master in self.trained.items()}

    def copy_to_model(self) -> None:
        """Copy the master weights into the model's compute copies.

        FSDP2 leaves the root's weights gathered after a forward without backward, so the next forward would use old
        ones.
        """
        for module in self._sharded:
            module.reshard()
        if self.copies and self.trained:
            copies = [local_part(self.parameters[name].data) for name in self.trained]
            torch._foreach_copy_(copies, list(self.trained.values()))

    def accumulate(self) -> None:
        """Accumulate the gradients of copies in float32. Call it after each backward."""
        if not self.copies:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                master, gradient = self.tensors[name], local_part(parameter.grad)
                if master.grad is None:
                    master.grad = self._gradient_sums.setdefault(name, torch.empty_like(master)).copy_(gradient)
                else:
                    master.grad.add_(gradient.to(master.device))
                parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Set the gradient of each master weight and return the gradients. Parameters without a gradient get zeros."""
        for name, master in self.trained.items():
            if not self.copies:
                gradient = self.parameters[name].grad
                master.grad = None if gradient is None else local_part(gradient)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.trained.values() if master.grad is not None]

    @property
    def gradient_sums(self) -> list[Tensor]:
        """Return the memory of the gradient sums between steps, when it holds no gradient."""
        return [tensor for name, tensor in self._gradient_sums.items() if self.tensors[name].grad is None]

    def drop_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            self.tensors[name].grad = parameter.grad = None


def exact_pattern(hf: Any) -> re.Pattern[str]:
    """Return the pattern of the parameters that transformers keeps in float32 in a model of 16 bits."""
    names = getattr(hf, "_keep_in_fp32_modules_strict", None) or ()
    return re.compile("|".join(map(re.escape, sorted(names))) or "(?!)")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or the tensor itself without a mesh."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(model: TrainedModel, mesh: Any, dtype: torch.dtype, *, offloads: bool) -> list[Any]:
    """Apply FSDP2 to decoder layers and root, and return them. Sum gradients over ranks, because a loss is a sum."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard as Placement

    # Casting inputs would rebuild the pack's layout in every layer. Hidden states already have the embedding's dtype.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Memory is pinned for copies to and from an accelerator. Without one, torch (2.13) cannot pin it.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offloads else OffloadPolicy()
    modules: list[Any] = [*separate_layers(model.hf), model]

    def placement(parameter: nn.Parameter) -> Placement:
        return Placement(sharded_dimension(parameter.shape, mesh.size()))

    for module in modules:
        fully_shard(module, mesh=mesh, shard_placement_fn=placement, mp_policy=policy, offload_policy=offload)
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        # Otherwise the factor is applied by a pre-multiplied sum, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)
    return modules


def separate_layers(hf: Any) -> list[nn.Module]:
    """Return the decoder layers, or none if some share parameters, which FSDP2 then shards with the root."""
    layers = decoder_layers(hf)
    owned = [parameter for layer in layers for parameter in layer.parameters()]
    return layers if len(set(owned)) == len(owned) else []


def _materialise(model: TrainedModel, device: torch.device, *, parameters_on: torch.device) -> None:
    """Allocate all parameters. `to_empty` would also lose the buffers and untie tied parameters."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ties = tied_names(model.hf)
    model.to_empty(device=parameters_on)
    for name, buffer in buffers.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = buffer.to(device)
    for alias, first in ties.items():
        owner, _, attribute = alias.rpartition(".")
        model.hf.get_submodule(owner)._parameters[attribute] = model.hf.get_parameter(first)
