"""FLOPs of a training step, and its time.

One multiplication and one addition are 2 FLOPs. N parameters that a token is multiplied with, without the embedding
table · S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from slimectl.architectures.config import Architecture
from slimectl.planner.parameters import ParameterPart, ResidentModel, activated, count
from slimectl.planner.workload import GIB, Figure, counted, parameters


def passed(parts: Sequence[ParameterPart], architecture: Architecture) -> int:
    """Parameters that multiply a token: the activated ones without the embedding table. A tied head counts."""
    table = 0 if architecture.tied else count(parts, "embedding")
    return activated(parts, architecture) - table


def attention_layers(architecture: Architecture) -> int:
    """Layers with full attention. The others (delta rule) cost the same at every position."""
    frequency = architecture.transformer.get("linear_attention_freq")
    if frequency is None:
        return architecture.layers
    if isinstance(frequency, list):
        return frequency.count(0)
    return architecture.layers // int(frequency)


def attended(architecture: Architecture, length: float) -> float:
    """Keys that a token of such a sequence attends to on average, summed over the layers with full attention.

    Half of the sequence, or W (1 - W / 2 length) in a layer with a shorter window W.
    """
    windows = [size for size in architecture.windows if size is not None and size < length]
    inside = sum(size * (1 - size / (2 * length)) for size in windows)
    return (attention_layers(architecture) - len(windows)) * length / 2 + inside


def attention_width(architecture: Architecture) -> int:
    """Columns of key and value that a pair of tokens multiplies, over all heads."""
    t = architecture.transformer
    if architecture.mla:
        return int(t["num_attention_heads"] * (t["qk_head_dim"] + t["qk_pos_emb_head_dim"] + t["v_head_dim"]))
    return int(t["num_attention_heads"] * 2 * t["kv_channels"])


def pair_cost(parts: Sequence[ParameterPart], architecture: Architecture) -> float:
    """Attention cost of a pair of tokens, relative to the cost of a token in all products with parameters.

    Layers with a window do not count: their cost is about that of a token.
    """
    layers = attention_layers(architecture) - sum(size is not None for size in architecture.windows)
    return layers * attention_width(architecture) / passed(parts, architecture)


def _multiplied(model: ResidentModel) -> int:
    """Parameters that multiply a token. A critic has no logits."""
    if model.name == "critic":
        return activated([part for part in model.parts if part.layer is not None], model.architecture)
    return passed(model.parts, model.architecture)


def _forward(model: ResidentModel, seq_len: int) -> float:
    return 2 * _multiplied(model) + 2 * attention_width(model.architecture) * attended(model.architecture, seq_len)


def token_flops(model: ResidentModel, seq_len: int) -> Figure:
    """FLOPs of one token of a sequence, forward and backward, without recomputation.

    Per parameter: forward 2, backward 2 for the input's gradient and 2 for a trained weight's gradient.
    """
    architecture, critic = model.architecture, model.name == "critic"
    N, L = _multiplied(model), activated(model.trained, architecture)
    # Forward 2 per pair and column, backward twice that.
    layers, width, pairs = attention_layers(architecture), attention_width(architecture), 6 if model.trained else 2
    per_token, formula = pairs * N, f"{pairs} x {parameters(N)} parameters"
    if any(part.inner for part in model.trained):
        per_token, formula = 4 * N + 2 * L, f"4 x {parameters(N)} parameters + 2 x {parameters(L)} that learn"
    if critic:  # a forward pass computes values before training
        pairs, per_token, formula = pairs + 2, per_token + 2 * N, f"{formula} + 2 x {parameters(N)} for values"
    value = per_token + pairs * width * attended(architecture, seq_len)
    name = "FLOPs per token" if model.name == "policy" else f"FLOPs per token, {model.name}"
    keys = f"{layers} layers x {width:,} columns x {seq_len:,} / 2"
    if architecture.windows:
        keys = f"{width:,} columns x {counted(attended(architecture, seq_len))} keys in all layers, windows included"
    return Figure(name, value, "FLOP", f"{formula} + {pairs} x {keys}")


def _image(model: ResidentModel, tokens: int) -> Figure:
    """FLOPs of an image of `tokens` tokens in the vision tower. A critic computes values before training."""
    assert model.tower is not None
    figure = model.tower.image_flops(tokens, trained=model.trains_tower)
    if model.name == "critic":
        values = model.tower.image_flops(tokens, trained=False)
        figure = replace(figure, value=figure.value + values.value, formula=f"{figure.formula} + 2 x … for values")
    return figure if model.name == "policy" else replace(figure, name=f"{figure.name}, {model.name}")


@dataclass(frozen=True)
class SequenceFlops:
    """FLOPs of a sequence of S tokens: (per_token + per_pair x attended(S)) x S.

    `attended` is the number of keys of a token on average. By default it is half of the sequence.

    >>> SequenceFlops(per_token=10.0, per_pair=2.0)(4)
    56.0
    """

    per_token: float
    per_pair: float
    attended: Callable[[float], float] = lambda length: length / 2

    def __call__(self, length: int) -> float:
        return (self.per_token + self.per_pair * self.attended(length)) * length if length else 0.0


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a forward pass, and of forward and backward without recomputation."""

    forward: SequenceFlops
    training: SequenceFlops


