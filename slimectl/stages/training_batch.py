"""First pass over a round: drops samples that carry no signal, and turns the others into rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slimectl.algorithms.baselines import attempt_rewards, decoupled_advantages, has_signal, normalize_rewards
from slimectl.algorithms.estimators import TrainingBatch
from slimectl.algorithms.metrics import zero_std_groups
from slimectl.algorithms.normalization import RewardMoments, clamped, share_beyond
from slimectl.data.images import images_of
from slimectl.data.routed_experts import Routing, routed_tokens
from slimectl.data.turn_rewards import rewarded_turns
from slimectl.errors import RecordError
from slimectl.settings import Settings
from slimectl.settings.algorithm import Sft
from slimectl.settings.needs import Need
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.settings.score import ScoreSettings
from slimectl.stages.filters import mask_samples
from slimectl.stages.hooks import Hooks
from slimectl.stages.preferences import build_preference_batch
from slimectl.stages.score import component_columns, component_weights, reward_number
from slimectl.stages.teachers import attach_teacher
from slimectl.types import Metrics, Sample, Status, TrainingSample

COLUMNS = {
    Need.REFERENCE: ("ref_log_probs", "Add --reference DIR to `slimectl score`"),
    Need.ROLLOUT_LOG_PROBS: ("rollout_log_probs", "Sample with `slimectl rollout`, which records them"),
}
"""Field of a sample, and the remedy if it is missing, by need."""


def build_training_batch(
    samples: list[Sample], settings: Settings, hooks: Hooks, *, version: int, moments: RewardMoments | None = None
) -> tuple[TrainingBatch, Metrics]:
    """Return the rows of a round without advantages, and counts of dropped samples and groups.

    Failed samples, samples without a reward, and samples staler than run.max_staleness at weight version `version` are
    dropped. Hooks are used for policy gradients only. The rewards of the round are added to `moments`, which has those
    of all earlier rounds, if the algorithm normalizes by them. Raises RecordError if a sample lacks a field that the
    algorithm needs.
    """
    algorithm, rewards = settings.algorithm, None
    unrewarded = [s for s in samples if s.has_no_reward] if Need.REWARDS in algorithm.needs else []
    samples = [sample for sample in samples if not sample.has_no_reward] if unrewarded else samples
    count = len(samples)
    if algorithm.trains_on == "rollouts":
        if hooks.filter_samples is not None:
            hooks.filter_samples(samples)
        samples = samples if hooks.convert is None else hooks.convert(samples)
        rewards = None if hooks.post_process_rewards is None else hooks.post_process_rewards(samples)
    answered = [i for i, sample in enumerate(samples) if sample.status is not Status.FAILED]
    ages = [_age(sample, version) for sample in samples]
    fresh, metrics = _select_fresh(answered, ages, settings.run.max_staleness)
    if unrewarded:
        metrics["rollout/dynamic_filter/drop_no_reward"] = float(len(unrewarded))
    if Need.GROUPS in algorithm.needs:
        _require_groups(algorithm.name, [(s.group_index, s.trajectory_id) for s in (*samples, *unrewarded)])
    build, shaped = BUILDERS[algorithm.trains_on], None if rewards is None else [rewards[1][i] for i in fresh]
    require_temperature([samples[i] for i in fresh], settings)
    batch, drops = build([samples[i] for i in fresh], algorithm, settings.score, shaped, moments)
    if isinstance(algorithm, PolicyGradient):
        drops |= mask_samples(batch, algorithm, settings.eval.success_threshold)
    if isinstance(algorithm, PolicyGradient) and algorithm.teacher_options is not None:
        for row, sample in zip(batch.rows, batch.row_samples, strict=True):
            attach_teacher(row, sample, algorithm, domain_key=settings.rollout.domain_key)
    if settings.train.use_rollout_routing_replay:
        for row, position in zip(batch.rows, batch.positions, strict=True):
            row.routed_experts = _routing(samples[fresh[position]])
    if rewards is not None and len(samples) == count:
        batch.reported_rewards = rewards[0]
    return batch, metrics | drops


def require_temperature(samples: Sequence[Sample], settings: Settings) -> None:
    """Check that log-probabilities of the samples are at the temperature of the policy.

    Samples without a temperature, from other programs, are accepted. Raises RecordError.
    """
    algorithm, expected = settings.algorithm, settings.policy_temperature
    names_key = algorithm.trains_on == "rollouts"
    for sample in samples:
        require_sampling_temperature(sample, settings)
        if Need.REFERENCE in algorithm.needs and sample.ref_temperature not in (None, expected):
            key = "rollout.temperature is" if names_key else f"{algorithm.name} uses them at"
            setting = f"rollout.temperature={expected:g}" if names_key else f"algorithm.name={algorithm.name}"
            raise RecordError(
                f"sample {sample.index}: ref_log_probs are at temperature {sample.ref_temperature:g}, but {key} "
                f"{expected:g}. Run `slimectl score --reference` with -s {setting}"
            )


def require_sampling_temperature(sample: Sample, settings: Settings) -> Sample:
    """Return a sample if it was sampled at the temperature at which its log-probabilities are computed.

    Otherwise, raises RecordError. Demonstrations, preferences and responses of other programs have no temperature.
    """
    expected, sampled = settings.policy_temperature, sample.rollout_temperature
    if settings.algorithm.trains_on == "rollouts" and sampled is not None and sampled != expected:
        raise RecordError(
            f"sample {sample.index}: was sampled at temperature {sampled:g}, but rollout.temperature is {expected:g}. "
            f"Add -s rollout.temperature={sampled:g}"
        )
    return sample


def build_sft_batch(
    samples: Sequence[Sample],
    algorithm: Sft,
    score: ScoreSettings,
    shaped: Sequence[float] | None = None,
    moments: RewardMoments | None = None,
) -> tuple[TrainingBatch, Metrics]:
    """Return a row for every demonstration."""
    return TrainingBatch([_row(sample) for sample in samples], [sample.trajectory_id for sample in samples]), {}


def build_policy_batch(
    samples: Sequence[Sample],
    algorithm: PolicyGradient,
    score: ScoreSettings,
    shaped: Sequence[float] | None = None,
    moments: RewardMoments | None = None,
) -> tuple[TrainingBatch, Metrics]:
    """Return rows for the samples whose group carries signal, and counts of groups without it.

    `shaped` has a reward per sample from a user's function. A missing reward is 0 if the algorithm needs no rewards.
    """
    rewards, groups = list[float](), dict[int, list[int]]()
    for i, sample in enumerate(samples):
        if sample.reward is None and Need.REWARDS in algorithm.needs:
            raise RecordError(f"sample {sample.index}: no reward. Run `slimectl score` on these samples first")
        rewards.append(0.0 if sample.reward is None else reward_number(sample, score.reward_key))
        groups.setdefault(sample.group_index, []).append(i)
    metrics: Metrics = {}
    if Need.REWARDS in algorithm.needs:
        metrics = zero_std_groups([[rewards[i] for i in members] for members in groups.values()])
    batch = TrainingBatch(
        [],
        [],
        samples=list(samples),
        rewards=rewards if shaped is None else list(shaped),
        compared=shaped is not None,
        moments=moments or RewardMoments(),
    )
    if Need.TURN_REWARDS in algorithm.needs:
        batch.turns = rewarded_turns(samples, algorithm.name)
    batch.normalized_rewards = batch.rewards
    if Need.COMPONENTS in algorithm.needs and not batch.compared:
        weights = component_weights(algorithm, score)
        batch.components = component_columns(samples, weights)
        attempts = [sample.group_index for sample in samples], [sample.trajectory_id for sample in samples]
        batch.normalized_rewards = decoupled_advantages(batch.components, weights, *attempts)
    elif not batch.compared:
        if "running" in (algorithm.norm_kinds or ()):
            batch.moments.add(list(attempt_rewards(samples, rewards).values()))
        batch.normalized_rewards = normalize_rewards(samples, rewards, algorithm, batch.moments)
    if (bound := algorithm.reward_clip) is not None:
        metrics["rollout/reward_clip_frac"] = share_beyond(batch.normalized_rewards, bound)
        batch.normalized_rewards = clamped(batch.normalized_rewards, bound)
    if algorithm.drop_zero_std_groups:
        groups, drops = _drop_without_signal(groups, list(batch.components.values()) or [rewards])
        metrics |= drops
    for i, sample in enumerate(samples):
        if sample.group_index in groups:
            _require_columns(sample, algorithm)
            row = _row(sample)
            row.reward = rewards[i]
            row.old_log_probs = row.rollout_log_probs if algorithm.use_rollout_logprobs else None
            batch.rows.append(row)
            batch.executions.append(sample.trajectory_id)
            batch.positions.append(i)
    return batch, metrics


BUILDERS: dict[str, Callable[..., tuple[TrainingBatch, Metrics]]] = {
    "rollouts": build_policy_batch,
    "demonstrations": build_sft_batch,
    "preferences": build_preference_batch,
}
"""Builders of a batch, by what an algorithm trains on."""


def _select_fresh(
    answered: Sequence[int], ages: Sequence[int | None], max_staleness: int | None
) -> tuple[Sequence[int], Metrics]:
    """Return the positions in `answered` that are not too stale, and metrics of the age of all samples."""
    metrics: Metrics = {}
    if known_ages := [age for age in ages if age is not None]:
        metrics["rollout/staleness/mean"] = sum(known_ages) / len(known_ages)
        metrics["rollout/staleness/max"] = float(max(known_ages))
    if max_staleness is None:
        return answered, metrics
    fresh = [i for i in answered if (ages[i] or 0) <= max_staleness]
    if len(fresh) < len(answered):
        metrics["rollout/dynamic_filter/drop_stale"] = float(len(answered) - len(fresh))
    return fresh, metrics


def _age(sample: Sample, version: int) -> int | None:
    """Return the number of weight versions since a sample's oldest token, or None for samples of other programs."""
    versions = sample.weight_versions
    if not versions or not all(text.isdecimal() for text in versions):
        return None
    # A policy that starts from a trained checkpoint counts from 0 again, but the age of its samples is not negative.
    return max(0, version - min(map(int, versions)))


