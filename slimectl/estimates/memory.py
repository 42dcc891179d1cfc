"""The memory of one rank at the peak of a training step: the second step on, when the optimizer has its state.

P parameters of the rank · c bytes of a number in forward and backward. The peak is reached as backward begins, with
the gradients of earlier packs in place; everything is counted at its largest, on the stage that holds most.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.estimates import activations
from slimectl.estimates.activations import Saved
from slimectl.estimates.figures import Figure, counted, parameters, total
from slimectl.estimates.parameters import Part, count, held, stage_of
from slimectl.estimates.run import CHUNK_LOGITS, KEPT_LOGITS, Run
from slimectl.weights.architecture import Architecture

PEAK = "peak per rank"


def figures(parts: Sequence[Part], architecture: Architecture, run: Run) -> list[Figure]:
    """Weights, gradients, optimizer, activations, head and their sum, on the rank that needs most."""
    of_stage = _fsdp if run.policy == "fsdp" else _megatron
    stages = range(run.layout.pipeline if run.policy == "megatron" else 1)
    found = [of_stage(parts, architecture, run, stage) for stage in stages]
    worst = max(found, key=lambda lines: sum(line.value for line in lines))
    where = f" on pipeline stage {found.index(worst)}" if len(found) > 1 else ""
    return [*worst, total(PEAK, worst, where)]


def peak(figures: Sequence[Figure]) -> float:
    return next(figure.value for figure in figures if figure.name == PEAK)


def _fsdp(parts: Sequence[Part], architecture: Architecture, run: Run, stage: int) -> list[Figure]:
    P, n, c = count(parts), run.world, run.bytes
    layer = max(_layer_sizes(parts, architecture))
    root = P - sum(_layer_sizes(parts, architecture))
    shared = f" / {n} ranks" if n > 1 else ""
    weights = Figure("weights", 4 * P / n, "bytes", f"float32 masters 4 x {P:,}{shared}")
    gradients = Figure("gradients", 4 * P / n, "bytes", f"float32 4 x {P:,}{shared}")
    if n > 1:
        words = f"{weights.formula} + gathered {c} x (2 layers of {parameters(layer)} + the rest {parameters(root)})"
        weights = Figure("weights", weights.value + c * (2 * layer + root), "bytes", words)
    elif c == 2:
        weights = Figure("weights", 6 * P, "bytes", f"{weights.formula} + bfloat16 copies 2 x {P:,}")
    return [
        weights,
        gradients,
        Figure("optimizer", 8 * P / n, "bytes", f"two moments, float32: 8 x {P:,}{shared}"),
        *_passing(parts, architecture, run, 0, float(max(layer, root) if n > 1 else 0)),
    ]


def _layer_sizes(parts: Sequence[Part], architecture: Architecture) -> list[int]:
    return [sum(part.count for part in parts if part.layer == i) for i in range(architecture.layers)]


def _megatron(parts: Sequence[Part], architecture: Architecture, run: Run, stage: int) -> list[Figure]:
    mine, layout, c = held(parts, architecture, run.layout, stage), run.layout, run.bytes
    P = parameters(mine.all)
    each, what = (12, "float32 master and two moments") if c == 2 else (8, "two moments, float32")
    optimizer = Figure("optimizer", each * mine.all, "bytes", f"{what}: {each} x {P}")
    if run.distributed_optimizer:
        shares, expert_shares = run.data * layout.context, layout.expert_data(run.world)
        words = f"{what}: {each} x {parameters(mine.dense)} / {shares} ranks"
        if mine.experts:
            words += f" + {each} x experts {parameters(mine.experts)} / {expert_shares} ranks"
        optimizer = Figure(
            "optimizer", each * (mine.dense / shares + mine.experts / expert_shares), "bytes", words
        )  # fmt: skip
    return [
        Figure("weights", c * mine.all, "bytes", f"{run.dtype} {c} x {P}"),
        Figure("gradients", 4 * mine.all, "bytes", f"float32 4 x {P}"),
        optimizer,
        *_passing(parts, architecture, run, stage, 0.0),
    ]


def _passing(parts: Sequence[Part], architecture: Architecture, run: Run, stage: int, gathered: float) -> list[Figure]:
    """What comes and goes with every pack: activations, the head's own, and the backward pass' temporaries."""
    last = run.policy == "fsdp" or stage == run.layout.pipeline - 1
    head = _head(architecture, run) if last else Figure("head", 0, "bytes", "on the last stage only")
    return [
        _activations(architecture, run, stage, last),
        head,
        _backward(parts, architecture, run, head.value, gathered),
    ]


def layer_of(architecture: Architecture, run: Run, index: int) -> list[Saved]:
    """What layer `index` keeps of every token."""
    if run.policy == "fsdp":
        return activations.fsdp_layer(architecture, run)
    t = architecture.transformer
    frequency, linear = t.get("moe_layer_freq", 1), t.get("linear_attention_freq")
    experts = bool(architecture.experts) and bool(
        frequency[index] if isinstance(frequency, list) else index % frequency == 0
    )
    delta = linear is not None and bool(linear[index] if isinstance(linear, list) else (index + 1) % linear != 0)
    return activations.megatron_layer(architecture, run, experts=experts, linear=delta)


def _activations(architecture: Architecture, run: Run, stage: int, last: bool) -> Figure:
    layers = [i for i in range(architecture.layers) if run.policy == "fsdp" or _stage(i, architecture, run) == stage]
    each = [activations.size(layer_of(architecture, run, i)) for i in layers]
    packs = in_flight(run, stage)
    heaviest = layer_of(architecture, run, layers[each.index(max(each))])
    what = f"{run.tokens:,} tokens x {len(layers)} layers"
    words = f"({' + '.join(part.text for part in heaviest)})"
    size = sum(each) * packs * run.tokens
    if run.recompute == "full":
        boundary = run.bytes * architecture.transformer["hidden_size"] / _cut(run)
        size = (len(layers) * boundary * packs + max(each)) * run.tokens
        words = f"cH {counted(boundary)}"
        what += f", and one layer anew: {run.tokens:,} x {counted(max(each))} bytes"
    if packs != 1:
        what = f"{packs:g} packs under way x {what}"
    size += run.tokens * _outer(architecture, run, stage, last)
    return Figure("activations", size, "bytes", f"{what} x {words} bytes, + embedding and last norm")


def _stage(layer: int, architecture: Architecture, run: Run) -> int:
    return stage_of(layer, architecture.layers, run.layout)


def _cut(run: Run) -> int:
    """Sequence parallelism cuts what lies between the matrices, wherever tensor parallelism is."""
    return run.layout.tensor if run.policy == "megatron" else 1


def _outer(architecture: Architecture, run: Run, stage: int, last: bool) -> float:
    """Token numbers and angles, and on the last stage the last norm, bytes per token."""
    H, c = int(architecture.transformer["hidden_size"]), run.bytes
    turned = float(architecture.transformer["kv_channels"]) * architecture.rope.percent
    if architecture.mla:
        turned = float(architecture.transformer["qk_pos_emb_head_dim"])
    outer = 8 + (2 * c if run.policy == "fsdp" else 4) * turned
    if not last:
        return outer
    norm = (4 + c) * H + 4 if run.policy == "fsdp" else ((8 if run.device == "cpu" else c) * H + 4) / _cut(run)
    return outer + norm


def in_flight(run: Run, stage: int) -> float:
    """Packs whose activations a stage holds at once; of interleaved stages, chunks / chunks of a stage.

    >>> from slimectl.layouts import ParallelLayout
    >>> in_flight(Run(4, ParallelLayout(pipeline=4)), 0), in_flight(Run(4, ParallelLayout(pipeline=4)), 3)
    (4, 1)
    """
    if run.policy == "fsdp":
        return 1
    pipeline, virtual = run.layout.pipeline, run.layout.virtual_pipeline
    if virtual is None:
        return pipeline - stage
    return (2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1) / virtual


def _head(architecture: Architecture, run: Run) -> Figure:
    """The head's own as policies/head.py works: log-probabilities kept, one chunk at work, then its gradients."""
    H, V, c = int(architecture.transformer["hidden_size"]), architecture.vocab_size / _cut(run), run.bytes
    R = run.responses
    chunk = min(CHUNK_LOGITS, R * V)
    kept = min(KEPT_LOGITS // CHUNK_LOGITS * chunk, R * V)
    words = (
        f"hidden states and their gradients 2c x {R:,} x {H:,} + log-probabilities kept 4 x min(2^25, {R:,} x {V:,.0f})"
        f" + a chunk of logits 8 x min(2^23, …) + the weight's gradient c x {V:,.0f} x {H:,}"
    )
    return Figure("head", 2 * R * c * H + 4 * kept + 8 * chunk + c * V * H, "bytes", words)


def _backward(parts: Sequence[Part], architecture: Architecture, run: Run, head: float, gathered: float) -> Figure:
    """Gradients inside one layer's MLP, where they are more than what the head gives back before the MLP's turn."""
    c, t = run.bytes, architecture.transformer
    F = int(t["ffn_hidden_size"]) / _cut(run)
    size, words = 3 * c * F * run.tokens, f"gradients in an MLP 3cF = 3 x {c} x {F:,.0f} x {run.tokens:,} tokens"
    if architecture.experts and run.policy == "megatron":
        layer = max(part.count for part in parts if part.kind == "experts")
        layer = layer // run.layout.expert // run.layout.expert_tensor
        rows = 3 * c * int(t["moe_ffn_hidden_size"]) * int(t["moe_router_topk"]) / _cut(run) * run.tokens
        # A grouped product takes the gate and up of all experts stacked in one tensor, and gives their gradients so.
        experts = 2 * c * layer * 2 / 3 + rows
        if experts > size:
            size, words = (
                experts,
                f"experts of a layer stacked, and their gradients: 4/3 c x {parameters(layer)}, + 3ckF",
            )
    words += ", as far as above the head's"
    if gathered:
        words += f" + gradients of a whole layer before they are shared out (4 + c) x {parameters(gathered)}"
    return Figure("backward", max(0.0, size - head) + (4 + c) * gathered, "bytes", words)
