"""slimectl plan"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from slimectl.architectures import cards
from slimectl.architectures.parallel import ParallelLayout
from slimectl.cli.options import SETTINGS, CommonOptions, with_options
from slimectl.errors import CheckpointError, SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.planner.plan import Plan, PlannedRun
    from slimectl.planner.vision import VisionTower
    from slimectl.planner.workload import Run
    from slimectl.settings import Settings


def option(name: str, help_text: str, panel: str | None = None, **limits: Any) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel, **limits)


TOKENS_PER_IMAGE = 256
"""Tokens of an image of 448 x 448 pixels, with one token per 28 x 28 pixels."""
LAYOUT, TRAINING, ENGINE = "Parallel layout (default: one that fits)", "Training", "Engine"
OTHER_MODELS, PLACEMENT = "Trained parameters, and other models on the same ranks", "Placement"
CHECK = "Check"
MACHINE_OPTIONS = ("card", "gpu_memory", "tflops", "mfu", "device", "simulate", "as_json")
"""Options that can be combined with the settings of a run: its machines and the format of the output."""
OPTION_NAMES = {
    "state_dtype": "optimizer-state-dtype",
    "max_tokens": "max-tokens-per-gpu",
    "tokens_per_image": "image-tokens",
}
"""Command-line names of options that differ from the names of their fields."""


@dataclass(kw_only=True, eq=False, repr=False)
class PlanOptions:
    """Options of `slimectl plan`: the model, the layout, the engine and other models."""

    card: Annotated[str | None, option("--card", "Model card (see `slimectl models`)")] = None
    model: Annotated[str | None, option("--model", "Model directory (Hugging Face format)", metavar="DIR")] = None
    gpus: Annotated[int, option("--gpus", "Training ranks", LAYOUT, min=1)] = 8
    tp: Annotated[int | None, option("--tp", "Tensor-parallel size", LAYOUT, min=1)] = None
    pp: Annotated[int | None, option("--pp", "Pipeline-parallel size", LAYOUT, min=1)] = None
    vpp: Annotated[int | None, option("--vpp", "Model chunks per pipeline rank", LAYOUT, min=2)] = None
    cp: Annotated[int | None, option("--cp", "Context-parallel size", LAYOUT, min=1)] = None
    ep: Annotated[int | None, option("--ep", "Expert-parallel size", LAYOUT, min=1)] = None
    etp: Annotated[int | None, option("--etp", "Tensor-parallel size of the experts", LAYOUT, min=1)] = None
    recompute: Annotated[
        Literal["none", "selective", "full"] | None,
        option("--recompute", "Recompute activations: none, selective (some modules) or full (whole layers)", TRAINING),
    ] = None
    recompute_module: Annotated[
        list[str] | None,
        option(
            "--recompute-module",
            "Module for --recompute selective: core_attn (default), mlp, moe (repeatable)",
            TRAINING,
        ),
    ] = None
    backend: Annotated[Literal["megatron", "fsdp"], option("--backend", "Training backend", TRAINING)] = "megatron"
    dtype: Annotated[Literal["bfloat16", "float32"], option("--dtype", "Compute precision", TRAINING)] = "bfloat16"
    optimizer: Annotated[
        Literal["adamw", "muon"], option("--optimizer", "Optimizer: adamw or muon (fsdp)", TRAINING)
    ] = "adamw"
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "int8"],
        option("--optimizer-state-dtype", "Precision of the optimizer's moments. int8: fsdp", TRAINING),
    ] = "float32"
    offload: Annotated[
        Literal["optimizer", "parameters"] | None,
        option("--offload", "Offload to host memory: optimizer, or parameters (includes the optimizer)", TRAINING),
    ] = None
    device: Annotated[Literal["cuda", "cpu"], option("--device", "Training device", TRAINING)] = "cuda"
    seq_len: Annotated[int, option("--seq-len", "Tokens per sequence, prompt and response", TRAINING, min=2)] = 8192
    response_len: Annotated[int | None, option("--response-len", "Response tokens per sequence", TRAINING, min=1)] = (
        None
    )
    max_tokens: Annotated[int, option("--max-tokens-per-gpu", "Tokens per micro-batch", TRAINING, min=1)] = 8192
    images: Annotated[int | None, option("--images", "Images per sequence (vision models)", TRAINING, min=0)] = None
    tokens_per_image: Annotated[
        int | None, option("--image-tokens", "Tokens per image. Default: 256", TRAINING, min=1)
    ] = None
    train_vision_tower: Annotated[bool, option("--train-vision-tower", "Train the vision tower too", TRAINING)] = False
    batch: Annotated[int, option("--batch", "Sequences per optimizer step", TRAINING, min=1)] = 256
    gpu_memory: Annotated[float, option("--gpu-memory", "Memory per GPU in GiB", TRAINING, min=0.1)] = 80
    tflops: Annotated[
        float | None, option("--tflops", "Peak TFLOP/s per GPU, to estimate time", TRAINING, min=0.001)
    ] = None
    mfu: Annotated[float, option("--mfu", "Fraction of the peak that is reached (MFU)", TRAINING, min=0.01, max=1)] = (
        0.35
    )
    engine_tp: Annotated[int, option("--engine-tp", "Tensor-parallel size of the engine", ENGINE, min=1)] = 1
    mem_fraction: Annotated[
        float, option("--mem-fraction", "Fraction of GPU memory for weights and cache", ENGINE, min=0.05, max=1)
    ] = 0.85
    engine_fp8: Annotated[bool, option("--engine-fp8", "Use fp8 matrices in the engine", ENGINE)] = False
    colocate: Annotated[
        bool, option("--colocate", "Share GPUs between trainer and engine, which take turns", ENGINE)
    ] = False
    concurrency: Annotated[int | None, option("--concurrency", "Sequences sampled concurrently", ENGINE, min=1)] = None
    as_json: Annotated[bool, option("--json", "Print JSON instead of a table")] = False
    lora_rank: Annotated[
        int | None, option("--lora-rank", "Rank of LoRA adapters. Only the adapters are trained", OTHER_MODELS, min=1)
    ] = None
    lora_target: Annotated[
        list[str] | None,
        option("--lora-target", "Linear layer to adapt (repeatable). Default: train.lora_targets", OTHER_MODELS),
    ] = None
    critic: Annotated[
        bool, option("--critic", "Add a separate critic, initialized from the model (ppo)", OTHER_MODELS)
    ] = False
    reference: Annotated[bool, option("--reference", "Add a frozen reference model", OTHER_MODELS)] = False
    teacher: Annotated[
        list[str] | None,
        option("--teacher", "Add a frozen teacher model: a card or a directory. Repeatable", OTHER_MODELS),
    ] = None
    simulate: Annotated[
        bool,
        option("--simulate", "Check the plan: run one step on fake tensors for some ranks (takes minutes)", CHECK),
    ] = False
    placement: Annotated[
        bool,
        option("--placement", "Show which process of a run uses which GPU (with -c or -s)", PLACEMENT),
    ] = False


@with_options("context options", SETTINGS)
def plan(context: typer.Context, options: PlanOptions, common: CommonOptions) -> None:
    """Estimate memory, FLOPs and time to train and serve a model, with formulas.

    Does not load the model and needs no GPU. With -c or -s, plans the run with these settings, and `--placement` shows
    which process of that run uses which GPU. `--simulate` runs the trainer's own code without a GPU and compares its
    memory, collectives and devices with the plan. The exit code is 1 if the layout does not fit, or if plan and
    simulation disagree.

    Example:

        slimectl plan --card qwen3-4B --gpus 8 --tp 2 --seq-len 16384 --tflops 989
        slimectl plan -s model.card=qwen3-0.6B -s cluster.actor_num_gpus_per_node=8
        slimectl plan --card qwen3-4B --gpus 1 --backend fsdp --lora-rank 32 --reference
    """
    if options.placement:
        from slimectl.cli.plan_placement import show_placement

        show_placement(
            with_card(common.resolve().settings, options.card), on_gpu=options.device == "cuda", as_json=options.as_json
        )
        return
    from slimectl.planner import plan as estimates
    from slimectl.planner.search import USABLE

    planned = _of_settings(context, options, common) if common.config or common.assign else _of_options(options)
    estimates.check(planned.shape, planned.run)
    result = estimates.plan_run(planned, memory_gib=options.gpu_memory, tflops=options.tflops, mfu=options.mfu)
    problems = _simulate(planned, result) if options.simulate else []
    print_plan(result, options.as_json)
    verdict = "fits" if result.fits else "does not fit"
    say = stdio.note if result.fits else stdio.say
    say(f"{estimates.describe(planned.run)}; {verdict} in {USABLE:.0%} of {options.gpu_memory:g} GiB per GPU")
    if planned.run.policy == "fsdp" and (options.model or common.config or common.assign):
        stdio.note(_paths(common.resolve().settings, planned.config))
    for problem in problems:
        stdio.say(problem)
    if problems or not result.fits:
        raise typer.Exit(1)


def _paths(settings: Settings, config: dict[str, Any]) -> str:
    """Return one line about how trainer and engine compute a model of a complete configuration."""
    from slimectl.runtime import builders

    return f"trainer: {builders.fsdp_path(config)}; engine: {builders.engine_path(settings, config)}"


def _of_options(options: PlanOptions) -> PlannedRun:
    """Return the run that the options describe. Raises SettingsError for options that cannot be combined."""
    from slimectl.planner.plan import PlannedRun, any_model_of

    if options.lora_target and options.lora_rank is None:
        raise SettingsError("--lora-target: has no effect without adapters. Add --lora-rank")
    _check_recompute_modules(options)
    config = configuration(options.card, options.model)
    targets = (options.lora_target or _default_lora_targets()) if options.lora_rank else []
    shape = any_model_of(
        config,
        fsdp=options.backend == "fsdp",
        lora_rank=options.lora_rank,
        lora_targets=targets,
        critic=options.critic,
        reference=options.reference,
        teachers=[_teacher(name) for name in options.teacher or ()],
        adapts_experts=options.backend == "megatron",
        freeze_vision_tower=not options.train_vision_tower,
    )
    _check_images(options, shape.tower)
    return PlannedRun(
        config,
        shape,
        _planned_run(options, shape),
        options.batch,
        options.engine_tp,
        options.mem_fraction,
        options.concurrency,
        options.engine_fp8,
        options.colocate,
        (options.lora_rank, targets) if options.lora_rank else None,
    )


def _of_settings(context: typer.Context, options: PlanOptions, common: CommonOptions) -> PlannedRun:
    """Return the run that the settings describe. Of the options, only MACHINE_OPTIONS may be given.

    Raises SettingsError.
    """
    from slimectl.runtime import capacity

    for name in (field.name for field in fields(options)):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in MACHINE_OPTIONS:
            flag = "--" + OPTION_NAMES.get(name, name).replace("_", "-")
            raise SettingsError(f"{flag}: the settings of the run determine this. Set it with -s, or drop -c and -s.")
    settings = with_card(common.resolve().settings, options.card)
    try:
        return capacity.planned_run(settings, device=options.device)
    except CheckpointError as error:
        if settings.model.path is None or Path(settings.model.path).exists():
            raise
        raise SettingsError(f"{error}. To plan without the model, give its card: --card NAME") from error


def with_card(settings: Settings, card: str | None = None) -> Settings:
    """Return the settings with a card in place of a model that is not on this machine, if a card has its name."""
    model = settings.model
    if card is not None or (model.path is not None and not Path(model.path).exists()):
        card = card or cards.named(model.path or "")
        if card is not None:
            stdio.note(f"{model.path}: not on this machine. Using the card {card}")
            update = {"path": None, "card": card}
            return settings.model_copy(update={"model": model.model_copy(update=update)})
    return settings


def _simulate(planned: PlannedRun, result: Plan) -> list[str]:
    """Add the figures of a simulated step to the plan. Return its problems, one line each."""
    from slimectl.planner import memory
    from slimectl.planner.simulation.report import simulation

    if planned.shape.other_models:
        raise SettingsError("--simulate: only simulates the policy. Drop --critic, --reference and --teacher")
    report = simulation(
        cards.language_model(planned.config),
        result.run,
        memory.peak(result.sections["training memory"]),
        lora=planned.lora,
    )
    result.sections["simulation"] = report.figures
    return report.problems


def _default_lora_targets() -> list[str]:
    from slimectl.settings.train import TrainSettings

    return TrainSettings().lora_targets


def _check_recompute_modules(options: PlanOptions) -> None:
    """Raise SettingsError for modules without selective recomputation, and for unknown ones."""
    if not options.recompute_module:
        return
    from slimectl.settings.train import RecomputeModule

    modules = get_args(RecomputeModule)
    if options.recompute != "selective":
        raise SettingsError("--recompute-module: has no effect without --recompute selective")
    for module in options.recompute_module:
        if module not in modules:
            raise SettingsError(f"--recompute-module {module}: must be one of {', '.join(modules)}")


def _check_images(options: PlanOptions, tower: VisionTower | None) -> None:
    """Raise SettingsError for images of a text model, and for options that do not support a vision model."""
    flags = {
        "--images": options.images is not None,
        "--image-tokens": options.tokens_per_image is not None,
        "--train-vision-tower": options.train_vision_tower,
    }
    if tower is None:
        for flag in (flag for flag, is_set in flags.items() if is_set):
            raise SettingsError(f"{flag}: this model does not support images. Drop {flag}, or plan a vision model")
        return
    if options.backend != "fsdp":
        raise SettingsError("--backend megatron: cannot train a vision model. Add --backend fsdp")
    if options.tokens_per_image is not None and not options.images:
        raise SettingsError("--image-tokens: has no effect without images. Add --images")
    if options.simulate:
        raise SettingsError("--simulate: cannot simulate a vision tower. Drop --simulate")
    if options.train_vision_tower and options.lora_rank is not None:
        raise SettingsError(
            "--train-vision-tower: with --lora-rank, only adapters of the decoder are trained. Drop one of the two"
        )


def _planned_run(options: PlanOptions, shape: Any) -> Run:
    """Return the run to plan, in the given layout or in one that fits."""
    from slimectl.planner import plan as estimates
    from slimectl.planner.workload import Run

    run = Run(
        options.gpus,
        ParallelLayout(),
        options.backend,
        options.dtype,
        options.recompute or "none",
        options.seq_len,
        options.max_tokens,
        min(1.0, (options.response_len or options.seq_len) / options.seq_len),
        options.device,
        recompute_modules=tuple(options.recompute_module or ("core_attn",)),
        state_dtype=options.state_dtype,
        optimizer=options.optimizer,
        offload=options.offload,
        images=options.images or 0,
        tokens_per_image=options.tokens_per_image or TOKENS_PER_IMAGE,
    )
    estimates.check_backend(shape, run)
    sizes = {
        "tensor": options.tp, "pipeline": options.pp, "virtual_pipeline": options.vpp, "context": options.cp,
        "expert": options.ep, "expert_tensor": options.etp,
    }  # fmt: skip
    requested = {name: size for name, size in sizes.items() if size is not None}
    if requested:
        return replace(run, layout=ParallelLayout(**requested))
    if options.backend != "megatron":
        return run
    suggestion = estimates.suggested(cards.load(options.card), options.gpus) if options.card else None
    return estimates.with_layout(
        shape, run, suggestion, recompute=options.recompute, batch=options.batch, memory_gib=options.gpu_memory
    )


def configuration(card: str | None, model: str | None) -> dict[str, Any]:
    """Return the complete configuration of a card or directory. Raises SettingsError if both are given and disagree."""
    from slimectl.architectures.config import read_config, with_defaults

    if card is None and model is None:
        raise SettingsError("plan: no model given. Add --card NAME or --model DIR")
    if model is None:
        return with_defaults(cards.load(card or "")["config"])
    from slimectl.runtime.builders import model_folder

    try:
        config = read_config(model_folder(str(Path(model)), weights=False))
    except CheckpointError as error:
        if Path(model).exists() or not (name := cards.named(model)):
            raise
        raise SettingsError(f"{model}: no such model directory. For the card of this model: --card {name}") from error
    if card is not None:
        cards.check(card, config, location=model)
    return config


def _teacher(name: str) -> dict[str, Any]:
    return configuration(None, name) if Path(name).is_dir() else configuration(name, None)


def print_plan(result: Plan, as_json: bool) -> None:
    """Print the plan as a table with a formula on every line, or as JSON."""
    from slimectl.planner.plan import describe

    if as_json:
        sections = {name: [asdict(figure) for figure in figures] for name, figures in result.sections.items()}
        print(json.dumps({"run": asdict(result.run), "fits": result.fits, "sections": sections}, indent=2))
        return
    every = [figure for section in result.sections.values() for figure in section]
    name_width, value_width = max(len(figure.name) for figure in every), max(len(figure.text) for figure in every)
    print(f"layout  {describe(result.run)}")
    for section, figures in result.sections.items():
        print(f"\n{section}")
        for figure in figures:
            print(f"  {figure.name:<{name_width}}  {figure.text:>{value_width}}  {figure.formula}")
