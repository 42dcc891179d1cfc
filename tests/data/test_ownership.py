"""Nothing is removed, cut or replaced that this program did not write."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.manifest import integrity_error
from slimectl.data.ownership import own_run_files
from slimectl.data.run_dir import RunDir, write_folder
from slimectl.engines.weight_sync.disk import write_checkpoint
from slimectl.errors import CheckpointError, SettingsError

RECORD = '{"step": 1, "metrics": {}}\n'


def fill(staged: Path) -> None:
    (staged / "policy").mkdir()
    (staged / "policy" / "model.safetensors").write_bytes(b"1234")
    (staged / "state.json").write_text(json.dumps({"sizes": {"metrics.jsonl": 27}}))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finished(path: Path, *, rounds: int = 2) -> RunDir:
    run = RunDir(path)
    run.start("x = 1\n")
    for number in range(1, rounds + 1):
        with (path / "metrics.jsonl").open("a") as file:
            file.write(RECORD)
        run.save(number, fill)
    return run


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "names", [["run.toml"], ["run.toml", "notes.txt"], ["notes.txt"], ["manifest.json", "run.toml"]]
)
def test_a_users_folder_is_refused_and_stays(tmp_path: Path, names: list[str], force: bool):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    before = contents(folder)
    with pytest.raises(SettingsError, match=r"but no manifest.json of a run, so slimectl does not write there. Choose"):
        RunDir(folder).start("", force=force)
    assert contents(folder) == before


def test_the_manifest_is_the_first_file_of_a_run(tmp_path: Path):
    run = RunDir(tmp_path / "a")
    run.path.mkdir()
    (run.path / ".tmp-manifest.json").write_text('{"slime')  # killed before even that was there
    run.start("x = 1\n", manifest={"settings": {}})
    assert json.loads((run.path / "manifest.json").read_text())["stage"] == "run"
    assert sorted(contents(run.path)) == ["manifest.json", "run.toml"]
    (run.path / "run.toml").unlink()
    run.start("x = 2\n")  # killed before run.toml was there
    assert (run.path / "run.toml").read_text() == "x = 2\n"


def test_force_removes_what_a_run_writes_and_says_what_stays(tmp_path: Path):
    run = finished(tmp_path / "a")
    theirs = ["notes.jsonl", "step_000001/notes.txt", "step_000001/policy/mine.bin", "eval/mine.txt", "step_x/policy/a"]
    for name in theirs:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("mine")
    words: list[str] = []
    run.start("x = 2\n", force=True, warn=words.append)
    assert sorted(contents(run.path)) == sorted([*theirs, "manifest.json", "run.toml"])
    assert words == [
        f"{run.path}: eval/mine.txt, notes.jsonl, step_000001/notes.txt and 2 more left in place, "
        "because slimectl did not write it"
    ]
    assert run.checkpoints() == []
    (run.path / "metrics.jsonl").write_text(RECORD)
    run.save(1, fill)  # under a name that holds the user's files
    assert (run.path / "step_000001/policy/mine.bin").read_text() == "mine"
    assert integrity_error(run.step(1)) is None


def test_nothing_is_removed_through_a_link(tmp_path: Path):
    run = finished(tmp_path / "real")
    (tmp_path / "link").symlink_to(run.path)
    with pytest.raises(SettingsError, match="link: is a link, and slimectl removes nothing through a link"):
        RunDir(tmp_path / "link").start("", force=True)
    moved = run.step(1).rename(tmp_path / "moved")
    run.step(1).symlink_to(moved)
    with pytest.raises(SettingsError, match="step_000001: is a link, so its run cannot be replaced"):
        run.start("", force=True)
    before = contents(moved)
    run.save(3, fill)
    run.prune(1)
    assert contents(moved) == before
    assert run.checkpoints() == [1, 3]


def test_metrics_that_are_a_link_are_not_cut(tmp_path: Path):
    run = finished(tmp_path / "a")
    (tmp_path / "mine").write_text("x" * 100)
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(SettingsError, match=r"metrics.jsonl: is a link, so its run cannot continue"):
        run.adopt()
    assert (tmp_path / "mine").read_text() == "x" * 100


def test_a_resume_cuts_back_its_own_files_only(tmp_path: Path):
    run = finished(tmp_path / "a")
    (run.path / "notes.jsonl").write_text("mine\n" * 9)
    run.cut_back({"metrics.jsonl": 27, "notes.jsonl": 0})
    assert (run.path / "metrics.jsonl").read_text() == RECORD
    assert (run.path / "notes.jsonl").read_text() == "mine\n" * 9


def test_an_older_versions_run_without_manifest_goes_on_and_is_signed(tmp_path: Path):
    run = finished(tmp_path / "a")
    (run.path / "manifest.json").unlink()
    (run.path / "notes.txt").write_text("mine")
    run.adopt()
    assert json.loads((run.path / "manifest.json").read_text())["stage"] == "run"
    assert (run.path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "model/weights", "step_000001/policy/weights", "notes.txt"])
def test_a_users_folder_with_a_run_toml_is_not_resumed(tmp_path: Path, name: str):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine\n")
    (tmp_path / "mine" / "run.toml").write_text("")
    with pytest.raises(
        SettingsError, match=r"has a run.toml, but no manifest.json and no files of a run. Start a run with"
    ):
        RunDir(tmp_path / "mine").adopt()
    assert file.read_text() == "mine\n"


def test_clean_up_after_a_crash_bears_what_vanished_and_nested_leftovers(tmp_path: Path):
    """Killed while state.json was written: a half-written file within a half-written checkpoint."""
    run = finished(tmp_path / "a")
    nested = run.path / ".tmp-step_000003" / "policy"
    nested.mkdir(parents=True)
    (nested.parent / ".tmp-state.json").write_text("{")
    (run.path / ".tmp-run.toml").write_text("")
    (run.path / ".tmp-mine").write_text("mine")
    run.adopt()
    run.adopt()
    assert [path.name for path in run.path.glob(".*")] == [".tmp-mine"]


def test_a_replacement_that_was_cut_off_is_finished(tmp_path: Path):
    run = finished(tmp_path / "a")
    (run.step(2) / "mine.txt").write_text("mine")
    run.step(2).rename(run.path / ".old-step_000002")
    run.adopt()
    assert run.checkpoints() == [1, 2]
    shutil.copytree(run.step(2), run.path / ".old-step_000002")
    (run.step(2) / "mine.txt").unlink()
    run.adopt()
    assert (run.step(2) / "mine.txt").read_text() == "mine"
    assert not (run.path / ".old-step_000002").exists()


def test_latest_is_repaired_and_metrics_are_never_padded(tmp_path: Path):
    run = finished(tmp_path / "a")
    (run.path / "latest").unlink()
    run.point_latest(run.step(2))
    assert os.readlink(run.path / "latest") == "step_000002"
    (run.path / "metrics.jsonl").write_text(RECORD[:20])
    run.cut_back({"metrics.jsonl": 27})
    assert (run.path / "metrics.jsonl").read_text() == RECORD[:20]


def test_a_checkpoint_whose_metrics_are_lost_is_passed_over(tmp_path: Path):
    run, words = finished(tmp_path / "a"), list[str]()
    state = run.step(2) / "state.json"
    manifest = json.loads((run.step(2) / "manifest.json").read_text())
    state.write_text(json.dumps({"sizes": {"metrics.jsonl": 54}}))
    manifest["files"].pop("state.json")
    (run.step(2) / "manifest.json").write_text(json.dumps(manifest))
    (run.path / "metrics.jsonl").write_text(RECORD + RECORD[:9])
    assert run.newest(words.append) == run.step(1)
    assert words == [
        f"{run.step(2)}: metrics.jsonl has 36 bytes, but had 54 when it was saved. Falling back to the "
        "previous checkpoint."
    ]
    (run.path / "metrics.jsonl").write_text("")
    with pytest.raises(
        CheckpointError, match=r"metrics.jsonl is shorter than at every checkpoint. .*--model .+_000001'?$"
    ):
        run.newest(words.append)


def test_a_folder_is_replaced_only_if_it_is_ours_and_keeps_what_is_not(tmp_path: Path):
    target = tmp_path / "model"
    write_folder(target, fill)
    (target / "notes.txt").write_text("mine")
    write_folder(target, fill)
    assert (target / "notes.txt").read_text() == "mine"
    assert integrity_error(target) is None
    (target / "manifest.json").unlink()
    before = contents(target)
    with pytest.raises(SettingsError, match="model: slimectl did not create it"):
        write_folder(target, fill)
    assert contents(target) == before


@pytest.mark.parametrize("name", [".tmp-model", ".old-model"])
def test_what_lies_under_a_staging_name_is_left_alone(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    if name == ".tmp-model":
        with pytest.raises(SettingsError, match=r"\.tmp-model: is in the way, and slimectl did not create it"):
            write_folder(tmp_path / "model", fill)
    else:
        write_folder(tmp_path / "model", fill)
    assert (tmp_path / name / "notes.txt").read_text() == "mine"


def test_a_file_of_the_new_folder_does_not_replace_a_users(tmp_path: Path):
    def more(staged: Path) -> None:
        fill(staged)
        (staged / "notes.txt").write_text("ours")

    write_folder(tmp_path / "model", fill)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match=r"model/notes.txt: is in the way, and slimectl did not write it"):
        write_folder(tmp_path / "model", more)
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert integrity_error(tmp_path / "model") is None


def test_two_writers_of_one_folder_are_kept_apart(tmp_path: Path):
    def within(staged: Path) -> None:
        fill(staged)
        child = os.fork()
        if child == 0:
            try:
                write_folder(tmp_path / "model", fill)
            except SettingsError as error:
                os._exit(7 if "model: is being written (process" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    write_folder(tmp_path / "model", within)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["model"]


def test_pushed_weights_do_not_replace_a_users_folder(tmp_path: Path):
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "model.safetensors").write_text("mine")
    arguments: dict[str, Any] = {"target": tmp_path / "current", "write": lambda path, tensors: None, "dtype": None}
    with pytest.raises(SettingsError, match="current: slimectl did not write it, but pushes weights under that name"):
        write_checkpoint([], **arguments)
    assert (tmp_path / "current" / "model.safetensors").read_text() == "mine"
    arguments["target"] = tmp_path / "fresh"
    write_checkpoint([], **arguments)
    write_checkpoint([], **arguments)  # its own folder of before


def test_the_table_of_names_has_all_that_a_run_writes(tmp_path: Path):
    run = finished(tmp_path / "a")
    assert own_run_files(run.path) == sorted([*contents(run.path), "latest"])
