"""Storage of a model's weights by Hugging Face name.

V vocabulary · E hidden size · H heads · D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.architectures.config_checks import OTHER_MODEL
from slimectl.architectures.family import DECODER, TOWER, Family, is_on
from slimectl.architectures.qwen_next import sizes
from slimectl.engines.embedded.delta_net import DeltaNet
from slimectl.engines.embedded.linear import Linear, Storage
from slimectl.engines.embedded.mlp import Experts, Mlp, SharedExpert
from slimectl.engines.embedded.native import DeltaWeights
from slimectl.engines.embedded.pictures import new_tower
from slimectl.errors import CheckpointError

BLOCK_BYTES = 2**20
BLOCK_ROWS = 64
"""A matrix is read in blocks of about BLOCK_BYTES and of a multiple of BLOCK_ROWS rows."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """The weights of grouped-query attention. `index` is its place in the cache of keys and values.

    `qk_norm_HD` repeats the query norm for every query head, then the key norm likewise. If `gated`, the projection of
    a query head includes a gate of its output.
    """

    index: int
    qkv: Linear
    qk_norm_HD: Tensor | None
    o: Linear
    gated: bool = False


@dataclass(slots=True)
class Layer:
    """The weights of one block."""

    input_norm_E: Tensor
    attention: GroupedAttention | DeltaNet
    post_norm_E: Tensor
    mlp: Mlp | Experts

    @property
    def addresses(self) -> list[int] | None:
        """Addresses for `Block` in kernels.c, or None unless the block is plain and the kernels compute it."""
        attention = self.attention
        if not isinstance(self.mlp, Mlp) or isinstance(attention, DeltaNet) or attention.gated:
            return None
        qkv, o, gate_up, down = (
            each.addresses for each in (attention.qkv, attention.o, self.mlp.gate_up, self.mlp.down)
        )
        if qkv is None or o is None or gate_up is None or down is None:
            return None
        qk_norm = 0 if attention.qk_norm_HD is None else attention.qk_norm_HD.data_ptr()
        norms = self.input_norm_E.data_ptr(), self.post_norm_E.data_ptr()
        return [norms[0], *qkv, qk_norm, *o, norms[1], *gate_up, *down]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in an open file. Reading it directly to its target costs less than mapping and copying its pages."""

    file: FileIO
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def copy_to(self, target: Tensor) -> None:
        """Read the tensor into `target`, which may have a broadcastable shape or another dtype or device.

        Raises CheckpointError if the file is truncated.
        """
        is_same = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        is_same = is_same and tuple(target.shape) == self.shape
        memory = target if is_same else torch.empty(self.shape, dtype=self.dtype)
        self._read(memory, self.offset)
        if memory is not target:
            target.copy_(memory)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, block of rows) of a matrix. A block is valid until the next one is read.

        Raises CheckpointError if the file is truncated.
        """
        rows, width = self.shape
        count = max(BLOCK_ROWS, BLOCK_BYTES // (width * self.dtype.itemsize) // BLOCK_ROWS * BLOCK_ROWS)
        memory = torch.empty(min(count, rows), width, dtype=self.dtype)
        for first in range(0, rows, count):
            block = memory[: min(count, rows - first)]
            self._read(block, self.offset + first * width * self.dtype.itemsize)
            yield first, block

    def _read(self, memory: Tensor, offset: int) -> None:
        if not memory.numel():
            return
        view = memory.detach().view(-1).view(torch.uint8).numpy().data
        self.file.seek(offset)
        while view:
            count = self.file.readinto(view)
            if not count:
                raise CheckpointError(f"weights: a block of shared memory is {len(view)} bytes too short")
            view = view[count:]


@dataclass(slots=True)
class TensorSlot:
    """Target of a named tensor: a view of the storage, or the outputs of a linear layer starting at `first`.

    A view may also be part of a linear layer, such as its bias.
    """

    shape: tuple[int, ...]
    view: Tensor | None = None
    linear: Linear | None = None
    first: int = 0

    def write(self, tensor: Tensor | FileTensor) -> None:
        """Store a tensor in the storage's dtype. Raises CheckpointError if its file is truncated."""
        if self.view is not None:
            if isinstance(tensor, FileTensor):
                tensor.copy_to(self.view)
            else:
                self.view.copy_(tensor)
            return
        assert self.linear is not None
        for first, rows in tensor.blocks() if isinstance(tensor, FileTensor) else [(0, tensor)]:
            self.linear.write(self.first + first, rows)

    def read(self) -> Tensor:
        """Return the tensor as stored, as a copy or a view."""
        if self.view is None:
            assert self.linear is not None
            return self.linear.read(self.first, self.shape[0])
        return self.view[0] if self.view.dim() > len(self.shape) else self.view


NamedTensors = Iterable[tuple[str, Tensor | FileTensor]]


