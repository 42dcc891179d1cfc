"""Data sets as Hugging Face's libraries keep them: saved folders, Arrow files, and snapshots by their hub name."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pyarrow
import pytest

from slimectl.data.columns import PromptOptions
from slimectl.data.hugging_face import snapshot
from slimectl.data.prompts import open_prompts
from slimectl.errors import CheckpointError, RecordError, SettingsError
from slimectl.runtime.builders import model_folder, source_of

TABLE = pyarrow.Table.from_pylist([{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(3)])
EXPECTED = [("0+1?", "1"), ("1+1?", "2"), ("2+1?", "3")]


def write_arrow(path: Path, *, footed: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyarrow.OSFile(str(path), "wb") as file:
        make = pyarrow.ipc.new_file if footed else pyarrow.ipc.new_stream
        with make(file, TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=2)
    return path


def rows(source: Path | str, **options: int) -> list[tuple[str, str]]:
    return [(prompt.text, prompt.label) for prompt in open_prompts([str(source)], PromptOptions(**options))]


def save(folder: Path) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    write_arrow(folder / "data-00000-of-00001.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return folder


def test_arrow_files_and_saved_folders_are_read_like_other_files(tmp_path: Path) -> None:
    for footed in (False, True):
        assert rows(write_arrow(tmp_path / f"{footed}.arrow", footed=footed)) == EXPECTED
    assert rows(save(tmp_path / "one")) == EXPECTED
    assert rows(f"{tmp_path / 'one'}@[1:2]") == EXPECTED[1:2]
    assert sorted(rows(tmp_path / "one", shuffle_seed=1)) == EXPECTED
    save(tmp_path / "two" / "train")
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert rows(tmp_path / "two") == EXPECTED
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(SettingsError, match=r"two: has the splits train, test. Choose one: .*two/train"):
        rows(tmp_path / "two")


def test_a_damaged_arrow_file_is_a_record_error(tmp_path: Path) -> None:
    file = write_arrow(tmp_path / "cut.arrow")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(RecordError, match=r"cut.arrow: cannot be read as Arrow after \d rows"):
        rows(file)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    snapshot.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def cached(cache: Path, repository: str) -> Path:
    """The snapshot folder of a repository in the cache."""
    (cache / repository / "refs").mkdir(parents=True)
    (cache / repository / "refs" / "main").write_text("0" * 40)
    folder = cache / repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    return folder


def test_a_hub_name_is_a_cached_snapshot_and_its_training_split(cache: Path) -> None:
    folder = cached(cache, "datasets--org--sums")
    for name in ("train", "test"):
        write_arrow(folder / "main" / f"{name}-00000.arrow")
    assert rows("org/sums") == EXPECTED
    assert rows("org/sums/main/test*") == EXPECTED
    assert rows("org/sums@[0:1]") == EXPECTED[:1]
    with pytest.raises(SettingsError, match=r"no data file of org/sums matches. It has main/test-00000.arrow"):
        rows("org/sums/other")
    write_arrow(folder / "hard" / "train-00000.arrow")
    with pytest.raises(SettingsError, match=r"has several parts. Choose one of them: org/sums/hard/train-00000.arrow"):
        rows("org/sums")
    assert rows("org/sums/hard") == EXPECTED


def test_what_is_not_in_the_cache_says_how_to_fetch_it(cache: Path) -> None:
    with pytest.raises(SettingsError, match=r"hf download org/sums --repo-type dataset$"):
        rows("org/sums/main/train*")
    with pytest.raises(CheckpointError, match=r"org/model: no such file or directory. .*: hf download org/model$"):
        source_of("org/model")  # as `run` and `convert` do
    with pytest.raises(CheckpointError, match=r"org/model: no such model directory. .*: hf download org/model$"):
        model_folder("org/model")
    (cache.parent / "data").mkdir()
    with pytest.raises(SettingsError, match=r"^data/train: no such prompt file. Give"):
        rows("data/train")
    with pytest.raises(SettingsError, match=r"^files/train.jsonl: no such prompt file. Give"):
        rows("files/train.jsonl")


def test_a_model_of_the_hub_is_its_cached_snapshot(cache: Path) -> None:
    folder = cached(cache, "models--org--model")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert model_folder("org/model") == folder
