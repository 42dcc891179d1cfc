"""A checkpoint in the background: whole or absent, one at a time, and its errors."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.atomic_replace import write_text
from slimectl.data.run_dir import RunDir
from slimectl.errors import StorageError
from slimectl.runtime.recorder import RunRecorder
from slimectl.settings import Settings
from slimectl.stages.train import TrainState


class Writer:
    """A policy that writes one file, and has written it when `go` is set."""

    weight_version = "1"

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.error, self.content = threading.Event(), error, "first"

    def save_in_background(self, path: Path) -> None:
        write_text(path / "model.safetensors", self.content)

    def is_saved(self) -> bool:
        if self.go.is_set() and self.error is not None:
            raise self.error
        return self.go.is_set()


def recorder(folder: Path) -> RunRecorder:
    run = RunDir(folder)
    if not folder.exists():
        run.start("")
    return RunRecorder(run, Settings.model_validate({"run": {"async_save": True}}))


def save(journal: RunRecorder, policy: Any, number: int) -> None:
    journal.save(policy, TrainState(step=number, rollout_id=number), [])


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path):
    journal, policy = recorder(tmp_path / "run"), Writer()
    save(journal, policy, 1)
    policy.content = "second"  # training goes on
    assert journal.folder.checkpoints() == []
    assert journal.checkpoints() == [1]
    assert not (tmp_path / "run" / "latest").exists()
    policy.go.set()
    journal.finish_save()
    assert journal.folder.checkpoints() == journal.checkpoints() == [1]
    assert os.readlink(tmp_path / "run" / "latest") == "step_000001"
    assert journal.folder.newest(pytest.fail) == journal.folder.step(1)
    assert (journal.folder.step(1) / "policy" / "model.safetensors").read_text() == "first"


def test_the_next_checkpoint_waits_for_the_previous_one(tmp_path: Path):
    journal, first, second = recorder(tmp_path / "run"), Writer(), Writer()
    second.go.set()
    save(journal, first, 1)
    saving = threading.Thread(target=save, args=(journal, second, 2))
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    assert not (tmp_path / "run" / ".tmp-step_000002").exists()
    first.go.set()
    saving.join()
    journal.finish_save()
    assert journal.folder.checkpoints() == [1, 2]


def test_a_kill_leaves_nothing_that_a_resume_takes_for_a_checkpoint(tmp_path: Path):
    journal, policy = recorder(tmp_path / "run"), Writer()
    policy.go.set()
    save(journal, policy, 1)
    journal.finish_save()
    child = os.fork()
    if child == 0:
        save(journal, Writer(), 2)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    staged = tmp_path / "run" / ".tmp-step_000002"
    assert (staged / "policy" / "model.safetensors").read_text() == "first"
    assert (staged / "state.json").exists()
    journal.folder.adopt()
    assert not staged.exists()
    assert journal.folder.newest(pytest.fail) == journal.folder.step(1)


def test_an_error_of_the_writer_is_reported_at_the_next_step_and_leaves_nothing(tmp_path: Path):
    journal, policy = recorder(tmp_path / "run"), Writer(OSError(28, "No space left on device"))
    save(journal, policy, 3)
    journal.check_save()
    policy.go.set()
    save_ended = journal._background_save
    assert save_ended is not None
    with pytest.raises(StorageError):
        save_ended.wait()
    with pytest.raises(StorageError, match=r"step_000003: No space left on device\. Nothing was left under that name"):
        journal.check_save()
    journal.abandon_save()
    assert journal.checkpoints() == []
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_an_error_before_the_state_is_copied_ends_the_save_at_once(tmp_path: Path):
    journal = recorder(tmp_path / "run")

    class Full(Writer):
        def save_in_background(self, path: Path) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device"):
        save(journal, Full(), 1)
