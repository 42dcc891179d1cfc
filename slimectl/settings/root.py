"""The root of the settings: all sections, and the numbers that follow from several of them."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slimectl.plugins.registry import ENGINES
from slimectl.settings.algorithm import AlgorithmSettings
from slimectl.settings.base import Section
from slimectl.settings.cluster import ClusterSettings, SyncSettings
from slimectl.settings.engine import EngineSettings, ModelSettings, SglangSettings, VllmSettings
from slimectl.settings.evaluate import EvalSettings
from slimectl.settings.launch import LaunchSettings
from slimectl.settings.rollout import RolloutSettings
from slimectl.settings.rollout_algorithms import Grpo
from slimectl.settings.run import CustomSettings, RunSettings, SftWarmupSettings, TrackSettings
from slimectl.settings.score import ScoreSettings
from slimectl.settings.train import Granularity, MegatronSettings, RecomputeModule, TrainSettings
from slimectl.system.redaction import remember, secrets_in

SectionType = TypeVar("SectionType", bound=BaseModel)


class Settings(Section):
    """All settings of a stage or a run. Third-party parts may add sections with their own names."""

    model_config = ConfigDict(extra="allow")

    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    sglang: SglangSettings = SglangSettings()
    vllm: VllmSettings = VllmSettings()
    rollout: RolloutSettings = RolloutSettings()
    score: ScoreSettings = ScoreSettings()
    algorithm: AlgorithmSettings = Field(default=Grpo())
    train: TrainSettings = TrainSettings()
    megatron: MegatronSettings = MegatronSettings()
    eval: EvalSettings = EvalSettings()
    sft_warmup: SftWarmupSettings = SftWarmupSettings()
    sync: SyncSettings = SyncSettings()
    run: RunSettings = RunSettings()
    track: TrackSettings = TrackSettings()
    cluster: ClusterSettings = ClusterSettings()
    launch: LaunchSettings = LaunchSettings()
    custom: CustomSettings = CustomSettings()

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_sections(cls, values: Any) -> Any:
        """Reject sections that are neither slimectl's nor validated sections of third-party parts."""
        for name in values.keys() - cls.model_fields.keys() if isinstance(values, dict) else ():
            if not isinstance(values[name], BaseModel):
                raise ValueError(f"{name}: unknown section")
        return values

    def part_section(self, name: str, cls: type[SectionType]) -> SectionType:
        """Return the section of a third-party part, or its defaults if these settings have none."""
        section = (self.__pydantic_extra__ or {}).get(name)
        return section if isinstance(section, cls) else cls()

    def model_post_init(self, _: Any) -> None:
        """Register the secrets of these settings, so that messages of this process mask them."""
        for secret in secrets_in(self.model_dump()):
            remember(secret)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Register the secrets in a worker process too, which unpickles the settings."""
        super().__setstate__(state)
        self.model_post_init(None)

    @property
    def has_agent(self) -> bool:
        """Whether an agent makes the attempts. It may also reward them."""
        rollout = self.rollout
        return bool(rollout.env or rollout.agent or rollout.custom_generate_function_path)

    @property
    def names_verifier(self) -> bool:
        """Whether [score] sets a reward, which then overrides the reward of an agent."""
        return bool(self.score.rm_type or self.score.rm or self.score.custom_rm_path)

    @property
    def num_engines(self) -> int:
        """Number of engines to start."""
        if self.sglang.server_groups:
            return sum(int(group.get("num_engines", 1)) for group in self.sglang.server_groups)
        gpus, gpus_per_engine = self.cluster.rollout_num_gpus, self.cluster.rollout_num_gpus_per_engine
        return self.engine.num_engines if gpus is None else gpus // gpus_per_engine

    @property
    def engine_gpus(self) -> tuple[int, ...]:
        """GPUs of each engine to start (on a CPU: processes)."""
        size = self.cluster.rollout_num_gpus_per_engine
        if not (groups := self.sglang.server_groups):
            return (size,) * self.num_engines
        counts = [(int(group.get("num_engines", 1)), int(group.get("num_gpus_per_engine", size))) for group in groups]
        return tuple(gpus for engines, gpus in counts for _ in range(engines))

    @property
    def rollout_gpus(self) -> int:
        """Total GPUs of all engines (on a CPU: engines). Running servers count as one per address."""
        if self.cluster.rollout_num_gpus is not None:
            return self.cluster.rollout_num_gpus
        return max(len(self.engine.url) * self.cluster.rollout_num_gpus_per_engine, sum(self.engine_gpus))

    @property
    def uses_servers(self) -> bool:
        """Whether engines are HTTP servers, rather than in the process of their caller."""
        in_process = ENGINES.fact(self.engine.backend, "in_process", False)
        return not in_process or bool(self.engine.url) or self.num_engines > 1

    @property
    def stage_uses_servers(self) -> bool:
        """Whether engines of a stage outside a run are servers. On a cluster they always are."""
        return self.uses_servers or self.cluster.executor != "local"

    @property
    def deterministic(self) -> bool:
        """Whether the trainer uses deterministic kernels, set by either of its keys."""
        is_mode = self.train.backend == "megatron" and bool(self.megatron.args.get("deterministic_mode"))
        return self.train.deterministic or is_mode

    @property
    def recompute_granularity(self) -> Granularity | None:
        """What the backward pass recomputes, set by any of its three keys."""
        if self.train.gradient_checkpointing:
            return "full"
        return self.megatron.recompute_granularity or self.train.recompute_granularity

    @property
    def recompute_modules(self) -> list[RecomputeModule]:
        """Modules of selective recomputation."""
        section = self.megatron if self.megatron.recompute_granularity == "selective" else self.train
        return section.recompute_modules

    @property
    def policy_temperature(self) -> float:
        """Temperature of the policy's log-probabilities: rollout.temperature, or 1 for data that was not sampled."""
        return self.rollout.temperature if self.algorithm.trains_on == "rollouts" else 1.0

    @property
    def rollouts_per_round(self) -> int:
        """Number of attempts per round. Demonstrations (sft) count one per prompt, and preferences (dpo) one pair."""
        if self.algorithm.trains_on != "rollouts":
            return self.train.global_batch_size or self.run.rollout_batch_size
        return self.run.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def rollouts_per_step(self) -> int:
        """Number of attempts per optimizer step."""
        if self.train.global_batch_size is not None:
            return self.train.global_batch_size
        return self.rollouts_per_round // (self.train.num_steps_per_rollout or 1)

    @property
    def one_step_per_round(self) -> bool:
        """Whether all remaining rollouts of a round make one step."""
        return self.train.global_batch_size is None and self.train.num_steps_per_rollout is None

    @property
    def epochs_per_round(self) -> int:
        """Passes over the rollouts of a round. Demonstrations are passed over once, also in the warm-up."""
        return self.train.ppo_epochs if self.algorithm.trains_on == "rollouts" else 1

    def steps_of(self, rollouts: int) -> int:
        """Return the number of optimizer steps for all rollouts of a run. The last step may be smaller.

        Steps may span rounds, so `rollouts` counts all rounds together.
        """
        return -(-rollouts // self.rollouts_per_step) * self.epochs_per_round
