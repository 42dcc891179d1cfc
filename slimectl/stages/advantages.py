"""Second and third pass over a round: computes the models' outputs before its updates, then the advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slimectl.algorithms.estimators import TrainingBatch, estimate_advantages
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.protocols import Critic, LogProbModel, Policy
from slimectl.settings import Settings
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.stages.finite_check import Outputs
from slimectl.stages.hooks import Hooks
from slimectl.stages.round_timer import RoundTimer
from slimectl.stages.score import reward_number, score_rows
from slimectl.stages.teachers import AlignedTeacher
from slimectl.types import Metrics, Prompt, Sample, TrainingSample


@dataclass(frozen=True)
class Models:
    """The models that a step updates (the policy, and the critic if there is one) and the timer of their passes.

    `frozen` has the models that only score responses, by their names in scoring passes.
    """

    policy: Policy
    critic: Critic | None = None
    frozen: Mapping[str, LogProbModel | AlignedTeacher] = field(default_factory=dict)
    timer: RoundTimer = field(default_factory=RoundTimer)
    updates_reference: bool = False
    """Whether the reference may have changed since samples were scored, so that it scores them again."""
    render: Callable[[Prompt], list[int]] | None = None
    """Returns the tokens of a prompt, for passes that score responses on another prompt."""

    def outputs(self, algorithm: AlgorithmSection) -> Outputs:
        """Return the method that computes the output trained by the algorithm, for every token of rows."""
        if algorithm.trained_output == "log_probs" or self.critic is None:
            return self.policy.log_probs
        return self.critic.values


def attach_scores(samples: Sequence[Sample], models: Models, settings: Settings) -> None:
    """Attach the log-probabilities of the algorithm's scoring passes, if their models are there."""
    for scoring in ALGORITHMS[settings.algorithm.name].scoring(settings):
        model = models.policy if scoring.model == "policy" else models.frozen.get(scoring.model)
        if model is not None:
            recompute = models.updates_reference and scoring.model == "reference"
            with models.timer.time(f"perf/{scoring.field.replace('_top', '')}_time", of=model):
                score_rows(
                    samples,
                    model,
                    scoring,
                    recompute=recompute,
                    temperature=settings.policy_temperature,
                    render=models.render,
                )


def attach_model_outputs(
    rows: Sequence[TrainingSample], models: Models, algorithm: AlgorithmSection, hooks: Hooks, *, several_steps: bool
) -> None:
    """Set `TrainingSample.old_log_probs` and `.values` if they are needed. Existing values are kept.

    If a round is one step, the policy does not change before the loss. The loss then uses its own detached
    log-probabilities as the old ones, which saves a forward pass, unless an advantage or a hook reads them.
    """
    if algorithm.trains_on != "rollouts":
        return
    hooks_read = hooks.advantages is not None or hooks.post_process_rows is not None
    lacking = [row for row in rows if row.old_log_probs is None]
    if lacking and (several_steps or hooks_read or Need.OLD_LOG_PROBS in algorithm.needs):
        with models.timer.time("perf/log_probs_time", of=models.policy):
            log_probs_by_row = models.policy.log_probs(lacking)
        models.timer.count_log_probs(lacking)
        for row, log_probs in zip(lacking, log_probs_by_row, strict=True):
            row.old_log_probs = log_probs
    unjudged = [row for row in rows if row.values is None]
    if unjudged and Need.CRITIC in algorithm.needs:
        assert models.critic is not None
        with models.timer.time("perf/values_time", of=models.critic):
            values_by_row = models.critic.values(unjudged)
        for row, values in zip(unjudged, values_by_row, strict=True):
            row.values = values


def set_advantages(batch: TrainingBatch, settings: Settings, hooks: Hooks, rollout_id: int) -> Metrics:
    """Set advantages (and returns, with a critic) by the algorithm or the user's function. Return their metrics.

    Rows must have the log-probabilities and values that the algorithm needs.
    """
    algorithm = settings.algorithm
    estimator = ALGORITHMS[algorithm.name].advantages
    if estimator is None:
        return {}
    metrics: Metrics = {}
    if hooks.advantages is not None:
        hooks.advantages(batch.rows, batch.row_samples, [batch.rewards[i] for i in batch.positions])
    elif batch.rows:
        advantages, metrics = estimate_advantages(batch, algorithm, estimator)
        for row, advantages_T in zip(batch.rows, advantages, strict=True):
            row.advantages = advantages_T.tolist()
    if hooks.post_process_rows is not None:
        rewards = [reward_number(sample, settings.score.reward_key) for sample in batch.row_samples]
        hooks.post_process_rows(batch.rows, batch.row_samples, rewards, rollout_id)
    return metrics
