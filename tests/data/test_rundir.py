"""A checkpoint is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from slimectl.data.io import byte_lines
from slimectl.data.manifest import integrity_error
from slimectl.data.ownership import refuse_links
from slimectl.data.run_dir import RunDir, write_folder
from slimectl.errors import CheckpointError, SettingsError, StorageError
from slimectl.system.model_files import follow_links, linked_step, policy_folder


def fill(staged: Path) -> None:
    (staged / "policy").mkdir()
    (staged / "policy" / "weights").write_bytes(b"1234")


def test_a_written_folder_is_whole_and_a_changed_byte_is_seen(tmp_path: Path):
    write_folder(tmp_path / "step", fill)
    assert integrity_error(tmp_path / "step") is None
    (tmp_path / "step" / "policy" / "weights").write_bytes(b"1235")
    assert "checksum" in str(integrity_error(tmp_path / "step"))
    (tmp_path / "step" / "policy" / "weights").write_bytes(b"123")
    assert integrity_error(tmp_path / "step") == "policy/weights has 3 bytes, not 4"
    (tmp_path / "step" / "policy" / "weights").unlink()
    assert integrity_error(tmp_path / "step") == "policy/weights is missing"


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path):
    def private(staged: Path) -> None:  # as safetensors and huggingface_hub write
        (staged / "weights").touch(mode=0o600)

    before = os.umask(0o027)
    try:
        write_folder(tmp_path / "step", private)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "step" / "weights").stat().st_mode) == 0o640


def test_a_full_disk_leaves_nothing_under_the_final_name_and_keeps_the_old(tmp_path: Path):
    def full(staged: Path) -> None:
        (staged / "half").write_bytes(b"12")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageError, match=r"No space left on device.*Free space or write elsewhere"):
        write_folder(tmp_path / "new", full)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "old", fill)
    with pytest.raises(StorageError):
        write_folder(tmp_path / "old", full)
    assert integrity_error(tmp_path / "old") is None
    assert [child.name for child in tmp_path.iterdir()] == ["old"]


def test_the_newest_whole_checkpoint_is_found_past_a_damaged_one(tmp_path: Path):
    run = RunDir(tmp_path)
    for number in (1, 2, 3):
        run.save(number, fill)
    (run.step(3) / "policy" / "weights").write_bytes(b"")
    warnings: list[str] = []
    assert run.newest(warnings.append) == run.step(2)
    assert "Falling back" in warnings[0]
    assert (tmp_path / "latest").resolve() == run.step(3)


def test_without_a_whole_checkpoint_there_is_nothing_to_resume(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        RunDir(tmp_path).newest(print)


def test_old_checkpoints_go_but_their_samples_stay(tmp_path: Path):
    run = RunDir(tmp_path)
    for number in (1, 2, 3):
        run.save(number, fill)
    (run.step(1) / "samples.jsonl").write_text("{}\n")
    run.prune(1)
    assert run.checkpoints() == [3]
    assert sorted(child.name for child in tmp_path.glob("step_*")) == ["step_000001", "step_000003"]


def test_growing_files_are_cut_back_to_what_a_checkpoint_saw(tmp_path: Path):
    run = RunDir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("one\n")
    sizes = run.sizes()
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    (tmp_path / "perf.jsonl").write_text("later\n")
    run.cut_back(sizes)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"
    assert (tmp_path / "perf.jsonl").read_text() == ""


def test_a_second_run_under_the_same_name_is_refused(tmp_path: Path):
    run = RunDir(tmp_path / "a")
    run.start("")
    run.start("")  # nothing has come of the first start
    (tmp_path / "a" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SettingsError, match="--resume"):
        run.start("")
    run.start("x = 1", force=True)
    assert (tmp_path / "a" / "run.toml").read_text() == "x = 1"


def test_a_file_system_without_links_gets_a_file_with_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))  # SMB and FUSE; exFAT says EPERM

    monkeypatch.setattr(os, "symlink", refuse)

    def fill_with_config(staged: Path) -> None:
        fill(staged)
        (staged / "policy" / "config.json").write_text("{}")

    run = RunDir(tmp_path)
    for number in (1, 2):
        run.save(number, fill_with_config)
    latest = tmp_path / "latest"
    assert latest.read_text() == "step_000002\n"
    assert not latest.is_symlink()
    # Whatever takes a model or a file of the run takes these paths.
    assert policy_folder(tmp_path) == policy_folder(latest) == run.step(2) / "policy"
    assert follow_links(latest / "policy" / "weights") == run.step(2) / "policy" / "weights"
    assert [line for _, line in byte_lines(latest / "policy" / "weights")] == [b"1234"]
    assert policy_folder(latest / "policy") == run.step(2) / "policy"
    refuse_links(tmp_path, "it cannot be replaced")
    shutil.rmtree(run.step(2))  # as after a kill between two steps of its removal
    (tmp_path / "run.toml").write_text("")
    (tmp_path / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    run.adopt()
    assert not latest.exists()
    run.point_latest(run.step(1))
    monkeypatch.undo()
    run.point_latest(run.step(2))  # moved to a file system with links
    assert os.readlink(latest) == "step_000002"


@pytest.mark.parametrize("text", ["", "../other/step_000001", "step_000001/../..", "mine", "\0"])
def test_another_file_named_latest_leads_nowhere(tmp_path: Path, text: str):
    (tmp_path / "latest").write_text(text)
    assert linked_step(tmp_path) is None
    assert follow_links(tmp_path / "latest") == tmp_path / "latest"
    with pytest.raises(SettingsError, match="latest: was not written by slimectl"):
        refuse_links(tmp_path, "it cannot be replaced")
