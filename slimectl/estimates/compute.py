"""FLOPs of a training step, and its time.

One multiplication and one addition are 2 FLOPs. N parameters that a token is multiplied with, without the embedding
table · S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.estimates.figures import Figure, counted, parameters
from slimectl.estimates.others import Standing, policy_of
from slimectl.estimates.parameters import Part, activated, count
from slimectl.weights.architecture import Architecture


def passed(parts: Sequence[Part], architecture: Architecture) -> int:
    """Parameters that multiply a token: the activated ones without the embedding table; a tied head counts."""
    table = 0 if architecture.tied else count(parts, "embedding")
    return activated(parts, architecture) - table


def attention_layers(architecture: Architecture) -> int:
    """Layers with full attention; the others (delta rule) cost the same at every position."""
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
    """Attention cost of a pair of tokens, relative to the cost of a token in all products with parameters."""
    return attention_layers(architecture) * attention_width(architecture) / passed(parts, architecture)


def token_flops(parts: Sequence[Part], architecture: Architecture, seq_len: int) -> Figure:
    """FLOPs of one token of a sequence, forward and backward, without recomputation."""
    return _token(policy_of(architecture, parts), seq_len)


def _multiplied(model: Standing) -> int:
    """Parameters that multiply a token; a critic has no logits."""
    if model.name == "critic":
        return activated([part for part in model.parts if part.layer is not None], model.architecture)
    return passed(model.parts, model.architecture)


def _forward(model: Standing, seq_len: int) -> float:
    layers, width = attention_layers(model.architecture), attention_width(model.architecture)
    return 2 * _multiplied(model) + 2 * layers * width * seq_len / 2


def _token(model: Standing, seq_len: int) -> Figure:
    """FLOPs per parameter: forward 2; backward 2 for the gradient of the input, and 2 for that of a trained weight."""
    architecture, critic = model.architecture, model.name == "critic"
    N, L = _multiplied(model), activated(model.trained, architecture)
    # Forward 2 per pair and column, backward twice that; a token attends to half of its sequence on average.
    layers, width, pairs = attention_layers(architecture), attention_width(architecture), 6 if model.trained else 2
    per_token, formula = pairs * N, f"{pairs} x {parameters(N)} parameters"
    if any(part.inner for part in model.trained):
        per_token, formula = 4 * N + 2 * L, f"4 x {parameters(N)} parameters + 2 x {parameters(L)} that learn"
    if critic:  # a forward pass computes values before training
        pairs, per_token, formula = pairs + 2, per_token + 2 * N, f"{formula} + 2 x {parameters(N)} for values"
    value = per_token + pairs * layers * width * seq_len / 2
    name = "FLOPs per token" if model.name == "policy" else f"FLOPs per token, {model.name}"
    return Figure(name, value, "FLOP", f"{formula} + {pairs} x {layers} layers x {width:,} columns x {seq_len:,} / 2")


def figures(
    models: Sequence[Standing],
    *,
    seq_len: int,
    batch: int,
    world: int,
    recomputes: bool,
    tflops: float | None,
    mfu: float,
) -> list[Figure]:
    """FLOPs of a token and of a step of `batch` sequences; its time on `world` GPUs of `tflops` at `mfu`."""
    tokens = [_token(model, seq_len) for model in models]
    formula = " + ".join(counted(token.value) for token in tokens)
    step = Figure(
        "FLOPs per step", sum(token.value for token in tokens) * seq_len * batch, "FLOP",
        f"{f'({formula})' if len(tokens) > 1 else formula} x {seq_len:,} tokens x {batch:,} sequences",
    )  # fmt: skip
    result = [*tokens, step]
    if recomputes:
        recomputed = sum(_forward(model, seq_len) for model in models if model.trained) * seq_len * batch
        formula = f"full recomputation runs forward twice: {counted(step.value)} + {counted(recomputed)}"
        result.append(Figure("FLOPs per step, recomputation included", step.value + recomputed, "FLOP", formula))
    if tflops is not None:
        seconds = step.value / (world * tflops * 1e12 * mfu)
        formula = (
            f"{counted(step.value)} / ({world} GPUs x {tflops:g} TFLOP/s x {mfu:g} of that, recomputation not counted)"
        )
        result.append(Figure("time per step", seconds, "s", formula))
        result.append(
            Figure("tokens per GPU and second", seq_len * batch / seconds / world, "", "tokens / time / GPUs")
        )
    return result
