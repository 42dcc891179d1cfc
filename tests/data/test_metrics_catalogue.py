"""Every number that a run writes down has a definition, and `slimectl metrics` shows it."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from data.others_names import NO_GPU, ROLL, SLIME, names
from workshop import Workshop, set_up

from slimectl.data.jsonl import read_samples
from slimectl.data.metrics_catalogue import CATALOGUE, Metric, axis_of, known

GENERATE = '''
async def generate(sample, sampling_params, generate):
    """Fails for one attempt in four; one in four has counts of an engine that drafts."""
    completion = await generate(sample.tokens, sampling_params)
    if sample.index % 4 == 3:
        raise TimeoutError("the tool did not answer")
    sample.append_response_tokens(completion.tokens, log_probs=completion.log_probs, text=completion.text)
    if sample.index % 4 == 0:
        sample.spec_info = {"spec_verify_ct": 1, "spec_draft_token_num": 4, "spec_accept_token_num": 2,
                            "completion_token_num": 3}
    return sample

def some(samples):
    """Drops one group of the first round, and finds the answers of another equal."""
    if samples[0].group_index == 1:
        return False, "dull"
    if samples[0].group_index == 2:
        for sample in samples:
            sample.reward = 0.5
    return True

def graded(sample):
    """Names what it read, so that answers can vote."""
    return {"score": float(sample.index % 3 == 0), "pred": sample.response[:1]}
'''

EVERYTHING = [
    "rollout.custom_generate_function_path=generate.py:generate",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.entropy_coef=0.01",
    "algorithm.use_tis=true",
    "algorithm.use_opsm=true",
    "algorithm.reward_clip=0.5",
    "algorithm.advantage_clip=0.4",
    "rollout.dynamic_sampling_filter_path=generate.py:some",
    "train.global_batch_size=5",
    "eval.n_samples_per_prompt=4",
    "sft_warmup.data=prompts.jsonl",
    "sft_warmup.max_steps=2",
    "sft_warmup.check_interval=1",
    "sft_warmup.batch_size=4",
    "sft_warmup.target_accuracy=1.0",
    "run.num_rollout=3",
    "run.async_level=1",
    "track.log_passrate=true",
    "track.log_multi_turn=true",
    "track.log_correct_samples=true",
    "track.log_reward_category=kind",
    "track.log_memory=true",
    "track.measure_peak=true",
    "run.keep_samples=train",
    "run.profile=[2,2]",
    "track.with=['jsonl']",
    "track.naming=both",
]

CRITIC_AND_TEACHER = [
    "run.name=ppo",
    "algorithm.name=ppo",
    "algorithm.norm_std_type=running",
    "algorithm.max_len_mask=true",
    "algorithm.difficulty_mask=true",
    "algorithm.error_max_len_threshold=1",
    "algorithm.kl_coef=0.1",
    "algorithm.opd_kl_coef=0.1",
    "train.num_steps_per_rollout=2",
    "train.ppo_epochs=2",
    "rollout.easy_threshold=0.5",
    "run.num_rollout=1",
    "eval.interval=none",
    "eval.n_samples_per_prompt=4",
    "score.custom_rm_path=generate.py:graded",
    "track.log_memory=true",
    "track.with=['jsonl']",
    "track.naming=both",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> Workshop:
    """A run `a` with everything switched on, and a run `ppo` with a critic and a teacher."""
    workshop = set_up(tmp_path_factory.mktemp("metrics"), model_dir("llama"))
    (workshop.folder / "generate.py").write_text(GENERATE)
    teacher = f"algorithm.opd_teacher_load={workshop.model}"
    for settings in (EVERYTHING, [*CRITIC_AND_TEACHER, teacher]):
        workshop.slimectl("run", *[word for setting in settings for word in ("-s", setting)])
    return workshop


@pytest.fixture(scope="module")
def written(finished: Workshop) -> dict[str, set[str]]:
    """Names of metrics by file, of both runs."""
    found: dict[str, set[str]] = {}
    for run, file in product(("a", "ppo"), ("metrics.jsonl", "perf.jsonl", "tracked.jsonl")):
        lines = (finished.folder / "runs" / run / file).read_text().splitlines()
        found.setdefault(file, set()).update(name for line in lines for name in json.loads(line)["metrics"])
    return found


@pytest.mark.slow
def test_every_metric_that_a_run_writes_is_in_the_catalogue(written: dict[str, set[str]]):
    names = set[str]().union(*written.values())
    assert sorted(name for name in names if not known(name)) == []


@pytest.mark.parametrize("table", [SLIME, ROLL], ids=["slime", "roll"])
def test_every_name_of_slime_and_of_roll_is_emitted_or_absent_for_a_reason(
    written: dict[str, set[str]], table: dict[str, str]
):
    emitted = written["tracked.jsonl"]
    for pattern, reason in table.items():
        for name in names(pattern):
            if reason == NO_GPU:
                assert known(re.sub(r"\{\w+\}", "0", name)), name
            else:
                assert any(map(Metric(name, "", "", "").matches, emitted)) == (not reason), (name, reason)


def test_the_documentation_says_which_names_of_others_are_absent():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    reasons = {reason: [] for reason in [*SLIME.values(), *ROLL.values()] if reason not in ("", NO_GPU)}
    for pattern, reason in [*SLIME.items(), *ROLL.items()]:
        if reason in reasons:
            reasons[reason].append(pattern)
    for reason, patterns in reasons.items():
        assert f"| {', '.join(f'`{pattern}`' for pattern in patterns)} | {reason} |" in page


def test_what_was_switched_on_was_written(written: dict[str, set[str]]):
    # Without these the test above would pass by looking at less.
    wanted = {
        "train/kl_loss",
        "train/entropy_loss",
        "train/tis_clipfrac",
        "train/train_rollout_k3",
        "train/pg_clipfrac",
        "train/clipfrac",
        "train/kl",
        "train/approxkl",
        "train/ratio_max",
        "train/ratio_low_clipfrac",
        "train/valid_sample_ratio",
        "train/rollouts_left_over",
        "train/ppo_epoch",
        "rollout/pool/easy",
        "rollout/error/TimeoutError",
        "rollout/staleness/max",
        "rollout/prefix_cache_hit_rate",
        "eval/small-pass@4",
        "eval/small-avg@4",
        "warmup/loss",
        "warmup/accuracy",
        "rollout/rewards",
        "rollout/reward_clip_frac",
        "rollout/advantage_clip_frac",
        "rollout/masked/max_len",
        "rollout/masked/difficulty",
        "rollout/masked/error_len",
        "rollout/advantages/max",
        "rollout/log_probs",
        "rollout/kl",
        "rollout/repetition_frac",
        "rollout/category/none/share",
        "passrate/pass@4",
        "multi_turn/round_number/mean",
        "eval/small/multi_turn/round_number/mean",
    }
    assert wanted - written["metrics.jsonl"] == set()
    clocked = {"perf/rollout_time", "perf/eval_time", "rollout/samples_per_second", "perf/save_model_time"}
    assert clocked - written["perf.jsonl"] == set()
    assert {"perf/tokens_per_gpu_per_sec", "perf/tokens_per_sec"} - written["perf.jsonl"] == set()


def test_trackers_get_all_that_is_written_the_warm_up_too(written: dict[str, set[str]]):
    assert written["metrics.jsonl"] - written["tracked.jsonl"] == set()


def test_what_the_clock_decides_stays_out_of_the_metrics(written: dict[str, set[str]]):
    clocked = {name for name in written["metrics.jsonl"] if "time" in name or "per_s" in name}
    assert clocked == set()


def test_the_rounds_that_are_named_are_profiled(finished: Workshop):
    [trace] = (finished.folder / "runs" / "a" / "profile").iterdir()
    assert trace.name == "rounds_2-2.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    operators = {event["name"] for event in events if event.get("cat") == "cpu_op"}
    assert {"aten::embedding", "aten::log_softmax"} <= operators
    threads = {event["tid"] for event in events if event.get("name") == "aten::embedding"}
    threads |= {event["tid"] for event in events if event.get("name") == "aten::softmax"}
    assert len(threads) == 2  # of the trainer, and of the engine, which works ahead
    # One of three rounds: the optimizer stepped as often as in it.
    lines = finished.metrics("a")
    steps = sum(line.get("rollout_id") == 2 and "train/step" in line["metrics"] for line in lines)
    assert sum(event["name"].startswith("Optimizer.step") for event in events) == steps


def test_what_was_trained_on_is_kept_token_by_token(finished: Workshop):
    run = finished.folder / "runs" / "a"
    kept = [json.loads(line) for file in sorted(run.glob("step_*/train_data.jsonl")) for line in file.open()]
    steps = [line for line in finished.metrics("a") if "train/loss" in line["metrics"]]
    assert len(kept) == sum(line["metrics"]["train/valid_samples"] for line in steps)
    for line in steps:
        rows = [row for row in kept if row["step"] == line["step"]]
        for row in rows:
            assert len(row["tokens"]) > row["response_length"] == len(row["clipped"]) == len(row["advantages"])
            gaps = zip(row["log_probs"], row["old_log_probs"], row["ratios"], strict=True)
            assert all(math.exp(now - old) == pytest.approx(ratio) for now, old, ratio in gaps)
        for name, column in (("train/pg_clipfrac", "clipped"), ("train/ois", "ratios")):
            weighted = [
                weight * value for row in rows for weight, value in zip(row["loss_weights"], row[column], strict=True)
            ]
            assert line["metrics"][name] == pytest.approx(sum(weighted), abs=1e-5)
    # Its lines are samples, and siblings of those of the round.
    samples = list(read_samples(run / "step_000001" / "train_data.jsonl"))
    originals = {sample.index: sample for sample in read_samples(run / "step_000001" / "samples.jsonl")}
    assert all(sample.tokens == originals[sample.index].tokens for sample in samples)


def test_no_metric_is_defined_twice():
    assert [name for name, count in Counter(metric.name for metric in CATALOGUE).items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("rollout/zero_std/count_0.5", True),
        ("rollout/error/ValueError", True),
        ("rollout/response_len/median", True),
        ("eval/aime-pass@16", True),
        ("eval/aime/response_len/max", True),
        ("train/losss", False),
        ("rollout/error/a/b", False),
        ("loss", False),
    ],
)
def test_a_name_with_a_part_that_varies_is_known_by_its_pattern(name: str, is_known: bool):
    assert known(name) is is_known


def test_the_command_prints_every_definition_and_finds_by_a_part_of_the_name(workshop: Workshop):
    printed = workshop.slimectl("metrics").decode()
    for metric in CATALOGUE:
        unit = f" [{metric.unit}]" if metric.unit else ""
        assert f"{metric.name}{unit}\n    {metric.definition}\n" in printed
    theirs = workshop.slimectl("metrics", "--naming", "roll").decode()
    assert "critic/score/mean" in theirs
    assert "rollout/raw_reward\n" not in theirs
    some = workshop.slimectl("metrics", "staleness").decode()
    assert "rollout/staleness" in some
    assert "train/loss" not in some


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("train/lr", "train/step"),
        ("rollout/raw_reward", "rollout/step"),
        ("perf/train_time", "rollout/step"),
        ("passrate/pass@4", "rollout/step"),
        ("eval/aime-pass@4", "eval/step"),
        ("critic/score/mean", "rollout/step"),
        ("critic/lr", "train/step"),
        ("eval/of/somebody/else", "eval/step"),
        ("my_own", "train/step"),
    ],
)
def test_every_name_has_an_axis(name: str, axis: str):
    assert axis_of(name) == axis