@dataclass(frozen=True)
class ImageFlops:
    """FLOPs of the vision tower as functions of an image's tokens. `token` is the id of an image token."""

    token: int
    forward: Callable[[int], float]
    training: Callable[[int], float]


def image_flops(model: ResidentModel, token: int) -> ImageFlops | None:
    """Return the FLOPs of images in the passes of a policy, or None for one without a vision tower."""
    tower = model.tower
    if tower is None:
        return None

    def passes(trained: bool) -> Callable[[int], float]:
        return lambda tokens: tower.image_flops(tokens, trained=trained).value

    return ImageFlops(token, passes(False), passes(model.trains_tower))


def model_flops(model: ResidentModel) -> ModelFlops:
    """Return the FLOPs of a model's passes per sequence, derived from a token in sequences of 0 and 2 tokens."""
    keys = partial(attended, model.architecture)
    forward, training = (
        SequenceFlops(at_0, (at_2 - at_0) / keys(2), keys)
        for at_0, at_2 in (
            (_forward(model, 0), _forward(model, 2)),
            (token_flops(model, 0).value, token_flops(model, 2).value),
        )
    )
    return ModelFlops(forward, training)


def flops_figures(
    models: Sequence[ResidentModel],
    *,
    seq_len: int,
    batch: int,
    world: int,
    recomputes: bool,
    tflops: float | None,
    mfu: float,
    images: int = 0,
    tokens_per_image: int = 0,
) -> list[Figure]:
    """FLOPs of a token, an image, and a step of `batch` sequences with `images` images each, and the time of a step.

    The time is for `world` GPUs of `tflops` at `mfu`.
    """
    tokens = [token_flops(model, seq_len) for model in models]
    pictures = [_image(model, tokens_per_image) for model in models if model.tower and images]
    formula = " + ".join(counted(token.value) for token in tokens)
    value = sum(token.value for token in tokens) * seq_len * batch
    formula = f"{f'({formula})' if len(tokens) > 1 else formula} x {seq_len:,} tokens x {batch:,} sequences"
    if pictures:
        value += sum(picture.value for picture in pictures) * images * batch
        per_image = " + ".join(counted(picture.value) for picture in pictures)
        formula += f" + {f'({per_image})' if len(pictures) > 1 else per_image} x {images * batch:,} images"
    step = Figure("FLOPs per step", value, "FLOP", formula)
    result = [*tokens, *pictures, step]
    if recomputes:
        recomputed = sum(_forward(model, seq_len) for model in models if model.trained) * seq_len * batch
        towers = [model.tower for model in models if model.tower and model.trains_tower]
        recomputed += sum(tower.image_flops(tokens_per_image, trained=False).value for tower in towers) * images * batch
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


def cache_per_token(architecture: Architecture, *, dtype_bytes: int, tensor: int) -> Figure:
    """KV cache of one token on one rank. Latent attention caches the latent, replicated on every rank."""
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


def cache_figures(
    parts: Sequence[ParameterPart],
    architecture: Architecture,
    *,
    dtype_bytes: int,
    tensor: int,
    memory_gib: float,
    share: float,
    seq_len: int,
    concurrency: int | None,
    fp8: bool = False,
) -> list[Figure]:
    """Weights, cache, and the number of tokens and sequences of `seq_len` in `share` of `memory_gib` on each rank.

    With `fp8`, a parameter of attention, MLPs and experts takes a byte. Its scales, 0.02 % of that, are not counted.
    """
    P, quantized = count(parts), count(parts, "attention", "mlp", "experts") if fp8 else 0
    formula = f"{dtype_bytes} x {P - quantized:,}" + (f" + fp8 1 x {quantized:,}" if fp8 else "")
    size = (dtype_bytes * (P - quantized) + quantized) / tensor
    formula = f"({formula}) / {tensor} ranks" if fp8 else f"{formula} / {tensor} ranks"
    weights = Figure("engine weights", size, "bytes", formula)
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
    result.append(Figure("sequences at once", fitting, "", f"of {seq_len:,} tokens, prompt and response"))
    if concurrency:
        size = concurrency * (per_token.value * seq_len + constant)
        formula = f"{concurrency:,} sequences x {seq_len:,} tokens x {counted(per_token.value)} bytes"
        result.append(Figure("cache for all", size, "bytes", formula))
    return result
