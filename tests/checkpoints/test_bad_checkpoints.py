"""Checkpoints that cannot be converted: one line that names what is wrong, and nothing under the target's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.convert_options import ConvertOptions
from slimectl.errors import CheckpointError

ModelDir = Callable[[str], Path]


@pytest.fixture
def source(tmp_path: Path, model_dir: ModelDir) -> Path:
    return copytree(model_dir("qwen3"), tmp_path / "source")


@pytest.fixture
def torch_dist(tmp_path: Path, model_dir: ModelDir) -> Path:
    convert_checkpoint(model_dir("qwen3"), tmp_path / "torch_dist", ConvertOptions(to="torch_dist", logits=0))
    (tmp_path / "torch_dist" / "manifest.json").unlink()  # as from elsewhere: a manifest would be what is refused
    return tmp_path / "torch_dist"


def change(folder: Path, tensors: Callable[[dict[str, Tensor]], Any]) -> None:
    held = load_file(folder / "model.safetensors")
    tensors(held)
    save_file(held, folder / "model.safetensors")


def refused(match: str, source: Path, **options: Any) -> None:
    target = source.with_name("out")
    with pytest.raises(CheckpointError, match=match) as error:
        convert_checkpoint(source, target, ConvertOptions(**options))
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in source.parent.iterdir()) == [source.name]


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_missing_extra_and_misshapen_tensors_are_named(to: str, source: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(source / "model.safetensors")
    change(source, lambda held: held.pop(name))
    refused(f"no tensor for {name}. Copy or download the checkpoint again", source, to=to)
    change(source, lambda held: held.update({name: whole[name].T.contiguous()}))
    refused(rf"{name} has shape \[64, 128\], but \[128, 64\] is expected from config.json", source, to=to)
    change(source, lambda held: held.update({name: whole[name], "model.layers.1.mlp.extra": torch.ones(1)}))
    refused(r"model\.layers\.1\.mlp\.extra: qwen3 models have no such tensor", source, to=to)


def test_head_that_is_tied_in_words_only_is_refused(source: Path):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refused(r"lm_head.weight differs from model.embed_tokens.weight, but they are tied", source, to="torch_dist")


def test_tensors_of_one_parameter_have_one_dtype(source: Path):
    name = "model.layers.0.self_attn.q_proj.weight"
    change(source, lambda held: held.update({name: held[name].bfloat16()}))
    refused("differ in dtype, but Megatron stores them in one tensor. Add --dtype", source, to="torch_dist")
    change(source, lambda held: held.update({n: t.bfloat16() for n, t in held.items() if "layers.0." in n}))
    refused(r"one layer, but torch.float32 in another. Add --dtype", source, to="torch_dist")


def test_card_that_contradicts_the_config_is_refused_key_by_key(source: Path, torch_dist: Path):
    torch_dist.rename(source.with_name("other"))
    with pytest.raises(CheckpointError, match=r"the card qwen3-0\.6B: .*hidden_size is 64, but 1024 in the card"):
        convert_checkpoint(source, source.with_name("out"), ConvertOptions(to="torch_dist", card="qwen3-0.6B"))
    with pytest.raises(CheckpointError, match=r"contradicts the card qwen3-0\.6B: .*hidden_size is 64"):
        convert_checkpoint(source.with_name("other"), source.with_name("out"), ConvertOptions(card="qwen3-0.6B"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(CheckpointError, match=r"--config: rms_norm_eps is 0\.001 in .*source, 1e-06 in .*other"):
        convert_checkpoint(source.with_name("other"), source.with_name("out"), ConvertOptions(config=source))
    assert not source.with_name("out").exists()


@pytest.mark.parametrize("cut", [1, 100_000])
def test_truncated_shard_is_refused(cut: int, source: Path):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    for to in ("hf", "torch_dist"):
        refused(r"model\.safetensors: cannot be read as safetensors \(.*it is truncated\)", source, to=to)
    file.write_bytes(file.read_bytes()[:40])
    refused(r"cannot be read as safetensors \(its header is damaged: a header of \d+ bytes in a file of 40\)", source)
    file.unlink()
    refused(r"no model\*\.safetensors: this is not a Hugging Face checkpoint", source)


def test_two_values_of_a_tensor_are_refused(source: Path):
    held = load_file(source / "model.safetensors")
    save_file({"lm_head.weight": held["lm_head.weight"] + 1}, source / "model-2.safetensors")
    refused(r"lm_head.weight comes twice, in model-2\.safetensors and model\.safetensors, with different", source)
    (source / "model.safetensors.index.json").write_text("{}")
    refused(r"index\.json: cannot be read \('weight_map'\)", source)


def test_truncated_distcp_is_refused(torch_dist: Path):
    largest = max(torch_dist.glob("*.distcp"), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    largest.write_bytes(whole[:-1000])
    refused(r"__0_0\.distcp: cannot be read \(\d+ bytes, .* ends at \d+, so it is truncated\). Copy", torch_dist)
    largest.write_bytes(bytes(len(whole)))
    refused(r"__0_0\.distcp: cannot be read \(", torch_dist)
    largest.unlink()
    refused(r"__0_0\.distcp: cannot be read \(.*No such file", torch_dist)


def test_torch_dist_without_its_metadata_is_refused(torch_dist: Path):
    whole = (torch_dist / ".metadata").read_bytes()
    (torch_dist / ".metadata").write_bytes(whole[:-100])
    refused(r"\.metadata: cannot be read \(", torch_dist)
    (torch_dist / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/harm'\ntR.")
    refused(r"\.metadata: cannot be read \(os\.system is not allowed in a checkpoint\)", torch_dist)
    (torch_dist / ".metadata").unlink()
    refused(r"a torch_dist checkpoint without \.metadata. Saving it was interrupted", torch_dist)


def test_torch_dist_of_another_model_is_refused(torch_dist: Path):
    config = json.loads((torch_dist / "config.json").read_text())

    def say(**changes: Any) -> None:
        (torch_dist / "config.json").write_text(json.dumps({**config, **changes}))

    say(num_hidden_layers=3, layer_types=None)
    refused(r"linear_qkv\S* has shape \[2, .*\], but \[3, ", torch_dist)
    say(intermediate_size=64)
    refused(r"mlp\.linear_fc1\.weight has shape \[2, 256, 64\], but \[2, 128, 64\] is expected", torch_dist)
    say(model_type="llama")
    refused(r"q_layernorm\S* and 1 more: llama models have no such tensor|k_layernorm\S* and 1 more", torch_dist)
    say(tie_word_embeddings=True)
    refused(r"output_layer\.weight: qwen3 models have no such tensor", torch_dist)
    say(model_type="gpt2")
    refused(r"model_type 'gpt2' has no weight mapping. Supported:", torch_dist)
    (torch_dist / "config.json").unlink()
    refused(r"without config\.json\. Give a Hugging Face directory with --config DIR", torch_dist)


def test_missing_chunk_is_refused(torch_dist: Path):
    import pickle

    from slimectl.checkpoints.torch_dist.metadata import read_metadata

    metadata = read_metadata(torch_dist)
    fc2 = next(index for index in metadata.storage_data if "linear_fc2.weight" in index.fqn and index.offset[0] == 1)
    place = metadata.storage_data.pop(fc2)
    (torch_dist / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(r"mlp\.linear_fc2\.weight lacks the chunk at \[1, 0, 0\]", torch_dist)
    metadata.storage_data[fc2] = place
    del metadata.state_dict_metadata[fc2.fqn].chunks[1]
    (torch_dist / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(r"mlp\.linear_fc2\.weight lacks the chunk at \[1, 0, 0\]", torch_dist)


def test_unreadable_configs_are_refused(source: Path):
    (source / "config.json").write_text("{")
    refused(r"config\.json: not JSON", source)
    (source / "config.json").write_text("[]")
    refused(r"config\.json: not a JSON object", source)
    (source / "config.json").unlink()
    refused(r"no config\.json: this is not a Hugging Face checkpoint", source)
    assert [name for name, _ in HFCheckpoint().read(source)]  # its weights are well
