"""Every mistake gets one line that says what, where and what next, and the exit code that errors.py documents."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import forkserver
import pytest
from workshop import Workshop

SAMPLE = {"group_index": 0, "index": 0, "prompt": "x", "tokens": [1, 2, 3], "response": "b", "response_length": 1,
          "label": "b"}  # fmt: skip


def refused(workshop: Workshop, *arguments: str, code: int, stdin: bytes | None = None) -> str:
    """The one line that a refused command writes."""
    workshop.slimectl(*arguments, code=code, stdin=stdin)
    lines = workshop.stderr.splitlines()
    assert len(lines) == 1, workshop.stderr
    assert lines[0].startswith("slimectl: ")
    return lines[0].removeprefix("slimectl: ")


def samples_file(workshop: Workshop, *samples: dict) -> str:
    path = workshop.folder / "samples.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path.name


def test_an_unknown_key_names_the_nearest(workshop: Workshop):
    line = refused(workshop, "run", "-s", "algorithm.eps_clip_hihg=1", code=2)
    assert line == "algorithm.eps_clip_hihg: unknown setting (command line). Did you mean algorithm.eps_clip_high?"


def test_a_wrong_type_names_key_value_and_origin(workshop: Workshop):
    line = refused(workshop, "run", "-s", "run.num_rollout=many", code=2)
    assert line.startswith("run.num_rollout: input should be a valid integer")
    assert line.endswith("not 'many' (command line)")


def test_a_missing_model(workshop: Workshop):
    line = refused(workshop, "rollout", "--data", "prompts.jsonl", "--model", "nowhere", code=1)
    assert line == "nowhere: no such model directory. Use a Hugging Face checkpoint directory"


@pytest.mark.parametrize(
    ("size", "reason"),
    [("tensor_model", "3 does not divide 4 attention heads"), ("pipeline_model", "3 does not divide 2 layers")],
)
def test_a_layout_that_the_model_cannot_have_is_said_before_a_folder_is_made(
    workshop: Workshop, size: str, reason: str
):
    ranks = ["-s", "cluster.actor_num_gpus_per_node=3", "-s", f"megatron.{size}_parallel_size=3"]
    line = refused(workshop, "run", "--backend", "megatron", *ranks, code=2)
    assert line.startswith(f"megatron.{size}_parallel_size: {reason}")
    assert not (workshop.folder / "runs").exists()


def test_an_unsupported_model_family(workshop: Workshop):
    other = workshop.folder / "other"
    other.mkdir()
    for file in workshop.model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps({"model_type": "newmodel"}))
    line = refused(workshop, "rollout", "--data", "prompts.jsonl", "--model", "other", code=1)
    assert "newmodel" in line
    assert "Upgrade transformers" in line


def test_an_empty_prompt_file(workshop: Workshop):
    (workshop.folder / "empty.jsonl").write_text("")
    line = refused(workshop, "run", "--data", "empty.jsonl", code=2)
    assert line == "empty.jsonl: no rows. Give a file or a slice that has some."
    assert not (workshop.folder / "runs").exists()


def test_a_prompt_file_without_the_key_lists_the_keys_that_are_there(workshop: Workshop):
    (workshop.folder / "other.jsonl").write_text('{"sum": "1+1", "label": "2"}\n')
    line = refused(workshop, "run", "--data", "other.jsonl", code=3)
    assert line.startswith("other.jsonl:1: ")
    assert "Its keys are sum, label" in line
    assert "rollout.input_key" in line


def test_a_malformed_line_1000_of_2000(workshop: Workshop):
    name = samples_file(workshop, *[{**SAMPLE, "index": i} for i in range(2000)])
    lines = (workshop.folder / name).read_text().splitlines()
    lines[999] = lines[999][:-5]
    (workshop.folder / name).write_text("\n".join(lines) + "\n")
    workshop.slimectl("score", name, "--rm-type", "exact", "--out", "scored.jsonl", code=3)
    kept, line = workshop.stderr.splitlines()
    assert kept.endswith("scored.jsonl.partial: keeping 999 samples. Run the same command again to continue.")
    assert line.startswith("slimectl: samples.jsonl:1000: ")
    assert not (workshop.folder / "scored.jsonl").exists()
    workshop.slimectl("score", name, "--rm-type", "exact", "--out", "scored.jsonl", "--on-error", "skip")
    assert len((workshop.folder / "scored.jsonl").read_text().splitlines()) == 1999
    assert len(workshop.slimectl("score", name, "--rm-type", "exact", "--on-error", "skip").splitlines()) == 1999
    assert "samples.jsonl:1000: " in workshop.stderr


def test_lists_of_unequal_length_name_line_field_and_both_lengths(workshop: Workshop):
    name = samples_file(workshop, SAMPLE, {**SAMPLE, "index": 1, "rollout_log_probs": [-1.0, -2.0]})
    line = refused(workshop, "score", name, "--rm-type", "exact", code=3)
    assert line == "samples.jsonl:2: Sample.rollout_log_probs: 2 values for 1 response tokens"


def test_a_slice_that_is_none_and_a_class_that_is_no_reward(workshop: Workshop):
    name = samples_file(workshop, SAMPLE)
    line = refused(workshop, "score", f"{name}@[a:b]", "--rm-type", "exact", code=2)
    assert line == "samples.jsonl@[a:b]: no such file. A part of a file is FILE@[a:b], with whole numbers a and b"
    (workshop.folder / "own.py").write_text(
        "class Own:\n    def __call__(self, sample):\n        return 1.0\n\nown = Own()\n"
    )
    line = refused(workshop, "score", name, "-s", "score.custom_rm_path=own.py:Own", code=2)
    assert line == "score.custom_rm_path: own.py:Own is a class. Create an instance in that file and name the instance."
    assert json.loads(workshop.slimectl("score", name, "-s", "score.custom_rm_path=own.py:own"))["reward"] == 1.0


def test_a_sample_without_reward_given_to_train(workshop: Workshop):
    name = samples_file(workshop, SAMPLE, {**SAMPLE, "index": 1})
    line = refused(workshop, "train", name, "-c", "slimectl.toml", code=3)
    assert line == "sample 0: no reward. Run `slimectl score` on these samples first"


@pytest.mark.parametrize("command", [["score", "-", "--rm-type", "exact"], ["train", "-", "-c", "slimectl.toml"]])
def test_an_empty_pipe_is_an_error_not_an_empty_success(workshop: Workshop, command: list[str]):
    line = refused(workshop, *command, code=3, stdin=b"")
    assert line.endswith("no samples. Look at the messages of the stage that wrote them.")


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        (["rollout", "--data", "prompts.jsonl"], "rollout.stop_token_ids=[999]"),
        (["eval"], "eval.data.small={path='prompts.jsonl',stop_token_ids=[999]}"),
        (["run"], "rollout.stop_token_ids=[999]"),
        (["run"], "eval.data.small={path='prompts.jsonl',stop_token_ids=[999]}"),
    ],
)
def test_a_stop_token_that_the_model_does_not_have(workshop: Workshop, command: list[str], setting: str):
    line = refused(workshop, *command, "-c", "slimectl.toml", "-s", setting, "-s", "rollout.min_new_tokens=2", code=2)
    name = "eval.data.small.stop_token_ids" if setting.startswith("eval") else "rollout.stop_token_ids"
    assert line == f"{name}: token 999 is outside the vocabulary of 259. Use ids of the model's tokenizer."
    assert not (workshop.folder / "runs").exists()


def test_a_group_of_one(workshop: Workshop):
    name = samples_file(workshop, {**SAMPLE, "reward": 1.0}, {**SAMPLE, "group_index": 1, "index": 1, "reward": 0.0})
    line = refused(workshop, "train", name, "-c", "slimectl.toml", code=3)
    assert line.startswith("group 0: only one response")
    line = refused(workshop, "run", "-s", "rollout.n_samples_per_prompt=1", code=2)
    assert line.startswith("rollout.n_samples_per_prompt: 1 gives groups of one")


def test_turns_without_rewards(workshop: Workshop):
    name = samples_file(workshop, *({**SAMPLE, "index": i, "reward": float(i)} for i in range(2)))
    line = refused(workshop, "train", name, "-c", "slimectl.toml", "-s", "algorithm.name=turn_grpo", code=3)
    assert line.startswith("sample 0: no turn_rewards, which turn_grpo needs. Sample from an environment")
    verifier = ["-s", "score.custom_rm_path=none", "-s", "score.rm_type=exact"]
    line = refused(workshop, "run", "-s", "algorithm.name=turn_grpo", *verifier, code=2)
    assert line.startswith("algorithm.name: turn_grpo needs a reward for each turn, and no environment, agent or")


def test_a_prompt_longer_than_the_context_is_left_out_and_named(workshop: Workshop):
    long, short = {"prompt": "x" * 300}, {"prompt": "say"}
    reason = "300 tokens leave no room for a response in a context of 256"
    (workshop.folder / "long.jsonl").write_text(f"{json.dumps(long)}\n{json.dumps(short)}\n")
    out = workshop.slimectl("rollout", "-c", "slimectl.toml", "--data", "long.jsonl")
    assert [json.loads(line)["group_index"] for line in out.splitlines()] == [1] * 4
    first, last = workshop.stderr.splitlines()
    assert first == f"long.jsonl:1: skipped: {reason}"
    assert last.endswith("prompts skipped 1")
    (workshop.folder / "long.jsonl").write_text(json.dumps(long) + "\n")
    workshop.slimectl("rollout", "-c", "slimectl.toml", "--data", "long.jsonl", code=3)
    assert workshop.stderr.splitlines()[-1].startswith(
        f"slimectl: 1 prompt read, all too long (the last one: {reason}). Raise rollout.max_prompt_len or"
    )


@pytest.mark.parametrize(
    ("body", "workers", "message"),
    [
        ("raise KeyError('gold')", "0", "raised KeyError: 'gold'"),
        ("raise KeyError('gold')", "1", "raised KeyError: 'gold'"),
        ("return None", "0", "is None, not a finite number"),
        ("return float('nan')", "0", "is nan, not a finite number"),
        ("return {'acc': 1.0}", "0", "reward_key"),
    ],
)
def test_a_reward_hook_that_raises_or_returns_nonsense(workshop: Workshop, body: str, message: str, workers: str):
    (workshop.folder / "bad.py").write_text(f"def reward(sample):\n    {body}\n")
    name = samples_file(workshop, SAMPLE)
    line = refused(workshop, "score", name, "--custom-rm-path", "bad.py:reward", "--workers", workers, code=2)
    assert message in line


@pytest.mark.slow
def test_a_full_disk_while_saving_leaves_nothing_half_written(workshop: Workshop):
    # A limit on file size fails the write as a full disk does: with an error in the middle of the file.
    workshop.slimectl("rollout", "-c", "slimectl.toml", "--out", "sampled.jsonl")
    workshop.slimectl("score", "sampled.jsonl", "-c", "slimectl.toml", "--out", "scored.jsonl")
    limit = ["RLIMIT_FSIZE", "100000"]
    arguments = [*limit, "train", "scored.jsonl", "-c", "slimectl.toml", "--save", "saved"]
    result = forkserver.run_python(forkserver.LIMITED, arguments, cwd=workshop.folder, env=workshop.environment)
    lines = result.stderr.splitlines()
    assert result.returncode == 1
    assert len(lines) == 1, lines
    assert "saved" in lines[0]
    assert "Free space or write elsewhere" in lines[0]
    assert not list(workshop.folder.glob("*saved*"))


def test_a_second_ctrl_c_stops_at_once(workshop: Workshop):
    rounds = ["-s", "run.num_rollout=1000", "-s", "rollout.max_response_len=200"]
    process = workshop.start("run", *rounds, stderr=subprocess.PIPE)
    metrics = workshop.folder / "runs" / "a" / "metrics.jsonl"
    while not metrics.exists():
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 130, words.decode()
    assert b"Traceback" not in words
