"""Building blocks that families share: embeddings, grouped-query attention, gated MLPs.

`hf` and `mcore` are the prefixes of one layer (or of a part of it) in both models, without the last dot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slimectl.architectures.config import Config, head_dim
from slimectl.architectures.mapping import (
    ConcatRows,
    Identity,
    InterleaveGroups,
    ParamMapping,
    TensorParallelSplit,
    Transposed,
)

MLP_NAMES = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the matrices of a gated MLP."""
NORMS = ("input_layernorm", "post_attention_layernorm")
"""Usual names of the norms before attention and before the MLP."""
MEGATRON_NORMS = ("input_layernorm", "pre_mlp_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
"""The same norms in Megatron, and those of sandwich layers: on the outputs of attention and of the MLP."""


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


def norms(config: Config, mcore: str, hf: str, names: Sequence[str] = NORMS) -> list[ParamMapping]:
    """Return the links of a layer's norms, with their names on disk in the order of MEGATRON_NORMS."""
    H = config["hidden_size"]
    pairs = zip(MEGATRON_NORMS, names, strict=False)
    return [same(f"{mcore}.{megatron}.weight", f"{hf}.{name}.weight", H) for megatron, name in pairs]


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
    """Return the links of down(silu(gate(x)) · up(x)). `mcore` and `hf` are prefixes, `names` the matrices on disk.

    The last of the names is down. Two names mean that gate and up are one tensor on disk.
    """
    *gate_up, down = (f"{hf}.{name}.weight" for name in names)
    rows, join = (ffn * 2 // len(gate_up), hidden), ConcatRows() if len(gate_up) == 2 else Identity()
    return [
        ParamMapping(
            f"{mcore}.linear_fc1.weight",
            tuple(gate_up),
            (rows,) * len(gate_up),
            join,
            TensorParallelSplit(0, (ffn, ffn)),
        ),
        same(f"{mcore}.linear_fc2.weight", down, hidden, ffn, split=TensorParallelSplit(1)),
    ]


def stacked_experts(mcore: str, hf: str, count: int, hidden: int, ffn: int) -> list[ParamMapping]:
    """Return the links of experts whose tensors of all experts are in one, with names of mapping.stack_views.

    On disk, matrices are [inputs, outputs], and outputs of gate and up alternate.
    """
    halves = TensorParallelSplit(0, (ffn, ffn))
    kinds = [
        ("linear_fc1.weight", "gate_up_proj", (hidden, 2 * ffn), Transposed(interleaved=True), halves),
        ("linear_fc1.bias", "gate_up_proj_bias", (2 * ffn,), Transposed(interleaved=True), halves),
        ("linear_fc2.weight", "down_proj", (ffn, hidden), Transposed(), TensorParallelSplit(1)),
        ("linear_fc2.bias", "down_proj_bias", (hidden,), Identity(), None),
    ]
    return [
        ParamMapping(f"{mcore}.experts.local_experts.{e}.{name}", (f"{hf}.experts.{stack}.{e}",), (shape,), join, split)
        for name, stack, shape, join, split in kinds
        for e in range(count)
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
