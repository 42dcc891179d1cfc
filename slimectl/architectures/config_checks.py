"""Validates config.json before anything is built from it: value types, ranges, and sizes against the weights.

An untrusted config.json may have a layer of 10^12 columns, -1 heads or a list instead of a number. Its readers
(transformers, a family of this package, an engine) would fail with a traceback or allocate all memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from slimectl.errors import CheckpointError

REQUIRED_SIZES = {
    "hidden_size": 2**18, "num_hidden_layers": 2**13, "num_attention_heads": 2**13, "vocab_size": 2**26,
    "intermediate_size": 2**22, "max_position_embeddings": 2**40,
}  # fmt: skip
"""Keys that are at least 1 if present, and their upper limits: 10 times the largest value of any known model."""
OPTIONAL_SIZES = {
    "num_key_value_heads": 2**13, "head_dim": 2**13, "moe_intermediate_size": 2**22, "num_experts_per_tok": 2**10,
    "shared_expert_intermediate_size": 2**22, "qk_nope_head_dim": 2**13, "qk_rope_head_dim": 2**13,
    "v_head_dim": 2**13, "kv_lora_rank": 2**18, "q_lora_rank": 2**18, "linear_num_key_heads": 2**13,
    "linear_num_value_heads": 2**13, "linear_key_head_dim": 2**13, "linear_value_head_dim": 2**13,
    "linear_conv_kernel_dim": 2**10, "index_n_heads": 2**13, "index_head_dim": 2**13, "n_group": 2**10,
    "topk_group": 2**10, "decoder_sparse_step": 2**13, "full_attention_interval": 2**13,
    "depth": 2**10, "num_heads": 2**13, "out_hidden_size": 2**18, "spatial_merge_size": 2**6, "window_size": 2**16,
    "num_position_embeddings": 2**24, "patch_size": 2**10, "temporal_patch_size": 2**6, "in_channels": 2**6,
}  # fmt: skip
"""Like REQUIRED_SIZES, but null is allowed."""
BY_LAYER = ("intermediate_size",)
"""Keys that may also be a list with a value for every layer, as in Gemma 3n."""
COUNTS = {
    "num_experts": 2**14, "n_routed_experts": 2**14, "num_local_experts": 2**14, "n_shared_experts": 2**10,
    "first_k_dense_replace": 2**13, "num_nextn_predict_layers": 2**10, "sliding_window": 2**40,
    "max_window_layers": 2**13, "index_topk": 2**30, "num_mtp_modules": 2**10,
}  # fmt: skip
"""Keys that are 0 or more, or null, and their upper limits."""
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "rope_theta", "routed_scaling_factor")
SHAPES: dict[str, tuple[type, ...]] = {
    "model_type": (str,), "architectures": (list,), "hidden_act": (str,), "tie_word_embeddings": (bool,),
    "attention_bias": (bool,), "mlp_bias": (bool,), "layer_types": (list,), "rope_parameters": (dict,),
    "rope_scaling": (dict,), "quantization_config": (dict,), "auto_map": (dict,), "text_config": (dict,),
    "vision_config": (dict,), "deepstack_visual_indexes": (list,),
    "mlp_layer_types": (list,), "mlp_only_layers": (list,), "use_sliding_window": (bool,), "norm_topk_prob": (bool,),
    "dtype": (str, dict), "torch_dtype": (str, dict), "partial_rotary_factor": (int, float), "use_cache": (bool,),
    "attention_dropout": (int, float), "initializer_range": (int, float),
}  # fmt: skip
"""Types of values that are not null."""
DTYPES = frozenset({
    "float64", "double", "float32", "float", "float16", "half", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz",
})  # fmt: skip
"""Weight dtypes by their torch names. transformers accepts no others."""
OTHER_MODEL = "config.json describes another model. Copy it and the weights from the same checkpoint"
"""Remedy for a tensor that the model of config.json does not have."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_LIST = 2**16
MAX_EXPERTS_IN_ALL = 2**18
"""Limit over all layers, ten times the number of Kimi K2. Each expert has up to three tensors."""
LEAST_BYTES_A_LAYER = 64
"""Lower limit. A layer has at least one tensor, which has an entry in the header of its file."""


