"""Conversions: every tensor arrives, bit for bit; a target is whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import forkserver
import pytest
import torch
from torch import Tensor

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.hf import HFCheckpoint, write_hf
from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.data.convert_options import ConvertOptions
from slimectl.data.manifest import integrity_error
from slimectl.errors import CheckpointError, SettingsError
from slimectl.protocols import NoProgress
from slimectl.stages.convert import Output, convert

ModelDir = Callable[[str], Path]


def tensors(path: Path) -> dict[str, Tensor]:
    return dict(HFCheckpoint().read(path))


class Counted(NoProgress):
    """Keeps what a conversion says of its progress."""

    def __init__(self) -> None:
        self.totals: list[int | None] = []
        self.counts: list[int] = []

    def expect(self, total: int | None, *, done: int = 0) -> None:
        self.totals.append(total)

    def reach(self, done: int) -> None:
        self.counts.append(done)


def no_companions(into: Path) -> None: ...


def test_cast_and_resharded_model_loads_and_equals_the_cast(tmp_path: Path, model_dir: ModelDir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = model_dir("qwen3"), tmp_path / "out"
    progress = Counted()
    summary = convert_checkpoint(
        source, target, ConvertOptions(dtype="bfloat16", max_shard_bytes=100_000), progress=progress
    )
    before, after = tensors(source), tensors(target)
    assert summary == {
        "tensors": len(before), "parameters": sum(t.numel() for t in before.values()),
        "bytes": sum(t.nbytes for t in before.values()) // 2, "dtype": "bfloat16", "verified": True,
        "logits_max_difference": summary["logits_max_difference"],
        "logits_compared_with": "slimectl's reading of the source",
    }  # fmt: skip
    assert 0 < summary["logits_max_difference"] < 0.1
    assert after.keys() == before.keys()
    assert progress.totals == [len(before)] * 2  # written, and read back
    assert progress.counts == [*range(1, len(before) + 1), len(before), *range(len(before))]
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
    assert integrity_error(tmp_path / "out") is None


def test_the_same_conversion_again_does_nothing(tmp_path: Path, model_dir: ModelDir):
    target = tmp_path / "out"
    convert_checkpoint(model_dir("llama"), target)
    made = (target / "model.safetensors").stat().st_mtime_ns
    assert convert_checkpoint(model_dir("llama"), target)["unchanged"]
    assert (target / "model.safetensors").stat().st_mtime_ns == made
    with pytest.raises(SettingsError, match=r"already exists\. Add --force"):
        convert_checkpoint(model_dir("llama"), target, ConvertOptions(dtype="float16"))
    assert "unchanged" not in convert_checkpoint(model_dir("llama"), target, force=True)
    (target / "tokenizer.json").unlink()
    with pytest.raises(SettingsError, match="already exists"):
        convert_checkpoint(model_dir("llama"), target)


def test_unknown_conversions_name_the_known(tmp_path: Path, model_dir: ModelDir):
    with pytest.raises(
        SettingsError, match=r"--to megatron: not a layout that can be written\. Choose hf or torch_dist"
    ):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", ConvertOptions(to="megatron"))
    with pytest.raises(SettingsError, match="--dtype int8: not a known value"):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", ConvertOptions(dtype="int8"))
    with pytest.raises(
        SettingsError, match=r"--quantize fp4: not a known value\. Known values: fp8, fp8_tensor, fp8_channel, int4"
    ):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", ConvertOptions(quantize="fp4"))
    with pytest.raises(SettingsError, match="--quantize fp8: Megatron does not train on quantized weights"):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", ConvertOptions(to="torch_dist", quantize="fp8"))
    with pytest.raises(SettingsError, match="--group 12: must be a multiple of 8"):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", ConvertOptions(quantize="int4", group=12))
    with pytest.raises(SettingsError, match="--block 0 128: rows and columns must be at least 1"):
        convert_checkpoint(model_dir("llama"), tmp_path / "out", ConvertOptions(quantize="fp8", block=(0, 128)))
    assert not (tmp_path / "out").exists()


class Held:
    """Weights in memory; `broken` names a tensor at which reading is interrupted."""

    def __init__(self, broken: str = "", **tensors: Tensor) -> None:
        self.tensors, self.broken = tensors, broken

    def forms(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def get(self, name: str) -> Tensor:
        if name == self.broken:
            raise KeyboardInterrupt
        return self.tensors[name]


def test_interrupted_conversion_leaves_nothing_under_the_name_and_goes_on(tmp_path: Path):
    progress = Counted()
    output = Output(partial(write_hf, max_shard_bytes=8), no_companions)
    options = {"progress": progress, "resume": "this work"}
    tensors = {name: torch.tensor([float(i), 1.0]) for i, name in enumerate("abc")}
    with pytest.raises(KeyboardInterrupt):
        convert(Held("c", **tensors), tmp_path / "out", output, **options)
    assert not (tmp_path / "out").exists()
    convert(Held(**tensors), tmp_path / "out", replace(output, reread=HFWeights), **options)
    assert progress.counts == [1, 2, 1, 3, 0, 1, 2]  # two of three; the third, so all are written; read back
    assert {name: tensor.tolist() for name, tensor in HFCheckpoint().read(tmp_path / "out")} == {
        "a": [0.0, 1.0], "b": [1.0, 1.0], "c": [2.0, 1.0],
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json", *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json",
    ]  # fmt: skip
    assert integrity_error(tmp_path / "out") is None


def test_another_conversion_does_not_go_on_with_what_one_left(tmp_path: Path):
    output = Output(partial(write_hf, max_shard_bytes=8), no_companions)
    with pytest.raises(KeyboardInterrupt):
        convert(Held("b", a=torch.zeros(2), b=torch.zeros(2)), tmp_path / "out", output, resume="one")
    other = Held(a=torch.ones(2), b=torch.ones(2))
    convert(other, tmp_path / "out", replace(output, reread=HFWeights), resume="another")
    assert {name: tensor.tolist() for name, tensor in HFCheckpoint().read(tmp_path / "out")} == {
        "a": [1.0, 1.0], "b": [1.0, 1.0],
    }  # fmt: skip


@pytest.mark.slow
def test_killed_conversion_is_taken_up_where_it_was(tmp_path: Path, model_dir: ModelDir):
    """Killed in the middle of nine shards, when three or more have their names; what is there is not read again."""
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from slimectl.checkpoints.conversion import convert_checkpoint\n"
        "from slimectl.protocols import NoProgress\n"
        "from slimectl.data.convert_options import ConvertOptions\n"
        "target = Path(sys.argv[2])\n"
        "staged = target.with_name('.tmp-out')\n"
        "class Killer(NoProgress):\n"
        "    def reach(self, done):\n"
        "        while done == 18:\n"
        "            if len(list(staged.glob('model*'))) >= 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "            time.sleep(0.01)\n"
        "options = ConvertOptions(max_shard_bytes=60_000, verify=False)\n"
        "convert_checkpoint(sys.argv[1], target, options, progress=Killer())\n"
    )
    source, target = model_dir("qwen3"), tmp_path / "out"
    child = forkserver.run_python(program, [str(source), str(target)], cwd=tmp_path)
    assert child.returncode == -9
    kept = {file.name: file.stat().st_ino for file in (tmp_path / ".tmp-out").glob("model*")}
    assert 3 <= len(kept) < 9
    assert not target.exists()
    progress = Counted()
    summary = convert_checkpoint(
        source, target, ConvertOptions(max_shard_bytes=60_000, verify=False), progress=progress
    )
    assert len(progress.counts) <= summary["tensors"]  # the last count is that of the phase's end
    assert progress.counts[-1] == summary["tensors"]
    assert all((target / name).stat().st_ino == inode for name, inode in kept.items())
    assert integrity_error(target) is None
    before, after = tensors(source), tensors(target)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_verifying_finds_one_wrong_bit_and_a_lost_tensor(tmp_path: Path):
    source = Held(a=torch.tensor([1.0, 2.0]), b=torch.tensor(3))
    flipped = Held(a=torch.tensor([1.0, 2.0000002]), b=torch.tensor(3))
    with pytest.raises(CheckpointError, match=r"verifying: a, torch.float32 \(2,\), differs from what was read"):
        convert(source, tmp_path / "out", Output(write_hf, no_companions, lambda path: flipped))
    lost = Held(a=torch.tensor([1.0, 2.0]))
    with pytest.raises(CheckpointError, match="verifying: b and 0 others are not in both"):
        convert(source, tmp_path / "out", Output(write_hf, no_companions, lambda path: lost))
    assert not list(tmp_path.iterdir())
    assert convert(source, tmp_path / "out", Output(write_hf, no_companions, HFWeights))["tensors"] == 2


@pytest.mark.slow
def test_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path: Path, model_dir: ModelDir):
    """A limit on file sizes stands for the full disk: both reach safetensors as an error of the system."""
    program = (
        "import resource, signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "from slimectl.checkpoints.conversion import convert_checkpoint\n"
        "from slimectl.errors import StorageError\n"
        "try: convert_checkpoint(sys.argv[1], Path(sys.argv[2]))\n"
        "except StorageError as error: print(error)\n"
    )
    child = forkserver.run_python(program, [str(model_dir("llama")), str(tmp_path / "out")], cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(f"{tmp_path}/out: File too large. Nothing was left under that name. Free space")
    assert os.listdir(tmp_path) == []
