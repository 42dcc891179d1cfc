"""Builds policies and critics: models that are trained, and frozen ones for log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.architectures import cards
from slimectl.architectures.parallel import ParallelLayout, problems
from slimectl.builders.models import device, is_gguf, model_folder
from slimectl.errors import MissingExtraError, SettingsError
from slimectl.hooks import TRAINING_HOOKS, FlatSettings, check_hooks, hook
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.algorithms.packing import BatchingOptions
    from slimectl.policies.lora import LoraOptions
    from slimectl.policies.megatron.hooks import UserFunctions
    from slimectl.policies.optimizer import OptimizerOptions
    from slimectl.protocols import Critic, Executor, Policy


def policy(
    settings: Settings,
    folder: Path,
    *,
    total_steps: int | None,
    lr: float | None = None,
    trains: bool = True,
    store_prefix: str = "",
    executor: Executor | None = None,
) -> Policy:
    """Build the policy for a model directory, over as many ranks as [cluster] says; an explicit `lr` is constant.

    `store_prefix` identifies the model to the user's functions on its ranks. `executor` places the ranks; without one
    they run on this machine.
    """
    trainer: Policy = _build_over_ranks(
        settings, partial(_build, settings, folder, total_steps, lr, trains, False, store_prefix), executor
    )
    if settings.uses_servers and not _has_ranks(settings):
        from slimectl.policies.locked import LockedPolicy

        return LockedPolicy(trainer)
    return trainer


def critic(
    settings: Settings, start: Path, *, total_steps: int | None = None, executor: Executor | None = None
) -> Critic | None:
    """Build the value model of the algorithm: ppo's critic, or a reward model, which is trained as [train] says.

    It is initialized from the model at `start`, or from algorithm.critic_load. None for an algorithm without one, and
    if the policy is its own critic.
    """
    options, lr = settings.algorithm.critic_options, None
    if options is not None:
        if options.shared:
            return None
        lr = options.lr
        start = model_folder(options.load, setting="algorithm.critic_load") if options.load else start
    elif settings.algorithm.trained_output != "values":
        return None
    trainer: Critic = _build_over_ranks(
        settings, partial(_build, settings, start, total_steps, lr, True, True, "critic_"), executor
    )
    return trainer


def _has_ranks(settings: Settings) -> bool:
    return settings.cluster.ranks > 1 or settings.cluster.executor != "local"


def _build_over_ranks(settings: Settings, build: Callable[[], Any], executor: Executor | None) -> Any:
    """Call `build` in this process, or on every rank."""
    if not _has_ranks(settings):
        return build()
    from slimectl.executors.local import LocalExecutor
    from slimectl.policies.rank_group import DistributedPolicy

    return DistributedPolicy(executor or LocalExecutor(), build, ranks=settings.cluster.ranks)


def check_policy(settings: Settings) -> None:
    """Check, before anything is built, that Megatron-core is installed and supports the layout of the model.

    Raises MissingExtraError, SettingsError or CheckpointError.
    """
    _check_models(settings)
    if settings.train.backend != "megatron":
        return
    if find_spec("megatron") is None:
        raise MissingExtraError("megatron-core", extra="megatron", wanted_by='train.backend = "megatron"')
    path, card = settings.model.path, settings.model.card
    if path is not None and is_gguf(path):
        return
    from slimectl.architectures.config import read_config, with_defaults
    from slimectl.architectures.lora import chosen, linear_layers
    from slimectl.architectures.registry import family_of

    config = read_config(model_folder(path)) if path is not None else with_defaults(cards.load(str(card))["config"])
    family = family_of(config)
    for problem in problems(layout(settings), family.architecture(config).transformer, settings.cluster.ranks):
        raise SettingsError(problem)
    if settings.train.lora_rank is not None:
        chosen(linear_layers(family.links(config)), settings.train.lora_targets)


def _check_models(settings: Settings) -> None:
    """Check that the models of the algorithm exist, and the functions that [train] names."""
    check_hooks(settings, *TRAINING_HOOKS)
    options = settings.algorithm.model_dump()
    if options.get("opd_kl_coef") and not options["opd_teacher_url"]:
        model_folder(options["opd_teacher_load"], setting="algorithm.opd_teacher_load")
    for key in ("ref_load", "critic_load"):
        if options.get(key):
            model_folder(options[key], setting=f"algorithm.{key}")


def _build(
    settings: Settings,
    folder: Path,
    total_steps: int | None,
    lr: float | None,
    trains: bool,
    values: bool,
    store_prefix: str,
) -> Any:
    """Build the model of one rank: a policy, or with `values` a critic."""
    from slimectl.checkpoints.hf import HFCheckpoint

    train, megatron = settings.train, settings.megatron
    shared: dict[str, Any] = {
        "optimizer": _optimizer(settings, total_steps, lr),
        "max_tokens_per_pack": train.max_tokens_per_gpu,
        "batching": _batching(settings, folder),
        "dtype": train.dtype,
        "freeze": train.freeze_params_name_list,
        "train_only": train.only_train_params_name_list,
        "trains": trains,
        "lora": _lora(settings) if trains else None,
        "device": device(train.device),
        "seed": settings.run.seed,
    }
    options = settings.algorithm.critic_options
    shares_critic = trains and options is not None and options.shared
    if not values:
        shared["temperature"] = settings.rollout.temperature
    if train.backend == "fsdp":
        from slimectl.policies.fsdp.critic import FsdpActorCritic, FsdpCritic
        from slimectl.policies.fsdp.policy import FsdpPolicy

        return (FsdpCritic if values else FsdpActorCritic if shares_critic else FsdpPolicy)(
            folder,
            HFCheckpoint(),
            gradient_checkpointing=train.gradient_checkpointing,
            share_prompts=train.share_prompt_prefix,
            **shared,
        )
    from slimectl.policies.megatron.config import Recompute
    from slimectl.policies.megatron.critic import MegatronActorCritic, MegatronCritic
    from slimectl.policies.megatron.policy import MegatronPolicy

    granularity = "full" if train.gradient_checkpointing else megatron.recompute_granularity or "none"
    return (MegatronCritic if values else MegatronActorCritic if shares_critic else MegatronPolicy)(
        folder,
        HFCheckpoint(),
        layout=layout(settings),
        recompute=Recompute(granularity, tuple(megatron.recompute_modules)),
        distributed_optimizer=megatron.use_distributed_optimizer,
        optimizer_cpu_offload=megatron.optimizer_cpu_offload,
        routing_replay=megatron.use_routing_replay,
        user_functions=_user_functions(settings, store_prefix),
        args=megatron.args,
        **shared,
    )


def _user_functions(settings: Settings, store_prefix: str) -> UserFunctions:
    """Load the functions of [megatron] for one model."""
    from slimectl.policies.megatron.hooks import UserFunctions

    return UserFunctions(
        args=FlatSettings(settings),
        init=hook(settings, "megatron.custom_init_path"),
        provider=hook(settings, "megatron.custom_model_provider_path"),
        log_prob=hook(settings, "megatron.custom_before_log_prob_hook_path"),
        train_step=hook(settings, "megatron.custom_before_train_step_hook_path"),
        store_prefix=store_prefix,
    )


def _batching(settings: Settings, folder: Path) -> BatchingOptions:
    """Return the options that pack rows into micro-batches and distribute them over ranks."""
    from slimectl.algorithms.packing import BatchingOptions

    train = settings.train
    size = None if train.use_dynamic_batch_size else train.micro_batch_size
    if not train.balance_by_flops:
        return BatchingOptions(size, "tokens" if train.balance_data else "none")
    from slimectl.architectures.config import read_config
    from slimectl.architectures.registry import family_of
    from slimectl.planner.flops import pair_cost
    from slimectl.planner.parameters import parts_of

    config = read_config(folder)
    family = family_of(config)
    return BatchingOptions(size, "flops", pair_cost(parts_of(family.links(config)), family.architecture(config)))


def _lora(settings: Settings) -> LoraOptions | None:
    from slimectl.policies.lora import LoraOptions

    train = settings.train
    if train.lora_rank is None:
        return None
    alpha = 2.0 * train.lora_rank if train.lora_alpha is None else train.lora_alpha
    load = Path(train.lora_load) if train.lora_load else None
    return LoraOptions(train.lora_rank, alpha, tuple(train.lora_targets), load)


def _optimizer(settings: Settings, total_steps: int | None, lr: float | None) -> OptimizerOptions:
    """Return the optimizer options of [train]; an explicit `lr` is constant."""
    from slimectl.policies.optimizer import OptimizerOptions

    train = settings.train
    return OptimizerOptions(
        lr=train.lr if lr is None else lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        schedule=train.lr_decay_style if lr is None else "constant",
        warmup_steps=train.lr_warmup_iters if lr is None else 0,
        decay_steps=train.lr_decay_iters or total_steps,
        min_lr=train.min_lr if lr is None else 0.0,
    )


def layout(settings: Settings) -> ParallelLayout:
    """Return the parallel layout that [megatron] specifies."""
    megatron = settings.megatron
    return ParallelLayout(
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size,
    )


def total_steps(settings: Settings) -> int | None:
    """Return the optimizer steps of a whole run; None if its length is unknown."""
    rounds = settings.run.num_rollout
    return None if rounds is None else rounds * settings.steps_per_round


def frozen(settings: Settings, folder: Path, *, executor: Executor | None = None, store_prefix: str = "ref_") -> Policy:
    """Build a frozen model, which only computes log-probabilities."""
    return policy(
        settings, folder, total_steps=None, lr=0.0, trains=False, store_prefix=store_prefix, executor=executor
    )
