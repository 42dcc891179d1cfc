"""Settings to policies: what trains, and what is only asked for log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl import cards
from slimectl.errors import MissingExtraError, SettingsError
from slimectl.hooks import TRAINING, check_hooks
from slimectl.layouts import ParallelLayout, problems
from slimectl.settings import Settings
from slimectl.settings.algorithm import Ppo, RewardModel, critic_is_shared
from slimectl.wiring.models import device, is_gguf, model_folder

if TYPE_CHECKING:
    from slimectl.algorithms.packing import Batching
    from slimectl.policies.lora import LoraOptions
    from slimectl.policies.optimizer import OptimizerOptions
    from slimectl.ports import Critic, Executor, Policy


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
    """The policy for a model directory, over as many ranks as [cluster] says; `lr` given is a constant one.

    `store_prefix` tells the user's functions on its ranks which model it is. The ranks live where `executor` puts them;
    on this machine where none is given.
    """
    made = _over_ranks(
        settings, partial(_build, settings, folder, total_steps, lr, trains, False, store_prefix), executor
    )
    if settings.uses_servers and not _has_ranks(settings):
        from slimectl.policies.exclusive import ExclusivePolicy

        return ExclusivePolicy(made)
    return made


def critic(
    settings: Settings, start: Path, *, total_steps: int | None = None, executor: Executor | None = None
) -> Critic | None:
    """What learns values, where the algorithm has it: ppo's critic, or a reward model, which learns as [train] says.

    It begins as the model at `start`, or as algorithm.critic_load. None also where the policy is its own critic.
    """
    algorithm, lr = settings.algorithm, None
    if critic_is_shared(algorithm):
        return None
    if isinstance(algorithm, Ppo):
        lr = algorithm.critic_lr
        start = model_folder(algorithm.critic_load, setting="algorithm.critic_load") if algorithm.critic_load else start
    elif not isinstance(algorithm, RewardModel):
        return None
    return _over_ranks(settings, partial(_build, settings, start, total_steps, lr, True, True, "critic_"), executor)


def _has_ranks(settings: Settings) -> bool:
    return settings.cluster.ranks > 1 or settings.cluster.executor != "local"


def _over_ranks(settings: Settings, build: Callable[[], Any], executor: Executor | None) -> Any:
    """What `build` makes: in this process, or on every rank."""
    if not _has_ranks(settings):
        return build()
    from slimectl.executors.local import LocalExecutor
    from slimectl.policies.group import GroupPolicy

    return GroupPolicy(executor or LocalExecutor(), build, ranks=settings.cluster.ranks)


def check_policy(settings: Settings) -> None:
    """Before anything is made: is Megatron-core there, and can the model be laid out so?

    Raises MissingExtraError, SettingsError or CheckpointError.
    """
    _check_models(settings)
    if settings.train.policy != "megatron":
        return
    if find_spec("megatron") is None:
        raise MissingExtraError("megatron-core", extra="megatron", wanted_by='train.policy = "megatron"')
    path, card = settings.model.path, settings.model.card
    if path is not None and is_gguf(path):
        return
    from slimectl.weights.adapters import chosen, linear_layers
    from slimectl.weights.complete import completed, read_config
    from slimectl.weights.families import family_of

    config = read_config(model_folder(path)) if path is not None else completed(cards.load(str(card))["config"])
    family = family_of(config)
    for problem in problems(layout(settings), family.architecture(config).transformer, settings.cluster.ranks):
        raise SettingsError(problem)
    if settings.train.lora_rank is not None:
        chosen(linear_layers(family.links(config)), settings.train.lora_targets)


def _check_models(settings: Settings) -> None:
    """The models that an algorithm names are there, and the functions that [train] names."""
    check_hooks(settings, *TRAINING)
    given = settings.algorithm.model_dump()
    if given.get("opd_kl_coef") and not given["opd_teacher_url"]:
        model_folder(given["opd_teacher_load"], setting="algorithm.opd_teacher_load")
    for key in ("ref_load", "critic_load"):
        if given.get(key):
            model_folder(given[key], setting=f"algorithm.{key}")


def _build(
    settings: Settings,
    folder: Path,
    total_steps: int | None,
    lr: float | None,
    trains: bool,
    values: bool,
    store_prefix: str,
) -> Any:
    """What every rank builds for itself: a policy, or with `values` a critic."""
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
    both = trains and critic_is_shared(settings.algorithm)
    if not values:
        shared["temperature"] = settings.rollout.temperature
    if train.policy == "fsdp":
        from slimectl.policies.fsdp.policy import FsdpPolicy
        from slimectl.policies.fsdp.shared import FsdpPolicyWithValues
        from slimectl.policies.fsdp.value import FsdpCritic

        return (FsdpCritic if values else FsdpPolicyWithValues if both else FsdpPolicy)(
            folder,
            HFCheckpoint(),
            gradient_checkpointing=train.gradient_checkpointing,
            share_prompts=train.share_prompts,
            **shared,
        )
    from slimectl.policies.megatron.config import Recompute
    from slimectl.policies.megatron.own import own_functions
    from slimectl.policies.megatron.policy import MegatronPolicy
    from slimectl.policies.megatron.shared import MegatronPolicyWithValues
    from slimectl.policies.megatron.value import MegatronCritic

    granularity = "full" if train.gradient_checkpointing else megatron.recompute_granularity or "none"
    return (MegatronCritic if values else MegatronPolicyWithValues if both else MegatronPolicy)(
        folder,
        HFCheckpoint(),
        layout=layout(settings),
        recompute=Recompute(granularity, tuple(megatron.recompute_modules)),
        distributed_optimizer=megatron.use_distributed_optimizer,
        optimizer_cpu_offload=megatron.optimizer_cpu_offload,
        routing_replay=megatron.use_routing_replay,
        user_functions=own_functions(settings, store_prefix=store_prefix),
        args=megatron.args,
        **shared,
    )


def _batching(settings: Settings, folder: Path) -> Batching:
    """How rows become micro-batches, and micro-batches the shares of ranks."""
    from slimectl.algorithms.packing import Batching

    train = settings.train
    size = None if train.use_dynamic_batch_size else train.micro_batch_size
    if not train.balance_by_flops:
        return Batching(size, "tokens" if train.balance_data else "none")
    from slimectl.estimates.compute import pair_cost
    from slimectl.estimates.parameters import parts_of
    from slimectl.weights.complete import read_config
    from slimectl.weights.families import family_of

    config = read_config(folder)
    family = family_of(config)
    return Batching(size, "flops", pair_cost(parts_of(family.links(config)), family.architecture(config)))


def _lora(settings: Settings) -> LoraOptions | None:
    from slimectl.policies.lora import LoraOptions

    train = settings.train
    if train.lora_rank is None:
        return None
    alpha = 2.0 * train.lora_rank if train.lora_alpha is None else train.lora_alpha
    load = Path(train.lora_load) if train.lora_load else None
    return LoraOptions(train.lora_rank, alpha, tuple(train.lora_targets), load)


def _optimizer(settings: Settings, total_steps: int | None, lr: float | None) -> OptimizerOptions:
    """The optimizer of [train]; `lr` given is a constant one."""
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
    """How [megatron] lays a model over ranks."""
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
    """Optimizer steps of a whole run, where its length is known."""
    rounds = settings.run.num_rollout
    return None if rounds is None else rounds * settings.steps_per_round


def frozen(settings: Settings, folder: Path, *, executor: Executor | None = None, store_prefix: str = "ref_") -> Policy:
    """A model that is only asked for log-probabilities."""
    return policy(
        settings, folder, total_steps=None, lr=0.0, trains=False, store_prefix=store_prefix, executor=executor
    )
