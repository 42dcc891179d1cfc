"""slimectl rollout: what becomes of a prompt's row, and what the command says about prompts and outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from workshop import Workshop

SHORT = ("-c", "slimectl.toml", "-s", "rollout.max_response_len=2", "-n", "2")


def write(workshop: Workshop, name: str, rows: list[dict[str, Any]]) -> str:
    (workshop.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def records(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


ROWS = [
    {"id": "a1", "difficulty": "easy", "prompt": "2+2=", "label": "4", "metadata": {"x": 1}, "index": 7, "reward": 1.0},
    {"id": "b2", "difficulty": "hard", "prompt": "3*3=", "label": "9", "tools": [], "facts": {"n": [3, None]}},
]


def test_keys_of_a_prompts_row_stay_with_its_samples_from_stage_to_stage(workshop: Workshop) -> None:
    data = write(workshop, "rows.jsonl", ROWS)
    sampled = workshop.slimectl("rollout", *SHORT, "--data", data)
    samples = records(sampled)
    assert [(s["id"], s["difficulty"]) for s in samples] == [("a1", "easy")] * 2 + [("b2", "hard")] * 2
    assert samples[2]["facts"] == {"n": [3, None]}
    # Names of a sample's own fields are its own.
    assert [(s["index"], s["reward"]) for s in samples] == [(0, None), (1, None), (2, None), (3, None)]
    (workshop.folder / "by_id.py").write_text("def reward(sample):\n    return float(sample.extra['id'] == 'b2')\n")
    scored = workshop.slimectl("score", "-", "--custom-rm-path", "by_id.py:reward", stdin=sampled)
    assert [(s["id"], s["reward"]) for s in records(scored)] == [("a1", 0.0)] * 2 + [("b2", 1.0)] * 2


def test_a_run_averages_rewards_by_a_key_of_the_prompts_rows(workshop: Workshop) -> None:
    data = write(workshop, "rows.jsonl", ROWS)
    by_id = "def reward(sample):\n    return float(sample.extra.get('id') == 'b2')\n"
    (workshop.folder / "by_id.py").write_text(by_id)
    category = ("-s", "track.log_reward_category=difficulty", "-s", "score.custom_rm_path=by_id.py:reward")
    once = (
        "-s",
        "run.num_rollout=1",
        "-s",
        "run.rollout_batch_size=2",
        "-s",
        "eval.data={}",
        "-s",
        "eval.interval=none",
    )
    workshop.slimectl("run", "--data", data, "--name", "b", *category, *once)
    metrics = next(line["metrics"] for line in workshop.metrics("b") if "rollout/step" in line["metrics"])
    assert (metrics["rollout/category/easy/reward"], metrics["rollout/category/hard/reward"]) == (0.0, 1.0)
    assert metrics["rollout/category/easy/share"] == 0.5


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ((), 1),
        (("-s", "rollout.apply_chat_template=false"), 0),
        (("-s", "rollout.apply_chat_template=true"), 0),
    ],
)
def test_a_string_that_passes_by_the_chat_template_is_said_once_unless_it_is_decided(
    workshop: Workshop, options: tuple[str, ...], warned: int
) -> None:
    undecided = ("--model", str(workshop.model), "--data", "prompts.jsonl", "--max-response-len", "2", "-n", "2")
    sampled = workshop.slimectl("rollout", *undecided, *options)
    lines = [line for line in workshop.stderr.splitlines() if "rollout.apply_chat_template=true" in line]
    assert len(lines) == warned
    assert all(line.startswith("prompts.jsonl:1: string prompts") for line in lines)
    templated = "rollout.apply_chat_template=true" in options
    prompt = "say one"
    assert (len(records(sampled)[0]["tokens"]) - 2 > len(prompt)) == templated


def test_a_chat_goes_through_the_template_without_a_warning(workshop: Workshop) -> None:
    data = write(workshop, "chats.jsonl", [{"prompt": [{"role": "user", "content": "hello"}]}])
    workshop.slimectl("rollout", "--model", str(workshop.model), "--data", data, "--max-response-len", "2")
    assert "apply_chat_template" not in workshop.stderr


@pytest.mark.slow
def test_a_file_of_other_inputs_is_replaced_with_force_alone(workshop: Workshop) -> None:
    first, second = write(workshop, "a.jsonl", ROWS[:1]), write(workshop, "b.jsonl", ROWS)
    command = ("rollout", *SHORT, "-o", "s.jsonl")
    workshop.slimectl(*command, "--data", first)
    before = (workshop.folder / "s.jsonl").read_bytes()
    for other in (second, f"{second}@[0:1]"):
        workshop.slimectl(*command, "--data", other, code=2)
        assert workshop.stderr == (
            f"slimectl: s.jsonl: was made from inputs other than {other}, {workshop.model}. Give another --out FILE, "
            f"or --force to replace it.\n"
        )
    assert (workshop.folder / "s.jsonl").read_bytes() == before
    workshop.slimectl(*command, "--data", first, "--temperature", "0.5")  # the same inputs
    workshop.slimectl(*command, "--data", second, "--force")
    assert len((workshop.folder / "s.jsonl").read_bytes().splitlines()) == 4


def test_a_file_of_the_users_is_replaced_with_force_alone(workshop: Workshop) -> None:
    mine = (workshop.folder / "reward.py").read_bytes()
    workshop.slimectl("rollout", *SHORT, "-o", "reward.py", code=2)
    assert "slimectl: reward.py: exists, but no stage wrote it. Give another --out FILE" in workshop.stderr
    assert (workshop.folder / "reward.py").read_bytes() == mine


@pytest.mark.slow
def test_the_folder_of_a_run_as_a_model_is_its_newest_checkpoint(workshop: Workshop) -> None:
    workshop.slimectl("run", "-s", "run.num_rollout=2", "-s", "eval.interval=none")
    direct = workshop.slimectl("rollout", *SHORT, "--model", "runs/a/latest")
    assert workshop.slimectl("rollout", *SHORT, "--model", "runs/a") == direct
    assert "runs/a is a run. Using its newest checkpoint, step_000002.\n" in workshop.stderr
    workshop.slimectl("convert", "runs/a", "plain", "--to", "hf")
    assert (workshop.folder / "plain" / "model.safetensors").exists()
    # A link that leads out of the run is not followed.
    (workshop.folder / "runs" / "a" / "latest").unlink()
    (workshop.folder / "runs" / "a" / "latest").symlink_to("../a/step_000001")
    workshop.slimectl("rollout", *SHORT, "--model", "runs/a", code=1)
    assert "runs/a: no config.json" in workshop.stderr
