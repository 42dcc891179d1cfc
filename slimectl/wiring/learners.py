"""Builds the models of `slimectl train`: those that are trained, and those that only score samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimectl.hooks import TRAINING, check_hooks
from slimectl.settings import Settings
from slimectl.settings.algorithm import Dpo, PolicyGradient, RewardModel
from slimectl.wiring.policies import critic, policy, total_steps
from slimectl.wiring.references import reference, teacher

if TYPE_CHECKING:
    from slimectl.ports import Executor, LogProbs

Field = Literal["ref_log_probs", "teacher_log_probs"]


@dataclass
class Learners:
    """Policy, critic, and the models that fill in missing fields of a sample, by field.

    A reward model is policy and critic in one.
    """

    policy: Any
    critic: Any
    asked: dict[Field, LogProbs] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Save the policy into `path`, a separate critic into `path`/critic."""
        self.policy.save(path)
        if self.critic is not None and self.critic is not self.policy:
            (path / "critic").mkdir()
            self.critic.save(path / "critic")

    def close(self) -> None:
        parts = [self.policy, *self.asked.values(), *([] if self.critic in (None, self.policy) else [self.critic])]
        for part in parts:
            part.close()


def learners(settings: Settings, folder: Path, *, executor: Executor) -> Learners:
    """Build the models that train on samples, initialized from the model in `folder`."""
    check_hooks(settings, *TRAINING)
    steps, algorithm = total_steps(settings), settings.algorithm
    values = critic(settings, folder, total_steps=steps, executor=executor)
    if isinstance(algorithm, RewardModel):
        return Learners(values, values)
    models = Learners(policy(settings, folder, total_steps=steps, executor=executor), values)
    # The KL divergence is measured where samples were scored, unless a reference is part of the algorithm itself.
    if isinstance(algorithm, Dpo) and (ref_model := reference(settings, folder, executor=executor)):
        models.asked["ref_log_probs"] = ref_model
    distilled = isinstance(algorithm, PolicyGradient) and (algorithm.opd_teacher_load or algorithm.opd_teacher_url)
    if distilled and (teacher_model := teacher(settings, folder, executor=executor)):
        models.asked["teacher_log_probs"] = teacher_model
    return models
