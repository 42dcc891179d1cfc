"""Hugging Face to torch_dist and back: every tensor the same to the last bit, in every family."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from architectures.hf_models import CONFIGS, saved
from safetensors.torch import load_file, save_file
from torch import Tensor
from vision_models import CONFIGS as VISION_CONFIGS
from vision_models import vision_model

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.safetensors_io import TensorMemory
from slimectl.checkpoints.torch_dist.archive import load_tensor
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist
from slimectl.checkpoints.torch_dist.reader import TorchDistReader
from slimectl.checkpoints.torch_dist.writer import Chunk, write_torch_dist
from slimectl.data.convert_options import ConvertOptions

ModelDir = Callable[[str], Path]


def tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def model(name: str, folder: Path) -> Path:
    """A model as its checkpoints are: with the type that config.json has on disk."""
    saved(name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": CONFIGS[name]["model_type"]}))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_back_is_byte_identical(name: str, tmp_path: Path):
    source = model(name, tmp_path / "hf")
    convert_checkpoint(source, tmp_path / "torch_dist", ConvertOptions(to="torch_dist", logits=0))
    assert is_torch_dist(tmp_path / "torch_dist")
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(max_shard_bytes=20_000, logits=0))
    same(tensors(tmp_path / "back"), tensors(source))
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors(source).values())
    for tensor, file in index["weight_map"].items():
        assert tensor in load_file(tmp_path / "back" / file)


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss"])
def test_megatrons_model_computes_the_same_logits_from_it(name: str, tmp_path: Path):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'slimectl[megatron]'")
    summary = convert_checkpoint(model(name, tmp_path / "hf"), tmp_path / "torch_dist", ConvertOptions(to="torch_dist"))
    assert summary["verified"]
    assert summary["logits_max_difference"] < 1e-5


@pytest.mark.parametrize("family", VISION_CONFIGS)
def test_a_vision_model_goes_there_and_back_with_its_tower_and_its_processor(family: str, tmp_path: Path):
    pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'slimectl[megatron]'")
    source = vision_model(tmp_path / "hf", family)
    other = ("video_preprocessor_config.json", "processor_config.json", "chat_template.json")
    for name in other:
        (source / name).write_text("{}")
    summary = convert_checkpoint(source, tmp_path / "torch_dist", ConvertOptions(to="torch_dist"))
    assert summary["logits_max_difference"] < 1e-5  # of the decoder, without images
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(logits=0))
    same(tensors(tmp_path / "back"), tensors(source))
    for name in ("config.json", "preprocessor_config.json", *other):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


def test_experts_in_one_tensor_are_taken_apart(tmp_path: Path):
    source = model("qwen3_moe", tmp_path / "hf")
    before = tensors(source)
    together = {name: tensor for name, tensor in before.items() if ".experts." not in name}
    for i in range(2):
        prefix = f"model.layers.{i}.mlp.experts"
        experts = [[before[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(4)]
        together[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        together[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in experts])
    save_file(together, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "torch_dist", ConvertOptions(to="torch_dist", logits=0))
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(logits=0))
    same(tensors(tmp_path / "back"), before)
    convert_checkpoint(source, tmp_path / "cast", ConvertOptions(dtype="bfloat16", logits=0))
    same(tensors(tmp_path / "cast"), {name: tensor.bfloat16() for name, tensor in together.items()})


def test_parts_that_training_does_not_use_are_carried_along(tmp_path: Path):
    source = model("mimo", tmp_path / "hf")
    mtp = {"model.mtp_layers.0.input_proj.weight": torch.randn(32, 64, dtype=torch.float16)}
    save_file(tensors(source) | mtp, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "torch_dist", ConvertOptions(to="torch_dist", logits=0))
    stored = TorchDistReader(tmp_path / "torch_dist").tensors
    assert stored["carried.model.mtp_layers.0.input_proj.weight"] == ((32, 64), torch.float16)
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(logits=0))
    same(tensors(tmp_path / "back"), tensors(source))


def test_head_beside_a_tied_embedding_is_dropped(tmp_path: Path):
    source = model("qwen3 tied", tmp_path / "hf")
    before = tensors(source)
    save_file({**before, "lm_head.weight": before["model.embed_tokens.weight"].clone()}, source / "model.safetensors")
    convert_checkpoint(source, tmp_path / "torch_dist", ConvertOptions(to="torch_dist", logits=0))
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(logits=0))
    same(tensors(tmp_path / "back"), before)


def test_layers_are_stacked_a_chunk_each_and_files_are_bounded(tmp_path: Path, model_dir: ModelDir):
    convert_checkpoint(
        model_dir("qwen3"), tmp_path / "torch_dist", ConvertOptions(to="torch_dist", max_shard_bytes=100_000, logits=0)
    )
    reader = TorchDistReader(tmp_path / "torch_dist")
    assert reader.tensors["decoder.layers.mlp.linear_fc1.weight"] == ((2, 256, 64), torch.float32)
    before = tensors(model_dir("qwen3"))
    second = reader.read("decoder.layers.mlp.linear_fc1.weight", (1, 0, 0), (1, 256, 64))[0]
    halves = [before[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(second, torch.cat(halves))
    files = list((tmp_path / "torch_dist").glob("*.distcp"))
    assert len(files) > 3
    assert all(file.stat().st_size < 130_000 for file in files)


def test_any_box_is_put_together_from_chunks_of_any_cut(tmp_path: Path):
    whole = torch.arange(2 * 6 * 8).view(2, 6, 8).float()
    boxes = [(i, j, k) for i in range(2) for j in (0, 3) for k in (0, 4)]
    chunks = [
        Chunk("a", (2, 6, 8), box, (1, 3, 4), torch.float32, lambda i=i, j=j, k=k: whole[i, j : j + 3, k : k + 4])
        for box in boxes
        for i, j, k in [box]
    ]
    write_torch_dist(tmp_path, chunks, max_file_bytes=60)
    reader = TorchDistReader(tmp_path)
    assert torch.equal(reader.read("a", (0, 0, 0), (2, 6, 8)), whole)
    assert torch.equal(reader.read("a", (1, 2, 3), (1, 3, 5)), whole[1:2, 2:5, 3:8])


def test_archives_are_read_where_they_lie_with_checksums_or_without(tmp_path: Path):
    values = torch.randn(1024, 600).bfloat16()
    chunks = [Chunk(key, (1024, 600), (0, 0), (1024, 600), values.dtype, lambda: values) for key in ("a", "b")]
    write_torch_dist(tmp_path, chunks)
    locations = [location for _, location in sorted(TorchDistReader(tmp_path)._metadata.storage_data.items(), key=str)]
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    assert [location.offset % 64 for location in locations] == [0, 0]
    for location in locations:  # as any program of torch reads them
        archive = io.BytesIO(data[location.offset : location.offset + location.length])
        assert torch.equal(torch.load(archive), values)
    mapped = TorchDistReader(tmp_path, TensorMemory()).read("b", (0, 0), (1024, 600))
    assert torch.equal(mapped, values)
    mapped.zero_()
    assert (tmp_path / "__0_0.distcp").read_bytes() == data
    assert torch.equal(TorchDistReader(tmp_path).read("b", (0, 0), (1024, 600)), values)
    assert torch.serialization.get_crc32_options()


def test_archive_with_checksums_or_at_an_odd_place_is_read_too(tmp_path: Path):
    for values in (torch.randn(1024, 600), torch.randn(600, 1024).t(), torch.arange(10)[2:5]):
        for place in (0, 1):
            archive = io.BytesIO()
            torch.save(values.contiguous(), archive)
            (tmp_path / "file").write_bytes(bytes(place) + archive.getvalue())
            with (tmp_path / "file").open("rb") as file:
                form: dict[str, Any] = {"shape": tuple(values.shape), "dtype": values.dtype}
                assert torch.equal(load_tensor(file, place, len(archive.getvalue()), **form), values)


def test_cast_keeps_what_routers_need_exact(tmp_path: Path):
    source = model("deepseek_v3", tmp_path / "hf")
    convert_checkpoint(source, tmp_path / "torch_dist", ConvertOptions(to="torch_dist", dtype="bfloat16", logits=0))
    convert_checkpoint(tmp_path / "torch_dist", tmp_path / "back", ConvertOptions(logits=0))
    before = tensors(source)
    for name, tensor in tensors(tmp_path / "back").items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert tensor.dtype == kept, name
        assert torch.equal(tensor, before[name].to(kept))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_training_checkpoint_converts_whatever_it_holds_besides(tmp_path: Path, model_dir: ModelDir):
    """Optimizer state beside the model, a framework's prefix, Megatron's tracker file, a folder an iteration."""
    convert_checkpoint(model_dir("qwen3"), tmp_path / "plain", ConvertOptions(to="torch_dist", logits=0))
    reader = TorchDistReader(tmp_path / "plain")
    kept = {f"module.{key}": key for key in reader.tensors} | {
        f"optimizer.state.exp_avg.{key}": key for key in reader.tensors
    }

    def chunk(stored: str, key: str) -> Chunk:
        (shape, dtype), zeros = reader.tensors[key], (0,) * len(reader.tensors[key][0])
        return Chunk(stored, shape, zeros, shape, dtype, lambda: reader.read(key, zeros, shape))

    iteration = tmp_path / "training" / "iter_0000012"
    iteration.mkdir(parents=True)
    write_torch_dist(iteration, [chunk(*pair) for pair in kept.items()], max_file_bytes=10**6)
    (tmp_path / "training" / "latest_checkpointed_iteration.txt").write_text("12\n")
    convert_checkpoint(tmp_path / "training", tmp_path / "back", ConvertOptions(config=model_dir("qwen3"), logits=0))
    same(tensors(tmp_path / "back"), tensors(model_dir("qwen3")))
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_a_step_of_a_run_stands_for_its_policy(tmp_path: Path, model_dir: ModelDir):
    copytree(model_dir("llama"), tmp_path / "step_000004" / "policy")
    (tmp_path / "step_000004" / "manifest.json").write_text('{"files": {}}')
    convert_checkpoint(tmp_path / "step_000004", tmp_path / "out", ConvertOptions(to="torch_dist", logits=0))
    convert_checkpoint(tmp_path / "out", tmp_path / "back", ConvertOptions(logits=0))
    same(tensors(tmp_path / "back"), tensors(model_dir("llama")))
    inputs = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]
    (tmp_path / "step_000004" / "manifest.json").write_text('{"files": {"another": "step"}}')
    convert_checkpoint(
        tmp_path / "step_000004", tmp_path / "out", ConvertOptions(to="torch_dist", logits=0), force=True
    )
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"] != inputs