class Weights:
    """Storage that is allocated once and written in place."""

    def __init__(self, config: Any, family: Family, storage: Storage, *, head_dim: int) -> None:
        self.tied = bool(config.tie_word_embeddings)
        self._family = family
        text_config = config.get_text_config()
        decoder = "model." if text_config is config else self.published_name(DECODER)
        sees = family.tower is not None and getattr(config, "vision_config", None) is not None
        self.tower = new_tower(config, dtype=storage.dtype, device=storage.device) if sees else None
        self._config = config = text_config
        self._values: dict[str, Any] = config.to_dict()
        self._sparse = family.expert_layers(self._values)
        fields = {} if family.attention is None else family.attention.fields(self._values)
        self._gated = bool(fields.get("attention_output_gate"))
        self._linear_layers = fields.get("linear_attention_freq", [])
        self.norm_offset = 1.0 if family.offset_norms else 0.0
        """What is added to the weights of the norms, except those of delta nets."""
        self._head_dim = head_dim
        self.storage = storage
        self.places: dict[str, TensorSlot] = {}
        vocabulary, hidden = config.vocab_size, config.hidden_size
        self._embedding = embedding = f"{decoder}embed_tokens.weight"
        self._embedding_VE = None if self.tied else self._tensor(embedding, vocabulary, hidden)
        self.layers = [self._layer(i, f"{decoder}layers.{i}.") for i in range(config.num_hidden_layers)]
        self.delta_nets = [layer.attention for layer in self.layers if isinstance(layer.attention, DeltaNet)]
        self.norm_E = self._tensor(f"{decoder}norm.weight", hidden)
        if self.tower is not None:
            for name, parameter in self.tower.named_parameters():
                place = TensorSlot(tuple(parameter.shape), parameter.data)
                self.places[self.published_name(TOWER + name)] = place
        head = embedding.removesuffix(".weight") if self.tied else "lm_head"
        self.head = self._linear(hidden, {head: vocabulary})

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Return the embeddings [N, E] of tokens as a new tensor."""
        return self.head.rows(tokens_N) if self._embedding_VE is None else F.embedding(tokens_N, self._embedding_VE)

    def place(self, name: str, tensor: Tensor | FileTensor) -> TensorSlot | None:
        """Return the target of a tensor, or None if this model does not store it.

        Raises CheckpointError if the tensor is not part of the model or has the wrong shape.
        """
        # Old checkpoints include a table that config.json already defines. A tied head is the embedding.
        if name.endswith("rotary_emb.inv_freq"):
            return None
        name = self.published_name(name)
        tied_head = self.tied and name == "lm_head.weight"
        place = self.places.get(self._embedding if tied_head else name)
        if place is None and self._family.carries(name):
            return None
        if place is None:
            model_type = self._config.model_type
            raise CheckpointError(f"weights: {name} is not part of this {model_type} model. {OTHER_MODEL}")
        if tuple(tensor.shape) != place.shape:
            raise CheckpointError(f"weights: {name} has shape {list(tensor.shape)}, expected {list(place.shape)}")
        return None if tied_head else place

    def published_name(self, name: str) -> str:
        """Return a tensor's name in published checkpoints. In vision models, transformers may use other names."""
        return self._family.published_name(name)

    @torch.no_grad()
    def write(self, tensors: NamedTensors) -> set[str]:
        """Copy tensors to the storage in any order, and return the written names. Raises like `place`."""
        names: set[str] = set()
        incomplete: dict[Linear, int] = {}  # number of outstanding tensors by layer
        for name, tensor in tensors:
            place = self.place(name, tensor)
            if place is None:
                continue
            place.write(tensor)
            names.add(self.published_name(name))
            if place.linear is not None:
                missing = incomplete.pop(place.linear, place.linear.count) - 1
                if missing:
                    incomplete[place.linear] = missing
                else:  # now, while the weights are in the CPU cache
                    place.linear.refresh()
        for linear in incomplete:
            linear.refresh()
        return names

    def block_addresses(self) -> Tensor | None:
        """Return the fixed addresses [L, A] of all blocks, or None unless the kernels compute all of them."""
        rows = [layer.addresses for layer in self.layers]
        return None if None in rows else torch.tensor(rows)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor as stored) for every tensor."""
        for name, place in self.places.items():
            yield name, place.read()

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.storage.tensor(*shape)
        self.places[name] = TensorSlot(shape, tensor)
        return tensor

    def _linear(self, inputs: int, outputs: dict[str, int], *, bias: bool = False, gates: bool = False) -> Linear:
        """Create one linear layer for the projections in `outputs`, a map from name to width."""
        linear = Linear(inputs, list(outputs.values()), self.storage, bias=bias, gates=gates)
        for (name, width), start in zip(outputs.items(), linear.starts, strict=True):
            self.places[f"{name}.weight"] = TensorSlot((width, inputs), linear=linear, first=start)
        for name, view in zip(outputs, linear.bias_parts, strict=False):
            self.places[f"{name}.bias"] = TensorSlot(tuple(view.shape), view, linear)
        return linear

    def _layer(self, index: int, prefix: str) -> Layer:
        hidden = self._config.hidden_size
        is_linear = bool(self._linear_layers and self._linear_layers[index])
        return Layer(
            input_norm_E=self._tensor(f"{prefix}input_layernorm.weight", hidden),
            attention=self._delta_net(index, prefix) if is_linear else self._attention(index, prefix),
            post_norm_E=self._tensor(f"{prefix}post_attention_layernorm.weight", hidden),
            mlp=self._experts(prefix) if self._sparse[index] else self._mlp(f"{prefix}mlp."),
        )

    def _attention(self, index: int, prefix: str) -> GroupedAttention:
        config, family, values, prefix = self._config, self._family, self._values, f"{prefix}self_attn."
        hidden, queries, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        heads = {"q": 2 * queries if self._gated else queries, "k": keys, "v": keys}
        widths = {f"{prefix}{kind}_proj": count * self._head_dim for kind, count in heads.items()}
        output = {f"{prefix}o_proj": hidden}
        return GroupedAttention(
            index=index - sum(self._linear_layers[:index]),
            qkv=self._linear(hidden, widths, bias=is_on(family.qkv_bias, values)),
            qk_norm_HD=self._qk_norm(prefix, queries, keys) if is_on(family.qk_norm, values) else None,
            o=self._linear(queries * self._head_dim, output, bias=is_on(family.output_bias, values)),
            gated=self._gated,
        )

    def _delta_net(self, index: int, prefix: str) -> DeltaNet:
        """Create a delta net from the family's links to Megatron's, which has the projections in the engine's order."""
        assert self._family.attention is not None
        all_links = self._family.attention.links(self._values, index, "", prefix.removesuffix("."))
        links = {link.megatron.removeprefix(".self_attention."): link for link in all_links}
        projection, out = links.pop("in_proj.weight"), links.pop("out_proj.weight")
        rows = {
            name.removesuffix(".weight"): shape[0] for name, shape in zip(projection.hf, projection.shapes, strict=True)
        }
        order_O = projection.join.whole(torch.arange(sum(rows.values())).split(list(rows.values())))
        is_ordered = torch.equal(order_O, torch.arange(len(order_O)))
        kernel, decay_log, decay_bias, norm = (
            self._tensor(links[name].hf[0], *links[name].shapes[0])
            for name in ("conv1d.weight", "A_log", "dt_bias", "out_norm.weight")
        )
        net, eps = sizes(self._values), float(self._config.rms_norm_eps)
        return DeltaNet(
            net,
            self._linear(self._config.hidden_size, rows),
            None if is_ordered else order_O.to(self.storage.device),
            DeltaWeights(net.key_heads, kernel, decay_log, decay_bias, norm, eps),
            out=self._linear(out.shapes[0][1], {out.hf[0].removesuffix(".weight"): out.shapes[0][0]}),
        )

    def _mlp(self, prefix: str, width: int | None = None) -> Mlp:
        hidden, inner = self._config.hidden_size, width or self._config.intermediate_size
        biased = is_on(self._family.mlp_bias, self._values)
        return Mlp(
            gate_up=self._linear(
                hidden, {f"{prefix}gate_proj": inner, f"{prefix}up_proj": inner}, bias=biased, gates=True
            ),
            down=self._linear(inner, {f"{prefix}down_proj": hidden}, bias=biased),
        )

    def _experts(self, prefix: str) -> Experts:
        """Create the experts of a layer. Checkpoints have a separate tensor for each matrix of each expert."""
        experts, values = self._family.experts, self._values
        assert experts is not None
        prefix = f"{prefix}{experts.prefix}."
        count, hidden, inner = experts.number(values), values["hidden_size"], values[experts.width]
        gate_up_EIH = self.storage.tensor(count, 2 * inner, hidden)
        down_EHF = self.storage.tensor(count, hidden, inner)
        for expert in range(count):
            views = (gate_up_EIH[expert, :inner], gate_up_EIH[expert, inner:], down_EHF[expert])
            for name, view in zip(experts.names, views, strict=True):
                self.places[f"{prefix}experts.{expert}.{name}.weight"] = TensorSlot(tuple(view.shape), view)
        gate_EH = self._tensor(f"{prefix}gate.weight", count, hidden)
        normalizes = is_on(experts.normalizes, values)
        shared = self._shared_expert(prefix)
        return Experts(gate_EH, gate_up_EIH, down_EHF, values["num_experts_per_tok"], normalizes, shared)

    def _shared_expert(self, prefix: str) -> SharedExpert | None:
        assert self._family.experts is not None
        shared = self._family.experts.shared
        width = 0 if shared is None else shared.width(self._values)
        if shared is None or not width:
            return None
        mlp = self._mlp(f"{prefix}{shared.name}.", width)
        gate = f"{prefix}{shared.name}_gate.weight"
        return SharedExpert(mlp, self._tensor(gate, 1, self._config.hidden_size) if shared.gated else None)

    def _qk_norm(self, prefix: str, queries: int, keys: int) -> Tensor:
        """Create one table of both norms by head. Writing a [D] tensor to a view repeats it for every head."""
        table_HD = self.storage.tensor(queries + keys, self._head_dim)
        for name, view in (("q_norm", table_HD[:queries]), ("k_norm", table_HD[queries:])):
            self.places[f"{prefix}{name}.weight"] = TensorSlot((self._head_dim,), view)
        return table_HD
