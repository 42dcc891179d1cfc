"""One round of samples, every algorithm that learns from it, and what holds a policy and a critic.

Importable by name, so that the processes of a group find it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slimectl.architectures.parallel import ParallelLayout
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import MegatronOptions, TrainerOptions
from slimectl.settings import Settings
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.stages.advantages import Models
from slimectl.stages.train import train
from slimectl.types import Loss, Metrics, Sample, Status, TrainingSample

STILL = OptimizerOptions(lr=0.0, weight_decay=0.0)
"""Steps that report everything and move nothing: one policy serves all cases."""

MOVED = {"use_rollout_logprobs": True}
"""The engine's log-probabilities are the old ones, so that ratios are not 1."""

MIS = {"tis_level": "sequence", "tis_mode": "mask", "tis_clip": 5.0, "tis_veto": 1e-4, "tis_batch_normalize": True}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"name": name, **(MOVED if issubclass(cls, PolicyGradient) else {})} for name, cls in ALGORITHMS.items()},
    "gdpo": {"name": "gdpo", "gdpo_weights": {"right": 1.0, "brief": 0.5}, **MOVED},
    "tis": {"name": "dapo", "use_tis": True},
    "icepop": {"name": "grpo", "use_tis": True, "tis_mode": "mask", "tis_clip_low": 0.5, "tis_clip": 1.5},
    "mis": {"name": "grpo", "use_tis": True, **MIS, "use_rs": True, "rs_clip_low": 0.8, "rs_clip": 1.2},
    "fixed length": {"name": "grpo", "fixed_length": 10, **MOVED},
    "per token": {"name": "grpo", "calculate_per_token_loss": True, **MOVED},
    "divergence in the loss": {"name": "grpo", "kl_loss_coef": 0.1, "use_unbiased_kl": True, **MOVED},
    "divergence in the reward": {"name": "reinforce_plus_plus", "kl_coef": 0.1, "gamma": 0.9},
    "entropy and off-policy masks": {"name": "grpo", "entropy_coef": 0.01, "use_opsm": True, **MOVED},
    "dual clip": {"name": "grpo", "eps_clip_c": 1.5, "normalize_advantages": True, **MOVED},
    "distillation beside rewards": {"name": "rloo", "opd_kl_coef": 0.5},
    "shared critic": {"name": "ppo", "critic": "shared", **MOVED},
    "all pairs": {"name": "dpo", "pairs": "all", "label_smoothing": 0.1},
}


class Holder(Protocol):
    """Where a policy and a critic are."""

    def call(self, who: str, method: str, *arguments: Any) -> Any: ...


class Learner:
    """Both in one process, or in one rank of many, and a policy that is its own critic where there is such a thing."""

    def __init__(self, policy: Any, critic: Any, both: Any = None) -> None:
        self.policy, self.critic, self.both = policy, critic, both

    def call(self, who: str, method: str, *arguments: Any) -> Any:
        return getattr(getattr(self, who), method)(*arguments)

    def arrange(self, options: dict[str, Any]) -> None:
        for learns in filter(None, (self.policy, self.critic, self.both)):
            learns.options = replace(learns.options, **options)


def fsdp(folder: Path) -> Learner:
    kinds = (FsdpPolicy, FsdpCritic, FsdpActorCritic)
    return Learner(*(kind(folder, HFCheckpoint(), TrainerOptions(optimizer=STILL)) for kind in kinds))


def megatron(folder: Path, layout: ParallelLayout) -> Learner:
    from slimectl.policies.megatron.policy import MegatronCritic, MegatronPolicy

    kinds = (MegatronPolicy, MegatronCritic)
    options = TrainerOptions(optimizer=STILL), MegatronOptions(layout=layout)
    return Learner(*(kind(folder, HFCheckpoint(), *options) for kind in kinds))


class Member:
    """One of them, as training sees it."""

    weight_version = "0"

    def __init__(self, holder: Holder, who: str) -> None:
        self.holder, self.who = holder, who

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.holder.call(self.who, "log_probs", rows)

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.holder.call(self.who, "values", rows)

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        return self.holder.call(self.who, "forward_backward", rows, loss)

    def optim_step(self) -> Metrics:
        return self.holder.call(self.who, "optim_step")


def attempts(log_probs: Any, seed: int = 0) -> list[Sample]:
    """Five groups of four answers of 1 to 12 tokens, one group of equal rewards, one execution of two samples.

    Each answer is two turns with rewards, and its reward has two components. Some tokens are masked, one sample whole.
    `log_probs` are the policy's. Those of the engine, a reference and a teacher differ from them by a little.
    """
    draw = random.Random(seed)
    samples = []
    for group in range(5):
        prompt = [draw.randrange(256) for _ in range(draw.randint(2, 12))]
        for i in range(4):
            length = draw.randint(1, 12)
            mask = [1, *(int(draw.random() < 0.8) for _ in range(length - 1))]
            tokens = prompt + [draw.randrange(256) for _ in range(length)]
            reward = 1.0 if group == 3 else draw.random()
            middle = length // 2
            turns = [
                {"reward": reward * i, "start": 0, "end": middle, "turn": 0, "state": "start"},
                {"reward": 0.5 - reward, "start": middle, "end": length, "turn": 1, "state": str(i % 2)},
            ]
            parts = {"score": reward, "right": float(reward > 0.5), "brief": -float(length)}
            samples.append(
                Sample(group, 4 * group + i, tokens=tokens, response_length=length, reward=parts, loss_mask=mask,
                       status=Status.COMPLETED, turn_rewards=turns)
            )  # fmt: skip
    samples[5].rollout_id = samples[6].rollout_id = samples[5].index
    samples[9].remove_sample = True
    rows = [
        TrainingSample(s.tokens, s.response_length, [0.0] * s.response_length, group=s.group_index) for s in samples
    ]
    for sample, own in zip(samples, log_probs(rows), strict=True):
        for name, width in (("rollout_log_probs", 0.4), ("ref_log_probs", 0.3), ("teacher_log_probs", 1.0)):
            setattr(sample, name, [value + draw.gauss(0, width) for value in own])
    return samples


def shuffled(samples: list[Sample], seed: int = 1) -> list[Sample]:
    """Groups in another order, and in each of them the executions."""
    draw = random.Random(seed)
    groups: dict[int, dict[int, list[Sample]]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, {}).setdefault(sample.trajectory_id, []).append(sample)
    made = []
    for group in draw.sample(list(groups), len(groups)):
        executions = list(groups[group].values())
        made += [sample for execution in draw.sample(executions, len(executions)) for sample in execution]
    return made


def step(holder: Holder, samples: list[Sample], case: str) -> Metrics:
    """What one step over the whole round reports."""
    sizes = {"run": {"rollout_batch_size": 20 if case == "sft" else 5}, "rollout": {"n_samples_per_prompt": 4}}
    settings = Settings.model_validate({"algorithm": CASES[case], **sizes})
    learns = {"reward_model": "critic", "shared critic": "both"}.get(case, "policy")
    policy: Any = Member(holder, learns)
    critic: Any = Member(holder, "critic")
    [report] = train(samples, Models(policy, critic), settings)
    return report.metrics
