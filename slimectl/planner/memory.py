"""Transient memory of a training step: activations, LM head, backward temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slimectl.architectures.config import Architecture
from slimectl.planner import activations
from slimectl.planner.activations import SavedActivation
from slimectl.planner.parameters import ParameterPart, ResidentModel, count, local_params, stage_of
from slimectl.planner.workload import CHUNK_LOGITS, KEPT_LOGITS, Figure, Run, counted, parameters, sized, total


def transient_memory(model: ResidentModel, run: Run, stage: int, gathered: float) -> list[Figure]:
    """Activations, head and backward temporaries of a trained model on a rank of pipeline stage `stage`.

    Gradients of `gathered` parameters are temporarily full (FSDP).
    """
    last = run.policy == "fsdp" or stage == run.layout.pipeline - 1
    head = _head(model, run) if last else Figure("head", 0, "bytes", "on the last stage only")
    tower = [model.tower.activations(run, trained=model.trains_tower)] if model.tower and run.images else []
    return [
        _activations(model.architecture, run, stage, last, inner=_inner(model, run, stage)),
        *tower,
        head,
        _backward(model, run, stage, head.value, gathered),
    ]


def inference_peak(model: ResidentModel, run: Run, stage: int) -> float:
    """Peak bytes of a forward pass without gradients: a layer's tensors, or a chunk of logits."""
    layers = [activations.size(layer) for layer in _stage_layers(model.architecture, run, stage)]
    H, V = int(model.architecture.transformer["hidden_size"]), model.architecture.vocab_size / _cut(run)
    chunk = min(CHUNK_LOGITS, run.responses * V)
    return max(run.tokens * max(layers), run.bytes * run.responses * H + (14 if run.bytes == 2 else 12) * chunk)


def _inner(model: ResidentModel, run: Run, stage: int) -> float:
    """Bytes per token between A and B of adapters, over the layers of a stage. A token uses k of E experts.

    The savings of frozen norms are not subtracted: 12 % of the activations of a layer of Qwen3-8B in bfloat16.
    """
    t, columns = model.architecture.transformer, 0.0
    layers = set(_layers(model.architecture, run, stage))
    for part in model.trained:
        if part.inner and part.layer in layers:
            share = t["moe_router_topk"] / model.architecture.experts if part.kind == "experts" else 1.0
            columns += share * part.inner
    return run.bytes * columns


def layer_of(architecture: Architecture, run: Run, index: int) -> list[SavedActivation]:
    """Saved tensors of layer `index`, per token."""
    return _layer_of_kind(architecture, run, *_layer_kind(architecture, run, index))


def _layer_of_kind(architecture: Architecture, run: Run, experts: bool, linear: bool) -> list[SavedActivation]:
    if run.policy == "fsdp":
        return activations.fsdp_layer(architecture, run, experts=experts)
    return activations.megatron_layer(architecture, run, experts=experts, linear=linear)


def _layer_kind(architecture: Architecture, run: Run, index: int) -> tuple[bool, bool]:
    """Whether layer `index` has experts, and whether it has linear attention."""
    t = architecture.transformer
    frequency, linear = t.get("moe_layer_freq", 1), t.get("linear_attention_freq")
    experts = bool(architecture.experts) and bool(
        frequency[index] if isinstance(frequency, list) else index % frequency == 0
    )
    delta = linear is not None and bool(linear[index] if isinstance(linear, list) else (index + 1) % linear != 0)
    return experts, delta


def _stage_layers(architecture: Architecture, run: Run, stage: int) -> list[list[SavedActivation]]:
    """Saved tensors of every layer of a stage, per token. Layers of one kind share a list."""
    kinds = [_layer_kind(architecture, run, i) for i in _layers(architecture, run, stage)]
    saved = {kind: _layer_of_kind(architecture, run, *kind) for kind in dict.fromkeys(kinds)}
    return [saved[kind] for kind in kinds]


def _activations(architecture: Architecture, run: Run, stage: int, last: bool, *, inner: float = 0.0) -> Figure:
    layers = _stage_layers(architecture, run, stage)
    layer_sizes = [activations.size(layer) for layer in layers]
    packs = in_flight(run, stage)
    heaviest = layers[layer_sizes.index(max(layer_sizes))]
    tokens_formula = f"{run.tokens:,} tokens x {len(layers)} layers"
    layer_formula = f"({' + '.join(part.text for part in heaviest)})"
    size = sum(layer_sizes) * packs * run.tokens
    if run.recompute == "full":
        boundary = run.bytes * architecture.transformer["hidden_size"] / _cut(run)
        size = len(layers) * boundary * packs * run.tokens
        layer_formula = f"input c H {counted(boundary)}"
    elif inner:
        size += packs * run.tokens * inner
        layer_formula += f" + between the halves of adapters {counted(inner / len(layers))}"
    if packs != 1:
        tokens_formula = f"{packs:g} packs in flight x {tokens_formula}"
    size += run.tokens * _outer(architecture, run, stage, last)
    return Figure("activations", size, "bytes", f"{tokens_formula} x {layer_formula} bytes, + embedding and last norm")


