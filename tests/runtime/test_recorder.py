"""What a run reads back of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.run_dir import RunDir, write_text
from slimectl.errors import CheckpointError
from slimectl.runtime.recorder import RunRecorder, load_state
from slimectl.settings import Settings
from slimectl.types import TrainingSample


def test_a_checkpoint_of_an_older_run_is_refused_in_one_line_before_weights_are_read(tmp_path: Path):
    folder = RunDir(tmp_path / "old")
    folder.start("", force=False)
    facts = {"step": 3, "rollout_id": 3, "pending": [], "sizes": {}, "scores": [], "evaluations": []}

    def fill(staged: Path) -> None:
        (staged / "policy").mkdir()
        write_text(staged / "state.json", json.dumps(facts))

    folder.save(3, fill)
    nothing_to_load: Any = None
    with pytest.raises(CheckpointError, match=r"step_000003/state.json: no 'sampling'.*--model \S+step_000003$"):
        RunRecorder(folder, Settings()).restore(nothing_to_load, print)


def test_rows_that_wait_in_an_older_checkpoint_keep_their_loss_weights(tmp_path: Path):
    row = {"tokens": [1, 2, 3], "response_length": 2, "weights": [1.0, 0.0], "advantages": [0.5, 0.5], "group": 4}
    write_text(tmp_path / "state.json", json.dumps({"step": 3, "rollout_id": 2, "pending": [[7, row]]}))
    policy: Any = None  # read only where there is no state
    state = load_state(tmp_path, policy)
    assert state.pending == [(7, TrainingSample([1, 2, 3], 2, [1.0, 0.0], [0.5, 0.5], group=4))]
