"""Settings to everything that `slimectl train` sets in motion: what learns, and what is asked about samples."""

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
    """A policy, its critic, and by field of a sample the models that fill in what it lacks.

    A reward model is policy and critic in one.
    """

    policy: Any
    critic: Any
    asked: dict[Field, LogProbs] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """The policy into `path`, a critic of its own into `path`/critic."""
        self.policy.save(path)
        if self.critic is not None and self.critic is not self.policy:
            (path / "critic").mkdir()
            self.critic.save(path / "critic")

    def close(self) -> None:
        parts = [self.policy, *self.asked.values(), *([] if self.critic in (None, self.policy) else [self.critic])]
        for part in parts:
            part.close()


def learners(settings: Settings, folder: Path, *, executor: Executor) -> Learners:
    """What learns from samples, beginning as the model in `folder`."""
    check_hooks(settings, *TRAINING)
    steps, algorithm = total_steps(settings), settings.algorithm
    values = critic(settings, folder, total_steps=steps, executor=executor)
    if isinstance(algorithm, RewardModel):
        return Learners(values, values)
    made = Learners(policy(settings, folder, total_steps=steps, executor=executor), values)
    # A divergence is measured where samples were scored, unless a reference is part of the algorithm itself.
    if isinstance(algorithm, Dpo) and (asked := reference(settings, folder, executor=executor)):
        made.asked["ref_log_probs"] = asked
    distilled = isinstance(algorithm, PolicyGradient) and (algorithm.opd_teacher_load or algorithm.opd_teacher_url)
    if distilled and (asked := teacher(settings, folder, executor=executor)):
        made.asked["teacher_log_probs"] = asked
    return made