def _layers(architecture: Architecture, run: Run, stage: int) -> list[int]:
    every = range(architecture.layers)
    return [i for i in every if run.policy == "fsdp" or stage_of(i, architecture.layers, run.layout) == stage]


def _cut(run: Run) -> int:
    """Number of ranks that share activations between matrices: sequence parallelism comes with tensor parallelism."""
    return run.layout.tensor if run.policy == "megatron" else 1


def _outer(architecture: Architecture, run: Run, stage: int, last: bool) -> float:
    """Bytes per token of token ids and rotary angles, and on the last stage of the final norm."""
    H, c = int(architecture.transformer["hidden_size"]), run.bytes
    rotary_dims = float(architecture.transformer["kv_channels"]) * architecture.rope.percent
    if architecture.mla:
        rotary_dims = float(architecture.transformer["qk_pos_emb_head_dim"])
    outer = 8 + (2 * c if run.policy == "fsdp" else 4) * rotary_dims
    if not last:
        return outer
    norm = (4 + c) * H + 4 if run.policy == "fsdp" else ((8 if run.device == "cpu" else c) * H + 4) / _cut(run)
    return outer + norm


def in_flight(run: Run, stage: int) -> float:
    """Packs whose activations a stage keeps at once. Interleaved stages count chunks / chunks per stage.

    >>> from slimectl.architectures.parallel import ParallelLayout
    >>> in_flight(Run(4, ParallelLayout(pipeline=4)), 0), in_flight(Run(4, ParallelLayout(pipeline=4)), 3)
    (4, 1)
    """
    if run.policy == "fsdp":
        return 1
    pipeline, virtual = run.layout.pipeline, run.layout.virtual_pipeline
    if virtual is None:
        return pipeline - stage
    return (2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1) / virtual


def _head(model: ResidentModel, run: Run) -> Figure:
    """Memory of policies/head.py: hidden states, saved log-probabilities, a chunk of logits, gradients."""
    H, V, R, c = (
        int(model.architecture.transformer["hidden_size"]),
        model.architecture.vocab_size / _cut(run),
        run.responses,
        run.bytes,
    )
    if model.head == "values":
        bytes_per_element = 2 * c + (8 if c == 2 else 0)  # bfloat16 has float32 copies too
        return Figure(
            "head",
            bytes_per_element * R * H,
            "bytes",
            f"hidden states and their gradients {bytes_per_element} x {R:,} x {H:,}",
        )
    chunk, hidden = min(CHUNK_LOGITS, R * V), c * R * H
    formula = f"hidden states c x {R:,} x {H:,} + log-probabilities kept 4 x min(2^25, {R:,} x {V:,.0f})"
    gradients, gradients_formula = (
        c * V * H + hidden,
        f"gradients of both and of the weight c({V:,.0f} + {R:,}) x {H:,}",
    )
    by_slabs = c == 2 and R * V > CHUNK_LOGITS
    if model.head == "stays":
        gradients, gradients_formula, by_slabs = hidden, f"gradients of both c x {R:,} x {H:,}", False
    if by_slabs:
        gradients += 4 * R * H
        gradients_formula += f" and a float32 sum 4 x {R:,} x {H:,}"
    if R * V <= KEPT_LOGITS and not by_slabs:
        # Backward works in place in saved tensors. Forward has one chunk of logits in addition.
        formula += f" + the larger of a chunk of logits 4 x min(2^23, …) and {gradients_formula}"
        return Figure("head", hidden + 4 * R * V + max(4 * chunk, gradients), "bytes", formula)
    # Logits and log-probabilities of this chunk and the previous one, of which bfloat16 has a copy.
    bytes_per_element = 14 if c == 2 else 12
    formula += f" + chunks of logits {bytes_per_element} x 2^23 + {gradients_formula}"
    logits = 4 * min(KEPT_LOGITS, R * V)
    return Figure("head", hidden + logits + bytes_per_element * chunk + gradients, "bytes", formula)


