"""Plans a run: the layout, and the memory and time of training and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimectl.architectures.cards import language_model
from slimectl.architectures.config import Architecture, Config
from slimectl.architectures.parallel import SETTINGS, ParallelLayout, problems
from slimectl.architectures.registry import family_of, known_family
from slimectl.errors import SettingsError
from slimectl.planner import flops, memory, parameters
from slimectl.planner.module_model import ModuleModel
from slimectl.planner.parameters import (
    ParameterPart,
    ResidentModel,
    adapter_parts,
    critic_of,
    parts_of,
    policy_of,
    tower_part,
)
from slimectl.planner.search import USABLE, fitting
from slimectl.planner.vision import VisionTower
from slimectl.planner.workload import GIB, Figure, Recompute, Run, sized
from slimectl.system.stdio import quantity

Suggestion = tuple[ParallelLayout, Recompute]


@dataclass(frozen=True)
class PlannedModel:
    """Inputs of the formulas: the policy's architecture and parameters, and the other models of the run.

    With `adapters`, only they are trained.
    """

    architecture: Architecture
    parts: Sequence[ParameterPart]
    adapters: Sequence[ParameterPart] = ()
    other_models: Sequence[ResidentModel] = ()
    approximate: str = ""
    """The model type of a model without formulas. Its parameters are exact, its activations are not."""

    @property
    def tower(self) -> VisionTower | None:
        return policy_of(self.architecture, self.parts).tower

    @property
    def all(self) -> list[ResidentModel]:
        return [policy_of(self.architecture, self.parts, self.adapters), *self.other_models]


@dataclass(frozen=True)
class PlannedRun:
    """Input of the planner: a model with its configuration, a training step, and an engine.

    With `colocate`, engines and trainer take turns on the same GPUs.
    """

    config: Config
    shape: PlannedModel
    run: Run
    batch: int
    engine_tensor: int
    engine_share: float
    concurrency: int | None
    engine_fp8: bool
    colocate: bool
    lora: tuple[int, list[str]] | None = None


@dataclass(frozen=True)
class Plan:
    """A planned run, and its figures by section."""

    run: Run
    sections: dict[str, list[Figure]]
    fits: bool


def model_of(
    config: Config,
    *,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = (),
    critic: bool = False,
    reference: bool = False,
    teachers: Sequence[PlannedModel] = (),
    adapts_experts: bool = True,
    freeze_vision_tower: bool = True,
) -> PlannedModel:
    """Build the model from the complete configuration of the policy, and the models of teachers.

    Adapters exclude experts unless `adapts_experts`, because the fsdp policy has them in fused parameters. A vision
    tower is part of the model if the family reads images.

    Raises CheckpointError for an unknown family, SettingsError for an adapter target that matches no layer.
    """
    language = language_model(config)
    family, tower = family_of(language), VisionTower.of(config)
    architecture, links = family.architecture(language), family.links(language)
    parts = parts_of(links)
    if tower is not None:
        parts.append(tower_part(tower, frozen=freeze_vision_tower))
    adapted = [link for link in links if adapts_experts or link.expert is None]
    adapters = adapter_parts(adapted, lora_rank, lora_targets) if lora_rank else []
    policy = PlannedModel(architecture, parts, adapters)
    return _with_others(policy, critic=critic, reference=reference, teachers=teachers)


def any_model_of(
    config: Config,
    *,
    fsdp: bool = False,
    lora_rank: int | None = None,
    lora_targets: Sequence[str] = (),
    teachers: Sequence[Config] = (),
    **options: Any,
) -> PlannedModel:
    """Build the model as `model_of` does, also for a family that only transformers knows.

    With `fsdp`, layers of a known family that the formulas of this backend do not cover are also approximated.
    `options` are model_of's. Raises CheckpointError, SettingsError.
    """
    standing = [any_model_of(teacher, fsdp=fsdp) for teacher in teachers]
    if _has_formulas(language_model(config), fsdp=fsdp):
        return model_of(config, lora_rank=lora_rank, lora_targets=lora_targets, teachers=standing, **options)
    module = ModuleModel(config)
    parts = module.parts()
    adapters = module.adapters(lora_rank, lora_targets) if lora_rank else []
    policy = PlannedModel(module.architecture(parts), parts, adapters, approximate=str(config.get("model_type")))
    critic, reference = options.get("critic", False), options.get("reference", False)
    return _with_others(policy, critic=critic, reference=reference, teachers=standing)


def _with_others(
    policy: PlannedModel, *, critic: bool, reference: bool, teachers: Sequence[PlannedModel]
) -> PlannedModel:
    """Add the other models of a run to a policy."""
    architecture, parts = policy.architecture, policy.parts
    others = [critic_of(architecture, parts, policy.adapters)] if critic else []
    if reference:
        others.append(ResidentModel("reference", architecture, parts))
    others += [ResidentModel("teacher", teacher.architecture, teacher.parts) for teacher in teachers]
    return replace(policy, other_models=others)


def _has_formulas(config: Config, *, fsdp: bool) -> bool:
    family = known_family(config.get("model_type"))
    if family is None or not fsdp:
        return family is not None
    architecture = family.of(config).architecture(config)
    return architecture.layer in ("plain", "sandwich") and not architecture.mla


def suggested(card: dict[str, Any], gpus: int) -> Suggestion | None:
    """Return the layout and recomputation of a card for this number of GPUs, or None if it has none."""
    layout = dict(card.get("layout", {}).get(f"gpus_{gpus}", {}))
    if not layout or "note" in layout:
        return None
    recompute: Recompute = layout.pop("recompute", "none")
    return ParallelLayout(**layout), recompute


def fits(model: PlannedModel, run: Run, memory_gib: float) -> bool:
    return memory.peak(memory.figures(model.all, run)) <= USABLE * memory_gib * GIB


def check(model: PlannedModel, run: Run) -> None:
    """Raise SettingsError for a run that the trainer would reject."""
    if run.image_tokens > run.seq_len:
        raise SettingsError(
            f"--image-tokens {run.tokens_per_image}: {run.images} images of this size need more than the {run.seq_len} "
            "tokens of a sequence. Raise --seq-len."
        )
    check_backend(model, run)
    for standing in model.all:
        _check(standing.architecture, run)


def check_backend(model: PlannedModel, run: Run) -> None:
    """Raise SettingsError for a model that the backend does not train."""
    if model.approximate and run.policy == "megatron":
        raise SettingsError(
            f"--backend megatron: {model.approximate} models have no weight mapping. Add --backend fsdp, which trains"
            " any causal model of transformers."
        )


def _check(architecture: Architecture, run: Run) -> None:
    if run.policy == "megatron" and run.offload == "parameters":
        raise SettingsError("--offload parameters: Megatron-core keeps its weights on the GPU. Use optimizer.")
    if run.policy == "megatron" and (run.optimizer == "muon" or run.state_dtype == "int8"):
        option = "--optimizer muon" if run.optimizer == "muon" else "--optimizer-state-dtype int8"
        raise SettingsError(f"{option}: Megatron-core's trainer does not have it. Add --backend fsdp.")
    if run.policy == "fsdp":
        if run.layout != ParallelLayout():
            raise SettingsError(
                "--backend fsdp: does not support parallel sizes. Drop them, or use --backend megatron."
            )
        return
    if run.recomputes("moe") and not architecture.experts:
        raise SettingsError("--recompute-module moe: this model has no experts. Drop the option.")
    for problem in problems(run.layout, architecture.transformer, run.world):
        raise SettingsError(problem)


def with_layout(
    model: PlannedModel,
    run: Run,
    suggestion: Suggestion | None,
    *,
    recompute: Recompute | None,
    batch: int,
    memory_gib: float,
) -> Run:
    """Return `run` with the suggested layout if that fits, else with the best that fits. Raises SettingsError."""
    if suggestion is not None:
        candidate = replace(run, layout=suggestion[0], recompute=recompute or suggestion[1])
        if fits(model, candidate, memory_gib):
            return candidate
    for choice in fitting(model.all, run, batch=batch, memory_gib=memory_gib):
        if recompute in (None, choice.recompute):
            return replace(run, layout=choice.layout, recompute=choice.recompute)
    minimum = memory.least(model.all, run)
    raise SettingsError(
        f"--gpus {run.world}: no layout fits {USABLE:.0%} of {memory_gib:g} GiB per GPU. Weights, gradients and "
        "optimizer"
        f" alone take {sized(minimum)} in all. Use more --gpus, a shorter --seq-len, or a layout to see its figures."
    )


def plan_run(planned: PlannedRun, *, memory_gib: float, tflops: float | None = None, mfu: float = 1.0) -> Plan:
    """Compute all figures of a checked run, with times for GPUs of `tflops` at `mfu`."""
    model, run = planned.shape, planned.run
    parts, architecture = model.parts, model.architecture
    training, host = memory.figures(model.all, run), memory.host_figures(model.all, run)
    engine_bytes = planned.engine_share * memory_gib * GIB
    turns = memory.shared_gpu_figures(training, engine_bytes=engine_bytes) if planned.colocate else []
    fits = memory.peak(training) <= USABLE * memory_gib * GIB
    if model.approximate:
        training = [_approximate(figure, model.approximate) for figure in training]
    return Plan(
        run,
        {
            "parameters": parameters.figures(parts, architecture, run.layout, model.adapters),
            "training memory": training,
            **({"host memory": host} if host else {}),
            **({"shared GPUs": turns} if turns else {}),
            "arithmetic": flops.flops_figures(
                model.all, seq_len=run.seq_len, batch=planned.batch, world=run.world,
                recomputes=run.recompute == "full", tflops=tflops, mfu=mfu,
                images=run.images, tokens_per_image=run.tokens_per_image,
            ),
            "engine": flops.cache_figures(
                parts, architecture, dtype_bytes=run.bytes, tensor=planned.engine_tensor, memory_gib=memory_gib,
                share=planned.engine_share, seq_len=run.seq_len, concurrency=planned.concurrency,
                fp8=planned.engine_fp8,
            ),
        },
        fits and all(figure.value <= memory_gib * GIB for figure in turns if figure.name == memory.PUSH),
    )  # fmt: skip


def _approximate(figure: Figure, model_type: str) -> Figure:
    """Name the estimate of activations as what it is."""
    if figure.name != "activations":
        return figure
    formula = f"approximate, as of Llama layers with the parameters of {model_type}: {figure.formula}"
    return replace(figure, name="activations (approximate)", formula=formula)


def describe(run: Run) -> str:
    """Describe the layout with the names of the settings.

    >>> describe(Run(8, ParallelLayout(tensor=2), recompute="full"))
    '8 ranks: tensor 2, data 4; recompute full'
    """
    recompute = f"recompute {run.recompute}"
    if run.recompute == "selective":
        recompute = f"recompute {', '.join(run.recompute_modules)}"
    if run.offload:
        recompute += f"; offload {run.offload}"
    if run.policy == "fsdp":
        return f"{quantity(run.world, 'rank')}: fsdp; {recompute}"
    sizes = [f"{name} {size}" for name in SETTINGS if (size := getattr(run.layout, name)) not in (None, 1)]
    return f"{quantity(run.world, 'rank')}: {', '.join([*sizes, f'data {run.data}'])}; {recompute}"
