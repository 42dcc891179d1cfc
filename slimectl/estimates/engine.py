"""Memory of an engine: weights, and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.estimates.compute import attention_layers
from slimectl.estimates.figures import GIB, Figure, counted
from slimectl.estimates.parameters import Part, count
from slimectl.weights.architecture import Architecture


def cache_per_token(architecture: Architecture, *, dtype_bytes: int, tensor: int) -> Figure:
    """KV cache of one token on one rank; for latent attention the latent, replicated on every rank."""
    t, layers = architecture.transformer, attention_layers(architecture)
    if architecture.mla:
        width = t["kv_lora_rank"] + t["qk_pos_emb_head_dim"]
        formula = f"{layers} layers x (latent {t['kv_lora_rank']} + rotary {t['qk_pos_emb_head_dim']}) x {dtype_bytes}"
        return Figure("cache per token", layers * width * dtype_bytes, "bytes", formula)
    groups = -(-int(t["num_query_groups"]) // tensor)
    formula = f"2 x {layers} layers x {groups} key-value heads x {t['kv_channels']} x {dtype_bytes}"
    return Figure("cache per token", 2 * layers * groups * t["kv_channels"] * dtype_bytes, "bytes", formula)


def state_per_sequence(architecture: Architecture, *, dtype_bytes: int, tensor: int) -> Figure | None:
    """Constant state of a sequence in delta rule layers: a matrix per head, and the inputs of the convolution."""
    t, layers = architecture.transformer, architecture.layers - attention_layers(architecture)
    if not layers:
        return None
    heads, key, value = t["linear_num_value_heads"], t["linear_key_head_dim"], t["linear_value_head_dim"]
    past = t["linear_conv_kernel_dim"] - 1
    columns = 2 * t["linear_num_key_heads"] * key + heads * value
    size = layers * (4 * heads * key * value + dtype_bytes * past * columns) / tensor
    formula = (
        f"{layers} layers x (4 x {heads} heads x {key} x {value} + {dtype_bytes} x {past} x {columns:,}) / {tensor}"
    )
    return Figure("state per sequence", size, "bytes", formula)


def figures(
    parts: Sequence[Part],
    architecture: Architecture,
    *,
    dtype_bytes: int,
    tensor: int,
    memory_gib: float,
    share: float,
    seq_len: int,
    concurrency: int | None,
) -> list[Figure]:
    """Weights, cache, and the number of tokens and sequences of `seq_len` in `share` of `memory_gib` on each rank."""
    P = count(parts)
    weights = Figure("engine weights", dtype_bytes * P / tensor, "bytes", f"{dtype_bytes} x {P:,} / {tensor} ranks")
    per_token = cache_per_token(architecture, dtype_bytes=dtype_bytes, tensor=tensor)
    state = state_per_sequence(architecture, dtype_bytes=dtype_bytes, tensor=tensor)
    free = max(0.0, memory_gib * GIB * share - weights.value)
    constant = state.value if state else 0.0
    fitting = int(free // (per_token.value * seq_len + constant))
    tokens = Figure(
        "tokens in cache", fitting * seq_len if state else free // per_token.value, "tokens",
        f"({share:g} x {memory_gib:g} GiB - {weights.text}) / {counted(per_token.value)} bytes",
    )  # fmt: skip
    result = [weights, per_token, *([state] if state else []), tokens]
    result.append(Figure("sequences at once", fitting, "", f"of {seq_len:,} tokens, prompt and answer"))
    if concurrency:
        size = concurrency * (per_token.value * seq_len + constant)
        formula = f"{concurrency:,} sequences x {seq_len:,} tokens x {counted(per_token.value)} bytes"
        result.append(Figure("cache for all", size, "bytes", formula))
    return result
