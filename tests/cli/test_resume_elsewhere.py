"""A resume reads the data of its checkpoint, wherever the command is typed, and tells data that has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from workshop import Workshop, set_up


@pytest.fixture
def one_round(tmp_path: Path, model_dir) -> Workshop:
    """A project with a run of one round, whose data, reward and folder have relative paths."""
    (tmp_path / "project").mkdir()
    workshop = set_up(tmp_path / "project", model_dir("llama"))
    workshop.slimectl("run", "-s", "run.num_rollout=1", "-s", "eval.interval=none")
    return workshop


def prompts(workshop: Workshop, number: int) -> list[str]:
    """The prompts of a round, once each."""
    file = workshop.folder / "runs" / "a" / f"step_{number:06d}" / "samples.jsonl"
    return list(dict.fromkeys(json.loads(line)["prompt"] for line in file.read_text().splitlines()))


def test_changed_data_is_refused_unless_it_is_wanted(one_round: Workshop):
    file = one_round.folder / "prompts.jsonl"
    settings = one_round.folder / "runs" / "a" / "run.toml"
    before, rows = settings.read_text(), file.read_text().splitlines(keepends=True)
    file.write_text("".join(rows[::-1]))
    more = ("run", "--resume", "runs/a", "-s", "run.num_rollout=2")
    refusal = "rollout.data: prompts.jsonl: changed ("
    assert refusal in one_round.slimectl(*more, "--dry-run", code=2).decode()
    one_round.slimectl(*more, code=2)
    assert refusal in one_round.stderr
    assert "continue with the new data: -s run.on_data_change=warn" in one_round.stderr
    assert settings.read_text() == before
    one_round.slimectl(*more, "-s", "run.on_data_change=warn")
    assert "Prompts may be repeated or skipped." in one_round.stderr
    assert "eval.data.small: prompts.jsonl@[0:3]: changed (" in one_round.stderr  # a warning only
    # The second half of the reversed file is the first half of the file as it was.
    assert prompts(one_round, 2) == prompts(one_round, 1)[::-1] == ["say four", "say three", "say two", "say one"]


def test_relative_paths_start_from_the_folder_of_the_first_start(one_round: Workshop):
    elsewhere = one_round.folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "prompts.jsonl").write_text('{"prompt": "another file"}\n' * 8)
    (elsewhere / "more.toml").write_text("[run]\nnum_rollout = 2\n")
    there = Workshop(elsewhere, one_round.model)
    shown = there.slimectl("run", "--resume", "../project/runs/a", "-c", "more.toml").decode()
    assert f"was started in {one_round.folder}, so relative paths in settings start there" in there.stderr
    assert "resuming runs/a after round 1" in there.stderr
    assert shown == "runs/a\n"
    assert prompts(one_round, 2) == ["say five", "say six", "say seven", "say eight"]

    moved = shutil.move(one_round.folder, one_round.folder.parent / "moved")
    there.slimectl("run", "--resume", f"{moved}/runs/a", "-s", "run.num_rollout=3")
    assert f"was started in {moved}" in there.stderr
    assert not list(elsewhere.glob("runs"))
