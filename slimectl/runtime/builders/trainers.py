"""Training backends by the name in train.backend. Each builds the model of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from slimectl.architectures import cards
from slimectl.architectures.parallel import ParallelLayout, dense_stage, prefix_obstacle, problems
from slimectl.errors import MissingExtraError, SettingsError
from slimectl.hooks import FlatSettings, hook
from slimectl.plugins.registry import POLICIES
from slimectl.runtime.builders.backends import backend
from slimectl.runtime.builders.models import device, is_gguf, model_folder
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.policies.megatron.hooks import UserFunctions
    from slimectl.policies.recompute import Recompute

Role = Literal["policy", "critic", "actor_critic"]
"""Role of a model: a policy, a separate critic, or a policy that is its own critic."""


@dataclass(frozen=True)
class Packing:
    """How a trainer packs rows: tokens per pack, data-parallel ranks, and whether common first tokens are shared."""

    max_tokens: int
    ranks: int
    shares_prefixes: bool


class PolicyBackend:
    """Base class of training backends. Other packages derive from it, with a constructor without arguments."""

    settings_class: ClassVar[type[BaseModel] | None] = None
    """Class of the trainer's own settings section, which has the trainer's name. None if there is none."""

    streams_adapters: ClassVar[bool] = False
    """Whether its policies implement AdapterPolicy of slimectl/protocols.py when they train adapters."""

    def check(self, settings: Settings) -> None:
        """Check that it is installed and supports the model, before anything is built.

        Raises MissingExtraError, SettingsError, BackendError or CheckpointError.
        """

    def check_training(self, settings: Settings, folder: Path, options: Mapping[str, Any]) -> None:
        """Check the options against the model in a folder, reading only its config.json.

        `options` are the same as for `build`. Raises SettingsError or CheckpointError.
        """

    def packing(self, settings: Settings, folder: Path) -> Packing | None:
        """Return how the trainer of a model directory packs rows, for perf metrics, or None if unknown."""
        return None

    def build(self, settings: Settings, folder: Path, *, role: Role, store_prefix: str, **options: Any) -> Any:
        """Create the model of this rank, a Policy or a Critic, from a model directory.

        Every trainer accepts these `options`: optimizer (OptimizerOptions), batching (BatchingOptions),
        max_tokens_per_pack, dtype, device, seed, freeze and train_only (name patterns), trains, lora (LoraOptions or
        None). Policies also get temperature. `checkpoint` is given if a certain format reads the weights.
        `store_prefix` identifies the model to the user's functions on its ranks.
        """
        raise NotImplementedError


class FsdpBackend(PolicyBackend):
    """The Hugging Face module, in one process or sharded by FSDP2."""

    streams_adapters = True

    def check_training(self, settings: Settings, folder: Path, options: Mapping[str, Any]) -> None:
        from slimectl.policies.fsdp.preflight import check_training

        check_training(
            folder,
            recompute=_recompute(settings),
            rollout_routing_replay=settings.train.use_rollout_routing_replay,
            **{name: options[name] for name in ("freeze", "train_only", "lora")},
        )

    def packing(self, settings: Settings, folder: Path) -> Packing:
        train = settings.train
        return Packing(train.max_tokens_per_gpu, settings.cluster.ranks, train.shares_prefixes)

    def build(self, settings: Settings, folder: Path, *, role: Role, store_prefix: str, **options: Any) -> Any:
        from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy

        classes: dict[Role, Any] = {"policy": FsdpPolicy, "critic": FsdpCritic, "actor_critic": FsdpActorCritic}
        options |= {"offload": settings.train.offload, "freeze_vision_tower": settings.train.freeze_vision_tower}
        return _build(classes[role], settings, folder, role, options)


def _check_save_format(settings: Settings, dense: int | None) -> None:
    """Reject torch_dist if pipeline stage `dense` has no experts, because megatron-core (0.16.1) fails an assertion.

    With TransformerEngine or Apex, its distributed optimizer does not fail. Delete this when megatron-core can save an
    optimizer without parameters.
    """
    megatron = settings.megatron
    if dense is None or megatron.save_format == "hf" or not megatron.use_distributed_optimizer:
        return
    if find_spec("transformer_engine") is None and find_spec("apex") is None:
        raise SettingsError(
            f"megatron.save_format: torch_dist needs experts on every pipeline stage, and stage {dense} has only dense"
            " layers. Set hf, or lower megatron.pipeline_model_parallel_size"
        )


class MegatronBackend(PolicyBackend):
    """Megatron-core, configured in [megatron]."""

    streams_adapters = True

    def check(self, settings: Settings) -> None:
        if find_spec("megatron") is None:
            raise MissingExtraError("megatron-core", extra="megatron", wanted_by='train.backend = "megatron"')
        path, card = settings.model.path, settings.model.card
        if path is not None and is_gguf(path):
            return
        from slimectl.architectures.config import read_config, with_defaults
        from slimectl.architectures.image_tokens import MODEL_TYPES
        from slimectl.architectures.lora import chosen, linear_layers
        from slimectl.architectures.registry import family_of

        config = read_config(model_folder(path)) if path is not None else with_defaults(cards.load(str(card))["config"])
        family = family_of(config)
        if family.name in MODEL_TYPES:
            raise SettingsError(
                f'train.backend: "megatron" does not train {family.name}, because it cannot read images. Use "fsdp".'
            )
        transformer = family.architecture(config).transformer
        for problem in problems(layout(settings), transformer, settings.cluster.ranks):
            raise SettingsError(problem)
        _check_save_format(settings, dense_stage(layout(settings), transformer))
        obstacle = prefix_obstacle(transformer, settings.megatron.args)
        if settings.train.share_prompt_prefix and obstacle:
            raise SettingsError(
                f"train.share_prompt_prefix: true has no effect ({obstacle}). Set it to none to share prefixes where "
                "possible."
            )
        if settings.train.lora_rank is not None:
            chosen(linear_layers(family.links(config)), settings.train.lora_targets)

    def check_training(self, settings: Settings, folder: Path, options: Mapping[str, Any]) -> None:
        from slimectl.policies.megatron.preflight import check_training

        check_training(
            folder,
            layout=layout(settings),
            args=_megatron_args(settings),
            recompute=_recompute(settings),
            distributed_optimizer=settings.megatron.use_distributed_optimizer,
            optimizer_cpu_offload=_offloads_optimizer(settings),
            routing_replay=settings.megatron.use_routing_replay,
            rollout_routing_replay=settings.train.use_rollout_routing_replay,
            **{name: options[name] for name in ("dtype", "optimizer", "freeze", "train_only", "lora")},
        )

    def packing(self, settings: Settings, folder: Path) -> Packing:
        from slimectl.architectures.config import read_config
        from slimectl.architectures.registry import family_of

        config, parallel, megatron = read_config(folder), layout(settings), settings.megatron
        transformer = family_of(config).architecture(config).transformer
        obstacle = prefix_obstacle(transformer, megatron.args)
        tokens, ranks = settings.train.max_tokens_per_gpu * parallel.context, parallel.data(settings.cluster.ranks)
        return Packing(tokens, ranks, settings.train.shares_prefixes and not obstacle)

    def build(self, settings: Settings, folder: Path, *, role: Role, store_prefix: str, **options: Any) -> Any:
        from slimectl.policies.megatron.policy import MegatronActorCritic, MegatronCritic, MegatronPolicy

        megatron = settings.megatron
        classes = {"policy": MegatronPolicy, "critic": MegatronCritic, "actor_critic": MegatronActorCritic}
        options |= {
            "layout": layout(settings),
            "distributed_optimizer": megatron.use_distributed_optimizer,
            "optimizer_cpu_offload": _offloads_optimizer(settings),
            "routing_replay": megatron.use_routing_replay,
            "user_functions": _user_functions(settings, store_prefix),
            "args": _megatron_args(settings),
            "save_format": "hf" if role == "critic" else megatron.save_format,
        }
        return _build(classes[role], settings, folder, role, options)


def _build(cls: Any, settings: Settings, folder: Path, role: Role, options: dict[str, Any]) -> Any:
    """Create the model of this rank from a trainer class, with the arguments that both trainers accept."""
    from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint

    kernels = _kernels(settings, folder)
    trainer = cls(
        folder,
        options.pop("checkpoint", None) or ModelCheckpoint(),
        recompute=_recompute(settings),
        share_prefixes=settings.train.shares_prefixes,
        rollout_routing_replay=_replays_rollouts(settings, role, options),
        **options,
    )
    trainer.kernels = kernels
    return trainer


def _megatron_args(settings: Settings) -> dict[str, Any]:
    """Return megatron.args, with Megatron-core's own option for train.deterministic."""
    return settings.megatron.args | ({"deterministic_mode": True} if settings.deterministic else {})


