"""LoRA adapters on the linear layers of mcore's model: a pair of matrices for each Hugging Face layer in them.

T tokens · K rank · I inputs · O outputs of a Megatron matrix on this rank · P Hugging Face layers in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from slimectl.architectures.lora import adapter_links, chosen, linear_layers
from slimectl.architectures.mapping import ParamMapping
from slimectl.errors import SettingsError
from slimectl.policies.lora import LoraOptions, base_of, initial
from slimectl.policies.megatron import parameters
from slimectl.policies.megatron.checkpoint import load_adapter, shapes_of
from slimectl.policies.megatron.master_weights import PARAM
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.megatron.parameters import DistributedParameters, group_of

Pair = tuple[ParamMapping, ParamMapping]

_REFUSED = {
    "moe_router_bias_update_rate": "it changes the base model, but only the adapters are saved",
    "fp8": "adapters were not tested with fp8",
    "moe_shared_expert_overlap": "its layers do not pass their tokens to adapters",
}


class Adapter(nn.Module):
    """Scaled B A of all Hugging Face layers that are fused in one Megatron matrix.

    Tensor parallelism shards it like the matrix. If the matrix is split by rows, B is split and A of every rank
    processes the rank's tokens. If it is split by columns, A is split and B processes the rank's tokens.
    """

    def __init__(
        self, link: ParamMapping, pairs: Sequence[Pair], scale: float, config: Any, device: torch.device
    ) -> None:
        super().__init__()
        self.scale, self.axis, self.group = scale, None if link.split is None else link.split.axis, group_of(link)
        self.routed, self.sequence_parallel = link.expert is not None, config.sequence_parallel
        self.outputs = link.shape[0] // (self.group.size() if self.axis == 0 else 1)
        self.A, self.B, self.rows = nn.ParameterDict(), nn.ParameterDict(), {}
        for a, b in pairs:
            name = a.megatron.rpartition(".")[2]
            self.A[name] = self._parameter(a, config.params_dtype, device)
            self.B[name] = self._parameter(b, config.params_dtype, device)
            self.rows[name] = self._rows(link, b, device)

    def _parameter(self, half: ParamMapping, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        shape, cut = list(half.shape), half.split
        if cut is not None:
            shape[cut.axis] //= self.group.size()
        parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        # Attributes by which mcore reduces gradients and counts each once in their norm.
        set_tensor_model_parallel_attributes(parameter, self.routed or cut is not None, cut.axis if cut else -1, 1)
        if self.routed:
            parameter.allreduce = False
            parameter.shared = cut is None and self.group.rank() > 0
        elif cut is None:
            parameter.sequence_parallel = self.sequence_parallel
        return parameter

    def _rows(self, link: ParamMapping, half: ParamMapping, device: torch.device) -> Tensor | None:
        """Return the output index on this rank of each row of B, or None if B has one row per output, in order."""
        if len(link.hf) == 1:
            return None
        part = next(i for i, name in enumerate(link.hf) if half.hf[0].startswith(name.removesuffix("weight")))
        sizes = [shape[0] for shape in link.shapes]
        numbers = torch.arange(sum(sizes)).split(sizes)
        local_rows, layer_rows = link.join.whole(numbers), numbers[part]
        if link.split is not None and half.split is not None:
            local_rows = link.split.shard(local_rows, self.group.rank(), self.group.size())
            layer_rows = half.split.shard(layer_rows, self.group.rank(), self.group.size())
        index_of_row = torch.full((sum(sizes),), -1)
        index_of_row[local_rows] = torch.arange(len(local_rows))
        assert (index_of_row[layer_rows] >= 0).all()
        return index_of_row[layer_rows].to(device)

    def down(self) -> Tensor:
        """Return all A, concatenated by rows: [P K, I]."""
        return torch.cat([self._copy_to_ranks(a, cut=self.axis == 1) for a in self.A.values()])

    def up(self) -> Tensor:
        """Return all B, each at the rows of its layer and the columns of its A, zeros elsewhere: [O, P K]."""
        columns = []
        for name, b in self.B.items():
            rows, b = self.rows[name], self._copy_to_ranks(b, cut=self.axis == 0)
            columns.append(b if rows is None else b.new_zeros(self.outputs, b.shape[1]).index_copy(0, rows, b))
        return torch.cat(columns, dim=1)

    def _copy_to_ranks(self, parameter: Tensor, *, cut: bool) -> Tensor:
        """Return a parameter. An unsplit one's gradient is summed over the ranks that share a routed expert."""
        if not self.routed or cut or self.group.size() == 1:
            return parameter
        return copy_to_tensor_model_parallel_region(parameter, group=self.group)

    def forward(self, states: Tensor) -> Tensor:
        """Return the adapter output to add to the matrix's output, for its input `states` [T, 1, I]."""
        inner = F.linear(states, self.down())
        if self.sequence_parallel and self.axis == 0:
            inner = gather_from_sequence_parallel_region(inner, group=self.group)
        elif self.sequence_parallel and self.axis == 1:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return self.scale * F.linear(inner, self.up())


