"""Parameters of all ranks by their global names: gathering, assigning and streaming them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slimectl.architectures.mapping import ParamMapping
from slimectl.errors import SettingsError
from slimectl.policies.megatron.master_weights import Master
from slimectl.policies.megatron.model import PackedGPT

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
FUSED_NORMS = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
"""Maps norms inside TransformerEngine layers of megatron-core to the same norms outside the layer."""
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def local_parameters(chunks: Sequence[PackedGPT]) -> dict[str, Tensor]:
    """Return parameters and buffers by the names of ParamMapping, with layers and experts counted over the whole model.

    The last stage's copy of a tied embedding is not included: see `tied_copy`.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name != HEAD or not chunk.share_embeddings_and_output_weights:
                tensors[global_name(name, chunk)] = tensor
    return tensors


def tied_copy(chunks: Sequence[PackedGPT]) -> Tensor | None:
    """Return the head that copies the embedding of another pipeline stage, or None if this rank has none."""
    last = chunks[-1]
    if last.post_process and last.share_embeddings_and_output_weights and not last.pre_process:
        return last.output_layer.weight
    return None


def global_name(name: str, chunk: PackedGPT) -> str:
    """Return the name in the whole model of the tensor that this rank's `chunk` calls `name`."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return name
    number = chunk.decoder.layers[int(layer[2])].layer_number - 1
    suffix = layer[3]
    for fused, separate in FUSED_NORMS.items():
        suffix = suffix.replace(fused, separate)
    name = f"{layer[1]}{number}{suffix}"
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    first = parallel_state.get_expert_model_parallel_rank() * (
        chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    return f"{expert[1]}{first + int(expert[2])}{expert[3]}"


Read = Callable[[str], Tensor]


class DistributedParameters:
    """Masters and moments of all ranks, by link.

    `local` has this rank's masters by global name. `copy` is the last stage's copy of a tied embedding. Every rank
    makes the same calls: a full tensor is gathered over data and tensor ranks, then broadcast from the first rank that
    has it. `value` returns the values of a tensor that may be asleep.
    """

    def __init__(
        self,
        links: Sequence[ParamMapping],
        local: dict[str, Master],
        copy: Master | None,
        device: torch.device,
        value: Callable[[Tensor], Tensor],
    ) -> None:
        self.links, self.local, self.copy, self.device, self.value = links, local, copy, device, value
        self.of_name = {name: link for link in links for name in link.hf}
        self.embedding = next(link.hf[0] for link in links if link.megatron == EMBEDDING)
        local_indices = [i for i, link in enumerate(links) if link.megatron in local]
        indices_by_rank: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(indices_by_rank, local_indices)
        self.source: dict[str, int] = {}
        for rank in reversed(range(len(indices_by_rank))):
            self.source |= {links[i].megatron: rank for i in indices_by_rank[rank]}

    def whole(self, link: ParamMapping, slot: str) -> Tensor:
        """Gather the full parameter, or its moment, in float32 on every rank."""
        master = self.local.get(link.megatron)
        tensor = None if master is None else _gather_shards(link, master.read(slot, self.value).float())
        if dist.get_world_size() == 1:
            assert tensor is not None
            return tensor
        if tensor is None or self.source[link.megatron] != dist.get_rank():
            tensor = torch.empty(_padded_shape(link), dtype=torch.float32, device=self.device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self.source[link.megatron])
        return tensor

    def tensors(self, names: Iterable[str], slot: str) -> Iterator[tuple[str, Tensor]]:
        """Stream (Hugging Face name, full tensor) in the order of `names`.

        A link is gathered once. Tensors of later names are kept until they are needed.
        """
        waiting: dict[str, Tensor] = {}
        for name in names:
            # A head that the checkpoint stores although it is tied.
            key = name if name in self.of_name else self.embedding
            if key not in waiting:
                link = self.of_name[key]
                waiting |= link.to_hf(self.whole(link, slot))
            yield name, waiting.pop(key)

    def each(self, links: Iterable[ParamMapping], slots: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Stream ("slot.Hugging Face name", full tensor), link by link."""
        for link in links:
            for slot in slots:
                for name, tensor in link.to_hf(self.whole(link, slot)):
                    yield f"{slot}.{name}", tensor

    def mine(self, links: Iterable[ParamMapping]) -> list[ParamMapping]:
        """Select the links of which this rank holds a part."""
        return [link for link in links if self._local_masters(link)]

    def assign(self, link: ParamMapping, slot: str, read: Read, *, updates: int = 0) -> None:
        """Write this rank's part of a parameter or moment. `read(name)` returns a Hugging Face tensor."""
        local_masters = self._local_masters(link)
        if local_masters:
            full = _pad_rows(link, link.to_megatron([read(name).to(self.device, torch.float32) for name in link.hf]))
            part = _local_shard(link, full)
            for master in local_masters:
                master.write(slot, part, updates=updates)

    def _local_masters(self, link: ParamMapping) -> list[Master]:
        master = self.local.get(link.megatron)
        copies = [self.copy] if self.copy is not None and link.megatron == EMBEDDING else []
        return [*([master] if master is not None else []), *copies]


def trained_links(links: Sequence[ParamMapping], names: set[str]) -> set[str]:
    """Return the Megatron names of the parameters whose Hugging Face names are in `names`.

    Raises SettingsError if only a part of a parameter is in `names`: Megatron fuses query, key and value, and gate and
    up.
    """
    trained = set()
    for link in links:
        inside = [name for name in link.hf if name in names]
        if inside and len(inside) < len(link.hf):
            outside = next(name for name in link.hf if name not in names)
            raise SettingsError(
                f"train.freeze_params_name_list: {outside} is frozen and {inside[0]} is not, but Megatron keeps them"
                " in one matrix. Freeze both or neither."
            )
        if inside:
            trained.add(link.megatron)
    return trained


def group_of(link: ParamMapping) -> dist.ProcessGroup:
    """Return the process group over which `link.split` shards the parameter."""
    if link.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gather_shards(link: ParamMapping, part: Tensor) -> Tensor:
    group = group_of(link)
    if link.split is None or group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return link.split.joined(parts)


def _local_shard(link: ParamMapping, full: Tensor) -> Tensor:
    group = group_of(link)
    return full if link.split is None else link.split.shard(full, group.rank(), group.size())


def _padded_shape(link: ParamMapping) -> tuple[int, ...]:
    if not link.padded:
        return link.shape
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return (-(-link.shape[0] // ranks) * ranks, *link.shape[1:])


def _pad_rows(link: ParamMapping, full: Tensor) -> Tensor:
    shape = _padded_shape(link)
    if tuple(full.shape) == shape:
        return full
    return torch.cat([full, full.new_zeros(shape[0] - full.shape[0], *shape[1:])])
