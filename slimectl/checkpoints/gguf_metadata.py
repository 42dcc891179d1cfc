"""Translates GGUF metadata that transformers ignores into keys of config.json, or rejects it.

llama.cpp defines the meaning of each key. Keys are written here without the prefix of the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from slimectl.errors import CheckpointError

SCALING = "rope.scaling."
ATTRIBUTES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "rope.freq_base": "rope_theta",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
"""Keys with the same meaning as a key of config.json, in architectures that have it."""
NEUTRAL: dict[str, Collection[Any]] = {
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.output_scale": (0, 1),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.causal": (1,),
    "attention.temperature_scale": (0,), "attention.shared_kv_layers": (0,), "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,), "router_logit_softcapping": (0,), "use_parallel_residual": (0,), "swin_norm": (0,),
    "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,), "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "expert_weights_scale": (0, 1), "expert_weights_norm": (1,),
    "expert_gating_func": (0, 1), "leading_dense_block_count": (0,), "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1), "nextn_predict_layers": (0,), "n_deepstack_layers": (0,),
    "pooling_type": (0,),
}  # fmt: skip
"""Values with which a key has no effect. A gating function of 1 is a softmax."""
WINDOWED = {"gemma2": 2, "gemma3_text": 6}
"""Families with windows in all but every nth layer, and llama.cpp's n for a file that does not have it."""
SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
"""Layers of their 27B models. There, llama.cpp divides attention scores by the root of hidden_size / heads, elsewhere
by the root of the width of a head. The file does not have this number."""
PATTERN = "attention.sliding_window_pattern"
NOTES = ("tensor_data_layout", "vocab_size", "rope.scaling.finetuned")
"""Keys about the origin of the file."""
SAME = 1e-5
"""Largest relative difference between float32 numbers that count as equal."""