class Adapters:
    """All adapters of a model: links for all ranks, modules for this one."""

    def __init__(self, options: LoraOptions, links: Sequence[ParamMapping], args: Mapping[str, Any]) -> None:
        """Raises SettingsError for a target that matches no linear layer, or an mcore argument that LoRA rules out."""
        for name in (name for name in _REFUSED if args.get(name)):
            raise SettingsError(f"megatron.args.{name}: is not possible with train.lora_rank ({_REFUSED[name]})")
        self.options = options
        layers = set(chosen(linear_layers(links), options.targets))
        pairs_by_link = [(link, adapter_links(link, layers, options.rank)) for link in links]
        self.of_matrix = {link.megatron: (link, pairs) for link, pairs in pairs_by_link if pairs}
        pairs = [pair for _, pairs in self.of_matrix.values() for pair in pairs]
        self.of_weight = {a.hf[0].removesuffix("lora_A.weight") + "weight": (a, b) for a, b in pairs}
        self.links = [half for pair in pairs for half in pair]

    def attach(self, chunks: Sequence[PackedGPT], device: torch.device) -> None:
        """Attach adapters to the linear layers of this rank."""
        for chunk in chunks:
            for name, module in list(chunk.named_modules()):
                link, pairs = self.of_matrix.get(parameters.global_name(f"{name}.weight", chunk), (None, []))
                if link is not None:
                    module.add_module("adapter", Adapter(link, pairs, self.options.scale, chunk.config, device))
                    module.register_forward_hook(_add_adapter_output)

    def begin(self, state: DistributedParameters, seed: int) -> None:
        """Initialize the adapters: random, or from the adapter to start from. Raises CheckpointError."""
        load = self.options.load
        if load is not None:
            base_of(load, self.options, parameter_names=shapes_of(self.links))
            load_adapter(load, state, self.links)
            return
        for link in state.mine(self.links):
            state.assign(link, PARAM, partial(initial, shape=link.shape, seed=seed))

    def merged(self, state: DistributedParameters, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Stream state.tensors with the adapters merged into the matrices."""
        for name, tensor in state.tensors(names, PARAM):
            if name in self.of_weight:
                tensor = self.options.merged(tensor, *(state.whole(half, PARAM) for half in self.of_weight[name]))
            yield name, tensor

    def layers(self, names: Sequence[str]) -> list[str]:
        """Return the Hugging Face names of the adapted layers, in the order of `names`."""
        return [name.removesuffix(".weight") for name in names if name in self.of_weight]

    def tensors(self, state: DistributedParameters, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Stream A and B of every adapted layer, full, in the order of `names`."""
        for name in names:
            for half in self.of_weight.get(name, ()):
                yield half.hf[0], state.whole(half, PARAM)


def _add_adapter_output(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    """Forward hook that adds the adapter's output. mcore's layers may also return a bias."""
    if isinstance(output, tuple):
        return output[0] + module.adapter(inputs[0]), *output[1:]
    return output + module.adapter(inputs[0])
