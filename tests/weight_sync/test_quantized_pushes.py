"""Pushes to servers that hold fp8: the tensors of their own checkpoint, quantized as its configuration says."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slimectl.checkpoints.conversion import convert_checkpoint
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.checkpoints.quantization import QuantizedStream
from slimectl.checkpoints.quantization_schemes import Fp8Blocks, Fp8Scale
from slimectl.data.convert_options import ConvertOptions
from slimectl.engines.weight_sync.base import cast
from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve

ModelDir = Callable[..., Path]
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"block": (32, 32)},
    "fp8_tensor": {},
    "fp8_channel": {},
}


class Readers:
    """Two servers that read a folder of pushed weights."""

    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    shares_memory = False

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.config: dict[str, Any] = {}

    def begin(self, *, mode: str) -> None: ...

    def end(self, *, within_s: float | None = None) -> None: ...

    def load_disk(self, folder: Path, *, version: str, delta: Path | None = None) -> None:
        # In place: a push works with a copy of its client.
        for file in folder.glob("*.safetensors"):
            self.tensors.update(load_file(file))
        self.config.update(json.loads((folder / "config.json").read_text()))


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(assignments)]).settings


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8).tolist())
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("quantize", SCHEMES)
def test_untrained_weights_arrive_as_the_checkpoint_that_servers_began_with(
    model_dir: ModelDir, tmp_path: Path, quantize: str
):
    source, served = model_dir("qwen3_moe"), tmp_path / "served"
    convert_checkpoint(
        source, served, ConvertOptions(dtype="bfloat16", quantize=quantize, logits=0, **SCHEMES[quantize])
    )
    original = load_file(served / "model.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in original.values()) == 8 + 3 + 15
    readers = Readers()
    chosen = settings(
        "engine.backend=sglang", f"engine.load={served}", "engine.dtype=bfloat16", "sync.transport=disk",
        f"sync.update_weight_disk_dir={tmp_path / 'weights'}",
    )  # fmt: skip
    rounded = tmp_path / "rounded"  # as the conversion rounds before it quantizes
    rounded.mkdir()
    (rounded / "config.json").write_text((source / "config.json").read_text())
    HFCheckpoint(dtype=torch.bfloat16).write(rounded, HFCheckpoint().read(source))
    policy = FsdpPolicy(rounded, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions()))
    builders.to_servers(chosen, policy, readers, model=rounded, folder=tmp_path).push()
    assert bits(readers.tensors) == bits(original)
    assert (
        readers.config["quantization_config"] == json.loads((served / "config.json").read_text())["quantization_config"]
    )


def test_one_scale_for_a_matrix_or_a_row_by_hand():
    weight = torch.tensor([[448.0, -3.0], [7.0, 3.5]])
    whole = Fp8Scale().quantized(weight)
    assert whole["weight_scale"].tolist() == [1.0]
    assert whole["weight"].float().tolist() == [[448.0, -3.0], [7.0, 3.5]]
    rows = Fp8Scale(per_row=True).quantized(weight)
    assert rows["weight_scale"].tolist() == [[1.0], [7 / 448]]
    assert rows["weight"].float().tolist() == [[448.0, -3.0], [448.0, 224.0]]
    assert Fp8Scale(per_row=True).weight(rows, torch.float32).tolist() == weight.tolist()
    assert Fp8Scale().quantized(torch.zeros(2, 2))["weight_scale"].tolist() == [1.0]


def test_blocks_of_128_that_do_not_divide_the_matrix_equal_a_loop_over_them():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    stored = Fp8Blocks().quantized(weight)
    for row in (0, 128):
        for column in (0, 128, 256):
            block = weight[row : row + 128, column : column + 128]
            scale = block.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            assert stored["weight_scale_inv"][row // 128, column // 128] == scale
            expected = (block / scale).to(torch.float8_e4m3fn).float()
            assert torch.equal(stored["weight"][row : row + 128, column : column + 128].float(), expected)


def stream(*names: str) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, torch.full((4, 4), 2.0)


FORMS = {
    "a.weight": ((4, 4), torch.float8_e4m3fn),
    "a.weight_scale": ((), torch.float32),
    "norm.weight": ((4,), torch.bfloat16),
}


def test_scales_keep_float32_and_the_shape_that_the_checkpoint_has():
    recode = pickle.loads(pickle.dumps(QuantizedStream(FORMS, Fp8Scale(), torch.bfloat16)))
    found = dict(cast(stream("a.weight", "norm.weight"), recode))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "a.weight": (torch.float8_e4m3fn, (4, 4)),
        "a.weight_scale": (torch.float32, ()),
        "norm.weight": (torch.bfloat16, (4, 4)),
    }


def test_checkpoints_of_other_models_are_refused_by_the_name_of_a_tensor():
    recode = QuantizedStream(FORMS, Fp8Scale(), torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"engine\.load: the policy has no a\.weight, which the engine holds in fp8"
    ):
        list(recode(stream("b.weight")))
    other = QuantizedStream({**FORMS, "a.weight": ((8, 4), torch.float8_e4m3fn)}, Fp8Scale(), torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"a\.weight has shape \[8, 4\] and 1 scales, but the policy's has \[4, 4\] and 1"
    ):
        list(other(stream("a.weight")))


def test_engines_that_hold_no_fp8_are_refused_before_anything_starts(model_dir: ModelDir, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"engine\.load has no effect with an embedded engine"):
        settings("engine.load=fp8")
    convert_checkpoint(model_dir("qwen3"), tmp_path / "int4", ConvertOptions(quantize="int4", group=32, logits=0))
    with pytest.raises(CheckpointError, match="is in 4 bits, which weight updates do not support"):
        builders.check_engine(settings("engine.backend=vllm", f"engine.load={tmp_path / 'int4'}"))
    convert_checkpoint(model_dir("qwen3"), tmp_path / "fp8", ConvertOptions(quantize="fp8_tensor", logits=0))
    with pytest.raises(SettingsError, match=r"engine\.dtype: float32, but fp8 servers compute in bfloat16"):
        builders.check_engine(settings("engine.backend=vllm", f"engine.load={tmp_path / 'fp8'}"))
