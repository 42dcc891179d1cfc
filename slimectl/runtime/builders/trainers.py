"""Training backends by the name in train.backend. Each builds the model of one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from slimectl.architectures import cards
from slimectl.architectures.config import read_config, with_defaults
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.architectures.parallel import ParallelLayout, dense_stage, prefix_obstacle, problems
from slimectl.architectures.registry import family_of
from slimectl.errors import MissingExtraError, SettingsError
from slimectl.hooks import FlatSettings, hook
from slimectl.plugins.registry import POLICIES
from slimectl.runtime.builders.backends import backend
from slimectl.runtime.builders.models import is_gguf, model_folder
from slimectl.settings import Settings
from slimectl.settings.train import MegatronSettings, TrainSettings

if TYPE_CHECKING:
    from slimectl.policies.fsdp.trainer import FsdpTrainer
    from slimectl.policies.megatron.trainer import MegatronTrainer
    from slimectl.policies.options import MegatronOptions, TrainerOptions
    from slimectl.protocols import CheckpointFormat

Role = Literal["policy", "critic", "actor_critic", "reference", "teacher"]
"""Role of a model: a policy, a separate critic, a policy that is its own critic, or a frozen policy."""
STORE_PREFIXES: dict[Role, str] = {"reference": "ref_", "teacher": "teacher_"}
"""Names of frozen models for the user's functions of [megatron]. The policy's is empty."""


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

    holds_teachers: ClassVar[bool] = False
    """Whether its policies have a method `set_teacher`, for distillation over the full vocabulary."""

    measures_packs: ClassVar[bool] = False
    """Whether its policies implement PackProber of slimectl/protocols.py."""

    def check(self, settings: Settings) -> None:
        """Check that it is installed and supports the model, before anything is built.

        Raises MissingExtraError, SettingsError, BackendError or CheckpointError.
        """

    def check_training(self, settings: Settings, folder: Path, options: TrainerOptions) -> str | None:
        """Check the options against the model in a folder, reading only its config.json.

        `options` are the same as for `build`. Returns how the model is computed, if there are several ways. Raises
        SettingsError or CheckpointError.
        """
        return None

    def packing(self, settings: Settings, folder: Path) -> Packing | None:
        """Return how the trainer of a model directory packs rows, for perf metrics, or None if unknown."""
        return None

    def build(
        self, settings: Settings, folder: Path, role: Role, options: TrainerOptions, checkpoint: CheckpointFormat
    ) -> Any:
        """Create the model of this rank, a Policy or a Critic, from a model directory.

        `options` are the settings of [train] and more (see slimectl/policies/options.py). `checkpoint` reads and writes
        weights.
        """
        raise NotImplementedError


class FsdpBackend(PolicyBackend):
    """The Hugging Face module, in one process or sharded by FSDP2."""

    streams_adapters = holds_teachers = measures_packs = True

    def check_training(self, settings: Settings, folder: Path, options: TrainerOptions) -> str:
        from slimectl.policies.fsdp.padded_model import path_of
        from slimectl.policies.fsdp.trainer import check_training

        return path_of(check_training(folder, options))

    def packing(self, settings: Settings, folder: Path) -> Packing:
        train = settings.train
        return Packing(train.pack_tokens, settings.cluster.ranks, train.shares_prefixes)

    def build(
        self, settings: Settings, folder: Path, role: Role, options: TrainerOptions, checkpoint: CheckpointFormat
    ) -> Any:
        from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy

        trainers: dict[Role, type[FsdpTrainer]] = {"critic": FsdpCritic, "actor_critic": FsdpActorCritic}
        return trainers.get(role, FsdpPolicy)(folder, checkpoint, options)


def fsdp_path(config: Mapping[str, Any]) -> str:
    """Return how fsdp computes the model of a complete configuration. Raises CheckpointError."""
    from slimectl.policies.fsdp.build import empty_model
    from slimectl.policies.fsdp.padded_model import path_of

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        return path_of(empty_model(Path(folder)))


def _check_save_format(megatron: MegatronSettings, dense: int | None) -> None:
    """Reject torch_dist if pipeline stage `dense` has no experts, because megatron-core (0.16.1) fails an assertion.

    With TransformerEngine or Apex, its distributed optimizer does not fail. Delete this when megatron-core can save an
    optimizer without parameters.
    """
    if dense is None or megatron.save_format == "hf" or not megatron.use_distributed_optimizer:
        return
    if find_spec("transformer_engine") is None and find_spec("apex") is None:
        raise SettingsError(
            f"megatron.save_format: torch_dist needs experts on every pipeline stage, and stage {dense} has only dense"
            " layers. Set hf, or lower megatron.pipeline_model_parallel_size"
        )


class MegatronBackend(PolicyBackend):
    """Megatron-core, configured in [megatron]."""

    streams_adapters = holds_teachers = measures_packs = True

    def check(self, settings: Settings) -> None:
        if find_spec("megatron") is None:
            raise MissingExtraError("megatron-core", extra="megatron", wanted_by='train.backend = "megatron"')
        path, card = settings.model.path, settings.model.card
        if path is not None and is_gguf(path):
            return
        from slimectl.architectures.lora import chosen, linear_layers

        config = read_config(model_folder(path)) if path is not None else with_defaults(cards.load(str(card))["config"])
        family = family_of(config)
        if family.name in MODEL_TYPES:
            raise SettingsError(
                f'train.backend: "megatron" does not train {family.name}, because it cannot read images. Use "fsdp".'
            )
        transformer = family.architecture(config).transformer
        parallel = layout(settings.megatron)
        for problem in problems(parallel, transformer, settings.cluster.ranks):
            raise SettingsError(problem)
        _check_save_format(settings.megatron, dense_stage(parallel, transformer))
        obstacle = prefix_obstacle(transformer, settings.megatron.args)
        if settings.train.share_prompt_prefix and obstacle:
            raise SettingsError(
                f"train.share_prompt_prefix: true has no effect ({obstacle}). Set it to none to share prefixes where "
                "possible."
            )
        if settings.train.lora_rank is not None:
            chosen(linear_layers(family.links(config)), settings.train.lora_targets)

    def check_training(self, settings: Settings, folder: Path, options: TrainerOptions) -> None:
        from slimectl.policies.megatron.preflight import check_training

        check_training(folder, options, _megatron_options(settings.megatron, options))

    def packing(self, settings: Settings, folder: Path) -> Packing:
        config, parallel = read_config(folder), layout(settings.megatron)
        transformer = family_of(config).architecture(config).transformer
        obstacle = prefix_obstacle(transformer, settings.megatron.args)
        tokens, ranks = settings.train.pack_tokens * parallel.context, parallel.data(settings.cluster.ranks)
        return Packing(tokens, ranks, settings.train.shares_prefixes and not obstacle)

    def build(
        self, settings: Settings, folder: Path, role: Role, options: TrainerOptions, checkpoint: CheckpointFormat
    ) -> Any:
        from slimectl.policies.megatron.hooks import UserFunctions
        from slimectl.policies.megatron.policy import MegatronActorCritic, MegatronCritic, MegatronPolicy

        functions = UserFunctions(
            args=FlatSettings(settings),
            init=hook(settings, "megatron.custom_init_path"),
            provider=hook(settings, "megatron.custom_model_provider_path"),
            log_prob=hook(settings, "megatron.custom_before_log_prob_hook_path"),
            train_step=hook(settings, "megatron.custom_before_train_step_hook_path"),
            store_prefix=STORE_PREFIXES.get(role, ""),
        )
        megatron = _megatron_options(settings.megatron, options)
        if role == "critic":
            megatron = replace(megatron, save_format="hf")
        trainers: dict[Role, type[MegatronTrainer]] = {"critic": MegatronCritic, "actor_critic": MegatronActorCritic}
        return trainers.get(role, MegatronPolicy)(folder, checkpoint, options, megatron, functions)


def _megatron_options(megatron: MegatronSettings, options: TrainerOptions) -> MegatronOptions:
    """Return the options of [megatron] for a model."""
    from slimectl.policies.options import MegatronOptions

    return MegatronOptions(
        layout=layout(megatron),
        args=megatron.args | ({"deterministic_mode": True} if options.deterministic else {}),
        distributed_optimizer=megatron.use_distributed_optimizer,
        optimizer_cpu_offload=megatron.optimizer_cpu_offload or options.offload == "optimizer",
        routing_replay=megatron.use_routing_replay,
        save_format=megatron.save_format,
    )


def policy_backend(train: TrainSettings) -> PolicyBackend:
    """Return the backend that train.backend selects."""
    return backend(POLICIES, train.backend, PolicyBackend)


def layout(megatron: MegatronSettings) -> ParallelLayout:
    """Return the parallel layout that [megatron] specifies."""
    return ParallelLayout(
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size,
    )
