"""Every number that a run writes down has a definition, and `slimectl metrics` shows it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from workshop import Workshop, set_up

from slimectl.data.metrics_catalogue import CATALOGUE, axis_of, known

GENERATE = '''
async def generate(sample, sampling_params, generate):
    """Fails for one attempt in four."""
    completion = await generate(sample.tokens, sampling_params)
    if sample.index % 4 == 3:
        raise TimeoutError("the tool did not answer")
    sample.append_response_tokens(completion.tokens, log_probs=completion.log_probs, text=completion.text)
    return sample
'''

EVERYTHING = [
    "rollout.custom_generate_function_path=generate.py:generate",
    "algorithm.kl_loss_coef=0.1",
    "algorithm.entropy_coef=0.01",
    "algorithm.use_tis=true",
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
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> dict[str, set[str]]:
    """Names in metrics.jsonl and perf.jsonl of a run with everything switched on."""
    workshop = set_up(tmp_path_factory.mktemp("metrics"), model_dir("llama"))
    (workshop.folder / "generate.py").write_text(GENERATE)
    workshop.slimectl("run", *[word for setting in EVERYTHING for word in ("-s", setting)])
    names: dict[str, set[str]] = {}
    for file in ("metrics.jsonl", "perf.jsonl"):
        lines = (workshop.folder / "runs" / "a" / file).read_text().splitlines()
        names[file] = {name for line in lines for name in json.loads(line)["metrics"]}
    return names


def test_every_metric_that_a_run_writes_is_in_the_catalogue(written: dict[str, set[str]]):
    names = written["metrics.jsonl"] | written["perf.jsonl"]
    assert sorted(name for name in names if not known(name)) == []


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
        "rollout/error/TimeoutError",
        "rollout/staleness/max",
        "rollout/prefix_cache_hit_rate",
        "eval/small-pass@4",
        "eval/small-avg@4",
        "warmup/loss",
        "warmup/accuracy",
        "rollout/rewards",
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


def test_what_the_clock_decides_stays_out_of_the_metrics(written: dict[str, set[str]]):
    clocked = {name for name in written["metrics.jsonl"] if "time" in name or "per_s" in name}
    assert clocked == set()


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


@pytest.mark.parametrize("naming", ["slime", "roll"])
def test_the_documentation_has_the_table_that_the_command_prints(workshop: Workshop, naming: str):
    """Make it anew with: slimectl metrics --naming NAMING --markdown"""
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert workshop.slimectl("metrics", "--naming", naming, "--markdown").decode() in page.read_text()


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
