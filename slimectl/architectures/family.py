"""The declaration of a model family. Trainer, converter, planner and embedded engine build theirs from it.

A family starts as Llama: RMSNorm before attention and MLP, grouped-query attention, a gated MLP with SiLU. Its
declaration lists the differences. A value that config.json decides is given as its key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, TypeVar

from slimectl.architectures import blocks
from slimectl.architectures.blocks import same
from slimectl.architectures.config import Architecture, Config, Layer, Rope, head_dim, language_model, rope
from slimectl.architectures.mapping import ParamMapping, TensorParallelSplit
from slimectl.errors import CheckpointError

Links = Callable[[Config, int, str, str], list[ParamMapping]]
"""(configuration, layer, its Megatron prefix, its Hugging Face prefix) -> links of a part of the layer."""
Switch = bool | str
"""A constant of the family, or the key of config.json that decides."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "quick_gelu")
"""Activations of gated MLPs that policies/megatron computes."""
DECODER, TOWER = "model.language_model.", "model.visual."
"""Prefixes of the parts of a vision model in transformers' modules."""
TOWER_PATTERN = r"^(model\.)?visual\."
"""Pattern of the vision tower's tensor names, in either spelling."""


def is_on(switch: Switch, config: Config) -> bool:
    return bool(config.get(switch)) if isinstance(switch, str) else switch


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token uses. `name` is its prefix below the layer's MLP.

    If `gated`, a matrix [1, H] weighs it.
    """

    width: Callable[[Config], int]
    name: str
    gated: bool = False


def every_layer(config: Config) -> list[bool]:
    return [True] * config["num_hidden_layers"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of some layers.

    `count` are the keys for the number of experts, and `width` is the key for the width of one. `sparse` says for every
    layer whether it has experts. A softmax router normalizes the weights of the chosen experts if `normalizes`. A
    sigmoid router always does, and has a bias, `bias`, that affects only the choice. `prefix` precedes the mixture's
    tensor names on disk, and `names` are an expert's matrices. `gate` is the router's name.

    If `stacked`, the experts of a layer are in one tensor for each matrix on disk, transposed and with biases (gpt-oss,
    arXiv:2508.10925). The router has a bias too, and gate and up are clamped.
    """

    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: str = "moe_intermediate_size"
    sparse: Callable[[Config], list[bool]] = every_layer
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: Switch = "norm_topk_prob"
    prefix: str = "mlp"
    bias: str = ""
    names: tuple[str, ...] = blocks.MLP_NAMES
    gate: str = "gate"
    stacked: bool = False
    shared: SharedExpert | None = None

    def number(self, config: Config) -> int:
        return int(config[next((key for key in self.count if key in config), self.count[-1])])

    def layers(self, config: Config) -> list[bool]:
        """Return for every layer whether it has experts."""
        return self.sparse(config) if self.number(config) else [False] * config["num_hidden_layers"]

    def fields(self, config: Config) -> dict[str, Any]:
        """Return the TransformerConfig fields. Raises CheckpointError if Megatron would route otherwise.

        moe_layer_freq is set only if some layers are dense, because mcore then gives each layer separate checkpoint
        keys.
        """
        sparse = self.layers(config)
        if not self.number(config):
            return {}
        coefficient = config.get("router_aux_loss_coef") if config.get("output_router_logits") else None
        fields: dict[str, Any] = {
            **({} if all(sparse) else {"moe_layer_freq": [int(layer) for layer in sparse]}),
            "num_moe_experts": self.number(config),
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config[self.width],
            "moe_aux_loss_coeff": coefficient or 0.0,
        }
        if self.router == "softmax":
            pre_softmax = not is_on(self.normalizes, config)
            fields |= {"moe_router_score_function": "softmax", "moe_router_pre_softmax": pre_softmax}
        else:
            fields |= _sigmoid_fields(config)
        if self.stacked:
            fields |= {"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
        if self.shared is not None and (width := self.shared.width(config)):
            fields["moe_shared_expert_intermediate_size"] = width
            fields |= {"moe_shared_expert_gate": True} if self.shared.gated else {}
        return fields

    def links(self, config: Config, mcore: str, hf: str) -> list[ParamMapping]:
        """Return the links of a layer's router, routed experts and shared expert."""
        H, count, mcore, hf = config["hidden_size"], self.number(config), f"{mcore}.mlp", f"{hf}.{self.prefix}"
        links = [same(f"{mcore}.router.weight", f"{hf}.{self.gate}.weight", count, H)]
        if self.stacked:
            links.append(same(f"{mcore}.router.bias", f"{hf}.{self.gate}.bias", count))
            return links + blocks.stacked_experts(mcore, hf, count, H, config[self.width])
        if self.bias:
            links.append(same(f"{mcore}.router.expert_bias", f"{hf}.{self.bias}", count))
        for e in range(count):
            expert = f"{mcore}.experts.local_experts.{e}"
            links += blocks.gated_mlp(expert, f"{hf}.experts.{e}", H, config[self.width], self.names)
        if self.shared is not None and (width := self.shared.width(config)):
            links += blocks.gated_mlp(f"{mcore}.shared_experts", f"{hf}.{self.shared.name}", H, width)
            if self.shared.gated:
                links.append(same(f"{mcore}.shared_experts.gate_weight", f"{hf}.{self.shared.name}_gate.weight", 1, H))
        return links


def _sigmoid_fields(config: Config) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's router (arXiv:2412.19437, eq. 12-16).

    It has sigmoid scores, a bias that affects only the selection, and weights that sum to the scaling factor. With
    groups, only experts of the best groups are selected. The bias is constant in training, as in the Hugging Face
    model. Set moe_router_bias_update_rate to update it. Raises CheckpointError if Megatron would select or weigh
    experts differently.
    """
    groups, best, topk = config.get("n_group") or 1, config.get("topk_group") or 1, config["num_experts_per_tok"]
    if not config.get("norm_topk_prob", True):
        raise CheckpointError(
            "config.json: norm_topk_prob is false, but Megatron's sigmoid router always normalizes. This model cannot "
            "be trained or converted."
        )
    if groups > 1 and topk != 2 * best:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {topk} over topk_group {best}: Megatron ranks groups by their best"
            f" {topk // best} experts, but this model by the best 2. It cannot be trained or converted."
        )
    scaling = config.get("routed_scaling_factor") or 1.0
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": None if scaling == 1.0 else float(scaling),
        **({"moe_router_num_groups": groups, "moe_router_group_topk": best} if groups > 1 else {}),
    }


@dataclass(frozen=True)
class Attention:
    """Attention that is not grouped-query attention in every layer: its tensors and TransformerConfig fields."""

    name: str
    links: Links
    fields: Callable[[Config], dict[str, Any]]
    layer: Layer = "plain"
    latent: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tower:
    """The vision tower of a family. Its module is transformers'.

    `defaults` are those of transformers for missing keys of vision_config. A `gated` tower has gated MLPs and RMSNorms.
    `published` are other prefixes of the same tensors in published checkpoints. `normalized_by_half` means that the
    published image processors use mean and deviation 0.5 per color, unlike CLIP's. `tiny_card` is the card of the
    family's smallest model. `rope_sections` are the default numbers of the decoder's frequencies that rotate by time,
    height and width, one section after the other or in turns.
    """

    defaults: Mapping[str, Any]
    tiny_card: str
    gated: bool = False
    published: Mapping[str, str] = field(default_factory=dict)
    normalized_by_half: bool = False
    rope_sections: tuple[int, ...] = ()
    alternates_sections: bool = False


Result = TypeVar("Result")


def _explained(method: Callable[[Family, Config], Result]) -> Callable[[Family, Config], Result]:
    """Turn errors on a configuration, which is untrusted input, into CheckpointErrors."""

    @wraps(method)
    def call(family: Family, config: Config) -> Result:
        try:
            return method(family, config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(
                f"config.json: not valid for a {family.name} model ({reason:.200}). Copy it from the model's original "
                f"checkpoint."
            ) from error

    return call


@dataclass(frozen=True)
class Family:
    """A model family. `model_types` are its values of `model_type` in config.json, by default its name.

    `required` are values of config.json that training needs, if the keys are there. `carried` are regular expressions
    for tensors that checkpoints hold but training does not use (multi-token prediction layers). Conversions copy them
    unchanged. `spare_layers` does the same for the num_nextn_predict_layers layers after the last one (DeepSeek's
    multi-token prediction).
    """

    name: str
    model_types: tuple[str, ...] = ()
    qkv_bias: Switch = False
    output_bias: Switch = False
    """Bias of attention's output projection."""
    mlp_bias: Switch = False
    qk_norm: Switch = False
    qk_norm_over: Literal["head", "token"] = "head"
    """Whether queries and keys are normalized head by head, or all heads of a token together."""
    norms: tuple[str, ...] = blocks.NORMS
    """Names of the norms before attention and before the MLP. Two more are on the outputs of attention and of the MLP,
    before they join the residual."""
    offset_norms: bool = False
    """Whether weights of norms are offsets from 1."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of their width."""
    activation: str = "silu"
    """Activation of the gated MLPs, as in hidden_act."""
    mlp_names: tuple[str, ...] = blocks.MLP_NAMES
    attention: Attention | None = None
    windows: Callable[[Config], list[int | None]] | None = None
    """Number of tokens that each layer attends to, or None for all."""
    local_rope: Callable[[Config], Rope] | None = None
    """Rotary embedding of the layers with a window, if they have another one."""
    softmax_scale: Callable[[Config], float] | None = None
    """Factor of attention scores, if it is not head_dim ** -0.5."""
    soft_caps: tuple[str, ...] = ()
    """Keys of limits on attention scores or logits."""
    sinks: bool = False
    """Whether every head has a logit that takes a part of the softmax."""
    rope: Callable[[Config], Rope] = rope
    experts: Experts | None = None
    tower: Tower | None = None
    required: Mapping[str, Any] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    spare_layers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_types", self.model_types or (self.name,))

    def carries(self, name: str) -> bool:
        """Return whether checkpoints hold a tensor of this name but training does not use it."""
        return any(re.search(pattern, name) for pattern in self.carried)

    def of(self, config: Config) -> Family:
        """Return the family for this configuration, with the patterns of its spare layers added to `carried`."""
        count = config.get("num_nextn_predict_layers") or 0
        if not self.spare_layers or not count:
            return self
        first = config["num_hidden_layers"]
        numbers = "|".join(str(number) for number in range(first, first + count))
        return replace(self, carried=(*self.carried, rf"^model\.layers\.({numbers})\."))

    def published_name(self, name: str) -> str:
        """Return the name that published checkpoints use for a parameter of transformers' module."""
        for prefix, published in ({} if self.tower is None else self.tower.published).items():
            if name.startswith(prefix):
                return published + name.removeprefix(prefix)
        return name

    @property
    def untrained(self) -> list[str]:
        """What neither Megatron's layers here nor the embedded engine compute."""
        return [
            *([f"{self.activation} in MLPs"] if self.activation not in ACTIVATIONS else []),
            *(["soft caps"] if self.soft_caps else []),
        ]

    @property
    def beyond_llama(self) -> list[str]:
        """What the embedded engine does not compute: all that a switch of Llama's layers does not give."""
        experts = self.experts
        return [
            *self.untrained,
            *([f"{self.activation} in MLPs"] if self.activation in ACTIVATIONS[1:] else []),
            *(["attention within windows"] if self.windows else []),
            *(["another scale of attention scores"] if self.softmax_scale else []),
            *(["attention sinks"] if self.sinks else []),
            *(["biases of all linear layers"] if self.is_biased else []),
            *(["scaled embeddings"] if self.scales_embedding else []),
            *([self.attention.name] if self.attention and self.attention.layer != "gated_delta" else []),
            *(["norms on the outputs of attention and MLP"] if self.is_sandwich else []),
            *(["norms over all heads of a token"] if self.qk_norm_over == "token" else []),
            *(["gate and up in one tensor"] if self.mlp_names != blocks.MLP_NAMES else []),
            *(["a sigmoid router"] if experts and experts.router == "sigmoid" else []),
        ]

    def expert_layers(self, config: Config) -> list[bool]:
        """Return for every layer whether it has experts."""
        return self.experts.layers(config) if self.experts else [False] * config["num_hidden_layers"]

    @_explained
    def architecture(self, config: Config) -> Architecture:
        """Return the decoder for Megatron. Raises CheckpointError for one that it cannot train."""
        config = language_model(config)
        self._check_trained(config)
        experts = {} if self.experts is None else self.experts.fields(config)
        ffn = config.get("intermediate_size")
        transformer = {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": experts["moe_ffn_hidden_size"] if ffn is None else ffn,
            "num_attention_heads": config["num_attention_heads"],
            "num_query_groups": config["num_key_value_heads"],
            "kv_channels": head_dim(config),
            "layernorm_epsilon": config["rms_norm_eps"],
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": self.is_biased,
            "add_qkv_bias": is_on(self.qkv_bias, config),
            "qk_layernorm": is_on(self.qk_norm, config),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **({"layernorm_zero_centered_gamma": True} if self.offset_norms else {}),
            **({"softmax_type": "learnable"} if self.sinks else {}),
            **({"softmax_scale": self.softmax_scale(config)} if self.softmax_scale else {}),
            **experts,
            **({} if self.attention is None else self.attention.fields(config)),
        }
        rotary = self.rope(config)
        if rotary.interleaved and self.attention is None:
            transformer["rotary_interleaved"] = True
        return Architecture(
            transformer,
            vocab_size=config["vocab_size"],
            max_positions=config["max_position_embeddings"],
            tied=bool(config.get("tie_word_embeddings")),
            rope=rotary,
            mla=self.attention is not None and self.attention.latent,
            layer=self._layer,
            activation=self.activation,
            embedding_scale=config["hidden_size"] ** 0.5 if self.scales_embedding else 1.0,
            windows=tuple(self.windows(config)) if self.windows else (),
            sinks=self.sinks,
            indexers=tuple(kind == "full" for kind in config.get("indexer_types") or ()),
            local_rope=None if self.local_rope is None else self.local_rope(config),
            extra={} if self.attention is None else dict(self.attention.extra),
        )

    @_explained
    def links(self, config: Config) -> list[ParamMapping]:
        """Return the links of all tensors of the decoder."""
        prefix = (
            "model.language_model" if "text_config" in config and self.published_name(DECODER) == DECODER else "model"
        )
        config = language_model(config)
        sparse, H = self.expert_layers(config), config["hidden_size"]

        def layer(i: int, mcore: str, hf: str) -> list[ParamMapping]:
            if self.experts is not None and sparse[i]:
                mlp = self.experts.links(config, mcore, hf)
            else:
                ffn = config["intermediate_size"]
                mlp = blocks.gated_mlp(f"{mcore}.mlp", f"{hf}.mlp", H, ffn, self.mlp_names)
            return [
                *(self.attention.links if self.attention else self._attention)(config, i, mcore, hf),
                *mlp,
                *blocks.norms(config, mcore, hf, self.norms),
            ]

        return blocks.layered(config, layer, prefix)

    @property
    def is_biased(self) -> bool:
        """Return whether all linear layers of attention, routers and experts have biases."""
        return self.output_bias is True and self.experts is not None and self.experts.stacked

    @property
    def is_sandwich(self) -> bool:
        """Return whether the outputs of attention and MLP are normalized too."""
        return len(self.norms) > len(blocks.NORMS)

    @property
    def _layer(self) -> Layer:
        if self.attention is not None:
            return self.attention.layer
        return "sandwich" if self.is_sandwich else "wide_qk_norm" if self.qk_norm_over == "token" else "plain"

    def _attention(self, config: Config, i: int, mcore: str, hf: str) -> list[ParamMapping]:
        """Return the links of grouped-query attention."""
        has_norms, by_token = is_on(self.qk_norm, config), self.qk_norm_over == "token"
        bias = is_on(self.qkv_bias, config)
        links = blocks.attention(config, mcore, hf, bias=bias, qk_norm=has_norms and not by_token)
        if has_norms and by_token:
            D, split = head_dim(config), TensorParallelSplit(0)
            for x, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
                name = f"{mcore}.self_attention.{x}_layernorm.weight"
                links.append(same(name, f"{hf}.self_attn.{x}_norm.weight", heads * D, split=split))
        mcore, hf = f"{mcore}.self_attention", f"{hf}.self_attn"
        if self.is_biased:
            links.append(same(f"{mcore}.linear_proj.bias", f"{hf}.o_proj.bias", config["hidden_size"]))
        if self.sinks:
            heads, name = config["num_attention_heads"], f"{mcore}.core_attention.softmax_offset"
            links.append(same(name, f"{hf}.sinks", heads, split=TensorParallelSplit(0)))
        return links

    def _check_trained(self, config: Config) -> None:
        """Raise CheckpointError for what Megatron's layers here do not have. Absent keys are accepted."""
        biases = (self.output_bias, self.mlp_bias)
        only_some = True in biases and not self.is_biased
        untrained = [*self.untrained, *(["biases of output projections"] if only_some else [])]
        if untrained:
            raise CheckpointError(
                f"config.json: {self.name} models cannot be trained by Megatron or converted ({', '.join(untrained)})"
            )
        no_biases = {key: False for key in biases if isinstance(key, str)}
        required = {"hidden_act": self.activation, "use_sliding_window": False, **no_biases, **self.required}
        for key, value in required.items():
            if (config.get(key) or value) != value:
                raise CheckpointError(
                    f"config.json: {key} {config[key]!r}: {config.get('model_type')} models can be trained and"
                    f" converted only with {value!r}"
                )
