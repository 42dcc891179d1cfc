"""Runs whose rounds leave something over: filtered, over-sampled, broken off; resumed with identical metrics."""

from __future__ import annotations

import json

import pytest
from workshop import Workshop

LENGTHS = """
def reward(sample):
    return float(sample.tokens[-1] % 2)

def not_all(args, samples):
    total = sum(sample.reward for sample in samples)
    return 0 < total < len(samples), f"all_{total:g}"
"""
FILTER = "rollout.dynamic_sampling_filter_path"
OVER, PARTIAL = "rollout.over_sampling_batch_size=7", "rollout.partial_rollout=true"


def steps(workshop: Workshop, name: str) -> list[dict]:
    return [line for line in workshop.metrics(name) if "train/step" in line["metrics"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        [f"{FILTER}=hooks.py:not_all", OVER],
        [
            f"{FILTER}=slimectl.stages.filters:nonzero_std",
            OVER,
            PARTIAL,
            "rollout.mask_offpolicy_in_partial_rollout=true",
            "rollout.max_prompt_len=8",
        ],
    ],
    ids=["filtered", "partial"],
)
def test_a_resumed_run_has_the_metrics_of_an_undisturbed_one(workshop: Workshop, chosen: list[str]):
    (workshop.folder / "hooks.py").write_text(LENGTHS)
    # Some bytes end an answer, so that answers differ in length.
    stops = f"rollout.stop_token_ids={list(range(100, 116))}"
    same = [
        "score.custom_rm_path=hooks.py:reward",
        "train.lr_decay_iters=4",
        "run.num_rollout=4",
        "rollout.max_response_len=40",
        stops,
    ]
    settings = [word for each in [*same, *chosen, "eval.data={}", "eval.interval=none"] for word in ("-s", each)]
    workshop.slimectl("run", "--name", "whole", *settings)
    workshop.slimectl("run", "--name", "broken", *settings, "-s", "run.num_rollout=2")
    state = json.loads((workshop.folder / "runs" / "broken" / "step_000002" / "state.json").read_text())["sampling"]
    workshop.slimectl("run", "--resume", "runs/broken", "-s", "run.num_rollout=4")
    whole = steps(workshop, "whole")
    assert [line["rollout_id"] for line in whole] == [1, 2, 3, 4]
    assert steps(workshop, "broken") == whole
    assert state["rounds"] == 2
    assert state["buffer"]
    names = {name for line in whole for name in line["metrics"]}
    assert any("dynamic_filter/drop_all_" in name for name in names) == ("hooks.py:not_all" in chosen[0])
    assert ("rollout/prompts_too_long" in names) == ("rollout.max_prompt_len=8" in chosen)
    assert {line["metrics"]["train/global_batch_size"] for line in whole} == {16}
    assert max(line["metrics"]["rollout/staleness/max"] for line in whole) >= 1
    if PARTIAL in chosen:
        files = (workshop.folder / "runs" / "whole").glob("step_*/state.json")
        buffers = [json.loads(file.read_text())["sampling"]["buffer"] for file in files]
        assert any(sample["status"] == "aborted" for groups in buffers for group in groups for sample in group)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.over_sampling_batch_size=3"], "3 is below run.rollout_batch_size: 4"),
        ([PARTIAL, "run.async_level=1"], "rollout.partial_rollout and run.async_level: 1 cannot be combined"),
        ([OVER, "run.async_level=2"], "rollout.over_sampling_batch_size and run.async_level: 2 cannot be combined"),
        (["rollout.mask_offpolicy_in_partial_rollout=true"], "without rollout.partial_rollout = true"),
        ([f"{FILTER}=hooks.py:nowhere"], f"{FILTER}: hooks.py:nowhere: hooks.py has no such name"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(workshop: Workshop, settings: list[str], words: str):
    (workshop.folder / "hooks.py").write_text(LENGTHS)
    workshop.slimectl("run", *[word for each in settings for word in ("-s", each)], code=2)
    assert words in workshop.stderr
    assert not (workshop.folder / "runs").exists()


def test_a_rollout_says_how_many_prompts_were_too_long(workshop: Workshop):
    out = workshop.slimectl("rollout", "-c", "slimectl.toml", "-n", "1", "-s", "rollout.max_prompt_len=8")
    assert len(out.splitlines()) == 5
    assert workshop.stderr.endswith(", prompts skipped 3\n")  # those that say three, seven and eight
