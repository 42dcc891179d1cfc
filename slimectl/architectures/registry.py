"""All model families, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from slimectl.architectures import blocks
from slimectl.architectures.config import Config, Rope, head_dim, rope
from slimectl.architectures.deepseek import LATENT, SPARSE_LATENT, sparse_layers
from slimectl.architectures.family import DECODER, TOWER, TOWER_PATTERN, Experts, Family, SharedExpert, Tower
from slimectl.architectures.mapping import Shape, published_shapes
from slimectl.architectures.qwen_next import GATED_DELTA, GATED_DELTA_OF_NEXT
from slimectl.errors import CheckpointError

INV_FREQ = r"rotary_emb\.inv_freq$"
"""A table of old checkpoints that config.json already defines."""


def stepped_layers(config: Config) -> list[bool]:
    """Return for every layer whether it has experts: all but `mlp_only_layers`, or one in decoder_sparse_step."""
    dense_layers, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    return [i not in dense_layers and (i + 1) % step == 0 for i in range(config["num_hidden_layers"])]


def interleaved_rope(config: Config) -> Rope:
    return rope(config, interleaved=True)


def minimax_rope(config: Config) -> Rope:
    """Published configurations give the rotated width only as rotary_dim."""
    return rope(config, percent=config.get("rotary_dim", head_dim(config)) / head_dim(config))


def sliding_windows(config: Config) -> list[int | None]:
    kinds = config["layer_types"]
    return [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]


LLAMA = Family(
    "llama", qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", carried=(INV_FREQ,)
)
"""Llama 2, 3, 3.1, 3.2, SmolLM2, and other models of the same layout."""

QWEN2 = Family("qwen2", qkv_bias=True)
MIMO = replace(QWEN2, name="mimo", model_types=("mimo",), carried=(r"^model\.mtp_layers\.",))
QWEN3 = Family("qwen3", qk_norm=True, qkv_bias="attention_bias", output_bias="attention_bias")
QWEN_EXPERTS = Experts(sparse=stepped_layers)
QWEN_SHARED = SharedExpert(lambda config: int(config["shared_expert_intermediate_size"]), "shared_expert", gated=True)
QWEN2_MOE = Family("qwen2_moe", qkv_bias="qkv_bias", experts=replace(QWEN_EXPERTS, shared=QWEN_SHARED))
QWEN3_MOE = replace(QWEN3, name="qwen3_moe", model_types=("qwen3_moe",), experts=QWEN_EXPERTS)

QWEN2_5_VL = replace(
    QWEN2,
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl", "qwen2_5_vl_text"),
    tower=Tower(
        {
            "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
        },
        tiny_card="tiny-vl",
        gated=True,
        published={DECODER: "model.", TOWER: "visual."},
    ),
    carried=(TOWER_PATTERN,),
)  # fmt: skip
"""Bai et al. 2025, arXiv:2502.13923. Without images its three rotary positions are equal."""
QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_text"),
    tower=Tower(
        {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
        },
        tiny_card="tiny-vl3",
        normalized_by_half=True,
        rope_sections=(24, 20, 20),
        alternates_sections=True,
    ),
    carried=(TOWER_PATTERN,),
)  # fmt: skip
"""Bai et al. 2025, arXiv:2511.21631. Without images nothing is added between its layers."""

QWEN3_NEXT = Family(
    "qwen3_next",
    qk_norm=True,
    offset_norms=True,
    attention=GATED_DELTA_OF_NEXT,
    experts=replace(QWEN_EXPERTS, shared=QWEN_SHARED),
    required={"attention_bias": False},
    carried=(r"^mtp\.",),
)
QWEN3_5 = Family(
    "qwen3_5",
    ("qwen3_5", "qwen3_5_text"),
    qk_norm=True,
    offset_norms=True,
    attention=GATED_DELTA,
    required={"attention_bias": False},
    carried=(r"^mtp\.", r"^model\.visual\."),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    experts=Experts(normalizes=True, shared=QWEN_SHARED),
)

DEEPSEEK_EXPERTS = Experts(
    count=("n_routed_experts",),
    sparse=sparse_layers,
    router="sigmoid",
    bias="gate.e_score_correction_bias",
    shared=SharedExpert(
        lambda config: int(config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0)), "shared_experts"
    ),
)
DEEPSEEK = Family(
    "deepseek_v3",
    ("deepseek_v3", "kimi_k2"),
    qk_norm=True,
    attention=LATENT,
    rope=lambda config: rope(config, interleaved=bool(config.get("rope_interleave", True))),
    experts=DEEPSEEK_EXPERTS,
    required={"attention_bias": False},
    carried=(INV_FREQ,),
    spare_layers=True,
)
"""DeepSeek-V3, V3.1, R1, Kimi K2, Moonlight."""
GLM4_MOE_LITE = replace(DEEPSEEK, name="glm4_moe_lite", model_types=("glm4_moe_lite",))
"""GLM-4.7-Flash: the same layers under another name."""
GLM_MOE_DSA = replace(DEEPSEEK, name="glm_moe_dsa", model_types=("glm_moe_dsa",), attention=SPARSE_LATENT, carried=())
"""GLM-5."""

GLM4 = Family(
    "glm4",
    qkv_bias="attention_bias",
    norms=(*blocks.NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    mlp_names=("gate_up_proj", "down_proj"),
    rope=interleaved_rope,
)
"""GLM-4-0414 and GLM-Z1."""
GLM4_MOE = Family(
    "glm4_moe", qkv_bias="attention_bias", qk_norm="use_qk_norm", experts=DEEPSEEK_EXPERTS, spare_layers=True
)
"""GLM-4.5."""

MINIMAX = Family(
    "minimax_m2",
    qk_norm=True,
    qk_norm_over="token",
    rope=minimax_rope,
    experts=Experts(
        width="intermediate_size",
        router="sigmoid",
        prefix="block_sparse_moe",
        bias="e_score_correction_bias",
        names=("w1", "w3", "w2"),
    ),
    required={"attention_bias": False},
)
"""MiniMax-M2."""

GEMMA3 = Family(
    "gemma3_text",
    qk_norm=True,
    norms=(
        "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm",
    ),
    offset_norms=True,
    scales_embedding=True,
    activation="gelu_pytorch_tanh",
    windows=sliding_windows,
    local_rope=lambda config: rope(config, layers="sliding_attention"),
    softmax_scale=lambda config: float(config["query_pre_attn_scalar"] ** -0.5),
    required={
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
)  # fmt: skip
"""Gemma 3 models of text only (270M, 1B), arXiv:2503.19786."""

GPT_OSS = Family(
    "gpt_oss",
    qkv_bias=True,
    output_bias=True,
    sinks=True,
    windows=sliding_windows,
    activation="quick_gelu",
    experts=Experts(width="intermediate_size", normalizes=True, gate="router", names=(), stacked=True),
    required={"hidden_act": "silu", "attention_bias": True},
)
"""gpt-oss. config.json says silu, but its experts compute x sigmoid(1.702 x), quick_gelu. arXiv:2508.10925."""

FAMILIES = {
    family.name: family
    for family in (
        LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, DEEPSEEK, GLM4_MOE_LITE, GLM4, GLM4_MOE, MIMO, MINIMAX, QWEN3_NEXT,
        QWEN3_5, QWEN3_5_MOE, GLM_MOE_DSA, QWEN2_5_VL, QWEN3_VL, GEMMA3,
        GPT_OSS,
    )
}  # fmt: skip


def known_family(model_type: object) -> Family | None:
    return next((family for family in FAMILIES.values() if model_type in family.model_types), None)


def tower_of(model_type: object) -> Tower | None:
    """Return the vision tower of the models of a family, or None for text models."""
    family = known_family(model_type)
    return None if family is None or family.name != model_type else family.tower


def family_of(config: Config) -> Family:
    """Look up the family of a configuration. Raises CheckpointError for an unknown model_type."""
    model_type = config.get("model_type", "")
    if (family := known_family(model_type)) is not None:
        return family.of(config)
    model_types = sorted(name for family in FAMILIES.values() for name in family.model_types)
    raise CheckpointError(
        f"config.json: model_type {model_type!r} has no weight mapping. Supported: {', '.join(model_types)}. To add "
        f"one, see CONTRIBUTING, recipe 3. megatron.custom_model_provider_path replaces the model, not its mapping."
    )


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. `activated` counts the parameters that one token uses, with only the top k routed experts."""

    total: int
    activated: int


def shapes(config: Config) -> dict[str, Shape]:
    """Return the shape of every tensor that the model uses, by its name on disk. Raises CheckpointError."""
    return published_shapes(family_of(config).links(config))


def parameters(config: Config) -> Parameters:
    """Count parameters from shapes. A tied head counts as the embedding. A router's bias is not a parameter."""
    family = family_of(config)
    architecture = family.architecture(config)
    sizes = [(math.prod(link.shape), link.expert is not None) for link in family.links(config) if not link.buffer]
    total = sum(size for size, _ in sizes)
    routed = sum(size for size, expert in sizes if expert)
    if not routed:
        return Parameters(total, total)
    topk = int(architecture.transformer["moe_router_topk"])
    return Parameters(total, total - routed + routed * topk // architecture.experts)