def _backward(model: ResidentModel, run: Run, stage: int, head: float, gathered: float) -> Figure:
    """Backward temporaries of one layer that exceed the memory that the head has freed before."""
    c, architecture = run.bytes, model.architecture
    size, formula = _layer_backward(model, run)
    if recomputed := _recomputed(architecture, run, stage):
        size += recomputed * run.tokens
        formula = f"one layer recomputed {run.tokens:,} tokens x {counted(recomputed)} bytes + {formula}"
    formula += ", minus the head's"
    if gathered:
        formula += f" + gradients of a whole layer before they are scattered (4 + c) x {parameters(gathered)}"
    return Figure("backward", max(0.0, size - head) + (4 + c) * gathered, "bytes", formula)


def _recomputed(architecture: Architecture, run: Run, stage: int) -> float:
    """Bytes per token that backward recomputes in one layer, for the largest layer of the stage."""
    if run.recompute == "none":
        return 0.0
    sizes = map(activations.size, _stage_layers(architecture, replace(run, recompute="none"), stage))
    saved = map(activations.size, _stage_layers(architecture, run, stage))
    return max(size - (0 if run.recompute == "full" else rest) for size, rest in zip(sizes, saved, strict=True))


def _layer_backward(model: ResidentModel, run: Run) -> tuple[float, str]:
    """Bytes of the gradients inside one layer's MLP or experts, the larger of both."""
    c, t = run.bytes, model.architecture.transformer
    F = int(t["ffn_hidden_size"]) / _cut(run)
    mlp = (3 * c * F * run.tokens, f"gradients in an MLP 3cF = 3 x {c} x {F:,.0f} x {run.tokens:,} tokens")
    if not model.architecture.experts:
        return mlp
    layer = max(part.count for part in model.parts if part.kind == "experts")
    layer = layer // run.layout.expert // run.layout.expert_tensor
    rows = 3 * c * int(t["moe_ffn_hidden_size"]) * int(t["moe_router_topk"]) / _cut(run) * run.tokens
    if run.policy == "fsdp":
        # Products of fused parameters. If sharded, their full gradients exist until the layer is reduced.
        whole = model.experts_learn and not run.sharded
        return max(mlp, (2 / 3 * c * layer * whole + rows, f"experts of a layer 2/3 c x {parameters(layer)}, + 3ckF"))
    # A grouped product reads gate and up of all experts stacked in one tensor, and returns gradients of that shape.
    if not model.experts_learn:
        return max(mlp, (2 / 3 * c * layer + rows, f"experts of a layer stacked: 2/3 c x {parameters(layer)}, + 3ckF"))
    formula = f"experts of a layer stacked, and their gradients: 4/3 c x {parameters(layer)}, + 3ckF"
    return max(mlp, (4 / 3 * c * layer + rows, formula))


PEAK = "peak per rank"


def figures(models: Sequence[ResidentModel], run: Run) -> list[Figure]:
    """Weights, gradients, optimizer, activations, head and their sum, on the rank with the largest sum.

    The first model is the policy.
    """
    lines_by_stage = [_stage(models[0], models[1:], run, stage) for stage in _stages(run)]
    worst = max(lines_by_stage, key=lambda lines: sum(line.value for line in lines))
    location = f" on pipeline stage {lines_by_stage.index(worst)}" if len(lines_by_stage) > 1 else ""
    return [*worst, total(PEAK, worst, location)]


HOST_PEAK = "host memory per rank"


def host_figures(models: Sequence[ResidentModel], run: Run) -> list[Figure]:
    """Host memory of the rank with the largest sum. Empty if nothing is offloaded."""
    if run.offload is None:
        return []
    lines_by_stage = [[_offloaded(model, run, stage) for model in models] for stage in _stages(run)]
    worst = max(lines_by_stage, key=lambda lines: sum(line.value for line in lines))
    return [*worst, total(HOST_PEAK, worst)]


def _stages(run: Run) -> range:
    return range(run.layout.pipeline if run.policy == "megatron" else 1)


