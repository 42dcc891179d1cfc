"""Which files of a model folder may be opened: regular ones, and links that stay at home or in a Hugging Face cache."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.hf_weights import shards
from slimectl.data.convert_options import ConvertOptions
from slimectl.errors import CheckpointError
from slimectl.policies.checkpoint import copy_companions
from slimectl.runtime.builders import model_folder
from slimectl.system.model_files import (
    MAX_CONFIG_BYTES,
    check_model_files,
    copy_file,
    end_token_ids,
    open_file,
    read_json,
)

ModelDir = Callable[[str], Path]
NAMES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.fixture
def model(tmp_path: Path, model_dir: ModelDir) -> Path:
    return copytree(model_dir("llama"), tmp_path / "model")


def refusal(folder: Path) -> str:
    """The line in which a folder is refused, by what samples from it and by a conversion."""
    with pytest.raises(CheckpointError) as error:
        model_folder(str(folder))
    with pytest.raises(CheckpointError) as other:
        convert_checkpoint(folder, folder.with_name("out"))
    assert str(error.value) == str(other.value)
    assert "\n" not in str(error.value)
    assert not folder.with_name("out").exists()
    return str(error.value)


@pytest.mark.parametrize("name", [*NAMES, "vocab.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_fifo_a_socket_a_directory_or_a_device_is_refused_without_waiting(name: str, model: Path):
    path = model / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert refusal(model) == f"{path}: a FIFO, not a file. Put the model's own file there."
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        home = Path.cwd()
        os.chdir(model)  # the address of a socket is short
        server.bind(name)
        os.chdir(home)
        assert refusal(model) == f"{path}: a socket, not a file. Put the model's own file there."
    path.unlink()
    path.mkdir()
    assert refusal(model) == f"{path}: a directory, not a file. Put the model's own file there."
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert f"{path}: a link out of its folder, to /dev/zero" in refusal(model)


@pytest.mark.parametrize("name", [*NAMES, "tokenizer_secret", "merges.txt"])
def test_a_link_out_of_the_folder_is_neither_read_nor_copied(name: str, model: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (model / name).unlink(missing_ok=True)
    for target in (secret, Path("../secret")):
        (model / name).symlink_to(target)
        assert (
            refusal(model)
            == f"{model / name}: a link out of its folder, to {secret}. Put a copy of the file there instead."
        )
        (tmp_path / "copy").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="a link out of its folder"):
            copy_file(model / name, tmp_path / "copy" / name)
        assert list((tmp_path / "copy").iterdir()) == []
        (model / name).unlink()


def test_companions_of_a_policy_are_not_copied_through_links(model: Path, tmp_path: Path):
    import torch

    (tmp_path / "secret").write_text("secret")
    (model / "tokenizer_notes").symlink_to("../secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="tokenizer_notes: a link out of its folder"):
        copy_companions(model, tmp_path / "out", torch.float32)
    assert "secret" not in "".join(path.read_text() for path in (tmp_path / "out").iterdir())


def test_links_that_stay_in_the_folder_or_lead_to_a_cached_blob_are_followed(model: Path, tmp_path: Path):
    (model / "tokenizer.json").rename(model / "inner.json")
    (model / "tokenizer.json").symlink_to("inner.json")
    assert model_folder(str(model)) == model
    blobs = tmp_path / "hub" / "models--someone--llama" / "blobs"
    snapshot = blobs.parent / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, name in enumerate(NAMES):
        digest = f"{i:040x}" if i % 2 else f"{i:064x}"
        blobs.joinpath(digest).write_bytes((model / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    assert model_folder(str(snapshot)) == snapshot
    assert convert_checkpoint(snapshot, tmp_path / "out", ConvertOptions(logits=0))["verified"]
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    (blobs / "notes").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../blobs/notes")
    with pytest.raises(CheckpointError, match=r"vocab\.json: a link out of its folder"):
        model_folder(str(snapshot))


def test_links_to_nothing_and_in_circles_are_refused(model: Path):
    (model / "vocab.json").symlink_to("not-there.json")
    assert "vocab.json: a broken link" in refusal(model)
    (model / "vocab.json").unlink()
    (model / "vocab.json").symlink_to("merges.txt")
    (model / "merges.txt").symlink_to("vocab.json")
    assert "merges.txt: a broken link" in refusal(model)


def test_what_nobody_opens_may_be_anything(model: Path):
    os.mkfifo(model / "pipe")
    (model / "README.md").symlink_to("/etc/hostname")
    (model / "tokenizer").mkdir()
    assert model_folder(str(model)) == model


@pytest.mark.parametrize("names", [["../secret.safetensors"], ["/etc/passwd"], [7], ["a/b.safetensors"], ["..", "\0"]])
def test_an_index_names_files_of_its_folder_only(names: list[object], model: Path, tmp_path: Path):
    (model / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {str(i): name for i, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: lists .*, which is outside "):
        shards(model)


@pytest.mark.parametrize("index", ["{", "[]", "7", '{"weight_map": []}', '{"weight_map": {"a": {}}}', "[" * 100_000])
def test_a_broken_index_is_refused_in_a_line(index: str, model: Path):
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json: ") as error:
        shards(model)
    assert "\n" not in str(error.value)


def test_json_is_bounded_before_it_is_read(model: Path):
    with (model / "config.json").open("wb") as file:
        file.truncate(10**12)
    assert refusal(model).startswith(f"{model / 'config.json'}: 1000000000000 bytes, but at most")
    (model / "config.json").write_text("{" + " " * MAX_CONFIG_BYTES + "}")
    with pytest.raises(CheckpointError, match="which is too large for this file"):
        read_json(model / "config.json", max_bytes=MAX_CONFIG_BYTES)
    (model / "config.json").write_text('{"a":' * 100_000)
    assert refusal(model) == f"{model / 'config.json'}: not JSON (nested too deeply). Download it again."
    (model / "tokenizer.json").write_bytes(b"")
    os.truncate(model / "tokenizer.json", 10**11)
    assert "tokenizer.json: 100000000000 bytes, but at most 536870912 are expected" in refusal(model)


def test_a_file_that_cannot_be_read_is_a_line(model: Path):
    check_model_files(model)
    with open_file(model / "config.json") as file:
        assert file.read(1) == b"{"
    with pytest.raises(FileNotFoundError):
        open_file(model / "none.json")
    with pytest.raises(CheckpointError, match="cannot be listed"):
        check_model_files(model / "none")


@pytest.mark.parametrize(
    ("config", "wanted"),
    [({"eos_token_id": 2}, [2]), ({"eos_token_id": 0, "text_config": {"eos_token_id": 5}}, [0]),
     ({"eos_token_id": None, "text_config": {"eos_token_id": [5, 6]}}, [5, 6]), ({"text_config": {}}, [])],
)  # fmt: skip
def test_end_tokens_of_a_text_config_where_the_model_names_none(
    tmp_path: Path, config: dict[str, Any], wanted: list[int]
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert end_token_ids(tmp_path) == wanted
