"""Detectors of the engine's weights, waiting, slow parts, and of memory and disk."""

from __future__ import annotations

import json
import math
import statistics
from contextlib import suppress

from slimectl.diagnosis import limits
from slimectl.diagnosis.detector import Observation
from slimectl.diagnosis.history import TOTAL, History
from slimectl.diagnosis.learning import REWARD

MISMATCH = "train/train_rollout_logprob_abs_diff"
WINDOW = 5
"""Rounds over which times are compared by their median."""


def mismatch(run: History) -> Observation | None:
    """Compare engine and trainer. Older weights and files of samples differ by design, and penalties add to it."""
    difference, stale = run.last(MISMATCH), run.last("rollout/staleness/max")
    if not difference or stale or run.is_recorded or _mixes_weights(run):
        return None
    bound = float(run.setting("run.max_logprob_mismatch", math.inf))
    title = f"Engine and trainer differ by {difference:.3g} nat per token"
    if penalties := _penalties(run):
        cause = f"The engine samples with {' and '.join(penalties)}, which the trainer does not apply"
        remedies = ("Set algorithm.use_tis = true", f"Remove {' and '.join(penalties)}")
        is_corrected = difference <= bound or run.setting("algorithm.use_tis")
        return None if is_corrected else Observation(title, (MISMATCH,), (cause,), remedies)
    bound = min(bound, limits.MISMATCH_EXACT) if _is_exact(run) else bound
    start = run.of(MISMATCH).baseline
    grows = difference > limits.MISMATCH_SMALL and difference > limits.MISMATCH_GROWTH * start
    if difference <= bound and not grows:
        return None
    grown = f", {difference / start:.0f} times the start" if grows and start else ""
    causes = ("New weights do not reach the engine",) if grows else ("The engine samples at another temperature",)
    return Observation(title + grown, (MISMATCH,), causes)


def _mixes_weights(run: History) -> bool:
    """Whether the engine's log-probabilities are the old ones, and rows wait for a step with other weights."""
    return bool(run.setting("algorithm.use_rollout_logprobs")) and "train/rollouts_left_over" in run.series


def _is_exact(run: History) -> bool:
    return _is_in_process(run) and run.setting("engine.dtype") == run.setting("train.dtype") == "float32"


def _is_in_process(run: History) -> bool:
    is_server = run.setting("engine.url") or run.setting("engine.num_engines", 1) > 1
    return run.setting("engine.backend") in ("auto", "embedded") and not is_server


PENALTIES = {"rollout.repetition_penalty": 1, "rollout.presence_penalty": 0, "rollout.frequency_penalty": 0}
"""Settings that change the engine's distribution, with the values that change nothing."""


def _penalties(run: History) -> list[str]:
    return [name for name, neutral in PENALTIES.items() if run.setting(name, neutral) != neutral]


def staleness(run: History) -> Observation | None:
    mean, steps = run.last("rollout/staleness/mean"), max(1, run.steps)
    ahead = int(run.setting("run.async_level", 0)) + int(run.setting("sync.update_weights_interval", 1)) - 1
    expected, moved = round(steps * (ahead + _rounds_of_surplus(run))), run.last("train/train_rollout_k3")
    is_old = mean >= limits.OLD_ROUNDS * steps and moved > limits.OLD_KL
    if run.is_recorded or (mean < expected + limits.STALE and not is_old):
        return None
    why = f", and the policy has moved by {moved:.2g} nat per token since" if is_old else ""
    settings = f", and settings explain {expected}" if mean >= expected + limits.STALE else ""
    return Observation(
        f"Samples are {mean:.1f} weight versions old{settings}{why}",
        ("rollout/staleness/mean", "rollout/staleness/max", "train/train_rollout_k3", REWARD),
    )


def _rounds_of_surplus(run: History) -> float:
    """Return how many rounds a finished group may wait, because others were started than a round needs."""
    started = float(run.setting("rollout.over_sampling_batch_size", 0))
    return started / float(run.setting("run.rollout_batch_size", 1)) + bool(run.setting("rollout.partial_rollout"))


def share(run: History, *names: str) -> float:
    """Return the median share of a round's time over the last rounds, summed over metrics, or 0 for too few rounds."""
    total = run.of(TOTAL)
    if len(total) < WINDOW:
        return 0.0
    parts = [_recent(run, name) for name in names]
    recent = _recent(run, TOTAL)
    return statistics.median(
        sum(part.get(number, 0.0) for part in parts) / total_s if total_s else 0.0 for number, total_s in recent.items()
    )


def _recent(run: History, name: str) -> dict[int, float]:
    series = run.of(name)
    return dict(zip(series.rounds[-WINDOW:], series.values[-WINDOW:], strict=True))


def waiting(run: History) -> Observation | None:
    part = share(run, "perf/wait_time")
    lost = sum(run.of("perf/wait_time").values)
    least = limits.WAIT_IN_TURNS if _is_in_process(run) and not run.setting("run.async_level", 0) else limits.WAIT
    if part < least or lost < limits.WORTHWHILE_S or run.setting("cluster.colocate"):
        return None
    ahead = int(run.setting("run.async_level", 0))
    remedy = ("Set run.async_level = 1",) if not ahead else ("Add engines, or give the engines more GPUs",)
    return Observation(
        f"Training waits for samples in {part:.0%} of the time ({lost:.0f} s so far)",
        ("perf/wait_time_ratio", "perf/generate_time", "perf/reward_time"),
        remedies=remedy,
    )


