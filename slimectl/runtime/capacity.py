"""Checks that a run fits into this machine's memory and disk, by the planner's formulas."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from slimectl.architectures import cards
from slimectl.architectures.config import read_config, with_defaults
from slimectl.errors import CheckpointError, SettingsError, SlimectlError, StorageError
from slimectl.planner import flops
from slimectl.planner import memory as training_memory
from slimectl.planner.parameters import count
from slimectl.planner.plan import PlannedModel, PlannedRun, any_model_of
from slimectl.planner.search import USABLE
from slimectl.planner.workload import Run, parameters, sized
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.needs import Need
from slimectl.settings.run import RunSettings
from slimectl.system import shared_memory
from slimectl.system.control_groups import memories
from slimectl.types import Metrics

ENGINE_SHARE = 0.85
"""Share of a GPU's memory that a server uses unless its arguments set it."""
PROMPT_TOKENS = 512
"""Assumed tokens of a prompt if no setting limits them."""
MASTER_BYTES, ADAM_BYTES = 4, 8
"""Bytes in a checkpoint for each parameter, and for each trained parameter."""


def configuration(settings: Settings) -> dict[str, Any] | None:
    """Return the configuration of the model, or None if there is no model or it must be converted first.

    Raises CheckpointError or SettingsError.
    """
    path, card = settings.model.path, settings.model.card
    if path is not None:
        return None if builders.is_gguf(path) else read_config(builders.model_folder(path))
    return None if card is None else with_defaults(cards.load(card)["config"])


def is_readable(settings: Settings) -> bool:
    """Return whether the model's configuration can be read. The check of the model reports why not."""
    try:
        return configuration(settings) is not None
    except SlimectlError:
        return False


def shape_of(settings: Settings) -> str:
    """Describe a model: family, layers, parameters."""
    config = configuration(settings) or {}
    language = cards.language_model(config)
    described = f"{language.get('model_type')}, {language.get('num_hidden_layers')} layers"
    with suppress(CheckpointError):  # unknown to the planner
        described += f", {parameters(count(any_model_of(config).parts))} parameters"
    return described


def memory(settings: Settings, *, with_engine: bool = True) -> str:
    """Compare the memory of a rank, and of an engine next to it, with this machine's. Empty if unknown.

    Raises SettingsError if they do not fit.
    """
    model = _model_of(settings)
    if model is None or settings.train.backend not in ("fsdp", "megatron"):
        return ""
    chosen = ""
    if settings.train.max_tokens_per_gpu == "auto":
        settings = with_pack_tokens(settings, estimated_pack(settings))
        chosen = f", packs of {settings.train.max_tokens_per_gpu} tokens"
    cluster, run = settings.cluster, _training_step(settings)
    ranks = 1 if run.device == "cuda" else cluster.actor_num_gpus_per_node  # on a CPU, ranks share the machine's memory
    needed = training_memory.peak(training_memory.figures(model.all, run)) * ranks
    text = f"training {sized(needed)}{chosen}"
    if with_engine and not settings.uses_servers:
        engine = _engine_bytes(settings, model, run)
        needed, text = needed + engine, f"{text}, engine {sized(engine)}"
    available = available_memory(run.device)
    if available is None or cluster.ray_address is not None:
        return f"{text} (the memory of its machines is unknown)"
    text = f"{text}, of {sized(available)} {'a GPU' if run.device == 'cuda' else 'free'}"
    if model.approximate:
        return f"{text} (approximate: {model.approximate} is of no family that the planner knows)"
    if needed > (USABLE if run.device == "cuda" else 1) * available:
        raise SettingsError(
            f"train.max_tokens_per_gpu: {settings.train.max_tokens_per_gpu} needs {text}. Lower it, or set "
            f'train.recompute_granularity = "full", or use more ranks (cluster.actor_num_gpus_per_node).'
        )
    return text


SMALLEST_PACK, CPU_PACK, LARGEST_PACK = 256, 8192, 2**18
"""Tokens of packs that are considered. Larger packs than CPU_PACK are not faster on a CPU."""


