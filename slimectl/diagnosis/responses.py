"""Detectors of what the policy writes, and of how it is graded."""

from __future__ import annotations

from slimectl.diagnosis import limits
from slimectl.diagnosis.detector import Observation
from slimectl.diagnosis.history import History, gain, significant
from slimectl.diagnosis.learning import REWARD

LENGTH = "rollout/response_len/mean"


def length_growth(run: History) -> Observation | None:
    return _length_change(run, grows=True)


def length_shrinkage(run: History) -> Observation | None:
    return _length_change(run, grows=False)


def _length_change(run: History, *, grows: bool) -> Observation | None:
    series = run.of(LENGTH)
    if len(series) <= limits.BASELINE or run.has_learned():
        return None
    now, start = series.values[-1], series.baseline
    if now < limits.LENGTH_GROWTH * start if grows else now > limits.LENGTH_SHRINKAGE * start:
        return None
    verb = "grow" if grows else "shrink"
    return Observation(
        f"Responses {verb} without a gain in reward: {now:.3g} tokens, and {start:.3g} at the start",
        (LENGTH, REWARD, "rollout/truncated_ratio"),
    )


def truncation(run: History) -> Observation | None:
    share = run.last("rollout/truncated_ratio")
    if share < limits.TRUNCATED:
        return None
    limit = run.setting("rollout.max_response_len")
    return Observation(
        f"{share:.0%} of the responses are cut at rollout.max_response_len = {limit}",
        ("rollout/truncated_ratio", LENGTH, REWARD),
        remedies=(f"Raise rollout.max_response_len to {2 * limit}",) if isinstance(limit, int) else (),
    )


def reward_follows_length(run: History) -> Observation | None:
    correlation = run.last("rollout/length_reward_correlation")
    if abs(correlation) < limits.FOLLOWS_LENGTH:
        return None
    longer = "longer" if correlation > 0 else "shorter"
    return Observation(
        f"The reward is mostly the length: {longer} responses get more in every group (correlation {correlation:.2f})",
        ("rollout/length_reward_correlation", LENGTH, REWARD),
    )


def duplicates(run: History) -> Observation | None:
    """Right responses may be equal, and so may those of a policy that has become certain."""
    share, entropy = run.last("rollout/duplicate_ratio"), run.of("rollout/entropy")
    is_low = run.last(REWARD) < 0.5 * float(run.setting("eval.success_threshold", 1.0))
    is_uncertain = len(entropy) > limits.BASELINE and entropy.values[-1] > entropy.baseline / 2
    if share < limits.DUPLICATES or run.setting("rollout.n_samples_per_prompt", 1) < 2:
        return None
    if not (is_low or is_uncertain):
        return None
    why = "and the reward is low" if is_low else f"at an entropy of {entropy.values[-1]:.2g} nat"
    return Observation(
        f"{share:.0%} of the responses repeat another response to the same prompt, {why}",
        ("rollout/duplicate_ratio", "rollout/entropy", REWARD),
        ("Responses are copied: by a cache, or by requests with the same seed",) if is_uncertain else (),
    )


def repetition(run: History) -> Observation | None:
    share = max(run.last("rollout/ngram_repetition"), run.last("rollout/repetition_frac"))
    if share < limits.REPETITION:
        return None
    return Observation(
        f"Responses repeat themselves: {share:.0%} of their 4-grams occurred before",
        ("rollout/ngram_repetition", "rollout/repetition_frac", LENGTH, REWARD),
    )


def _samples(run: History) -> float:
    prompts = float(run.setting("run.rollout_batch_size", 0))
    return prompts * float(run.setting("rollout.n_samples_per_prompt", 1))


def verifier_timeouts(run: History) -> Observation | None:
    share = run.last("rollout/reward_timeouts")
    if share < limits.TIMEOUTS:
        return None
    seconds = run.setting("score.timeout_s", 0)
    return Observation(
        f"Grading of {share:.0%} of the samples exceeds score.timeout_s = {seconds:g}, and their reward is 0",
        ("rollout/reward_timeouts", "perf/reward_time"),
    )


def verifier_errors(run: History) -> Observation | None:
    without = run.last("rollout/no_reward")
    failed = sum(series.values[-1] for _, series in run.under("rollout/error/"))
    samples = _samples(run)
    agents = max(
        run.last("rollout/agent/failed"), run.last("rollout/agent/timed_out"), run.last("rollout/env/failures")
    )
    shares = {
        f"{without:.0%} of the samples have no reward": without,
        f"{failed:.0f} attempts failed": failed / samples if samples else 0.0,
        f"{agents:.0%} of the attempts of the program failed": agents,
    }
    title, share = max(shares.items(), key=lambda item: item[1])
    if share < limits.FAILED:
        return None
    errors = [f"rollout/error/{name}" for name, _ in run.under("rollout/error/")]
    return Observation(title, ("rollout/no_reward", *errors, "rollout/agent/failed", "rollout/env/failures"))


def component_dominates(run: History) -> Observation | None:
    parts = {name: series for name, series in run.under("rollout/reward/") if not name.endswith("/std")}
    if len(parts) < 2:
        return None
    gains = {name: gain(series) for name, series in parts.items()}
    clear = {name: abs(gains[name]) > significant(series) > 0 for name, series in parts.items()}
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    if gains[best] > 0 > gains[worst] and clear[best] and clear[worst] and gains[best] > abs(gains[worst]):
        return Observation(
            f"The reward component {best} rises by {gains[best]:.2g} while {worst} falls by {-gains[worst]:.2g}",
            (f"rollout/reward/{best}", f"rollout/reward/{worst}", REWARD),
        )
    spreads = {name: run.last(f"rollout/reward/{name}/std") for name in parts}
    widest = max(spreads, key=spreads.__getitem__)
    varying = [name for name, spread in spreads.items() if name != widest and spread > 0]
    if varying and all(spreads[widest] > limits.DOMINATES * spreads[name] for name in varying):
        return Observation(
            f"The reward component {widest} decides alone: it varies {limits.DOMINATES:g} times more than the others",
            tuple(f"rollout/reward/{name}/std" for name in (widest, *varying)),
        )
    return None
