"""Where every weight of a model lives, under its Hugging Face name.

V vocabulary · E hidden size · H heads · D head dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimectl.engines.embedded.linear import Linear, can_pack
from slimectl.errors import CheckpointError


@dataclass(slots=True)
class Layer:
    """The weights of one block; `qk_norm_HD` is the query norm for every query head, then the key norm."""

    input_norm_E: Tensor
    qkv: Linear
    qk_norm_HD: Tensor | None
    o: Linear
    post_norm_E: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True)
class Place:
    """Where a named tensor goes: a view of the storage, and the product that packs it (None: nothing does)."""

    view: Tensor
    shape: tuple[int, ...]
    linear: Linear | None = None


class Weights:
    """Storage that is allocated once and written in place."""

    def __init__(self, config: Any, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        self._made: dict[str, Any] = {"dtype": dtype, "device": device}
        self._packs = can_pack(dtype, device)
        self.places: dict[str, Place] = {}
        vocabulary, hidden = config.vocab_size, config.hidden_size
        self.embedding_VE = self._tensor("model.embed_tokens.weight", vocabulary, hidden)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.norm_E = self._tensor("model.norm.weight", hidden)
        self.tied = bool(config.tie_word_embeddings)
        if self.tied:
            self.head = Linear(
                hidden, [vocabulary], bias=False, packs=self._packs, weight_OI=self.embedding_VE, **self._made
            )
            self.places["model.embed_tokens.weight"].linear = self.head
        else:
            self.head = self._linear(hidden, {"lm_head": vocabulary}, bias=False)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write every tensor to its place, in any order.

        Raises CheckpointError on a missing, extra or misshapen one.
        """
        missing = set(self.places)
        unpacked = Counter(id(place.linear) for place in self.places.values())
        for name, tensor in tensors:
            if name.endswith("rotary_emb.inv_freq"):  # old checkpoints carry the table that config.json defines
                continue
            tied_head = self.tied and name == "lm_head.weight"
            place = self.places.get("model.embed_tokens.weight" if tied_head else name)
            if place is None:
                raise CheckpointError(f"weights: {name} is not part of this {self._config.model_type} model")
            if tuple(tensor.shape) != place.shape:
                raise CheckpointError(f"weights: {name} has shape {list(tensor.shape)}, expected {list(place.shape)}")
            if tied_head or name not in missing:
                continue
            place.view.copy_(tensor)
            missing.remove(name)
            unpacked[id(place.linear)] -= 1
            if place.linear is not None and not unpacked[id(place.linear)]:
                place.linear.refresh()
        if missing:
            raise CheckpointError(
                f"weights: no tensor for {min(missing)} ({len(missing)} missing); give the whole model"
            )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        storage = torch.empty(*shape, **self._made)
        self.places[name] = Place(storage, shape)
        return storage

    def _linear(self, inputs: int, outputs: dict[str, int], *, bias: bool) -> Linear:
        """One product for the projections named in `outputs`, each with its width."""
        linear = Linear(inputs, list(outputs.values()), bias=bias, packs=self._packs, **self._made)
        for kind, views in (("weight", linear.parts), ("bias", linear.bias_parts)):
            for name, view in zip(outputs, views, strict=False):
                self.places[f"{name}.{kind}"] = Place(view, tuple(view.shape), linear)
        return linear

    def _layer(self, prefix: str) -> Layer:
        config, at, mlp = self._config, f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        widths = {f"{at}{kind}_proj": count * self._head_dim for kind, count in heads.items()}
        biased = bool(getattr(config, "attention_bias", False))
        biased_mlp = bool(getattr(config, "mlp_bias", False))
        return Layer(
            input_norm_E=self._tensor(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._linear(hidden, widths, bias=biased or config.model_type == "qwen2"),
            qk_norm_HD=self._qk_norm(at, heads["q"], heads["k"]) if config.model_type == "qwen3" else None,
            o=self._linear(heads["q"] * self._head_dim, {f"{at}o_proj": hidden}, bias=biased),
            post_norm_E=self._tensor(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._linear(hidden, {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, bias=biased_mlp),
            down=self._linear(inner, {f"{mlp}down_proj": hidden}, bias=biased_mlp),
        )

    def _qk_norm(self, prefix: str, queries: int, keys: int) -> Tensor:
        """Both norms head by head in one table; a [D] tensor written to a view of it spreads over the heads."""
        table_HD = torch.empty(queries + keys, self._head_dim, **self._made)
        for name, view in (("q_norm", table_HD[:queries]), ("k_norm", table_HD[queries:])):
            self.places[f"{prefix}{name}.weight"] = Place(view, (self._head_dim,))
        return table_HD