def estimated_pack(settings: Settings) -> int:
    """Return the largest power of two of tokens in a pack that the planner expects to fit on this machine.

    Returns the default if the model or its machine is unknown to the planner.
    """
    on_gpu = builders.device(settings.train.device) == "cuda"
    tokens = LARGEST_PACK if on_gpu else CPU_PACK
    while tokens > SMALLEST_PACK:
        with suppress(SettingsError):
            is_known = " of " in memory(with_pack_tokens(settings, tokens))
            return tokens if is_known else min(tokens, CPU_PACK)
        tokens //= 2
    return SMALLEST_PACK


def with_pack_tokens(settings: Settings, tokens: int) -> Settings:
    """Return the settings with another train.max_tokens_per_gpu."""
    return settings.model_copy(update={"train": settings.train.model_copy(update={"max_tokens_per_gpu": tokens})})


def longest_sequence(settings: Settings) -> int:
    """Return the tokens of the longest prompt with its response. Without a limit, a prompt has PROMPT_TOKENS."""
    rollout = settings.rollout
    return rollout.max_context_len or (rollout.max_prompt_len or PROMPT_TOKENS) + rollout.max_response_len


def disk(settings: Settings) -> str:
    """Compare the checkpoints that a run keeps with the free space. Raises StorageError if they do not fit."""
    for setting, folder in _written_folders(settings):
        check_folder(setting, folder)
    if settings.uses_servers and settings.sync.transport == "tensor":
        shared_memory.check_writable()
    free = free_space(Path(settings.run.dir))
    model = _model_of(settings)
    if model is None:
        return f"{sized(free)} free in {settings.run.dir}"
    trained = count(model.all[0].trained)
    size = MASTER_BYTES * count(model.parts) + ADAM_BYTES * trained
    checkpoints = _checkpoints(settings.run)
    # A new checkpoint is written before an old one is removed.
    needed = size * (checkpoints + 1)
    text = f"{checkpoints} checkpoint{'s' if checkpoints > 1 else ''} of {sized(size)} and the next, {sized(free)} free"
    if needed > free:
        raise StorageError(f"run.dir: {settings.run.dir}: {text}. Free space, or lower run.keep_checkpoints.")
    return f"{text} in {settings.run.dir}"


