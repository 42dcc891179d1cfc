"""Reads config.json, and defines Architecture (fields of mcore's TransformerConfig)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slimectl.architectures.config_checks import check_config
from slimectl.architectures.config_defaults import STAND_INS, with_known_defaults
from slimectl.errors import CheckpointError, first_line
from slimectl.system.model_files import MAX_CONFIG_BYTES, adapter_remedy, open_file, read_json

Config = dict[str, Any]
"""A complete Hugging Face configuration: every key of the model's class, including defaults."""


Layer = Literal["plain", "sandwich", "wide_qk_norm", "gated_delta", "sparse_latent"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    `percent` is the rotated share of each head. `interleaved` pairs neighbours instead of halves. `scaling` is the
    Hugging Face `rope_parameters` (with `rope_type`) if it is not plain.
    """

    theta: float
    percent: float = 1.0
    interleaved: bool = False
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True)
class Architecture:
    """Parameters to build a Megatron GPTModel.

    `transformer` holds values for fields of mcore's TransformerConfig (MLATransformerConfig if `mla`) under their own
    names, as plain data. `activation_func` is not data, so `activation` names it. `layer` is the type of a decoder
    layer. "plain" is mcore's layer. policies/megatron builds the others, if it supports them:

    - "sandwich": norms `post_self_attn_layernorm` and `post_mlp_layernorm` before the outputs join the residual.
    - "wide_qk_norm": q_layernorm and k_layernorm over all heads of a token together.
    - "gated_delta": layers of `linear_attention_freq` are gated delta nets, the others have a gated output. Norm
      weights are offsets from 1, except the delta net's `out_norm` (unlike in mcore).
    - "sparse_latent": latent attention to the tokens that an indexer selects (mcore's "dsa").
    """

    transformer: dict[str, Any]
    vocab_size: int
    max_positions: int
    tied: bool
    rope: Rope
    mla: bool = False
    layer: Layer = "plain"
    activation: str = "silu"
    """Activation of the gated MLPs: silu, gelu_pytorch_tanh or quick_gelu."""
    embedding_scale: float = 1.0
    """Factor of the embedding's output, rounded to its dtype."""
    windows: tuple[int | None, ...] = ()
    """Number of tokens that each layer attends to, None for all. Empty if no layer has a window."""
    sinks: bool = False
    """Whether every head has a logit that takes a part of the softmax."""
    local_rope: Rope | None = None
    """Rotary embedding of the layers with a window, if it differs from `rope`."""
    indexers: tuple[bool, ...] = ()
    """Whether each layer has an indexer. A layer without one uses the choice of the last layer that has one."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional parameters of a layer that is not plain."""

    @property
    def layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def experts(self) -> int:
        return int(self.transformer.get("num_moe_experts") or 0)

    def moe(self, layer: int) -> bool:
        """Return whether this layer (counted from 0) has experts."""
        return self.experts > 0 and _in_pattern(self.transformer.get("moe_layer_freq"), layer, otherwise=True)

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that this layer (counted from 0) attends to, or None for all."""
        return self.windows[layer] if self.windows else None

    def selecting_layer(self, layer: int) -> int | None:
        """Return the number (from 1) of the layer whose indexer chooses the keys of this one, or None if none does."""
        return next((i + 1 for i in range(layer, -1, -1) if self.indexers[i]), None) if self.indexers else None

    def linear_attention(self, layer: int) -> bool:
        """Return whether this layer (counted from 0) has linear attention."""
        return _in_pattern(self.transformer.get("linear_attention_freq"), layer, otherwise=False)


def _in_pattern(pattern: list[int] | None, layer: int, *, otherwise: bool) -> bool:
    return otherwise if pattern is None else bool(pattern[layer])


def rope(config: Config, *, percent: float = 1.0, interleaved: bool = False, layers: str = "full_attention") -> Rope:
    """Read the rotary parameters of a configuration, in the new form (rope_parameters) or the old one (rope_theta).

    `layers` is the type of layers whose parameters are read, if types have their own.
    """
    parameters: Config = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters = dict(parameters.get(layers) or parameters)
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    percent = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or percent)
    scaling = None if kind == "default" else {**parameters, "rope_type": kind, "rope_theta": theta}
    return Rope(theta, percent, interleaved, scaling)


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def language_model(config: Config) -> Config:
    """Return the language model's part of a configuration."""
    if "text_config" not in config:
        return config
    return {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings")}


def with_defaults(raw: Config) -> Config:
    """Return the configuration with every key of its class that affects the model. `model_type` is unchanged.

    For supported families this does not need transformers. Raises CheckpointError.
    """
    if (config := with_known_defaults(raw)) is not None:
        return config
    from transformers import AutoConfig

    model_type = raw.get("model_type", "")
    if model_type not in STAND_INS:
        check_known(raw, "config.json")
    try:
        complete = AutoConfig.for_model(**{**raw, "model_type": STAND_INS.get(model_type, model_type)}).to_dict()
    except Exception as error:
        line = first_line(error)
        raise CheckpointError(f"config.json: model_type {model_type!r} cannot be used ({line})") from error
    return {**complete, "model_type": model_type}


def check_known(raw: Config, location: str) -> None:
    """Raise CheckpointError, with what to do, for a model that the installed transformers does not know."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    remedy = f"transformers {transformers.__version__} does not know it. Upgrade transformers, or give another model"
    if raw.get("auto_map"):
        remedy = (
            "it needs Python code of its checkpoint (auto_map), which slimectl does not run. Upgrade transformers to"
            " a version that has this model, or give another model"
        )
    raise CheckpointError(f"{location}: model_type {str(model_type)!r:.80}: {remedy}.")


def without_weights(config: Config) -> Any:
    """Return transformers' causal model of a complete configuration, on the meta device. Raises CheckpointError."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()  # this module computes nothing, so a missing kernel does not matter
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:
        raise CheckpointError(
            f"config.json: transformers cannot build a causal model of type {config.get('model_type')}"
            f" ({first_line(error):.200}). Give a model that continues text."
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def read_config(folder: Path) -> Config:
    """Read the complete configuration of a Hugging Face directory. Raises CheckpointError."""
    return with_defaults(raw_config(folder))


def raw_config(folder: Path) -> Config:
    """Read config.json unchanged, and check it against the size of the folder's weights. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        raw = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    except FileNotFoundError:
        reason = adapter_remedy(folder) or "this is not a Hugging Face checkpoint"
        raise CheckpointError(f"{folder}: no config.json: {reason}") from None
    check_config(raw, str(path), weight_bytes=_weight_bytes(folder))
    return raw


def _weight_bytes(folder: Path) -> int | None:
    """Return the bytes of all safetensors in the folder, or None if there are none or a header is truncated."""
    sizes = []
    for path in folder.glob("*.safetensors"):
        with open_file(path) as file:
            sizes.append(os.fstat(file.fileno()).st_size)
            if 8 + int.from_bytes(file.read(8), "little") > sizes[-1]:
                return None
    return sum(sizes) if sizes else None
