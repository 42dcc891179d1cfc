"""Conversions: every tensor arrives, bit for bit; a target is whole or absent."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
from torch import Tensor

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.conversions import convert_checkpoint
from slimectl.data.rundir import damage
from slimectl.errors import CheckpointError, SettingsError
from slimectl.stages.convert import convert

ModelDir = Callable[[str], Path]


def tensors(path: Path) -> dict[str, Tensor]:
    return dict(HFCheckpoint().read(path))


def no_companions(into: Path) -> None: ...


def test_cast_and_resharded_model_loads_and_equals_the_cast(tmp_path: Path, model_dir: ModelDir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = model_dir("qwen3"), tmp_path / "out"
    heard: list[str] = []
    summary = convert_checkpoint(source, target, dtype="bfloat16", max_shard_bytes=100_000, progress=heard.append)
    before, after = tensors(source), tensors(target)
    assert summary == {
        "tensors": len(before), "parameters": sum(t.numel() for t in before.values()),
        "bytes": sum(t.nbytes for t in before.values()) // 2, "dtype": "bfloat16", "verified": True,
    }  # fmt: skip
    assert sorted(heard) == sorted(after) == sorted(before)
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert len(list(target.glob("*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(target).decode([104, 105]) == "hi"


def test_manifest_says_what_it_was_made_from(tmp_path: Path, model_dir: ModelDir):
    convert_checkpoint(model_dir("llama"), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["stage"] == "convert"
    assert list(manifest["inputs"]) == [str(model_dir("llama"))]
    assert manifest["counts"]["tensors"] == len(tensors(model_dir("llama")))
    assert damage(tmp_path / "out") is None


def test_the_same_conversion_again_does_nothing(tmp_path: Path, model_dir: ModelDir):
    target = tmp_path / "out"
    convert_checkpoint(model_dir("llama"), target)
    made = (target / "model.safetensors").stat().st_mtime_ns
    assert convert_checkpoint(model_dir("llama"), target)["unchanged"]
    assert (target / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(SettingsError, match="exists already; add --force"):
        convert_checkpoint(model_dir("llama"), target, dtype="float16")
    assert "unchanged" not in convert_checkpoint(model_dir("llama"), target, force=True)
    (target / "tokenizer.json").unlink()
    with pytest.raises(SettingsError, match="exists already"):
        convert_checkpoint(model_dir("llama"), target)


def test_unknown_conversions_name_the_known(tmp_path: Path, model_dir: ModelDir):
    with pytest.raises(SettingsError, match="--to torch_dist: not among the conversions that exist: gguf to hf, hf to"):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", to="torch_dist")
    with pytest.raises(SettingsError, match="--dtype int8: not among those known"):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", dtype="int8")
    quantized = copytree(model_dir("llama"), tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(CheckpointError, match="its weights are fp8"):
        convert_checkpoint(quantized, tmp_path / "out")
    (quantized / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json; this is not a Hugging Face checkpoint"):
        convert_checkpoint(quantized, tmp_path / "out")


def test_interrupted_conversion_leaves_nothing(tmp_path: Path):
    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(2)
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(breaking(), tmp_path / "out", write=HFCheckpoint().write, companions=no_companions)
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_verifying_finds_one_wrong_bit_and_a_lost_tensor(tmp_path: Path):
    source = [("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor(3))]

    def flipped(path: Path) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in HFCheckpoint().read(path):
            yield name, torch.nextafter(tensor, torch.tensor(9.0)) if name == "a" else tensor

    def lost(path: Path) -> list[tuple[str, Tensor]]:
        return [pair for pair in HFCheckpoint().read(path) if pair[0] == "a"]

    parts = {"write": HFCheckpoint().write, "companions": no_companions}
    with pytest.raises(CheckpointError, match=r"verifying: a, torch.float32 \(2,\), is not what was read"):
        convert(source, tmp_path / "out", reread=flipped, **parts)
    with pytest.raises(CheckpointError, match="verifying: b and 0 others are not in both"):
        convert(source, tmp_path / "out", reread=lost, **parts)
    with pytest.raises(CheckpointError, match="a: comes twice"):
        convert(source * 2, tmp_path / "out", **parts)
    assert not list(tmp_path.iterdir())
    assert convert(source, tmp_path / "out", reread=HFCheckpoint().read, **parts)["tensors"] == 2


def test_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path: Path, model_dir: ModelDir):
    """A limit on file sizes stands for the full disk: both reach safetensors as an error of the system."""
    program = (
        "import signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from slimectl.conversions import convert_checkpoint\n"
        "from slimectl.errors import StorageError\n"
        "try: convert_checkpoint(sys.argv[1], Path(sys.argv[2]))\n"
        "except StorageError as error: print(error)\n"
    )
    arguments = [sys.executable, "-c", program, str(model_dir("llama")), str(tmp_path / "out")]
    child = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert child.stdout.startswith(f"{tmp_path}/out: File too large; nothing was left under that name; free space")
    assert os.listdir(tmp_path) == []