def slow_grader(run: History) -> Observation | None:
    part, seconds = share(run, "perf/reward_time"), run.last("perf/reward_time")
    if part < limits.GRADING or seconds < limits.GRADING_S:
        return None
    return Observation(
        f"Grading takes {part:.0%} of the time, {seconds:.2g} s per round", ("perf/reward_time", "perf/generate_time")
    )


PASSES = ("perf/log_probs_time", "perf/ref_log_probs_time", "perf/teacher_log_probs_time")


def slow_log_probs(run: History) -> Observation | None:
    part, training = share(run, *PASSES), share(run, "perf/actor_train_time")
    most = limits.LOG_PROBS * training * sum(bool(len(run.of(name))) for name in PASSES)
    if run.is_recorded or part < limits.LOG_PROBS_SHARE or part < most:
        return None  # rounds of a file are scored whole, and only pairs that differ are trained on
    return Observation(
        f"Passes for log-probabilities take {part:.0%} of the time, and training {training:.0%}",
        (*PASSES, "perf/actor_train_time"),
    )


def slow_push(run: History) -> Observation | None:
    part = share(run, "perf/update_weights_time")
    if part < limits.PUSHING or sum(run.of("perf/update_weights_time").values) < limits.WORTHWHILE_S:
        return None
    return Observation(
        f"Sending weights takes {part:.0%} of the time", ("perf/update_weights_time", "perf/update_weights_bytes")
    )


def checkpoints(run: History) -> Observation | None:
    saving, total = run.series.get("perf/save_model_time"), run.of(TOTAL)
    spent = sum(saving.values) if saving else 0.0
    total_s = spent + sum(total.values)
    if spent < limits.WORTHWHILE_S or spent < limits.SAVING * total_s:
        return None
    return Observation(f"Writing checkpoints takes {spent / total_s:.0%} of the time", ("perf/save_model_time", TOTAL))


def straggler(run: History) -> Observation | None:
    for part in ("rank", "engine"):
        ratio = run.last(f"perf/slowest_{part}_ratio")
        if ratio > limits.STRAGGLER:
            number = run.last(f"perf/slowest_{part}")
            return Observation(
                f"Training waits for {part} {number:.0f}, which takes {ratio:.1f} times as long as the median",
                (f"perf/slowest_{part}_ratio", f"perf/slowest_{part}"),
            )
    longest, middle = run.last("rollout/response_len/max"), run.last("rollout/response_len/median")
    lost = sum(run.of("perf/wait_time").values)
    waits = share(run, "perf/generate_time") > limits.WAIT and lost > limits.WORTHWHILE_S
    if not waits or longest < limits.LONGEST * middle or run.setting("rollout.partial_rollout"):
        return None
    return Observation(
        f"One long response holds up a round: {longest:.0f} tokens, and the median is {middle:.0f}",
        ("rollout/response_len/max", "rollout/response_len/median", "perf/generate_time"),
        remedies=("Set rollout.partial_rollout = true, or run.async_level = 2",),
    )


def memory(run: History) -> Observation | None:
    for name, device in (("perf/gpu_memory_used_ratio", "a training GPU"), ("perf/memory_used_ratio", "the machine")):
        if (used := run.last(name)) >= limits.MEMORY:
            return Observation(f"The memory of {device} is nearly full: {used:.0%}", (name, "perf/cpu_memory_gb"))
    return None


def disk(run: History) -> Observation | None:
    used, free = run.last("perf/disk_used_ratio"), run.last("perf/disk_free_gb")
    series = run.of("perf/disk_free_gb")
    filling = _rounds_left(run)
    full = used >= limits.DISK and len(series)
    rounds_left = (run.planned or 0) - run.round
    if not full and (filling is None or filling > rounds_left):
        return None
    ends = f", and is full in about {filling:.0f} rounds" if filling is not None and filling <= rounds_left else ""
    return Observation(
        f"The disk of the run has {free:.3g} GiB left{ends}", ("perf/disk_free_gb", "perf/disk_used_ratio")
    )


def _rounds_left(run: History) -> float | None:
    """Return after how many rounds the disk is full if it fills as in the last 20 rounds, or None if it does not."""
    free = run.of("perf/disk_free_gb").tail(4 * WINDOW)
    if len(free) < 4 * WINDOW:
        return None
    per_round = (statistics.median(free[:WINDOW]) - statistics.median(free[-WINDOW:])) / (3 * WINDOW)
    return free[-1] / per_round if per_round > 0 else None


def low_utilization(run: History) -> Observation | None:
    series = run.of("perf/mfu")
    if len(series) < WINDOW or not run.last("perf/gpu_memory_allocated_gb"):
        return None
    reached = statistics.median(series.tail(WINDOW))
    if reached >= limits.UTILIZATION * limits.PLANNED_MFU:
        return None
    return Observation(
        f"Training reaches {reached:.1%} of the GPU's peak. `slimectl plan` assumes {limits.PLANNED_MFU:.0%}",
        ("perf/mfu", "perf/actor_train_tflops"),
    )


def out_of_memory(run: History) -> Observation | None:
    splits = run.last("perf/pack_splits")
    if not splits:
        return None
    fit = None
    with suppress(OSError, ValueError, KeyError):
        fit = json.loads((run.folder / "memory.json").read_text())["fit"]["train.max_tokens_per_gpu"]
    return Observation(
        f"Out of memory: {splits:.0f} packs of the round were split because they did not fit",
        ("perf/pack_splits", "perf/gpu_memory_used_ratio"),
        remedies=(f"Set train.max_tokens_per_gpu = {fit}, which fits",) if fit else (),
    )


def never(run: History) -> Observation | None:
    """Find nothing, for findings that are not in the records."""
