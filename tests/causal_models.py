"""Small random configurations of the causal language models of transformers.

A configuration starts as the default of its class, so that every mechanism of an architecture is on. Only sizes change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 160
LAYERS = 2


def _each(size: int, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), size)


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **_each(32, "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size lru_width state_width"),
    **_each(48, "intermediate_size n_inner ffn_dim ffn_hidden_size intermediate_size_mlp dense_intermediate_size"),
    **_each(
        24, "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"
    ),
    **_each(24, "moe_shared_expert_intermediate_size moe_ffn_hidden_size"),
    **_each(LAYERS, "num_hidden_layers n_layer n_layers num_layers"),
    **_each(4, "num_attention_heads n_head n_heads num_heads"),
    **_each(2, "num_key_value_heads num_kv_heads"),
    **_each(8, "head_dim attention_head_dim"),
    **_each(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_each(2, "num_experts_per_tok moe_k moe_topk moe_top_k experts_per_token top_k_experts"),
    **_each(128, "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len"),
    **_each(1, "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace"),
    # Windows are shorter than the rows. Indices are longer, so that they have every token, as in short rows of GLM-5.
    **_each(8, "sliding_window attention_window_size window_size attention_chunk_size"),
    **_each(64, "index_topk"),
    **_each(16, "q_lora_rank kv_lora_rank"),
    **_each(8, "qk_nope_head_dim v_head_dim index_head_dim"),
    **_each(4, "qk_rope_head_dim rotary_dim"),
    **_each(2, "index_n_heads linear_num_key_heads"),
    **_each(8, "mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size"),
    **_each(8, "mamba_chunk_size chunk_size linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input"),
    **_each(4, "linear_num_value_heads mamba_dt_rank time_step_rank conv_kernel mamba_d_conv"),
    **_each(2, "mamba_expand expand"),
    **_each(1, "mamba_n_groups n_groups"),
    "qk_head_dim": 12,
    "mamba_d_ssm": 64,
    "vocab_size_per_layer_input": VOCABULARY,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HYBRID = ["mamba", "hybrid", "mamba", "hybrid"]
LATENT = {"head_dim": 4, "num_key_value_heads": 4}
"""Latent attention has one key head per query head, and head_dim is the rotated part."""
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    # The defaults of transformers 5.12 lack rope_theta, and their clip_qkv of None fails.
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.95, 0.0], "laurel_rank": 4},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "modernbert-decoder": {"pad_token_id": 0},
    # Without mamba-ssm, transformers mixes later chunks into earlier tokens, so rows must fit in one chunk.
    "nemotron_h": {"chunk_size": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # the cache does not know rounded widths of smaller ones
    "youtu": LATENT,
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2, "num_key_value_heads": 4,
              "attention_head_dim": 16, "pad_token_id": 0, "use_mamba_kernels": False},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": HYBRID, "mamba_headdim": 8, "n_mamba_heads": 8,
               "num_key_value_heads": 4, "attention_head_dim": 16, "adapter_rank": 4, "kv_channels": 8,
               "pad_token_id": 0, "chunk_size": 64},
}  # fmt: skip
"""What a model type needs besides sizes."""


def _others(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


OTHERS: dict[str, str] = {
    **_others(
        "encoders, or decoders of an encoder",
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert cpmant data2vec-text"
        " electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet reformer rembert roberta"
        " roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod",
    ),
    **_others("only with images or sound", "emu3 git mllama moshi musicgen musicgen_melody phi4_multimodal"),
    **_others("draft models of another model", "gemma4_assistant gemma4_unified_assistant"),
    "blt": "groups bytes by a second model. Not tried",
}
"""Model types that transformers lists as causal language models, but that are not compared, with the reason."""


def model_types() -> list[str]:
    """Return the model types of transformers' causal language models, without aliases of the same text model."""
    names = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in OTHERS and name in CONFIG_MAPPING]
    return [name for name in names if f"{name}_text" not in names]


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the default configuration of the text model of a type, with small sizes and two layers of each kind."""
    whole = CONFIG_MAPPING[model_type]()
    cls = type(whole.get_text_config())
    values = whole.get_text_config().to_dict()
    known = set(values) | {
        name for name in SIZES if hasattr(cls, name) and not isinstance(getattr(cls, name), property)
    }
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if values.get("layer_types"):
        kinds = list(dict.fromkeys(values["layer_types"]))
        count = max(LAYERS, len(kinds))
        sizes["layer_types"] = (kinds * count)[:count]
        sizes |= {name: count for name in _each(0, "num_hidden_layers n_layer n_layers num_layers") if name in sizes}
    return cls(**(sizes | CHANGES.get(model_type, {})))


def write_model(model_type: str, folder: Path) -> None:
    """Write a small random model to a folder, as transformers saves it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.abs().max() == 0:
            torch.nn.init.normal_(parameter, std=0.1)  # so that every weight has an effect and a gradient
    model.save_pretrained(folder)
