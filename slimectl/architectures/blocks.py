"""Building blocks that families share: embeddings, grouped-query attention, gated MLPs.

`hf` and `mcore` are the prefixes of one layer (or of a part of it) in both models, without the last dot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slimectl.architectures.config import Config, head_dim
from slimectl.architectures.mapping import ConcatRows, InterleaveGroups, ParamMapping, TensorParallelSplit
from slimectl.errors import CheckpointError

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the matrices of a gated MLP."""


def same(
    megatron: str, hf: str, *shape: int, split: TensorParallelSplit | None = None, padded: bool = False
) -> ParamMapping:
    """Return the link of a parameter that both models store in the same form."""
    return ParamMapping(megatron, (hf,), (shape,), split=split, padded=padded)


def outer(config: Config, hf: str = "model") -> list[ParamMapping]:
    """Return the links of embedding, last norm and head, unless the head is tied. `hf` is the decoder's prefix."""
    V, H = config["vocab_size"], config["hidden_size"]
    links = [
        same(
            "embedding.word_embeddings.weight",
            f"{hf}.embed_tokens.weight",
            V,
            H,
            split=TensorParallelSplit(0),
            padded=True,
        ),
        same("decoder.final_layernorm.weight", f"{hf}.norm.weight", H),
    ]
    if not config.get("tie_word_embeddings"):
        links.append(same("output_layer.weight", "lm_head.weight", V, H, split=TensorParallelSplit(0), padded=True))
    return links


def norms(config: Config, mcore: str, hf: str) -> list[ParamMapping]:
    """Return the links of the norms before attention and before the MLP."""
    H = config["hidden_size"]
    return [
        same(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight", H),
        same(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", H),
    ]


def attention(config: Config, mcore: str, hf: str, *, bias: bool = False, qk_norm: bool = False) -> list[ParamMapping]:
    """Return the links of grouped-query attention. `qk_norm` is RMSNorm over each head. `bias` is on Q, K and V."""
    H, D, groups = config["hidden_size"], head_dim(config), config["num_key_value_heads"]
    q, kv = config["num_attention_heads"] * D, groups * D
    mcore, hf = f"{mcore}.self_attention", f"{hf}.self_attn"
    names = [f"{hf}.{part}_proj" for part in "qkv"]
    fused = f"{mcore}.linear_qkv"
    qkv, split = InterleaveGroups(groups), TensorParallelSplit(0)
    links = [
        ParamMapping(f"{fused}.weight", tuple(f"{n}.weight" for n in names), ((q, H), (kv, H), (kv, H)), qkv, split),
        same(f"{mcore}.linear_proj.weight", f"{hf}.o_proj.weight", H, q, split=TensorParallelSplit(1)),
    ]
    if bias:
        links.append(ParamMapping(f"{fused}.bias", tuple(f"{n}.bias" for n in names), ((q,), (kv,), (kv,)), qkv, split))
    if qk_norm:
        links += [same(f"{mcore}.{x}_layernorm.weight", f"{hf}.{x}_norm.weight", D) for x in "qk"]
    return links


def gated_mlp(mcore: str, hf: str, hidden: int, ffn: int, names: Sequence[str] = MLP_NAMES) -> list[ParamMapping]:
    """Return the links of down(silu(gate(x)) · up(x)). `mcore` and `hf` are prefixes, `names` the matrices on disk."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return [
        ParamMapping(
            f"{mcore}.linear_fc1.weight",
            (gate, up),
            ((ffn, hidden),) * 2,
            ConcatRows(),
            TensorParallelSplit(0, (ffn, ffn)),
        ),
        same(f"{mcore}.linear_fc2.weight", down, hidden, ffn, split=TensorParallelSplit(1)),
    ]


def layered(
    config: Config, layer: Callable[[int, str, str], list[ParamMapping]], hf: str = "model"
) -> list[ParamMapping]:
    """Return the links of a model: `outer`, with `layer(i, mcore prefix, Hugging Face prefix)` after the embedding."""
    embedding, *final = outer(config, hf)
    inner = [
        link for i in range(config["num_hidden_layers"]) for link in layer(i, f"decoder.layers.{i}", f"{hf}.layers.{i}")
    ]
    return [embedding, *inner, *final]


def fields(config: Config, *, experts: int, ffn: int, sparse: list[bool]) -> dict[str, Any]:
    """Return the TransformerConfig fields of a mixture of experts. `sparse` flags the layers with experts.

    moe_layer_freq is set only if some layers are dense, because mcore then gives each layer separate checkpoint keys.
    """
    pattern = {} if all(sparse) else {"moe_layer_freq": [int(layer) for layer in sparse]}
    coefficient = config.get("router_aux_loss_coef") if config.get("output_router_logits") else None
    return {
        **pattern,
        "num_moe_experts": experts,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": ffn,
        "moe_aux_loss_coeff": coefficient or 0.0,
    }


def softmax_routing(*, normalized: bool) -> dict[str, Any]:
    """Return the fields of a softmax router, over all experts or, if `normalized`, over the selected top-k experts."""
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not normalized}


def sigmoid_routing(config: Config) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's router (arXiv:2412.19437, eq. 12-16).

    It has sigmoid scores, a bias that affects only the selection, and weights that sum to the scaling factor. With
    groups, only experts of the best groups are selected. The bias is constant in training, as in the Hugging Face
    model. Set moe_router_bias_update_rate to update it. Raises CheckpointError if Megatron would select or weigh
    experts differently.
    """
    groups, best, topk = config.get("n_group") or 1, config.get("topk_group") or 1, config["num_experts_per_tok"]
    if not config.get("norm_topk_prob", True):
        raise CheckpointError(
            "config.json: norm_topk_prob is false, but Megatron's sigmoid router always normalizes. This model "
            "cannot be"
            " trained or converted."
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


def routed(
    config: Config,
    mcore: str,
    hf: str,
    *,
    experts: int,
    ffn: int,
    bias: str | None = None,
    names: tuple[str, ...] = MLP_NAMES,
) -> list[ParamMapping]:
    """Return the links of router and experts. `hf` is the prefix of the mixture, `bias` the router's bias below it."""
    H = config["hidden_size"]
    links = [same(f"{mcore}.mlp.router.weight", f"{hf}.gate.weight", experts, H)]
    if bias:
        links.append(same(f"{mcore}.mlp.router.expert_bias", f"{hf}.{bias}", experts))
    for e in range(experts):
        links += gated_mlp(f"{mcore}.mlp.experts.local_experts.{e}", f"{hf}.experts.{e}", H, ffn, names)
    return links


def shared(config: Config, mcore: str, hf: str, ffn: int, *, gate: str | None = None) -> list[ParamMapping]:
    """Return the links of the shared expert. `hf` is the prefix of its MLP, `gate` the matrix [1, H] that weighs it."""
    links = gated_mlp(f"{mcore}.mlp.shared_experts", hf, config["hidden_size"], ffn)
    if gate:
        links.append(same(f"{mcore}.mlp.shared_experts.gate_weight", gate, 1, config["hidden_size"]))
    return links