def _offloaded(model: ResidentModel, run: Run, stage: int) -> Figure:
    """Host memory of a model: its offloaded masters, gradients and moments, and copies of weights that train there."""
    moments, _ = run.moments
    if run.policy == "megatron":
        trained = local_params(model.trained, model.architecture, run.layout, stage)
        shares, expert_shares = _optimizer_shares(run)
        count_of_rank = trained.dense / shares + trained.experts / expert_shares
        formula = f"masters and moments {4 + moments:g} x {parameters(count_of_rank)}"
        return Figure(f"{model.name} offloaded", (4 + moments) * count_of_rank, "bytes", formula)
    P, L, n = count(model.parts), count(model.trained), run.world
    shared = f" / {n} ranks" if n > 1 else ""
    state = _moments(model.trained, run)
    formula = f"gradients 4 x {L:,} + {state.formula}"
    if run.offload == "optimizer":
        size = (8 * L + state.value) / n
        return Figure(f"{model.name} offloaded", size, "bytes", f"(masters 4 x {L:,} + {formula}){shared}")
    size = (4 * P + 4 * L + state.value) / n
    return Figure(f"{model.name} offloaded", size, "bytes", f"(weights 4 x {P:,} + {formula}){shared}")


def _moments(trained: Sequence[ParameterPart], run: Run) -> Figure:
    """Return the bytes of all moments of trained parameters. Muon has one per matrix of a layer, routers included."""
    size, name = run.moments
    if run.optimizer == "adamw":
        return Figure("moments", size * count(trained), "bytes", f"{name}: {size:g} x {count(trained):,}")
    matrices = count(trained, "attention", "mlp", "experts")
    vectors = count(trained) - matrices
    formula = f"(one moment, {run.state_dtype}: {size / 2:g} x {matrices:,} + {name}: {size:g} x {vectors:,})"
    return Figure("moments", size / 2 * matrices + size * vectors, "bytes", formula)


def shared_gpu_figures(training: Sequence[Figure], *, engine_bytes: float) -> list[Figure]:
    """Memory if engines and trainer take turns: trainer state in host memory, and the peak during a weight push."""
    resident = [f for f in training if f.name.endswith(("weights", "optimizer"))]
    weights = next(figure for figure in training if figure.name == "weights")
    names = " + ".join(figure.name for figure in resident)
    return [
        Figure("trainer asleep in host memory", sum(figure.value for figure in resident), "bytes", names),
        Figure(PUSH, engine_bytes + weights.value, "bytes", f"the engine's {sized(engine_bytes)} + weights"),
    ]


PUSH = "peak of a push"


def peak(figures: Sequence[Figure]) -> float:
    return next(figure.value for figure in figures if figure.name == PEAK)


def least(models: Sequence[ResidentModel], run: Run) -> float:
    """Bytes of weights, gradients and optimizer over all ranks, without replication."""
    bytes_per_parameter = 8 if run.bytes == 2 else 4
    return sum(
        run.bytes * count(model.parts) + bytes_per_parameter * count(model.trained) + _moments(model.trained, run).value
        for model in models
    )


def _stage(policy: ResidentModel, other_models: Sequence[ResidentModel], run: Run, stage: int) -> list[Figure]:
    weights, gradients, optimizer = _resident_figures(policy, run, stage)
    if gathered := _gathered(policy, run):
        formula = f"{weights.formula} + {gathered.formula}"
        weights = replace(weights, value=weights.value + gathered.value, formula=formula)
    transient = transient_memory(policy, run, stage, _unreduced_gradients(policy, run))
    lines = [weights, gradients, optimizer, *transient]
    turn = sum(figure.value for figure in transient) + (gathered.value if gathered else 0.0)
    turns = [(turn if _keeps_gradients(run) else turn + gradients.value, policy.name)]
    for model in other_models:
        resident, turn_bytes = _other_model(model, run, stage)
        lines += resident
        turns.append((turn_bytes, model.name))
    longest, name = max(turns)
    if name != policy.name:
        formula = f"its activations and head, minus the policy's {parameters(turns[0][0])} bytes"
        lines.append(Figure(f"{name}'s turn", longest - turns[0][0], "bytes", formula))
    return lines


def _other_model(model: ResidentModel, run: Run, stage: int) -> tuple[list[Figure], float]:
    """Resident memory of a model other than the policy, and the bytes of its turn."""
    weights, gradients, optimizer = _resident_figures(model, run, stage)
    gathered = _gathered(model, run)
    resident, turn = [weights], gathered.value if gathered else 0.0
    if not model.trained:
        turn += inference_peak(model, run, stage)
    else:
        turn += sum(figure.value for figure in transient_memory(model, run, stage, _unreduced_gradients(model, run)))
        resident.append(optimizer)
        if _keeps_gradients(run):
            resident.append(gradients)
        else:
            turn += gradients.value
    return [replace(figure, name=f"{model.name} {figure.name}") for figure in resident], turn