def check_config(config: dict[str, Any], location: str, *, weight_bytes: int | None = None) -> None:
    """Raise CheckpointError for an implausible config.json. `weight_bytes` is the size of its weights on disk."""
    for part in (config, config.get("text_config"), config.get("vision_config")):
        if isinstance(part, dict):
            problem = next(_problems(part, weight_bytes), None)
            if problem:
                raise CheckpointError(f"{location}: {problem}. Copy config.json and weights from the same checkpoint.")


def _problems(config: dict[str, Any], weight_bytes: int | None) -> Iterator[str]:
    for key, kinds in SHAPES.items():
        value = config.get(key)
        is_valid = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not None and not is_valid:
            yield f"{key} {_format_value(value)}, not {' or '.join(_KINDS[kind] for kind in kinds)}"
        elif isinstance(value, list) and len(value) > MAX_LIST:
            yield f"{key} has {len(value)} entries"
    for key, maximum in (REQUIRED_SIZES | OPTIONAL_SIZES | COUNTS).items():
        if key in config and not (config[key] is None and key not in REQUIRED_SIZES):
            minimum, value = 0 if key in COUNTS else 1, config[key]
            values = value if key in BY_LAYER and isinstance(value, list) else [value]
            if not all(_is_number(each, minimum, maximum) for each in values):
                yield f"{key} {_format_value(config[key])}, not a number from {minimum} to {maximum}"
    for key in ("dtype", "torch_dtype"):
        if isinstance(config.get(key), str) and config[key] not in DTYPES:
            yield f"{key} {_format_value(config[key])}, not a weight dtype such as float32, bfloat16 or float16"
    for key in POSITIVE:
        if config.get(key) is not None and not (_is_real(config[key]) and 0 < config[key] < math.inf):
            yield f"{key} {_format_value(config[key])}, not a positive number"
    for key in TOKEN_IDS:
        value = config.get(key)
        if not all(_is_number(item, -1, 2**31) for item in (value if isinstance(value, list) else [value or 0])):
            yield f"{key} {_format_value(value)}, not a token or a list of tokens"
    yield from _conflicts(config)
    if weight_bytes is not None:
        yield from _excess_sizes(config, weight_bytes)


def _conflicts(config: dict[str, Any]) -> Iterator[str]:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    groups = config.get("num_key_value_heads")
    layers = config.get("num_hidden_layers") or 0
    experts = max(config.get(key) or 0 for key in ("num_experts", "n_routed_experts", "num_local_experts"))
    if layers * experts > MAX_EXPERTS_IN_ALL:
        yield f"num_hidden_layers {layers} with {experts} experts each"
    if heads and groups and heads % groups:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
    if hidden and heads and "kv_lora_rank" not in config and not config.get("head_dim") and hidden % heads:
        yield f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is no head_dim"


def _excess_sizes(config: dict[str, Any], weight_bytes: int) -> Iterator[str]:
    """Yield sizes too large for `weight_bytes`, at half a byte per embedding element and one tensor per layer."""
    hidden, vocabulary = config.get("hidden_size") or 0, config.get("vocab_size") or 0
    layers = config.get("num_hidden_layers") or 0
    if hidden * vocabulary > 2 * weight_bytes:
        yield f"vocab_size {vocabulary} x hidden_size {hidden} is too large for {weight_bytes} bytes of weights"
    elif layers * LEAST_BYTES_A_LAYER > weight_bytes:
        yield f"num_hidden_layers {layers} is too large for {weight_bytes} bytes of weights"


def _is_number(value: Any, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS = {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}


def _format_value(value: Any) -> str:
    """Return a short form of a value for a message."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge number"
    return text if len(text) <= 40 else f"{text[:40]}…"
