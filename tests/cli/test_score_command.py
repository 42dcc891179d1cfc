"""`slimectl score` explains its rewards, and says beforehand whether they are fit to train on."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess

import pytest
from workshop import Workshop

from slimectl.data.jsonl import read_samples

BOXES = {0: r"so \boxed{8}", 1: r"so \boxed{7}", 2: "so 7", 3: "no idea"}


def samples_file(workshop: Workshop, responses: dict[int, str], label: object = "7") -> str:
    samples = [
        {"group_index": index // 2, "index": index, "prompt": "x", "tokens": [1, 2], "response": response,
         "response_length": 1, "label": label, "status": "completed"}
        for index, response in responses.items()
    ]  # fmt: skip
    path = workshop.folder / "samples.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path.name


def test_the_summary_has_the_mean_of_every_component(workshop: Workshop):
    name = samples_file(workshop, BOXES)
    parts = 'score.rm=[{type = "math"}, {type = "length_penalty", name = "short", weight = -0.5, limit = 8}]'
    workshop.slimectl("score", name, "-s", parts)
    last = workshop.stderr.splitlines()[-1]
    assert re.fullmatch(r"4 samples, mean reward [-\d.]+, math 0\.25, short [\d.]+, accuracy .*", last), last


def test_explain_writes_why_into_every_record_and_sums_up_on_stderr(workshop: Workshop):
    name = samples_file(workshop, BOXES)
    out = workshop.slimectl("score", name, "--rm-type", "math", "--explain")
    first, _, third, _ = map(json.loads, out.splitlines())
    assert (first["reward"], third["reward"]) == (0.0, 0.0)
    assert first["metadata"]["explanation"] == {
        "extracted": "8",
        "from": r"last \boxed{}",
        "span": [10, 11],
        "why": "does not equal the label '7' (read as '8')",
    }
    assert third["metadata"]["explanation"]["why"] == r"no \boxed{} or \fbox{}, or the last one never closes"
    assert workshop.stderr.splitlines() == [
        r"reward 0: 2 samples, e.g. sample 2: last \boxed{}: no \boxed{} or \fbox{}, or the last one never closes",
        r"reward 0: 1 sample, e.g. sample 0: last \boxed{}: '8' does not equal the label '7' (read as '8')",
        r"reward 1: 1 sample, e.g. sample 1: last \boxed{}: '7' equals the label '7'",
        "4 samples, mean reward 0.25",
    ]


OWN = """
def by_columns(prompts, completions, target, **columns):
    rows = zip(completions, target, columns["data_source"])
    return [float(word in text) + (source == "sums") for text, word, source in rows]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * (ground_truth in solution_str), "source": data_source}

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text == "so 7") for text in solution_strs]
"""
TRL = """
from own import by_columns
from trl import GRPOConfig, GRPOTrainer
if __name__ == "__main__":
    GRPOTrainer("m", reward_funcs=by_columns, args=GRPOConfig(num_generations=2), train_dataset="d.jsonl").train()
