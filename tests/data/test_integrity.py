"""Files against their manifest: a flipped byte is a line that names the file, whoever reads the folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import xxhash

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.data import manifest as integrity
from slimectl.data.convert_options import ConvertOptions
from slimectl.data.manifest import check_integrity, integrity_error
from slimectl.data.run_dir import write_folder
from slimectl.errors import CheckpointError
from slimectl.runtime.builders import model_folder

ModelDir = Callable[[str], Path]


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, model_dir: ModelDir) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert_checkpoint(model_dir("llama"), folder, ConvertOptions(logits=0))
    return folder


@pytest.fixture
def model(converted: Path, tmp_path: Path) -> Path:
    return copytree(converted, tmp_path / "model")


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        model_folder(str(folder), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_flipped_byte_is_refused_and_the_message_says_how_to_go_on(name: str, model: Path, tmp_path: Path):
    assert model_folder(str(model)) == model
    flip(model / name)
    expected = (
        f"{model}: {name} does not match its checksum in {model}/manifest.json. Copy or convert it again. If you"
        f" changed it yourself, remove {model}/manifest.json."
    )
    assert refused(model) == expected
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        convert_checkpoint(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (model / "manifest.json").unlink()
    assert model_folder(str(model)) == model


def test_a_lost_or_shortened_file_is_refused_and_an_added_one_is_not(model: Path):
    (model / "chat_template.jinja").unlink()
    assert "chat_template.jinja is missing in" in refused(model)
    (model / "chat_template.jinja").write_text("short")
    assert "chat_template.jinja has 5 bytes, not 173" in refused(model)
    (model / "manifest.json").unlink()
    (model / "special_tokens_map.json").write_text("{}")
    assert model_folder(str(model)) == model


def test_a_step_of_a_run_is_known_by_the_manifest_above_its_policy(converted: Path, tmp_path: Path):
    step = tmp_path / "step_000001"

    def fill(staged: Path) -> None:
        copytree(converted, staged / "policy")
        (staged / "policy" / "manifest.json").unlink()

    write_folder(step, fill)
    (tmp_path / "latest").symlink_to(step.name)
    assert model_folder(str(tmp_path / "latest")) == tmp_path / "latest" / "policy"
    flip(step / "policy" / "model.safetensors")
    for path in (step, step / "policy", tmp_path / "latest"):
        assert "policy/model.safetensors does not match its checksum" in refused(path)
        assert "elsewhere and use the copy" in refused(path)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        convert_checkpoint(step, tmp_path / "out")


def test_large_weights_are_hashed_where_it_is_asked_and_by_every_conversion(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(integrity, "HASHED_BYTES", 100_000)
    monkeypatch.setattr(integrity, "SMALL_BYTES", 100_000)
    assert (model / "model.safetensors").stat().st_size > 100_000
    flip(model / "model.safetensors")
    assert model_folder(str(model)) == model
    assert "model.safetensors does not match" in refused(model, verify=True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match"):
        convert_checkpoint(model, tmp_path / "out")
    flip(model / "model.safetensors")
    flip(model / "tokenizer.json")
    assert "tokenizer.json does not match" in refused(model)


def test_weights_have_a_fast_checksum_small_files_sha256_and_either_is_compared(model: Path):
    manifest = json.loads((model / "manifest.json").read_text())
    weights, config = model / "model.safetensors", model / "config.json"
    assert manifest["files"][weights.name] == {
        "bytes": weights.stat().st_size, "xxh3_128": xxhash.xxh3_128_hexdigest(weights.read_bytes())
    }  # fmt: skip
    assert manifest["files"][config.name]["sha256"] == hashlib.sha256(config.read_bytes()).hexdigest()
    # As slimectl 0.1 wrote it.
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    manifest["files"][weights.name] = {"bytes": weights.stat().st_size, "sha256": digest}
    (model / "manifest.json").write_text(json.dumps(manifest))
    assert check_integrity(model, full=True)
    flip(weights)
    assert "model.safetensors does not match its checksum" in refused(model)


def test_a_large_file_of_a_folder_has_the_fast_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(integrity, "SMALL_BYTES", 3)

    def fill(staged: Path) -> None:
        for name in ("abc", "abcd"):
            (staged / name).write_text(name)

    write_folder(tmp_path / "step", fill)
    files = json.loads((tmp_path / "step" / "manifest.json").read_text())["files"]
    assert files["abc"] == {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    assert files["abcd"] == {"bytes": 4, "xxh3_128": xxhash.xxh3_128_hexdigest(b"abcd")}
    assert integrity_error(tmp_path / "step") is None


def test_a_conversion_says_that_its_source_matched_only_where_there_was_a_manifest(model: Path, tmp_path: Path):
    summary = convert_checkpoint(model, tmp_path / "one", ConvertOptions(logits=0))
    assert (summary["verified"], summary["source"]) == (True, "as its manifest says")
    (model / "manifest.json").unlink()
    summary = convert_checkpoint(model, tmp_path / "two", ConvertOptions(logits=0))
    assert summary["verified"]
    assert "source" not in summary


def test_a_folder_is_hashed_once_however_often_it_is_opened(model: Path):
    integrity._first_error.cache_clear()
    for _ in range(3):
        assert check_integrity(model)
    assert integrity._first_error.cache_info().misses == 1
    flip(model / "tokenizer.json")
    with pytest.raises(CheckpointError):
        check_integrity(model)


@pytest.mark.parametrize(
    "files",
    [[], 7, "all", None, {"a": 7}, {"a": {}}, {"a": {"bytes": "1", "sha256": "x"}}, {"a": {"bytes": 1, "sha256": 7}}],
)
def test_a_manifest_of_another_program_says_nothing(files: Any, model: Path):
    (model / "manifest.json").write_text(json.dumps({"files": files}))
    assert not check_integrity(model)
    assert integrity_error(model) == "no readable manifest.json (it lists no files)"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ".."])
def test_a_manifest_leads_nowhere_else(name: str, model: Path):
    facts = {"bytes": 1, "sha256": "0" * 64}
    (model / "manifest.json").write_text(json.dumps({"files": {name: facts}}))
    assert "which is not a file of its folder" in refused(model)
    assert "which is not a file of its folder" in str(integrity_error(model))


def test_a_damaged_manifest_is_refused_in_a_line(model: Path):
    for text in ("{", "[]", "[" * 100_000, "\0", '{"files": {'):
        (model / "manifest.json").write_text(text)
        assert "manifest.json: not " in refused(model)
        assert str(integrity_error(model)).startswith("no readable manifest.json (")
