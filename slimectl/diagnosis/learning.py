"""Detectors of what a run learns: signal, rewards, evaluations, advantages."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from slimectl.diagnosis import limits
from slimectl.diagnosis.detector import Observation
from slimectl.diagnosis.history import History, Series, gain, significant

REWARD = "rollout/raw_reward"
ENTROPY = "rollout/entropy"
COLLAPSE_WINDOW = 3
"""Rounds over which rewards are averaged to find a collapse."""


def no_signal(run: History) -> Observation | None:
    rounds = run.of("rollout/no_signal").rounds
    in_a_row = next((i for i, number in enumerate(reversed(rounds)) if number != run.round - i), len(rounds))
    if not in_a_row or in_a_row < min(limits.NO_SIGNAL_ROUNDS, run.setting("run.no_signal_rounds", 10)):
        return None
    return replace(_lack_of_signal(run), first=run.round - in_a_row + 1)


def _lack_of_signal(run: History) -> Observation:
    """Return why the last round has no signal."""
    low, high = run.last("rollout/min_reward", math.nan) + 0.0, run.last("rollout/max_reward", math.nan)  # never -0
    evidence = ("rollout/no_signal", REWARD, "rollout/truncated_ratio")
    if low != high:
        return Observation("No learning signal: the rewards of every group are equal", evidence)
    title = f"No learning signal: every reward is {low:g}"
    if low >= _success(run):
        return Observation(title, evidence, ("The prompts are too easy",), (EASY,))
    if (broken := _broken_policy(run, low)) is not None:
        return Observation(title, (*evidence, ENTROPY), *broken)
    if run.last("rollout/truncated_ratio") == 1:
        limit = run.setting("rollout.max_response_len")
        cut = f"Every response is cut at rollout.max_response_len = {limit}, before its answer"
        return Observation(title, evidence, (cut,), ("Raise rollout.max_response_len, or ask for shorter responses",))
    if run.is_recorded or run.setting("run.keep_samples") or run.setting("eval.interval"):
        return Observation(title, evidence)
    commands = (
        "slimectl rollout -c {run}/run.toml --model {run}/latest -o samples.jsonl",
        "slimectl score samples.jsonl -c {run}/run.toml --explain",
    )
    return Observation(title, evidence, commands=commands)


def _broken_policy(run: History, low: float) -> tuple[tuple[str], tuple[str]] | None:
    """Return the cause and the remedy if an update has destroyed the policy: reward and entropy were higher before."""
    reward, entropy = run.of(REWARD), run.of(ENTROPY)
    if max(reward.values, default=low) <= low or not len(entropy):
        return None
    now, highest = entropy.values[-1], max(entropy.values)
    if now > limits.ENTROPY_COLLAPSE * highest:
        return None
    lr = float(run.setting("train.lr", 0.0))
    before = f"the reward was {max(reward.values):.3g}, and the entropy {highest:.2g} nat"
    return (f"An update destroyed the policy: {before}",), (f"Restart with train.lr = {lr / 10:g}",)


EASY = "Train on harder prompts, or make the reward stricter"


def vanishing_signal(run: History) -> Observation | None:
    groups, equal, solved = _equal_groups(run)
    if not groups or equal < limits.EQUAL_GROUPS * groups or solved > equal / 2 or run.last("rollout/no_signal"):
        return None
    return Observation(
        f"Little learning signal: {equal:.0f} of {groups:.0f} groups have equal rewards",
        (*_zero_std(run), REWARD),
    )


def all_solved(run: History) -> Observation | None:
    groups, _, solved = _equal_groups(run)
    if not groups or solved < limits.SOLVED_GROUPS * groups or run.last("rollout/no_signal"):
        return None
    return Observation(
        f"Nearly every prompt is solved: all responses succeed in {solved:.0f} of {groups:.0f} groups",
        (*_zero_std(run), REWARD),
    )


def _success(run: History) -> float:
    return float(run.setting("eval.success_threshold", 1.0))


def _zero_std(run: History) -> list[str]:
    return [f"rollout/zero_std/{name}" for name, _ in run.under("rollout/zero_std/")]


def _equal_groups(run: History) -> tuple[float, float, float]:
    """Return the numbers of groups of the last round: all, groups with equal rewards, and groups that succeed."""
    equal = solved = 0.0
    for name, series in run.under("rollout/zero_std/count_"):
        equal += series.values[-1]
        if float(name) >= _success(run):
            solved += series.values[-1]
    return float(run.setting("run.rollout_batch_size", 0)), equal, solved


def flat_reward(run: History) -> Observation | None:
    reward = run.of(REWARD)
    if len(reward) < limits.FLAT_ROUNDS or run.last("rollout/no_signal") or reward.values[-1] >= 0.9 * _success(run):
        return None
    window = len(reward) // 3
    change = statistics.fmean(reward.values[-window:]) - statistics.fmean(reward.values[:window])
    if change > 2 * reward.noise * math.sqrt(2 / window):
        return None
    frozen = run.setting("train.freeze_params_name_list") or run.setting("train.only_train_params_name_list")
    causes = ("train.freeze_params_name_list or only_train_params_name_list leaves too little to train",)
    return Observation(
        f"The reward is flat: {reward.baseline:.3g} at the start and {statistics.median(reward.tail(5)):.3g} after "
        f"{len(reward)} rounds, with signal",
        (REWARD, "train/grad_norm", "train/lr"),
        causes if frozen else (),
    )


def reward_collapse(run: History) -> Observation | None:
    reward = run.of(REWARD)
    window = COLLAPSE_WINDOW
    if len(reward) < 2 * window:
        return None
    place, top = _best_window(reward)
    end, low = reward.tail(window), min(0.0, min(reward.values))
    now, peak = statistics.fmean(end), statistics.fmean(top)
    if min(top) <= max(end) or now - low >= (peak - low) / 2:
        return None
    return _collapse(run, "the mean reward", (reward.rounds[place + window // 2], peak, now), REWARD)


def _best_window(series: Series) -> tuple[int, list[float]]:
    values, window = series.values, COLLAPSE_WINDOW
    starts = range(len(values) - 2 * window + 1)
    start = max(starts, key=lambda i: values[i] + values[i + 1] + values[i + 2])
    return start, list(values[start : start + window])


def evaluation_collapse(run: History) -> Observation | None:
    for name, series in run.evaluations.items():
        if not name.endswith("_accuracy") or len(series) < 2:
            continue
        best = max(range(len(series)), key=series.values.__getitem__)
        peak, last = series.values[best], series.values[-1]
        later = series.values[best + 1 :][-2:]  # one evaluation below half of the best may be bad luck
        collapsed = last < peak / 4 or (len(later) == 2 and max(later) < peak / 2)
        errors = _stderr(run, name, series.rounds[best]) + _stderr(run, name)
        if (
            collapsed
            and peak - last > 2 * errors
            and not _holds(run, name.removesuffix("_accuracy"), series.rounds[best])
        ):
            title = f"the accuracy on {name.removeprefix('eval/').removesuffix('_accuracy')}"
            return _collapse(run, title, (series.rounds[best], peak, last), name)
    return None


def _holds(run: History, dataset: str, best: int) -> bool:
    """Return whether the mean reward on a dataset is what it was at round `best`: answers are nearly right."""
    name = f"{dataset}_avg_reward"
    series = run.evaluations.get(name, Series())
    before = dict(zip(series.rounds, series.values, strict=True)).get(best)
    if before is None:
        return False
    return before - series.values[-1] <= 2 * (_stderr(run, name, best) + _stderr(run, name))


def _stderr(run: History, name: str, number: int | None = None) -> float:
    errors = run.evaluations.get(f"{name}_stderr", Series())
    by_round = dict(zip(errors.rounds, errors.values, strict=True))
    return by_round.get(run.evaluated if number is None else number, 0.0)


def _collapse(run: History, name: str, figures: tuple[int, float, float], metric: str) -> Observation:
    best, peak, now = figures
    lr = float(run.setting("train.lr", 0.0))
    saved = [int(path.name[5:]) for path in run.folder.glob("step_*") if (path / "policy").exists()]
    before = [number for number in saved if number <= best]
    command = "train" if run.is_recorded else "run"
    again = f"slimectl {command} -c {{run}}/run.toml -s run.name=ANOTHER -s train.lr={lr / 10:g}"
    if before:
        again += f" --model {{run}}/step_{max(before):06d}"
    way = "Restart from the checkpoint before it" if before else "Restart. run.save_best keeps the best checkpoint"
    return Observation(
        f"{name[0].upper()}{name[1:]} collapsed: it was {peak:.3g} at round {best} and is {now:.3g}",
        (metric, "train/grad_norm", "train/ppo_kl", "train/kl_loss"),
        (f"Steps are too large: train.lr is {lr:g}",),
        (f"Lower train.lr to {lr / 10:g}. {way}",),
        (again,),
    )


def gaming(run: History) -> Observation | None:
    reward = run.series.get(REWARD, Series())
    for name, series in run.evaluations.items():
        if not name.endswith("_avg_reward") or len(series) < 2:
            continue
        dataset = name.removesuffix("_avg_reward")
        rises, noise = gain(reward), significant(reward)
        error = math.hypot(_stderr(run, name, series.rounds[0]), _stderr(run, name))  # one alone is 0 at accuracy 0
        change = series.values[-1] - series.values[0]
        falls = change < -3 * error and rises > noise / 2 > 0
        lags = change + limits.GAMING_ERRORS * error < limits.GAMING_SHARE * rises and rises > noise > 0
        if error and (falls or lags):
            verb = "falls" if change < -error else "stays flat"
            return Observation(
                f"The training reward rises by {rises:.3g}, but {dataset} {verb} ({change:+.3g})", (REWARD, dataset)
            )
    return None


def flat_evaluation(run: History) -> Observation | None:
    for name, series in run.evaluations.items():
        if not name.endswith("_accuracy") or len(series) <= limits.FLAT_EVALUATIONS or series.values[0] > 0.95:
            continue
        if series.rounds[-1] - series.rounds[0] < limits.FLAT_ROUNDS:
            continue
        later = series.values[1:]
        if max(later) > series.values[0] + _stderr(run, name):
            continue
        return Observation(
            f"{name} is flat: {series.values[0]:.3g} at round {series.rounds[0]}, and at most {max(later):.3g} in "
            f"{len(later)} later evaluations",
            (name, REWARD),
        )
    return None


def advantages(run: History) -> Observation | None:
    if not (run.setting("algorithm.normalize_advantages") or run.setting("algorithm.grpo_std_normalization")):
        return None
    mean, deviation = run.last("rollout/advantages"), run.last("rollout/advantages/std", 1.0)
    if abs(mean) < limits.FLAT_ADVANTAGES and deviation < limits.LARGE_ADVANTAGES:
        return None
    return Observation(
        f"Advantages are not normalized: their mean is {mean:.2g} and their deviation {deviation:.2g}",
        ("rollout/advantages", "rollout/advantages/std", "rollout/response_len/mean"),
    )