"""
VERL = "python3 -m verl.trainer.main_ppo data.train_files=d.parquet actor_rollout_ref.model.path=m "
VERL += "algorithm.adv_estimator=grpo custom_reward_function.path=own.py "


@pytest.mark.parametrize(("name", "text", "rewards"), [
    ("trl.py", TRL, [1.0, 2.0, 2.0, 1.0]),
    ("verl.sh", VERL + "custom_reward_function.reward_kwargs.scale=0.5", [0.0, 0.5, 0.5, 0.0]),
    ("batch.sh", VERL + "custom_reward_function.name=batch reward_model.reward_manager=batch", [0.0, 0.0, 1.0, 0.0]),
])  # fmt: skip
def test_a_function_of_trl_or_verl_grades_with_the_settings_of_its_launch_file(
    name: str, text: str, rewards: list[float], workshop: Workshop
):
    (workshop.folder / "own.py").write_text(OWN)
    (workshop.folder / name).write_text(text)
    samples = samples_file(workshop, BOXES)
    path = workshop.folder / samples
    rows = [{**json.loads(line), "target": "7", "data_source": "sums"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workshop.slimectl("settings", "from", name, "--out", "run.toml")
    scored = [json.loads(line)["reward"] for line in workshop.slimectl("score", samples, "-c", "run.toml").splitlines()]
    assert [reward["score"] if isinstance(reward, dict) else reward for reward in scored] == rewards


def test_explaining_is_another_output_than_not_explaining(workshop: Workshop):
    name = samples_file(workshop, BOXES)
    workshop.slimectl("score", name, "--rm-type", "numeric", "--out", "scored.jsonl")
    workshop.slimectl("score", name, "--rm-type", "numeric", "--out", "scored.jsonl", "--explain")
    assert "explanation" in (workshop.folder / "scored.jsonl").read_text()


def test_at_a_terminal_explanations_are_lines(workshop: Workshop):
    name = samples_file(workshop, BOXES)
    ours, theirs = pty.openpty()
    options = ("--rm-type", "numeric", "--explain")
    with workshop.start("score", name, *options, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        assert process.wait(timeout=300) == 0
    os.close(theirs)
    lines = os.read(ours, 100_000).decode().splitlines()
    os.close(ours)
    assert lines[1] == "sample 1: reward 1: last number of the response: '7' is the label '7'"
    assert lines[3] == "sample 3: reward 0: last number of the response: no number there"


def test_check_prints_a_line_a_check_and_its_exit_code_is_the_verdict(workshop: Workshop):
    name = samples_file(workshop, BOXES)
    out = workshop.slimectl("score", name, "--rm-type", "numeric", "--check").decode().splitlines()
    assert [line.split()[:2] for line in out] == [
        ["ok", word] for word in ("errors", "type", "range", "determinism", "time", "variance")
    ]
    assert workshop.stderr == ""
    out = workshop.slimectl("score", name, "--rm-type", "exact", "--check", code=1).decode()
    assert "FAIL  variance     0 of 2 groups have different rewards" in out
    assert workshop.stderr == "slimectl: 1 of 6 checks failed (variance). Fix the reward function first.\n"


def test_check_reports_what_would_stop_a_run(workshop: Workshop):
    name = samples_file(workshop, BOXES, label=None)
    out = workshop.slimectl("score", name, "--rm-type", "numeric", "--check", code=1).decode().splitlines()
    assert out[0].startswith(
        "FAIL  errors       4 samples, the first is sample 0: RecordError: sample 0: label: missing"
    )


def test_a_weighted_sum_is_given_as_a_setting(workshop: Workshop):
    name = samples_file(workshop, BOXES)
    parts = '[{type = "numeric"}, {type = "length_penalty", weight = -0.1, limit = 10}]'
    out = workshop.slimectl("score", name, "-s", f"score.rm={parts}", "--explain").splitlines()
    assert json.loads(out[1])["reward"] == {"score": 0.99, "numeric": 1.0, "length_penalty": 0.1}
    assert "1 x numeric 1 (is the label '7'); -0.1 x length_penalty 0.1" in workshop.stderr


UNFIT = """
import time

def no_key(sample): return {"acc": 1.0, "len": 2.0}
def mixed(sample): return [1.0, {"score": 0.5}, True, "0.5"][sample.index]
def nan(sample): return 1.0 if sample.index < 3 else float("nan")
def raises(sample): return [1.0] * 3 if sample.index == 9 else [1.0, 1.0, 1.0][sample.index]
def short(samples): return [1.0 for sample in samples if sample.index < 3]
def hangs(sample):
    while sample.index == 1: time.sleep(1)
    return 1.0
"""


@pytest.mark.parametrize(
    ("name", "kept", "message"),
    [
        ("no_key", 0, "score.custom_rm_path: unfit.py:no_key: score.reward_key: not set, and no 'score' is in the "
         "reward of sample 0 (acc, len). Set it to one of them"),
        ("mixed", 3, "score.custom_rm_path: unfit.py:mixed: reward of sample 3 is '0.5', not a finite number. Fix the "
         "reward function"),
        ("nan", 3, "score.custom_rm_path: unfit.py:nan: reward of sample 3 is nan, not a finite number. Fix the "
         "reward function"),
        ("raises", 3, "sample 3: score.custom_rm_path: unfit.py:raises raised IndexError: list index out of range "
         "(unfit.py:7). Fix it there."),
        ("short", 0, "samples 0 to 3: score.custom_rm_path: unfit.py:short returned 3 rewards for 4 samples. Return "
         "one for each."),
    ],
)  # fmt: skip
def test_a_reward_that_is_none_is_named_and_what_came_before_it_is_kept(workshop: Workshop, name, kept, message):
    samples_file(workshop, BOXES)
    (workshop.folder / "unfit.py").write_text(UNFIT)
    workshop.slimectl("score", "samples.jsonl", "--custom-rm-path", f"unfit.py:{name}", "--out", "out.jsonl", code=2)
    *said, last = workshop.stderr.splitlines()
    assert last == f"slimectl: {message}"
    assert len(said) == (kept > 0)
    assert all(f"out.jsonl.partial: keeping {kept} samples. Run the same command again" in line for line in said)


@pytest.mark.slow
def test_a_reward_that_hangs_costs_its_sample_and_is_counted(workshop: Workshop):
    samples_file(workshop, BOXES)
    (workshop.folder / "unfit.py").write_text(UNFIT)
    options = ("--custom-rm-path", "unfit.py:hangs", "--workers", "1", "-s", "score.wall_timeout_s=2")
    out = workshop.slimectl("score", "samples.jsonl", *options)
    scored = [json.loads(line) for line in out.splitlines()]
    assert [sample["reward"] for sample in scored] == [1.0, 0.0, 1.0, 1.0]
    assert scored[1]["metadata"] == {"reward_error": "took longer than 2 s"}
    assert workshop.stderr.splitlines()[-1] == "4 samples, mean reward 0.75, over the time limit 1"


SLOW = """
import os

