"""What comes and goes with every pack of a training step: activations, the head, the temporaries of backward."""

from __future__ import annotations

from slimectl.estimates import activations
from slimectl.estimates.activations import Saved
from slimectl.estimates.figures import Figure, counted, parameters
from slimectl.estimates.others import Standing
from slimectl.estimates.parameters import stage_of
from slimectl.estimates.run import CHUNK_LOGITS, KEPT_LOGITS, Run
from slimectl.weights.architecture import Architecture


def passing(model: Standing, run: Run, stage: int, gathered: float) -> list[Figure]:
    """The three figures of a rank of pipeline stage `stage` of a model that learns; gradients of `gathered` parameters
    are whole for a while (FSDP)."""
    last = run.policy == "fsdp" or stage == run.layout.pipeline - 1
    head = _head(model, run) if last else Figure("head", 0, "bytes", "on the last stage only")
    return [
        _activations(model.architecture, run, stage, last, inner=_inner(model, run, stage)),
        head,
        _backward(model, run, stage, head.value, gathered),
    ]


def asked(model: Standing, run: Run, stage: int) -> float:
    """Bytes at work in a forward pass without gradients: a layer's tensors, or a chunk of logits."""
    layers = [activations.size(layer_of(model.architecture, run, i)) for i in _layers(model.architecture, run, stage)]
    H, V = int(model.architecture.transformer["hidden_size"]), model.architecture.vocab_size / _cut(run)
    chunk = min(CHUNK_LOGITS, run.responses * V)
    return max(run.tokens * max(layers), run.bytes * run.responses * H + (14 if run.bytes == 2 else 12) * chunk)


def _inner(model: Standing, run: Run, stage: int) -> float:
    """Bytes per token between the halves of adapters, over the layers of a stage; a token meets k of E experts.

    What frozen norms keep less is not taken off: 12 % of what a layer of Qwen3-8B keeps in bfloat16.
    """
    t, columns = model.architecture.transformer, 0.0
    for part in model.trained:
        if part.layer is not None and part.layer in _layers(model.architecture, run, stage):
            share = t["moe_router_topk"] / model.architecture.experts if part.kind == "experts" else 1.0
            columns += share * part.inner
    return run.bytes * columns


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


def _activations(architecture: Architecture, run: Run, stage: int, last: bool, *, inner: float = 0.0) -> Figure:
    layers = _layers(architecture, run, stage)
    each = [activations.size(layer_of(architecture, run, i)) for i in layers]
    packs = in_flight(run, stage)
    heaviest = layer_of(architecture, run, layers[each.index(max(each))])
    what = f"{run.tokens:,} tokens x {len(layers)} layers"
    words = f"({' + '.join(part.text for part in heaviest)})"
    size = sum(each) * packs * run.tokens
    if run.recompute == "full":
        boundary = run.bytes * architecture.transformer["hidden_size"] / _cut(run)
        size = len(layers) * boundary * packs * run.tokens
        words = f"input c H {counted(boundary)}"
    elif inner:
        size += packs * run.tokens * inner
        words += f" + between the halves of adapters {counted(inner / len(layers))}"
    if packs != 1:
        what = f"{packs:g} packs under way x {what}"
    size += run.tokens * _outer(architecture, run, stage, last)
    return Figure("activations", size, "bytes", f"{what} x {words} bytes, + embedding and last norm")


def _layers(architecture: Architecture, run: Run, stage: int) -> list[int]:
    every = range(architecture.layers)
    return [i for i in every if run.policy == "fsdp" or stage_of(i, architecture.layers, run.layout) == stage]


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


def _head(model: Standing, run: Run) -> Figure:
    """The head's own as policies/head.py works: hidden states, log-probabilities kept, logits at work, gradients."""
    H, V, R, c = (
        int(model.architecture.transformer["hidden_size"]),
        model.architecture.vocab_size / _cut(run),
        run.responses,
        run.bytes,
    )
    if model.head == "values":
        each = 2 * c + (8 if c == 2 else 0)  # of bfloat16 float32 copies besides
        return Figure("head", each * R * H, "bytes", f"hidden states and their gradients {each} x {R:,} x {H:,}")
    chunk, hidden = min(CHUNK_LOGITS, R * V), c * R * H
    words = f"hidden states c x {R:,} x {H:,} + log-probabilities kept 4 x min(2^25, {R:,} x {V:,.0f})"
    gradients, of = c * V * H + hidden, f"gradients of both and of the weight c({V:,.0f} + {R:,}) x {H:,}"
    if model.head == "stays":
        gradients, of = hidden, f"gradients of both c x {R:,} x {H:,}"
    if R * V <= KEPT_LOGITS:
        # Backward works inside what is kept; forward has one chunk's logits besides.
        words += f" + the larger of a chunk of logits 4 x min(2^23, …) and {of}"
        return Figure("head", hidden + 4 * R * V + max(4 * chunk, gradients), "bytes", words)
    # Logits and their log-probabilities, beside those of the chunk before, which bfloat16 has a copy of.
    each = 14 if c == 2 else 12
    words += f" + chunks of logits {each} x 2^23 + {of}"
    return Figure("head", hidden + 4 * KEPT_LOGITS + each * chunk + gradients, "bytes", words)


def _backward(model: Standing, run: Run, stage: int, head: float, gathered: float) -> Figure:
    """What one layer's backward pass takes, where that is more than what the head gives back before its turn."""
    c, architecture = run.bytes, model.architecture
    size, words = _layer_backward(model, run)
    if run.recompute == "full":
        anew = max(activations.size(layer_of(architecture, run, i)) for i in _layers(architecture, run, stage))
        size += anew * run.tokens
        words = f"one layer anew {run.tokens:,} tokens x {counted(anew)} bytes + {words}"
    words += ", as far as above the head's"
    if gathered:
        words += f" + gradients of a whole layer before they are shared out (4 + c) x {parameters(gathered)}"
    return Figure("backward", max(0.0, size - head) + (4 + c) * gathered, "bytes", words)


def _layer_backward(model: Standing, run: Run) -> tuple[float, str]:
    """Bytes of the gradients inside one layer's MLP or experts, whichever are more."""
    c, t = run.bytes, model.architecture.transformer
    F = int(t["ffn_hidden_size"]) / _cut(run)
    mlp = (3 * c * F * run.tokens, f"gradients in an MLP 3cF = 3 x {c} x {F:,.0f} x {run.tokens:,} tokens")
    if not model.architecture.experts:
        return mlp
    layer = max(part.count for part in model.parts if part.kind == "experts")
    layer = layer // run.layout.expert // run.layout.expert_tensor
    rows = 3 * c * int(t["moe_ffn_hidden_size"]) * int(t["moe_router_topk"]) / _cut(run) * run.tokens
    # A grouped product takes the gate and up of all experts stacked in one tensor, and gives their gradients so.
    if not model.experts_learn:
        return max(mlp, (2 / 3 * c * layer + rows, f"experts of a layer stacked: 2/3 c x {parameters(layer)}, + 3ckF"))
    words = f"experts of a layer stacked, and their gradients: 4/3 c x {parameters(layer)}, + 3ckF"
    return max(mlp, (4 / 3 * c * layer + rows, words))
