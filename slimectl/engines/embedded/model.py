"""The forward pass of Llama, and of families that are a switch of its layers away from it.

N rows (one per token) · C rows of a chunk · E hidden size · H heads · D head dimension · V vocabulary · B sequences · L
layers · T tokens · k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.architectures.config_defaults import STAND_INS
from slimectl.architectures.family import Family
from slimectl.architectures.image_tokens import ImageTokens
from slimectl.architectures.registry import FAMILIES, known_family
from slimectl.engines.embedded.attention import Decode, Prefill, Rope
from slimectl.engines.embedded.delta_net import DeltaNet, Recall
from slimectl.engines.embedded.kv_cache import Cache
from slimectl.engines.embedded.linear import Storage
from slimectl.engines.embedded.mlp import Experts, Mlp
from slimectl.engines.embedded.native import BlockShape, SpanTable, load_kernels
from slimectl.engines.embedded.pictures import PictureInputs, Pictures
from slimectl.engines.embedded.prefix_tree import CachedSpan, Node, PrefixTree
from slimectl.engines.embedded.states import SlotStates, State
from slimectl.engines.embedded.token_scores import TokenScores, token_scores
from slimectl.engines.embedded.weights import GroupedAttention, Weights
from slimectl.errors import CheckpointError

ROWS = 16
"""Above this, packed decoding steps pad rows to a multiple: oneDNN builds kernels for each number of rows."""


@dataclass(slots=True)
class Prefix:
    """A computed prompt: its start in the prefix tree, keys and values of the rest, and the logits after it.

    `node` is the last node of the cached start, or None. `keys_values` is [L, 2, K, T, D], or what the cache of another
    model takes in place of it, and `logits_V` is [V]. `cached_tokens` counts the tokens taken from the cache. `used` is
    set when the first sequence takes the prompt. `experts_TLk` covers the whole prompt, including its start, in a
    mixture of experts. `state` is the state after the prompt in a model with delta nets.
    """

    node: Node | None
    keys_values: Any
    logits_V: Tensor
    cached_tokens: int
    experts_TLk: Tensor | None = None
    state: State | None = None
    used: bool = False

    @property
    def offset(self) -> int:
        return 0 if self.node is None else self.node.end

    def tail(self, start: int) -> Tensor:
        """Return a copy of the keys and values from token `start` on."""
        tail: Tensor = self.keys_values[:, :, :, start:]
        return tail.clone(memory_format=torch.contiguous_format)

    def own_storage(self) -> None:
        """Copy the tensors that are views of a whole pass, so that keeping this prompt does not keep the others."""
        self.keys_values, self.logits_V = self.keys_values.clone(), self.logits_V.clone()
        self.experts_TLk = None if self.experts_TLk is None else self.experts_TLk.clone()

    def experts_from(self, start: int) -> Tensor | None:
        """Return a copy of the experts from token `start` on."""
        return None if self.experts_TLk is None else self.experts_TLk[start:].clone()


class Inputs(NamedTuple):
    """The last token of each sequence and its position. `longest` is an upper bound of the sequence lengths.

    `offsets_B` counts the tokens that each sequence reads from `spans`, or is None if no sequence reads any.
    `rope_shift_B` is added to positions for the rotary embedding, because images take fewer positions than tokens. It
    is None without images.
    """

    tokens_B: Tensor
    positions_B: Tensor
    longest: int
    offsets_B: Tensor | None = None
    spans: Sequence[CachedSpan] = ()
    rope_shift_B: Tensor | None = None

    @property
    def slot_positions_B(self) -> Tensor:
        """Positions within the slots, which hold only the tokens after the spans."""
        return self.positions_B if self.offsets_B is None else self.positions_B - self.offsets_B

    def padded(self, rows: int) -> Inputs:
        """Return the inputs with `rows` additional rows at position 0."""
        if not rows:
            return self

        def longer(part: Tensor) -> Tensor:
            return F.pad(part, (0, rows))

        return self._replace(
            tokens_B=longer(self.tokens_B),
            positions_B=longer(self.positions_B),
            offsets_B=None if self.offsets_B is None else longer(self.offsets_B),
            rope_shift_B=None if self.rope_shift_B is None else longer(self.rope_shift_B),
        )


class EngineModel:
    """Weights and forward pass. The caller owns the cache."""

    def __init__(self, config: Any, *, dtype: torch.dtype, device: torch.device, compile_kernels: bool = True) -> None:
        whole, config = config, config.get_text_config()
        family = _checked_family(whole.model_type, config)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.vocabulary = int(config.vocab_size)
        self._dtype = dtype
        self._device = device
        self._eps = float(config.rms_norm_eps)
        can_compile = compile_kernels and device.type == "cpu" and self.head_dim % 16 == config.hidden_size % 8 == 0
        self._kernels = load_kernels(dtype) if can_compile else None
        self.weights = Weights(whole, family, Storage.of(dtype, device, self._kernels), head_dim=self.head_dim)
        inner = int(getattr(config, "intermediate_size", None) or 0)
        self._block_shape = BlockShape(self.heads, self.kv_heads, self.head_dim, inner, self._eps)
        if not self._cached_layers:
            raise CheckpointError("config.json: layer_types has no full attention, which the embedded engine needs")
        rotated = int(self.head_dim * family.rope(config.to_dict()).percent)
        self._rope = Rope(config, family.tower, width=rotated, dtype=dtype, device=device)
        mixtures = [layer.mlp for layer in self.weights.layers if isinstance(layer.mlp, Experts)]
        self.expert_choices = mixtures[0].choices if mixtures else 0
        """Number of experts per token. 0 in a dense model."""
        self.pictures: Pictures | None = None
        tokens = ImageTokens.of(whole)
        if tokens is not None and self.weights.tower is not None:
            self.pictures = Pictures(tokens, self.weights.tower)

    @property
    def _cached_layers(self) -> int:
        """Number of layers that have keys and values."""
        return len(self.weights.layers) - len(self.weights.delta_nets)

    def _new_states(self, slots: int) -> SlotStates | None:
        nets = self.weights.delta_nets
        if not nets:
            return None
        states = SlotStates(len(nets), nets[0].sizes, nets[0].taps, dtype=self._dtype, device=self._device)
        states.reserve(slots, used=0)
        return states

    def new_cache(self) -> Cache:
        return Cache(
            self._cached_layers,
            self.kv_heads,
            self.head_dim,
            dtype=self._dtype,
            device=self._device,
            states=self._new_states(0),
        )

    def new_tree(self, capacity: int) -> PrefixTree:
        """Create a prefix tree of at most `capacity` bytes."""
        token_bytes = 2 * self._cached_layers * self.kv_heads * self.head_dim * self._dtype.itemsize
        token_bytes += len(self.weights.layers) * self.expert_choices * torch.int16.itemsize
        states = self._new_states(0)
        state_bytes = 0 if states is None else states.slot_bytes
        return PrefixTree(
            capacity=capacity, token_bytes=token_bytes, layers=self._cached_layers, state_bytes=state_bytes
        )

    @property
    def reusable_tokens(self) -> float:
        """Maximum prompt length at which prompts can share keys and values."""
        return self._rope.reusable_tokens

    def prefill(self, prompts: list[tuple[int, ...]], nodes: Sequence[Node | None]) -> list[Prefix]:
        """Compute prompts in one pass, each starting after its node of the prefix tree."""
        starts = [0 if node is None else node.end for node in nodes]
        rests = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        before = [[] if node is None else [part.keys_values for part in node.path()] for node in nodes]
        pictures = None if self.pictures is None else self.pictures.inputs(prompts, starts)
        states = self._new_states(len(prompts))
        for i, node in enumerate([] if states is None else nodes):
            if states is not None and node is not None and node.state is not None:
                states.put(i, 1, node.state)
        attend, _, stream_NE, experts_NLk = self._prefill_pass(rests, before, states, pictures)
        logits_BV = self._logits(stream_NE[attend.last_B])
        pieces = torch.split(attend.keys_values.permute(0, 2, 3, 1, 4), list(map(len, rests)), dim=3)
        prefixes = [Prefix(*parts) for parts in zip(nodes, pieces, logits_BV, starts, strict=True)]
        for i, prefix in enumerate(prefixes):
            prefix.state = None if states is None else states.copy(i)
        if experts_NLk is not None:
            for prefix, new_TLk in zip(prefixes, experts_NLk.cpu().split(list(map(len, rests))), strict=True):
                path = [] if prefix.node is None else prefix.node.path()
                before_TLk = [part.experts_TLk for part in path if part.experts_TLk is not None]
                prefix.experts_TLk = torch.cat([*before_TLk, new_TLk])
        return prefixes

    def sequence_scores(self, sequences: list[tuple[int, ...]], starts: list[int], *, top: int) -> list[TokenScores]:
        """Score the tokens after position `start` of each sequence in one pass, with the `top` likeliest at each."""
        states = self._new_states(len(sequences))
        _, tokens_N, stream_NE, _ = self._prefill_pass(sequences, [[]] * len(sequences), states)
        lengths = list(map(len, sequences))
        parts = zip(tokens_N.split(lengths), stream_NE.split(lengths), starts, strict=True)
        return [
            token_scores(tokens_T, stream_TE, self._logits, start=start, top=top, vocabulary=self.vocabulary)
            for tokens_T, stream_TE, start in parts
        ]

    def _prefill_pass(
        self,
        prompts: list[tuple[int, ...]],
        prefixes: Sequence[Sequence[Tensor]],
        states: SlotStates | None,
        pictures: PictureInputs | None = None,
    ) -> tuple[Prefill, Tensor, Tensor, Tensor | None]:
        """Run concatenated prompts. Return attention, tokens [N], residual stream [N, E] and experts [N, L, k]."""
        lengths = [len(prompt) for prompt in prompts]
        layers = self._cached_layers
        attend = Prefill(lengths, layers=layers, heads=self.heads, device=self._device, prefixes=prefixes)
        recall = None if states is None else Recall(states, lengths, self._kernels)
        tokens_N = torch.tensor([token for prompt in prompts for token in prompt], device=self._device)
        if pictures is None:
            rope = self._rope.prompt_rows(attend.positions_N, lengths, attend.longest)
            return attend, tokens_N, *self._hidden(self._embedded(tokens_N), rope, attend, recall)
        stream_NE = self._embedded(tokens_N.clamp(min=0))
        if len(pictures.rows_R):
            stream_NE[pictures.rows_R] = pictures.features.embeddings_CO
        rope = self._rope.section_rows(pictures.positions_3N, attend.longest)
        return attend, tokens_N, *self._hidden(stream_NE, rope, attend, recall, pictures)

    def padded_rows(self, rows: int) -> int:
        """Return the cheapest number of rows for a step of at least `rows` rows."""
        return -(-rows // ROWS) * ROWS if self.weights.storage.packs and rows > ROWS else rows

    def decode(self, inputs: Inputs, cache: Cache, *, rows: int) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, V] after one more token in each of the first B slots, and the tokens' experts [B, L, k].

        The step computes `rows` slots. The slots after B are padding and must be free.
        """
        count = len(inputs.tokens_B)
        inputs = inputs.padded(rows - count)
        positions_B = inputs.positions_B
        if inputs.rope_shift_B is not None:
            positions_B = positions_B + inputs.rope_shift_B
        rope = self._rope.rows(positions_B, inputs.longest)
        stream_BE = self._embedded(inputs.tokens_B)
        if self._kernels is not None and self._blocks_LA is not None:
            slot_positions_B, shared = inputs.slot_positions_B, SpanTable(inputs.spans, rows)
            self._kernels.decode(
                self._blocks_LA, self._block_shape, stream_BE, cache.slab, slot_positions_B, shared, rope
            )
            return self._logits(stream_BE)[:count], None
        attend = Decode(
            cache,
            inputs.slot_positions_B,
            heads=self.heads,
            dtype=self._dtype,
            spans=inputs.spans,
            kernels=self._kernels,
        )
        recall = None if cache.states is None else Recall(cache.states, [1] * rows, self._kernels)
        stream_BE, experts_BLk = self._hidden(stream_BE, rope, attend, recall)
        return self._logits(stream_BE)[:count], None if experts_BLk is None else experts_BLk[:count]

    @cached_property
    def _blocks_LA(self) -> Tensor | None:
        """Addresses of the blocks' weights, or None if the kernels do not run whole blocks."""
        return self.weights.block_addresses()

    def _embedded(self, tokens_N: Tensor) -> Tensor:
        return self.weights.embed(tokens_N)

    def _hidden(
        self,
        stream_NE: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: Callable[[int, Tensor], Tensor],
        recall: Recall | None,
        pictures: PictureInputs | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all blocks on the residual stream [N, E]. Return the stream after the last block, and the experts.

        Deepstack features of `pictures` are added after the first blocks if the vision tower has them. The experts are
        [N, L, k] with zeros for dense layers, or None in a dense model.
        """
        rows = stream_NE.shape[0]
        experts_NLk = None
        if self.expert_choices:
            shape = (rows, len(self.weights.layers), self.expert_choices)
            experts_NLk = torch.zeros(shape, dtype=torch.int16, device=stream_NE.device)
        for index, layer in enumerate(self.weights.layers):
            normed_NE = self._norm(stream_NE, layer.input_norm_E)
            if isinstance(layer.attention, DeltaNet):
                assert recall is not None
                stream_NE = layer.attention.added_to(stream_NE, normed_NE, recall)
            else:
                stream_NE = self._attended(stream_NE, normed_NE, layer.attention, attend, rope)
            normed_NE = self._norm(stream_NE, layer.post_norm_E)
            if isinstance(layer.mlp, Mlp):
                stream_NE = layer.mlp.added_to(stream_NE, normed_NE)
            else:
                stream_NE, experts_Nk = layer.mlp.added_to(stream_NE, normed_NE)
                assert experts_NLk is not None
                experts_NLk[:, index] = experts_Nk
            if pictures is not None and index < len(pictures.features.deepstack):
                stream_NE.index_add_(0, pictures.rows_R, pictures.features.deepstack[index])
        return stream_NE, experts_NLk

    def _attended(
        self,
        stream_NE: Tensor,
        normed_NE: Tensor,
        attention: GroupedAttention,
        attend: Callable[[int, Tensor], Tensor],
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return stream + attention(normed)."""
        qkv_NHD = attention.qkv(normed_NE).view(len(normed_NE), -1, self.head_dim)
        if not attention.gated:
            self._rotate(qkv_NHD, attention.qk_norm_HD, *rope)
            return attention.o.added_to(stream_NE, attend(attention.index, qkv_NHD))
        queries_NHD, kv_NHD = qkv_NHD[:, : 2 * self.heads], qkv_NHD[:, 2 * self.heads :]
        qkv_NHD = torch.cat((queries_NHD[:, ::2], kv_NHD), 1)
        self._rotate(qkv_NHD, attention.qk_norm_HD, *rope)
        gate_NX = queries_NHD[:, 1::2].flatten(1).sigmoid()
        return attention.o.added_to(stream_NE, attend(attention.index, qkv_NHD) * gate_NX)

    def _rotate(self, qkv_NHD: Tensor, norm_HD: Tensor | None, cos_N1R: Tensor, sin_N1R: Tensor) -> None:
        """Rotate R dimensions of the heads of queries and keys in place, after normalizing them in some families."""
        qk_NHD, rotated = qkv_NHD[:, : self.heads + self.kv_heads], cos_N1R.shape[-1]
        if norm_HD is not None and self._kernels is not None:
            self._kernels.norm_heads(qkv_NHD, norm_HD, self._eps, self.weights.norm_offset)
        elif norm_HD is not None:
            qk_NHD.copy_(_rms_norm(qk_NHD, norm_HD, self._eps, self.weights.norm_offset))
        if self._kernels is not None and rotated % 16 == 0:
            self._kernels.rotate(qkv_NHD, qk_NHD.shape[1], cos_N1R, sin_N1R)
            return
        qk_NHR = qk_NHD[..., :rotated]
        halves_NHR = qk_NHR.roll(rotated // 2, -1)
        qk_NHR.mul_(cos_N1R).addcmul_(halves_NHR, sin_N1R)

    def _logits(self, stream_BE: Tensor) -> Tensor:
        return self.weights.head(self._norm(stream_BE, self.weights.norm_E))

    def _norm(self, stream_NE: Tensor, weight_E: Tensor) -> Tensor:
        if self._kernels is not None:
            return self._kernels.rms_norm(stream_NE, weight_E, self._eps, self.weights.norm_offset)
        return _rms_norm(stream_NE, weight_E, self._eps, self.weights.norm_offset)


def _rms_norm(rows: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return rows / rms(rows) * (weight + offset), where the last dimension is normalized."""
    if not offset:
        return F.rms_norm(rows, rows.shape[-1:], eps=eps) * weight
    # In float32, because the sum would round the weight.
    return (F.rms_norm(rows.float(), rows.shape[-1:], eps=eps) * (weight.float() + offset)).to(rows.dtype)


def embedded_families() -> tuple[str, ...]:
    """Return the model types that the engine runs."""
    supported = (family for family in FAMILIES.values() if not family.beyond_llama)
    types = (name for family in supported for name in (family.model_types if family.tower is None else (family.name,)))
    return tuple(name for name in types if name not in STAND_INS)


def runs_embedded(config: Mapping[str, Any]) -> bool:
    """Return whether the engine runs the model of a config.json."""
    text = {"hidden_act": "silu", **(config.get("text_config") or config)}
    try:
        _checked_family(str(config.get("model_type")), SimpleNamespace(**text))
    except CheckpointError:
        return False
    return True


def _checked_family(model_type: str, config: Any) -> Family:
    """Return the family. Raises CheckpointError for a model that the engine does not compute."""
    family = known_family(model_type)
    if family is None or model_type not in embedded_families():
        reason = "" if family is None or not family.beyond_llama else f" ({', '.join(family.beyond_llama)})"
        raise CheckpointError(
            f"config.json: the embedded engine does not support model_type {model_type!r}{reason}. "
            f"Supported: {', '.join(embedded_families())}"
        )
    if config.hidden_act != "silu":
        raise CheckpointError(
            f"config.json: the embedded engine does not support hidden_act {config.hidden_act!r}, only silu"
        )
    if getattr(config, "use_sliding_window", False):
        raise CheckpointError("config.json: the embedded engine does not support use_sliding_window. Set it to false.")
    return family
