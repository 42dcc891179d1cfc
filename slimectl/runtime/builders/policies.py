"""Builds policies and critics: models that are trained, and frozen ones for log-probabilities."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from slimectl.architectures import cards
from slimectl.architectures.config import read_config, with_defaults
from slimectl.data.routed_experts import routing_marks
from slimectl.errors import SettingsError, SlimectlError
from slimectl.hooks import TRAINING_HOOKS, check_hooks
from slimectl.protocols import NO_PROGRESS, Progress
from slimectl.runtime.builders.models import device, is_gguf, model_folder
from slimectl.runtime.builders.trainers import Role, policy_backend
from slimectl.settings import Settings
from slimectl.settings.train import TrainSettings
from slimectl.system.stdio import logger

if TYPE_CHECKING:
    from slimectl.algorithms.packing import BatchingOptions
    from slimectl.policies.lora import LoraOptions
    from slimectl.policies.optimizer import OptimizerOptions
    from slimectl.policies.options import TrainerOptions
    from slimectl.protocols import CheckpointFormat, Critic, Executor, Policy
    from slimectl.stages.round_timer import Packer, RoundTimer


def policy(
    settings: Settings,
    folder: Path,
    *,
    total_steps: int | None,
    lr: float | None = None,
    executor: Executor | None = None,
) -> Policy:
    """Build the policy for a model directory on the ranks of [cluster]. An explicit `lr` is constant.

    `executor` places the ranks. Without one, they run on this machine.
    """
    trainer: Policy = _over_ranks(settings, folder, "policy", total_steps, lr, executor)
    return trainer


def frozen(settings: Settings, folder: Path, role: Role = "reference", *, executor: Executor | None = None) -> Policy:
    """Build a frozen model that only computes log-probabilities."""
    trainer: Policy = _over_ranks(settings, folder, role, None, 0.0, executor)
    return trainer


def rank_policy(settings: Settings, folder: Path, checkpoint: CheckpointFormat) -> Policy:
    """Build the policy of this rank in a process that has joined the group. `checkpoint` reads the weights."""
    trainer: Policy = _build(settings, folder, "policy", None, None, checkpoint)
    return trainer


def critic(
    settings: Settings, start: Path, *, total_steps: int | None = None, executor: Executor | None = None
) -> Critic | None:
    """Build the value model of the algorithm: ppo's critic, or a reward model, which uses the settings of [train].

    It is initialized from the model at `start`, or from algorithm.critic_load. Returns None for an algorithm without
    one, and if the policy is its own critic.
    """
    options, lr = settings.algorithm.critic_options, None
    if options is not None:
        if options.shared:
            return None
        lr = options.lr
        start = model_folder(options.load, setting="algorithm.critic_load") if options.load else start
    elif settings.algorithm.trained_output != "values":
        return None
    trainer: Critic = _over_ranks(settings, start, "critic", total_steps, lr, executor)
    return trainer


def _over_ranks(
    settings: Settings, folder: Path, role: Role, total_steps: int | None, lr: float | None, executor: Executor | None
) -> Any:
    """Build the model in this process, or on every rank. Threads of restarted servers also read a local policy."""
    from slimectl.executors.local import LocalExecutor
    from slimectl.policies.rank_group import DistributedPolicy, LockedPolicy

    cluster, build = settings.cluster, partial(_build, settings, folder, role, total_steps, lr)
    if cluster.ranks > 1 or cluster.executor != "local":
        return DistributedPolicy(executor or LocalExecutor(), build, ranks=cluster.ranks)
    return LockedPolicy(build()) if settings.uses_servers and role != "critic" else build()


def check_policy(settings: Settings) -> None:
    """Check the models of the algorithm, the functions of [train] and the trainer, before anything is built.

    Raises MissingExtraError, SettingsError, BackendError or CheckpointError.
    """
    check_hooks(settings, *TRAINING_HOOKS)
    options, teaching = settings.algorithm.model_dump(), settings.algorithm.teacher_options
    for teacher in teaching.teachers if teaching is not None and teaching.self_teacher is None else ():
        if not teacher.urls:
            model_folder(teacher.load, setting=teacher.load_setting)
    for key in ("ref_load", "critic_load"):
        if options.get(key):
            model_folder(options[key], setting=f"algorithm.{key}")
    trainers = policy_backend(settings.train)
    if teaching is not None and teaching.in_trainer and not trainers.holds_teachers:
        raise SettingsError(
            f'algorithm.opd_divergence: train.backend "{settings.train.backend}" does not compare distributions over '
            "the full vocabulary. Set algorithm.opd_top_k."
        )
    trainers.check(settings)


def check_training(settings: Settings) -> str:
    """Check layer and parameter names, arguments, schedule and adapters against the model, without its weights.

    Returns the trainer, and how it computes the model if there are several ways. Raises MissingExtraError,
    SettingsError, BackendError or CheckpointError.
    """
    from slimectl.checkpoints.hf_weights import check_plain

    check_policy(settings)
    path, card = settings.model.path, settings.model.card
    if path is not None and is_gguf(path):
        return settings.train.backend  # the configuration is known only after conversion
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if path is not None:
            folder = model_folder(path)
            check_plain(folder)
        else:
            config = with_defaults(cards.load(str(card))["config"])
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        steps = settings.train.lr_decay_iters or total_steps(settings)
        lr = settings.train.lr if steps is None else None  # the end of a schedule may follow from a file of samples
        options = _options(settings, folder, "policy", steps, lr)
        return policy_backend(settings.train).check_training(settings, folder, options) or settings.train.backend


def _build(
    settings: Settings,
    folder: Path,
    role: Role,
    total_steps: int | None,
    lr: float | None,
    checkpoint: CheckpointFormat | None = None,
) -> Any:
    """Build the model of one rank: a policy, a critic, or a frozen policy. `checkpoint` reads its weights."""
    from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
    from slimectl.policies.determinism import gpu_is_used, prepare_gpu

    options = _options(settings, folder, role, total_steps, lr)
    if options.deterministic and options.device == "cuda":  # before the model exists
        prepare_gpu(used=gpu_is_used())
    critic = settings.algorithm.critic_options
    if role == "policy" and critic is not None and critic.shared:
        role = "actor_critic"
    trainers, teaching = policy_backend(settings.train), settings.algorithm.teacher_options
    built = trainers.build(settings, folder, role, options, checkpoint or ModelCheckpoint())
    if role in ("policy", "actor_critic") and teaching is not None and teaching.in_trainer:
        teacher_folder = model_folder(teaching.load, setting="algorithm.opd_teacher_load")
        built.set_teacher(_build(settings, teacher_folder, "teacher", None, 0.0, checkpoint))
    return built


def _options(settings: Settings, folder: Path, role: Role, total_steps: int | None, lr: float | None) -> TrainerOptions:
    """Return the options of a model for any trainer. Raises SettingsError if train.deterministic cannot train it."""
    from slimectl.policies.determinism import check_model
    from slimectl.policies.options import TrainerOptions
    from slimectl.policies.recompute import Recompute

    train, trains, values = settings.train, role not in ("reference", "teacher"), role == "critic"
    if settings.deterministic:
        check_model(read_config(folder), device=device(train.device), backend=train.backend)
    return TrainerOptions(
        optimizer=_optimizer(train, total_steps, lr),
        temperature=1.0 if values else settings.policy_temperature,
        max_tokens_per_pack=train.pack_tokens,
        batching=_batching(train, folder),
        share_prefixes=train.shares_prefixes,
        dtype=train.dtype,
        recompute=Recompute(settings.recompute_granularity or "none", tuple(settings.recompute_modules)),
        freeze=train.freeze_params_name_list,
        train_only=train.only_train_params_name_list,
        freeze_vision_tower=train.freeze_vision_tower,
        trains=trains,
        lora=_lora(train) if trains else None,
        offload=train.offload,
        # Only the policy replays the engine's routing, not frozen models and critics.
        rollout_routing_replay=train.use_rollout_routing_replay and trains and not values,
        saves_moments=not train.no_save_optim,
        loads_moments=not train.no_load_optim,
        device=device(train.device),
        deterministic=settings.deterministic,
        seed=settings.run.seed,
    )


def _batching(train: TrainSettings, folder: Path) -> BatchingOptions:
    """Return the options that pack rows into micro-batches and distribute them over ranks."""
    from slimectl.algorithms.packing import BatchingOptions

    size = None if train.use_dynamic_batch_size else train.micro_batch_size
    if not train.balance_by_flops:
        return BatchingOptions(size, "tokens" if train.balance_data else "none")
    from slimectl.planner.flops import pair_cost
    from slimectl.planner.plan import any_model_of

    model = any_model_of(read_config(folder))
    return BatchingOptions(size, "flops", pair_cost(model.parts, model.architecture))


def round_timer(settings: Settings, folder: Path, policy: Policy, *, progress: Progress = NO_PROGRESS) -> RoundTimer:
    """Return the timer of a run's rounds, with FLOPs of known model families and peak rates of known devices.

    With track.measure_peak, it measures the peak of every rank and uses the slowest. `progress` receives the phases.
    """
    from slimectl.planner.devices import device_peak, measured_peak
    from slimectl.planner.flops import image_flops, model_flops
    from slimectl.planner.plan import model_of
    from slimectl.stages.round_timer import ArithmeticRate, RoundTimer, on_ranks

    train, log_memory = settings.train, settings.track.log_memory
    if settings.algorithm.trained_output != "log_probs":
        return RoundTimer(log_memory=log_memory, progress=progress)
    try:
        config = read_config(folder)
        model = model_of(
            config,
            lora_rank=train.lora_rank,
            lora_targets=train.lora_targets,
            freeze_vision_tower=train.freeze_vision_tower,
        )
    except SlimectlError:  # unknown family
        return RoundTimer(log_memory=log_memory, progress=progress)
    peaks: list[float | None] = []
    if settings.track.measure_peak:
        peaks = [*on_ranks(policy, measured_peak, device(train.device), train.dtype)]
    elif train.dtype != "float32" and device(train.device) == "cuda":
        peaks = on_ranks(policy, device_peak)
    measured = [peak for peak in peaks if peak is not None]
    rate = ArithmeticRate(
        model_flops(model.all[0]),
        settings.cluster.ranks,
        min(measured) if measured else None,
        image_flops(model.all[0], config.get("image_token_id", -1)),
    )
    return RoundTimer(log_memory=log_memory, rate=rate, pack=_packer(settings, folder), progress=progress)


def _packer(settings: Settings, folder: Path) -> Packer | None:
    """Return the function that packs rows as the policy does, or None if the trainer does not describe its packing."""
    from slimectl.algorithms.packing import plan_batches

    packing = policy_backend(settings.train).packing(settings, folder)
    if packing is None:
        return None
    options: dict[str, Any] = {"max_tokens": packing.max_tokens, "ranks": packing.ranks}
    options |= {"share": packing.shares_prefixes, "batching": _batching(settings.train, folder)}
    if settings.train.use_rollout_routing_replay:
        return lambda rows: plan_batches(rows, marks=routing_marks(rows), **options)
    return partial(plan_batches, **options)


def _lora(train: TrainSettings) -> LoraOptions | None:
    from slimectl.policies.lora import LoraOptions

    if train.lora_rank is None:
        return None
    alpha = 2.0 * train.lora_rank if train.lora_alpha is None else train.lora_alpha
    load = Path(train.lora_load) if train.lora_load else None
    return LoraOptions(train.lora_rank, alpha, tuple(train.lora_targets), load)


def _optimizer(train: TrainSettings, total_steps: int | None, lr: float | None = None) -> OptimizerOptions:
    """Return the optimizer options of [train]. An explicit `lr` is constant."""
    from slimectl.policies.optimizer import OptimizerOptions

    steps = train.lr_decay_iters or total_steps
    return OptimizerOptions(
        lr=train.lr if lr is None else lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        schedule=train.lr_decay_style if lr is None else "constant",
        warmup_steps=train.warmup_steps(steps) if lr is None else 0,
        decay_steps=steps,
        min_lr=train.min_lr if lr is None else 0.0,
        wsd_steps=train.lr_wsd_decay_iters or -(-(steps or 0) // 10),
        wsd_style=train.lr_wsd_decay_style,
        state_dtype=train.optimizer_state_dtype,
        name=train.optimizer,
        muon_momentum=train.muon_momentum,
        muon_use_nesterov=train.muon_use_nesterov,
        muon_num_ns_steps=train.muon_num_ns_steps,
    )


def warn_of_changed_schedule(train: TrainSettings, checkpoint: Path, total_steps: int | None) -> None:
    """Warn if the learning rate of the next step differs from the run that saved the checkpoint."""
    from slimectl.policies.checkpoint import saved_options
    from slimectl.policies.optimizer import changed_schedule

    saved = saved_options(checkpoint)
    if saved is not None and (message := changed_schedule(*saved, _optimizer(train, total_steps))):
        logger.warning(message)


def unmet_schedule(train: TrainSettings, updates: int, total_steps: int | None) -> str:
    """Describe where the schedule ended if a run did not make `total_steps` updates, or return ""."""
    from slimectl.policies.optimizer import unmet_schedule

    return "" if train.lr_decay_iters else unmet_schedule(updates, _optimizer(train, total_steps))


def total_steps(settings: Settings, *, rollouts: int | None = None) -> int | None:
    """Return the optimizer steps of the trained model in a whole run, or None if its length is unknown.

    `rollouts` is the number of rollouts in a file of samples, where a pair counts as one. Steps that train only the
    critic are not counted.
    """
    rounds = settings.run.num_rollout
    if rounds is not None:
        rollouts = rounds * settings.rollouts_per_round
    elif rollouts is not None:
        rollouts *= settings.run.num_epoch or 1
    if rollouts is None:
        return None
    return settings.steps_of(rollouts) - settings.algorithm.critic_only_steps
