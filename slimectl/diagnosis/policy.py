"""Detectors of how the policy changes: entropy, KL divergence, ratios, gradients, clipping, learning rate."""

from __future__ import annotations

import statistics

from slimectl.diagnosis import limits
from slimectl.diagnosis.detector import Observation
from slimectl.diagnosis.history import History, gain, significant
from slimectl.diagnosis.learning import REWARD, all_solved, vanishing_signal

NORM = "train/grad_norm"


def _entropy(run: History) -> str:
    return "rollout/entropy" if len(run.of("rollout/entropy")) else "train/entropy_loss"


def entropy_collapse(run: History) -> Observation | None:
    name = _entropy(run)
    series = run.of(name)
    if len(series) <= limits.BASELINE:
        return None
    now, start = series.values[-1], series.baseline
    solved = run.last(REWARD) >= 0.9 * float(run.setting("eval.success_threshold", 1.0))
    if solved or now > max(limits.ENTROPY_COLLAPSE * start, limits.ENTROPY_FLOOR):
        return None
    return Observation(f"The entropy collapsed: it is {now:.2g} nat, and was {start:.2g}", (name, REWARD))


def entropy_explosion(run: History) -> Observation | None:
    name = _entropy(run)
    series, reward = run.of(name), run.of(REWARD)
    if len(series) <= limits.BASELINE:
        return None
    now, start = series.values[-1], series.baseline
    falls = len(reward) > limits.BASELINE and gain(reward, 3) < -significant(reward, 3)
    if now < start + 0.5 or now < (limits.ENTROPY_EXPLOSION if falls else limits.ENTROPY_NOISE) * start:
        return None
    return Observation(f"The entropy explodes: it is {now:.2g} nat, and was {start:.2g}", (name, REWARD))


def kl_growth(run: History) -> Observation | None:
    for name in ("train/kl_loss", "rollout/kl"):
        series = run.of(name)
        if len(series) < 2 * limits.BASELINE:
            continue
        now = statistics.fmean(series.values[-limits.BASELINE :])
        before = statistics.fmean(series.values[-2 * limits.BASELINE : -limits.BASELINE])
        if now > limits.KL_LARGE or (now > limits.KL_PER_TOKEN and now > limits.KL_RISING * before):
            return Observation(
                f"The KL divergence from the reference keeps rising: {now:.2g} nat per token, after {before:.2g}",
                (name, REWARD),
            )
    if (step := run.last("train/approxkl")) > limits.STEP_KL:
        return Observation(
            f"A round moves the policy by {step:.2g} nat² per token (train/approxkl)",
            ("train/approxkl", "train/ppo_kl", "train/ratio_max"),
        )
    return None


def ratio_growth(run: History) -> Observation | None:
    largest = run.last("train/ratio_max", 1.0)
    if largest < limits.RATIO_LARGE:
        return None
    return Observation(
        f"Importance ratios are large: a token is {largest:.3g} times as likely as when it was sampled",
        ("train/ratio_max", "train/ratio_min", "train/approxkl"),
    )


def gradient_spikes(run: History) -> Observation | None:
    series = run.of(NORM)
    if len(series) <= limits.BASELINE:
        return None
    recent = series.tail(limits.SPIKE_WINDOW)
    usual = statistics.median(series.tail(2 * limits.SPIKE_WINDOW))
    spikes = [value for value in recent if value > limits.SPIKE * usual]
    if not usual or (len(spikes) < limits.SPIKES and max(recent) < limits.HUGE_SPIKE * usual):
        return None
    return Observation(
        f"The gradient norm spikes: up to {max(recent):.3g}, {max(recent) / usual:.0f} times the median", (NORM, REWARD)
    )


def diverging(run: History) -> Observation | None:
    series = run.of(NORM)
    if len(series) < 2 * limits.BASELINE or not series.baseline:
        return None
    now = statistics.median(series.tail(limits.BASELINE))
    if now < limits.GRADIENT_GROWTH * series.baseline or run.has_learned():
        return None
    return Observation(
        f"Training diverges: the gradient norm is {now:.3g}, and was {series.baseline:.3g} at the start", (NORM, REWARD)
    )


def clip_fraction(run: History) -> Observation | None:
    clipped = run.last("train/pg_clipfrac")
    outside = run.last("train/ratio_high_clipfrac") + run.last("train/ratio_low_clipfrac")
    if clipped < limits.CLIPPED and outside < limits.OUT_OF_RANGE:
        return None
    low = run.setting("algorithm.eps_clip", 0.2)
    high = run.setting("algorithm.eps_clip_high", low)
    tiny = outside >= limits.OUT_OF_RANGE and run.last("train/approxkl") < limits.STEP_KL / 10
    cause = f"The clip range is too narrow: algorithm.eps_clip is {low:g}, eps_clip_high {high:g}"
    return Observation(
        f"Clipping removes the gradient of {clipped:.0%} of the tokens. The ratios of {outside:.0%} are out of range",
        ("train/pg_clipfrac", "train/ratio_high_clipfrac", "train/ratio_low_clipfrac", "train/approxkl"),
        (cause,) if tiny else (),
        ("Raise algorithm.eps_clip (0.2 for ratios of tokens, 3e-4 for gspo)",) if tiny else (),
    )


def learning_rate_zero(run: History) -> Observation | None:
    series = run.of("train/lr")
    if not len(series) or series.values[-1] > 0:
        return None
    lr = run.setting("train.lr", 0.0)
    remainder = f", and {run.planned - run.round} rounds remain" if run.planned and run.planned > run.round else ""
    ended = ("The schedule has ended (train.lr_decay_iters, train.lr_decay_style)",) if lr else ("train.lr is 0",)
    return Observation(f"The learning rate is 0{remainder}", ("train/lr", NORM), ended)


def frozen(run: History) -> Observation | None:
    """Compare the gradient norm with 0, and with that of the first rounds, while the policy is as uncertain as then."""
    series, entropy = run.of(NORM), run.of(_entropy(run))
    if not len(series) or run.last("rollout/no_signal") or vanishing_signal(run) or all_solved(run):
        return None
    if series.values[-1] == 0:
        return Observation("No weight changes: the gradient norm is 0, although rewards differ", (NORM, "train/loss"))
    now, start = series.values[-1], series.baseline
    if len(entropy) <= limits.BASELINE or now > limits.FROZEN * start or entropy.values[-1] < entropy.baseline / 2:
        return None
    return Observation(
        f"Most weights have no gradient: its norm is {now:.2g}, and was {start:.2g} at the same entropy",
        (NORM, _entropy(run), REWARD),
    )