def reward(sample):
    with open("graded.txt", "a") as file:
        file.write(f"{sample.index} ")
    if sample.index == 6 and os.path.exists("trap"):
        os.kill(os.getpid(), 9) if open("trap").read() == "kill" else 1 / 0
    return float(sample.index)

def whole(samples):
    return [reward(sample) + 100 * len(samples) for sample in samples]
"""


def cut_off(workshop: Workshop, how: str, *arguments: str, out: str = "scored.jsonl") -> list[str]:
    """Score ten samples, die at the seventh, score again; the indices that were graded."""
    samples_file(workshop, {index: str(index) for index in range(10)})
    (workshop.folder / "slow.py").write_text(SLOW)
    (workshop.folder / "trap").write_text(how)
    command = ("score", "samples.jsonl", *arguments, "--out", out)
    workshop.slimectl(*command, code=-9 if how == "kill" else 2)
    assert not (workshop.folder / out).exists()
    (workshop.folder / "trap").unlink()
    workshop.slimectl(*command)
    return (workshop.folder / "graded.txt").read_text().split()


@pytest.mark.parametrize("out", ["scored.jsonl", "scored.jsonl.gz"])
def test_scoring_that_was_cut_off_goes_on_after_the_last_sample(workshop: Workshop, out: str):
    graded = cut_off(workshop, "raise", "--custom-rm-path", "slow.py:reward", out=out)
    assert graded == [*map(str, range(7)), *map(str, range(6, 10))]
    assert workshop.stderr.splitlines() == [
        f"{out}: continuing after 6 samples of an interrupted attempt.",
        "10 samples, mean reward 4.5, accuracy 0.9 (reward >= 1)",
    ]
    rewards = [sample.reward for sample in read_samples(workshop.folder / out)]
    assert rewards == [float(index) for index in range(10)]
    assert list(workshop.folder.glob("*.partial*")) == []
    workshop.slimectl("score", "samples.jsonl", "--custom-rm-path", "slow.py:reward", "--out", out)
    assert "is up to date with these inputs and settings" in workshop.stderr


def test_a_group_that_was_cut_off_is_graded_whole(workshop: Workshop):
    graded = cut_off(workshop, "raise", "--custom-rm-path", "slow.py:whole", "-s", "score.group_rm=true")
    assert graded == ["0", "1", "2", "3", "4", "5", "6", "4", "5", "6", "7", "8", "9"]
    rewards = [sample.reward for sample in read_samples(workshop.folder / "scored.jsonl")]
    assert rewards == [200.0 + index for index in range(10)]


def test_scoring_that_was_killed_begins_again_or_goes_on_but_loses_nothing(workshop: Workshop):
    graded = cut_off(workshop, "kill", "--custom-rm-path", "slow.py:reward")
    assert graded[-1] == "9"
    assert [sample.index for sample in read_samples(workshop.folder / "scored.jsonl")] == list(range(10))


def test_other_settings_or_force_begin_anew(workshop: Workshop):
    samples_file(workshop, {index: str(index) for index in range(10)})
    (workshop.folder / "slow.py").write_text(SLOW)
    command = ("score", "samples.jsonl", "--custom-rm-path", "slow.py:reward", "--out", "scored.jsonl")
    (workshop.folder / "trap").write_text("raise")
    workshop.slimectl(*command, code=2)
    assert "scored.jsonl.partial: keeping 6 samples. Run the same command again to continue." in workshop.stderr
    workshop.slimectl(*command, "-s", "rollout.seed=9", code=2)
    workshop.slimectl(*command, "-s", "rollout.seed=9", "--force", code=2)
    assert (workshop.folder / "graded.txt").read_text().split() == [*map(str, range(7))] * 3


def test_prompts_that_were_never_sampled_are_no_samples_of_reward_0(workshop: Workshop):
    workshop.slimectl("score", "prompts.jsonl", "--rm-type", "exact", "-o", "scored.jsonl", code=3)
    assert workshop.stderr == (
        "slimectl: prompts.jsonl:1: no response and no tokens, so there is nothing to grade. "
        "Sample it with `slimectl rollout`.\n"
    )
    assert not (workshop.folder / "scored.jsonl").exists()
    workshop.slimectl("score", "prompts.jsonl", "--rm-type", "exact", "--on-error", "skip", "-o", "s.jsonl", code=3)
    # An empty answer is an answer.
    empty = b'{"prompt": "say one", "label": "one", "response": ""}\n'
    assert json.loads(workshop.slimectl("score", "-", "--rm-type", "exact", stdin=empty))["reward"] == 0.0
