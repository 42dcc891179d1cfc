"""Experts kept in one tensor: the same numbers as experts apart."""

from __future__ import annotations

import pytest
import torch

from slimectl.architectures.mapping import views
from slimectl.errors import CheckpointError


def test_each_expert_has_its_rows():
    # Two experts of width one: gate over up of the first, then of the second.
    tensors = {"a.experts.gate_up_proj": torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])}
    found = views({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    seen = {name: tensors[view.source][view.index] for name, view in found.items()}
    assert {name: tensor.tolist() for name, tensor in seen.items()} == {
        "a.experts.0.gate_proj.weight": [[1, 2]],
        "a.experts.0.up_proj.weight": [[3, 4]],
        "a.experts.1.gate_proj.weight": [[5, 6]],
        "a.experts.1.up_proj.weight": [[7, 8]],
    }
    assert {view.shape for view in found.values()} == {(1, 2)}


def test_down_projections_are_whole_matrices():
    found = views({"a.experts.down_proj": (3, 4, 2)})
    assert set(found) == {f"a.experts.{e}.down_proj.weight" for e in range(3)}
    assert found["a.experts.2.down_proj.weight"].index == (2, slice(0, 4))


def test_experts_apart_need_no_view():
    assert views({"a.experts.0.down_proj.weight": (4, 2), "a.mlp.gate_up_proj.weight": (8, 4)}) == {}


def test_experts_in_memory_of_transformers_are_those_on_disk(tmp_path):
    """transformers stacks experts in memory; a checkpoint that stored that would be read right."""
    from hf_models import config_of, saved
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from slimectl.architectures.registry import shapes

    folder = saved("qwen3_5_moe", tmp_path)
    disk = load_file(folder / "model.safetensors")
    memory = dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    found = views({name: tuple(tensor.shape) for name, tensor in memory.items()})
    missing = shapes(config_of("qwen3_5_moe")).keys() - memory.keys()
    assert missing == found.keys()
    for name, view in found.items():
        assert torch.equal(memory[view.source][view.index], disk[name])


def test_checkpoint_of_stacked_experts_is_opened_like_one_of_experts_apart(tmp_path):
    from hf_models import saved
    from safetensors.torch import load_file, save_file

    from slimectl.checkpoints.hf import HFCheckpoint

    tensors = load_file(saved("qwen3_5_moe", tmp_path) / "model.safetensors")
    save_file(stack(tensors), tmp_path / "model.safetensors")
    found = HFCheckpoint().open(tmp_path)
    assert {name: shape for name, (shape, _) in found.forms().items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert all(torch.equal(found.get(name), tensor) for name, tensor in tensors.items())


def stack(tensors):
    """All experts of a layer in two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = sorted({name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name})
    for prefix in prefixes:
        parts = {
            kind: [tensors[f"{prefix}.{e}.{kind}_proj.weight"] for e in range(4)] for kind in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{prefix}.down_proj"] = torch.stack(parts["down"])
    return found


def test_shape_that_holds_no_experts_is_refused():
    with pytest.raises(CheckpointError, match=r"a\.experts\.gate_up_proj has shape \[2, 3, 4\]"):
        views({"a.experts.gate_up_proj": (2, 3, 4)})