def _require_groups(name: str, attempts: Sequence[tuple[int, int]]) -> None:
    """Raise RecordError if every group has only one response, so that comparing within groups gives no signal.

    `attempts` has (group, execution) of each sample.
    """
    groups = [group for group, _ in dict.fromkeys(attempts)]
    if len(groups) == len(set(groups)):
        raise RecordError(
            f"group {next(iter(groups))}: only one response, but {name} compares the responses to a prompt. "
            f"Sample several (rollout.n_samples_per_prompt)"
        )


def _require_columns(sample: Sample, algorithm: PolicyGradient) -> None:
    """Raise RecordError if a sample lacks log-probabilities that a setting needs."""
    for setting, need in algorithm.needs_by_setting.items():
        if need in (Need.TEACHER, Need.TEACHER_TOP):
            continue  # attach_teacher reads them
        name, remedy = COLUMNS[need]
        if getattr(sample, name) is None:
            raise RecordError(f"sample {sample.index}: no {name}, which {setting} needs. {remedy}")


def _routing(sample: Sample) -> Routing:
    """Return the experts of a sample's tokens. Raises RecordError if they are missing before the last trained token.

    Tokens after the last trained one, such as a tool's, may have none, because they do not change the gradient.
    """
    trained = [place for place, bit in enumerate(sample.mask(), sample.prompt_length) if bit]
    count, needed = routed_tokens(sample.rollout_routed_experts), max(trained, default=0)
    if sample.rollout_routed_experts is None or count < needed:
        raise RecordError(
            f"sample {sample.index}: rollout_routed_experts has {count or 'none'} of the {needed} tokens before the "
            f"last trained one, which train.use_rollout_routing_replay needs. Sample with `slimectl rollout -s "
            f"train.use_rollout_routing_replay=true`"
        )
    return sample.rollout_routed_experts


def _drop_without_signal(
    groups: dict[int, list[int]], columns: Sequence[Sequence[float | None]]
) -> tuple[dict[int, list[int]], Metrics]:
    """Return the groups whose rewards differ, and how many were dropped by reason.

    A group has the places of its samples in the `columns`: of the rewards, or of each component that is compared.
    """
    retained: dict[int, list[int]] = {}
    drops: Metrics = {}
    for key, members in groups.items():
        signals = [has_signal([column[i] for i in members]) for column in columns]
        if any(keep for keep, _ in signals):
            retained[key] = members
        else:
            name = f"rollout/dynamic_filter/drop_{signals[0][1]}"
            drops[name] = drops.get(name, 0.0) + 1.0
    return retained, drops


def _row(sample: Sample) -> TrainingSample:
    """Return a sample as a row. Its weights are the mask until the step's reduction replaces them."""
    return TrainingSample(
        tokens=sample.tokens,
        response_length=sample.response_length,
        loss_weights=[float(bit) for bit in sample.mask()],
        ref_log_probs=sample.ref_log_probs,
        rollout_log_probs=sample.rollout_log_probs,
        group=sample.group_index,
        index=sample.index,
        images=images_of(sample),
    )
