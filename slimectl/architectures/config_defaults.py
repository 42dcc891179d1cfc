"""Defaults of Hugging Face configurations of the supported families, without importing transformers.

`config_defaults.json` holds the defaults of the configuration classes. `tests/architectures/test_config_defaults.py`
writes it and compares it with transformers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Config = dict[str, Any]

STAND_INS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Architectures whose class exists only in the checkpoint, and the transformers class with the same defaults."""

NULLABLE = frozenset({"q_lora_rank", "sliding_window"})
"""Keys that may be null although their default is not."""
ROPE_TYPES = ("default", "llama3", "yarn")
LAYER_TYPES = {"glm_moe_dsa": "deepseek_sparse_attention"}
"""Attention type of layers, if it is not full attention. Some families also have full layers at intervals."""


@cache
def _table() -> dict[str, Config]:
    """Return {model_type: {"fields": …, "aliases": {…}, "theta": …, "rotary": …, "interval": …}}."""
    path = Path(__file__).with_suffix(".json")
    table: dict[str, Config] = json.loads(path.read_text(encoding="utf-8"))
    return table


def with_known_defaults(raw: Config) -> Config | None:
    """Return the configuration with the defaults of its class, or None if that requires transformers.

    It does for other families, and for values that a class rejects or translates in a special way.
    """
    model_type = raw.get("model_type", "")
    if isinstance(text := raw.get("text_config"), dict):
        language_model = with_known_defaults(text) if text.get("model_type") in _table() else None
        return None if language_model is None else {**raw, "text_config": language_model}
    defaults = _table().get(STAND_INS.get(model_type, str(model_type)))
    if defaults is None or not _is_plain(raw, defaults):
        return None
    config: Config = defaults["fields"] | {defaults["aliases"].get(key, key): value for key, value in raw.items()}
    if (dtype := config.pop("torch_dtype", None)) is not None:
        config["dtype"] = config.get("dtype") or dtype
    config |= _derived(config, defaults) | {"rope_parameters": _rope_parameters(raw, config, defaults)}
    is_derived = defaults["interval"] and raw.get("layer_types") is None
    for key in ("rope_scaling", "rope_theta", *(["full_attention_interval"] if is_derived else [])):
        config.pop(key, None)
    return config


def _is_plain(raw: Config, defaults: Config) -> bool:
    """Return whether every value has the type of its default, and the rules of this file are enough for it."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else None
    return (
        all(_fits(raw[key], default, key) for key, default in defaults["fields"].items() if key in raw)
        and not raw.get("use_sliding_window")
        and not any(alias in raw and key in raw for alias, key in defaults["aliases"].items())
        and all(
            _fits(raw[alias], defaults["fields"][key], key)
            for alias, key in defaults["aliases"].items()
            if alias in raw
        )
        and isinstance(raw.get("rope_theta", 1.0), int | float)
        and rope_type in ROPE_TYPES
        and raw.get("index_topk_pattern") is None
    )


def _fits(value: Any, default: Any, key: str) -> bool:
    if default is None or value is None:
        return (value is None and (default is None or key in NULLABLE)) or (default is None and _is_simple(value))
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _is_simple(value: Any) -> bool:
    """Return whether a value without a default is a number, a list or a table, the usual types of such keys."""
    return isinstance(value, int | float | list | dict) and not isinstance(value, bool)


def _rope_parameters(raw: Config, config: Config, defaults: Config) -> Config:
    """Return the rotary parameters in one table, wherever the configuration stores them."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    parameters.setdefault("rope_theta", raw.get("rope_theta", defaults["theta"]))
    if (share := raw.get("partial_rotary_factor", defaults["rotary"])) is not None:
        parameters.setdefault("partial_rotary_factor", share)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] != "default":
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return parameters


def _derived(config: Config, defaults: Config) -> Config:
    """Return the values that follow from others."""
    fields, layers = defaults["fields"], config["num_hidden_layers"]
    derived: Config = {}
    if config.get("num_key_value_heads") is None:
        derived["num_key_value_heads"] = config["num_attention_heads"]
    if "head_dim" in fields and config["head_dim"] is None:
        derived["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if "qk_nope_head_dim" in fields:
        derived["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if defaults["head_dim_is_rotary"]:
        derived["head_dim"] = config["qk_rope_head_dim"]
    if "use_sliding_window" in fields:
        derived["sliding_window"] = defaults["no_window"]
    if "mlp_only_layers" in fields and config["mlp_only_layers"] is None:
        derived["mlp_only_layers"] = []
    if "layer_types" in fields and config["layer_types"] is None:
        interval, kind = defaults["interval"], LAYER_TYPES.get(config["model_type"], "full_attention")
        every = int(config.get("full_attention_interval", interval) or 1) if interval else 1
        derived["layer_types"] = ["linear_attention" if (layer + 1) % every else kind for layer in range(layers)]
    if "mlp_layer_types" in fields and config["mlp_layer_types"] is None:
        dense = min(config.get("first_k_dense_replace", 1), layers)
        derived["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    if "indexer_types" in fields and config["indexer_types"] is None:
        period, offset = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
        derived["indexer_types"] = [
            "shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(layers)
        ]
    return derived