def _written_folders(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield the settings with folders for files of a run, and the folders."""
    yield "run.dir", Path(settings.run.dir)
    if settings.track.dir is not None:
        yield "track.dir", Path(settings.track.dir)
    arguments = settings.track.kwargs
    if log_dir := arguments.get("tensorboard", {}).get("log_dir"):
        yield "track.kwargs.tensorboard.log_dir", Path(log_dir)
    if path := arguments.get("jsonl", {}).get("path"):
        yield "track.kwargs.jsonl.path", Path(path).parent
    if settings.sync.update_weight_disk_dir is not None:
        yield "sync.update_weight_disk_dir", Path(settings.sync.update_weight_disk_dir)


def check_folder(setting: str, folder: Path) -> None:
    """Raise StorageError if a folder cannot be created or written to."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise StorageError(f"{setting}: {existing} is not a folder. Use another.")
    if not os.access(existing, os.W_OK):
        raise StorageError(f"{setting}: {existing} is not writable. Use another folder.")


def free_space(folder: Path) -> int:
    """Return the free bytes where a folder is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _checkpoints(run: RunSettings) -> int:
    """Return the number of checkpoints at the end of the run."""
    if run.save_interval is None or run.num_rollout is None:
        return run.keep_checkpoints or 1
    return min(run.keep_checkpoints or run.num_rollout, -(-run.num_rollout // run.save_interval))


def planned_run(settings: Settings, *, device: Literal["cuda", "cpu"]) -> PlannedRun:
    """Return the planner's description of a run. Raises SettingsError or CheckpointError."""
    if settings.train.backend not in ("fsdp", "megatron"):
        raise SettingsError(
            f"train.backend: the planner has no formulas for {settings.train.backend}. Use fsdp or megatron."
        )
    config = configuration(settings)
    if config is None:
        raise SettingsError("model.path: the planner needs a Hugging Face directory or a card. Set model.card.")
    args, cluster = settings.sglang.args | settings.vllm.args, settings.cluster
    share = args.get("mem_fraction_static", args.get("gpu_memory_utilization", ENGINE_SHARE))
    return PlannedRun(
        config,
        _planned_shape(settings, config),
        _training_step(settings, "cpu" if settings.train.device == "cpu" else device),
        settings.rollouts_per_step,
        max([cluster.rollout_num_gpus_per_engine, *settings.engine_gpus]),
        float(share),
        -(-settings.rollouts_per_round // max(1, len(settings.engine_gpus))),
        args.get("quantization") == "fp8",
        cluster.colocate,
        (settings.train.lora_rank, settings.train.lora_targets) if settings.train.lora_rank else None,
    )


def _model_of(settings: Settings) -> PlannedModel | None:
    """Return the planner's description of the run's models, or None if they are unknown to it."""
    try:
        config = configuration(settings)
        return None if config is None else _planned_shape(settings, config)
    except SlimectlError:  # the check of the model reports it
        return None


def _planned_shape(settings: Settings, config: dict[str, Any]) -> PlannedModel:
    """Return the models of the run: the policy with this configuration, a critic, a reference, teachers."""
    algorithm, train = settings.algorithm, settings.train
    critic, teaching = algorithm.critic_options, algorithm.teacher_options
    loads = [teacher.load for teacher in teaching.teachers if teacher.load] if teaching is not None else []
    teachers = [read_config(builders.model_folder(load)) for load in loads]
    if teaching is not None and teaching.self_teacher == "start":
        teachers.append(config)
    return any_model_of(
        config,
        fsdp=train.backend == "fsdp",
        lora_rank=train.lora_rank,
        lora_targets=train.lora_targets,
        critic=critic is not None and not critic.shared,
        reference=Need.REFERENCE in algorithm.needs,
        adapts_experts=train.backend == "megatron",
        teachers=teachers,
        freeze_vision_tower=train.freeze_vision_tower,
    )


def _training_step(settings: Settings, device: Literal["cuda", "cpu"] | None = None) -> Run:
    """Return the planner's description of a training step. Packs are not longer than the step itself.

    `device` defaults to what train.device means on this machine.
    """
    train, rollout, cluster = settings.train, settings.rollout, settings.cluster
    offloads = settings.megatron.optimizer_cpu_offload and train.backend == "megatron"
    sequence = longest_sequence(settings)
    return Run(
        world=cluster.ranks,
        layout=builders.layout(settings.megatron),
        policy="megatron" if train.backend == "megatron" else "fsdp",
        dtype=train.dtype,
        recompute=settings.recompute_granularity or "none",
        recompute_modules=tuple(settings.recompute_modules),
        state_dtype=train.optimizer_state_dtype,
        optimizer=train.optimizer,
        offload=train.offload or ("optimizer" if offloads else None),
        seq_len=sequence,
        max_tokens_per_gpu=min(train.pack_tokens, sequence * settings.rollouts_per_step),
        response_share=min(1.0, rollout.max_response_len / sequence),
        device=device or ("cuda" if builders.device(train.device) == "cuda" else "cpu"),
        distributed_optimizer=settings.megatron.use_distributed_optimizer,
    )


def _engine_bytes(settings: Settings, model: PlannedModel, run: Run) -> float:
    """Return the bytes of weights and caches of this process's engine with its maximum number of requests."""
    width = 4 if settings.engine.dtype == "float32" else 2
    cache = flops.cache_per_token(model.architecture, dtype_bytes=width, tensor=1).value
    requests = min(settings.engine.max_running_requests, settings.rollouts_per_round)
    prefixes = min(settings.engine.prefix_cache_gib * 2**30, cache * settings.rollouts_per_round * run.seq_len)
    return width * count(model.parts) + cache * requests * run.seq_len + prefixes


def machine_perf(folder: Path) -> Metrics:
    """Return the use of the memory of this machine, and of the disk of a folder."""
    disk = shutil.disk_usage(folder)
    metrics = {"perf/disk_free_gb": disk.free / 2**30, "perf/disk_used_ratio": 1 - disk.free / disk.total}
    if shares := [1 - memory.free / memory.total for memory in memories()]:
        metrics["perf/memory_used_ratio"] = max(shares)
    return metrics


def available_memory(device: str) -> float | None:
    """Return the bytes of a GPU, or the free bytes of this machine and its control group, or None if unknown."""
    if device == "cuda":
        import torch

        return float(torch.cuda.get_device_properties(0).total_memory)
    free = [memory.free for memory in memories()]
    return float(min(free)) if free else None