def _keeps_gradients(run: Run) -> bool:
    """Whether gradient memory is kept from step to step."""
    return run.policy == "megatron" or (not run.sharded and run.bytes == 2)


def _resident_figures(model: ResidentModel, run: Run, stage: int) -> tuple[Figure, Figure, Figure]:
    return _fsdp(model, run) if run.policy == "fsdp" else _megatron(model, run, stage)


def _fsdp(model: ResidentModel, run: Run) -> tuple[Figure, Figure, Figure]:
    P, L, n, c = count(model.parts), count(model.trained), run.world, run.bytes
    shared = f" / {n} ranks" if n > 1 else ""
    moments = _moments(model.trained, run)
    if run.offload == "parameters":
        names = ("weights", "gradients", "optimizer")
        weights, gradients, optimizer = (Figure(name, 0, "bytes", "in host memory") for name in names)
        return weights, gradients, optimizer
    weights = Figure("weights", 4 * P / n, "bytes", f"float32 masters 4 x {P:,}{shared}")
    gradients = Figure("gradients", 4 * L / n, "bytes", f"float32 4 x {L:,}{shared}")
    optimizer = Figure("optimizer", moments.value / n, "bytes", f"{moments.formula}{shared}")
    if run.offload == "optimizer":
        optimizer = replace(optimizer, value=0.0, formula="in host memory")
    if run.sharded:
        return weights, gradients, optimizer
    if run.offload == "optimizer":
        weights = Figure("weights", c * P, "bytes", f"{run.dtype} {c} x {P:,}")
        gradients = Figure("gradients", c * L, "bytes", f"of a pass, {run.dtype} {c} x {L:,}")
    elif c == 2:
        formula = f"float32 masters 4 x {L:,} + " if L else ""
        weights = Figure("weights", 4 * L + 2 * P, "bytes", f"{formula}bfloat16 2 x {P:,}")
    return weights, gradients, optimizer


def _gathered(model: ResidentModel, run: Run) -> Figure | None:
    """Return the parameters that FSDP gathers temporarily on every rank, or None if the model is not sharded."""
    if not run.sharded:
        return None
    layer, root = _layer_and_rest(model.parts, model.architecture)
    formula = f"gathered {run.bytes} x (2 layers of {parameters(layer)} + the rest {parameters(root)})"
    return Figure("gathered", run.bytes * (2 * layer + root), "bytes", formula)


def _unreduced_gradients(model: ResidentModel, run: Run) -> float:
    """Number of parameters with full gradients before the reduce-scatter."""
    if not run.sharded:
        return 0.0
    return float(max(_layer_and_rest(model.trained, model.architecture)))


def _layer_and_rest(parts: Sequence[ParameterPart], architecture: Architecture) -> tuple[int, int]:
    layers = [sum(part.count for part in parts if part.layer == i) for i in range(architecture.layers)]
    return max(layers), count(parts) - sum(layers)


def _optimizer_shares(run: Run) -> tuple[int, int]:
    """Numbers of ranks that share the optimizer state of dense parameters, and of experts."""
    if not run.distributed_optimizer:
        return 1, 1
    return run.data * run.layout.context, run.layout.expert_data(run.world)


def _megatron(model: ResidentModel, run: Run, stage: int) -> tuple[Figure, Figure, Figure]:
    layout, c = run.layout, run.bytes
    local = local_params(model.parts, model.architecture, layout, stage)
    trained = local_params(model.trained, model.architecture, layout, stage)
    L = parameters(trained.all)
    state_bytes, state_name = run.moments if run.offload is None else (0, "moments in host memory")
    if c == 2:
        state_bytes, state_name = state_bytes + 4, f"float32 master, {state_name}"
    optimizer = Figure("optimizer", state_bytes * trained.all, "bytes", f"{state_name}: {state_bytes:g} x {L}")
    if run.distributed_optimizer:
        shares, expert_shares = _optimizer_shares(run)
        formula = f"{state_name}: {state_bytes:g} x {parameters(trained.dense)} / {shares} ranks"
        if trained.experts:
            formula += f" + {state_bytes:g} x experts {parameters(trained.experts)} / {expert_shares} ranks"
        optimizer = Figure(
            "optimizer", state_bytes * (trained.dense / shares + trained.experts / expert_shares), "bytes", formula
        )  # fmt: skip
    return (
        Figure("weights", c * local.all, "bytes", f"{run.dtype} {c} x {parameters(local.all)}"),
        Figure("gradients", 4 * trained.all, "bytes", f"float32 4 x {L}"),
        optimizer,
    )
