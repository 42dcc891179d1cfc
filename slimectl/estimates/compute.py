"""The arithmetic of a training step, and the time that it takes.

One multiplication and one addition are 2 FLOPs. N parameters that a token passes through, without the embedding, which
is looked up · S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.estimates.figures import Figure, counted, parameters
from slimectl.estimates.parameters import Part, activated, count
from slimectl.weights.architecture import Architecture


def passed(parts: Sequence[Part], architecture: Architecture) -> int:
    """Parameters that multiply a token: the activated ones without the table; a tied head is a product all the same."""
    table = 0 if architecture.tied else count(parts, "embedding")
    return activated(parts, architecture) - table


def attention_layers(architecture: Architecture) -> int:
    """Layers whose tokens see all earlier ones; the others (delta rule) cost the same at every position."""
    frequency = architecture.transformer.get("linear_attention_freq")
    if frequency is None:
        return architecture.layers
    if isinstance(frequency, list):
        return frequency.count(0)
    return architecture.layers // int(frequency)


def attention_width(architecture: Architecture) -> int:
    """Columns of key and value that a pair of tokens multiplies, over all heads."""
    t = architecture.transformer
    if architecture.mla:
        return int(t["num_attention_heads"] * (t["qk_head_dim"] + t["qk_pos_emb_head_dim"] + t["v_head_dim"]))
    return int(t["num_attention_heads"] * 2 * t["kv_channels"])


def pair_cost(parts: Sequence[Part], architecture: Architecture) -> float:
    """What a pair of tokens costs in attention, where a token costs 1 in all products with parameters."""
    return attention_layers(architecture) * attention_width(architecture) / passed(parts, architecture)


def token_flops(parts: Sequence[Part], architecture: Architecture, seq_len: int) -> Figure:
    """FLOPs of one token of a sequence, forward and backward, nothing computed twice."""
    N, layers, width = passed(parts, architecture), attention_layers(architecture), attention_width(architecture)
    # Forward 2 a pair and column, backward twice that; a token sees half of its sequence on average.
    value = 6 * N + 6 * layers * width * seq_len / 2
    words = f"6 x {parameters(N)} parameters + 6 x {layers} layers x {width:,} columns x {seq_len:,} / 2"
    return Figure("FLOPs per token", value, "FLOP", words)


def figures(
    parts: Sequence[Part],
    architecture: Architecture,
    *,
    seq_len: int,
    batch: int,
    world: int,
    recomputes: bool,
    tflops: float | None,
    mfu: float,
) -> list[Figure]:
    """FLOPs of a token and of a step of `batch` sequences; its time on `world` GPUs of `tflops` at `mfu`."""
    token = token_flops(parts, architecture, seq_len)
    step = Figure(
        "FLOPs per step", token.value * seq_len * batch, "FLOP",
        f"{counted(token.value)} x {seq_len:,} tokens x {batch:,} sequences",
    )  # fmt: skip
    found = [token, step]
    if recomputes:
        words = f"full recomputation runs forward twice: 4/3 x {counted(step.value)}"
        found.append(Figure("FLOPs per step, recomputation included", step.value * 4 / 3, "FLOP", words))
    if tflops is not None:
        seconds = step.value / (world * tflops * 1e12 * mfu)
        words = (
            f"{counted(step.value)} / ({world} GPUs x {tflops:g} TFLOP/s x {mfu:g} of that, recomputation not counted)"
        )
        found.append(Figure("time per step", seconds, "s", words))
        found.append(Figure("tokens per GPU and second", seq_len * batch / seconds / world, "", "tokens / time / GPUs"))
    return found