def _kernels(settings: Settings, folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Return the context for a trainer's computations, and prepare this process for it before the model exists."""
    from slimectl.policies.determinism import deterministic_kernels, gpu_is_used, prepare_gpu

    if not settings.deterministic:
        return nullcontext
    check_deterministic(settings, folder)
    if device(settings.train.device) == "cuda":
        prepare_gpu(used=gpu_is_used())
    return deterministic_kernels


def check_deterministic(settings: Settings, folder: Path) -> None:
    """Raise SettingsError for a model that train.deterministic cannot train on its device."""
    from slimectl.architectures.config import read_config
    from slimectl.policies.determinism import check_model

    if settings.deterministic:
        check_model(read_config(folder), device=device(settings.train.device), backend=settings.train.backend)


def _replays_rollouts(settings: Settings, role: Role, options: Mapping[str, Any]) -> bool:
    """Return whether a model replays the engine's routing. Only the policy does, not frozen models and critics."""
    return settings.train.use_rollout_routing_replay and role != "critic" and bool(options["trains"])


def _offloads_optimizer(settings: Settings) -> bool:
    return settings.megatron.optimizer_cpu_offload or settings.train.offload == "optimizer"


def _recompute(settings: Settings) -> Recompute:
    """Return what the backward pass recomputes."""
    from slimectl.policies.recompute import Recompute

    return Recompute(settings.recompute_granularity or "none", tuple(settings.recompute_modules))


def _user_functions(settings: Settings, store_prefix: str) -> UserFunctions:
    """Load the user's functions in [megatron] for one model."""
    from slimectl.policies.megatron.hooks import UserFunctions

    return UserFunctions(
        args=FlatSettings(settings),
        init=hook(settings, "megatron.custom_init_path"),
        provider=hook(settings, "megatron.custom_model_provider_path"),
        log_prob=hook(settings, "megatron.custom_before_log_prob_hook_path"),
        train_step=hook(settings, "megatron.custom_before_train_step_hook_path"),
        store_prefix=store_prefix,
    )


def policy_backend(settings: Settings) -> PolicyBackend:
    """Return the backend that train.backend selects."""
    return backend(POLICIES, settings.train.backend, PolicyBackend)


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