def changed_keys(config: Any, metadata: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the keys of config.json that follow from metadata, except the `known` keys that `config` already has.

    Raises CheckpointError for metadata that changes the computation and has no counterpart.
    """
    changes = {
        attribute: metadata[key]
        for key, attribute in ATTRIBUTES.items()
        if key in metadata and key not in known and (attribute == "rope_theta" or hasattr(config, attribute))
    }
    changes |= _rope_parameters(metadata, config)
    if config.model_type in WINDOWED:
        changes |= _gemma_keys(metadata, config)
    if _has_window(metadata) and hasattr(config, "sliding_window") and not hasattr(config, "use_sliding_window"):
        changes["sliding_window"] = metadata["attention.sliding_window"]
    for key, value in metadata.items():
        is_mapped = key in known or key in NOTES or ATTRIBUTES.get(key) in changes or key.startswith(SCALING)
        if not is_mapped and not _is_neutral(key, value, metadata, config, changes):
            raise CheckpointError(
                f"{key} = {value!r:.60} changes what the model computes, but {config.model_type} in config.json has no"
                " key for it. Convert from the model's original checkpoint instead."
            )
    _check_rotated_width(metadata, config, changes)
    return changes


def _rope_parameters(metadata: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return {"rope_parameters": …} if the file scales the frequencies or has two bases, else {}.

    llama.cpp scales only the layers without a window in families with a base of their own for windows.
    """
    scaling, plain = _rope_scaling(metadata), getattr(config, "rope_parameters", None) or {}
    if "full_attention" not in plain:
        theta = metadata.get("rope.freq_base", plain.get("rope_theta", 10000.0))
        return {"rope_parameters": {**plain, "rope_theta": theta, **scaling}} if scaling else {}
    local = {"rope_theta": metadata["rope.freq_base_swa"]} if "rope.freq_base_swa" in metadata else {}
    if not scaling and not local:
        return {}
    full = plain["full_attention"] | scaling
    sliding = plain["sliding_attention"] | local
    return {"rope_parameters": {**plain, "full_attention": full, "sliding_attention": sliding}}


def _gemma_keys(metadata: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the keys of Gemma 2 and 3 that differ: which layers have a window, and what divides the scores."""
    count, period = config.num_hidden_layers, metadata.get(PATTERN, WINDOWED[config.model_type])
    windowed = period if isinstance(period, list) else [not period or bool((i + 1) % period) for i in range(count)]
    if not metadata.get("attention.sliding_window"):
        windowed = [False] * count
    by_width = count == SCALED_BY_WIDTH[config.model_type]
    keys = {
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
        "query_pre_attn_scalar": config.hidden_size // config.num_attention_heads if by_width else config.head_dim,
    }
    return {key: value for key, value in keys.items() if getattr(config, key) != value}


def _rope_scaling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary frequencies in the form of config.json, or {} without any. Raises CheckpointError.

    As in llama.cpp, a factor without a type is linear, including under the key of old files, and 0 means no scaling.
    """
    kind = metadata.get(f"{SCALING}type", "linear")
    factor = float(metadata.get(f"{SCALING}factor", metadata.get("rope.scale_linear", 0.0)))
    if kind == "none" or (kind in ("linear", "yarn") and factor in (0.0, 1.0)):
        return {}
    if kind == "linear":
        _refuse_scaling(metadata, ())
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{SCALING}type = {kind!r} is not supported, only linear and yarn. Convert from the model's original "
            "checkpoint instead."
        )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = int(
        metadata.get(f"{SCALING}original_context_length", metadata["context_length"])
    )
    _refuse_scaling(metadata, ("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"))
    strength = metadata.get(f"{SCALING}attn_factor", metadata.get(f"{SCALING}yarn_attn_factor", 1.0))
    if strength != 1.0:
        scaling["attention_factor"] = strength * (1 + 0.1 * math.log(factor))
    for key in ("beta_fast", "beta_slow"):
        if f"{SCALING}yarn_{key}" in metadata:
            scaling[key] = metadata[f"{SCALING}yarn_{key}"]
    return scaling


def _refuse_scaling(metadata: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise CheckpointError for scaling parameters that have an effect but no key in config.json."""
    neutral = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
    ignored = ("type", "factor", "original_context_length", "finetuned", *known)
    for key, value in metadata.items():
        name = key.removeprefix(SCALING)
        if key.startswith(SCALING) and name not in ignored and neutral.get(name) != value:
            raise CheckpointError(
                f"{key} = {value!r:.60} changes the rotary frequencies, but config.json has no key for it. Convert from"
                " the model's original checkpoint instead."
            )


def _has_window(metadata: Mapping[str, Any]) -> bool:
    """Return whether attention is limited to a window that is shorter than the context."""
    return 0 < int(metadata.get("attention.sliding_window") or 0) < int(metadata.get("context_length") or 0)


def _is_neutral(key: str, value: Any, metadata: Mapping[str, Any], config: Any, changes: Mapping[str, Any]) -> bool:
    """Return whether a key without a counterpart in config.json has no effect."""
    width = _head_dim(config, changes)
    if key == "attention.sliding_window":
        return (
            key.split(".")[1] in changes or not _has_window(metadata) or value == getattr(config, "sliding_window", 0)
        )
    if key == PATTERN:
        return config.model_type in WINDOWED  # see _gemma_keys
    if key == "rope.freq_base_swa":
        return "full_attention" in (getattr(config, "rope_parameters", None) or {})  # see _rope_parameters
    if key == "attention.scale":
        return value == 0 or math.isclose(value, width**-0.5, rel_tol=SAME)
    if key in ("attention.key_length", "attention.value_length"):
        return bool(value == width)
    if key in ("rope.dimension_count", "rope.scale_linear"):
        return True  # see _check_rotated_width and _rope_scaling
    return key in NEUTRAL and value in NEUTRAL[key]


def _head_dim(config: Any, changes: Mapping[str, Any]) -> int:
    width = changes.get("head_dim") or getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def _check_rotated_width(metadata: Mapping[str, Any], config: Any, changes: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the rotated part of each head does not match config.json."""
    rotated, width = metadata.get("rope.dimension_count"), _head_dim(config, changes)
    parameters = changes.get("rope_parameters") or getattr(config, "rope_parameters", None) or {}
    expected = int(width * (parameters.get("partial_rotary_factor") or 1))
    if rotated is not None and rotated != expected:
        raise CheckpointError(
            f"rope.dimension_count is {rotated}, but {config.model_type} rotates {expected} dimensions of each head."
            " Convert from the model's original checkpoint instead."
        )
