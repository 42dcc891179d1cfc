"""The merging of adapters that runs in SGLang's and vLLM's Python: the same bits and fingerprint as here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.policy_cases import Clipped, random_rows

from slimectl.checkpoints.base_model import fingerprint
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.supervisor import bootstrap
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions

ModelDir = Callable[..., Path]
FOLDER = str(Path(bootstrap.__file__).parent)
"""What is in it imports nothing of slimectl, and is imported from the path."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import merged_adapter

    yield merged_adapter
    del sys.modules["merged_adapter"]


def adapted(folder: Path, *targets: str) -> FsdpPolicy:
    lora = LoraOptions(rank=2, alpha=6.0, targets=targets)
    policy = FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.02), lora=lora))
    policy.forward_backward(random_rows(), Clipped())
    policy.optim_step()
    return policy


def header(policy: FsdpPolicy, **changes: Any) -> dict[str, Any]:
    adapter = policy.adapter()
    shown = {"base": str(adapter.base), "rank": adapter.rank, "alpha": adapter.alpha, "layers": len(adapter.layers)}
    return shown | {"fingerprint": fingerprint(adapter.base), **changes}


@pytest.mark.parametrize("family", ["llama", "llama_untied", "qwen3_moe"])
def test_the_weights_are_the_policys_and_only_what_changed_is_loaded(module: Any, model_dir: ModelDir, family: str):
    folder = model_dir(family)
    merger, held = module.Merger(folder, whole=False), dict[str, torch.Tensor]()

    def push(policy: FsdpPolicy) -> set[str]:
        parts = list(policy.adapter().tensors)
        assert not list(merger.add(header(policy), parts[:3], last=False))
        loaded = dict(merger.add(header(policy), parts[3:], last=True))
        merger.loaded()
        held.update(loaded)
        for name, tensor in policy.weights():
            assert torch.equal(held[name], tensor), name
        return {module.block_of(name) for name in loaded}

    everything = push(adapted(folder, "q_proj", "o_proj"))
    attention = {block for block in everything if block.endswith("self_attn")}
    assert everything > attention == push(adapted(folder, "q_proj", "k_proj"))
    merger.whole = False  # as after whole weights
    assert push(adapted(folder, "v_proj")) == everything


def test_another_base_model_and_parts_that_do_not_fit_are_refused(module: Any, model_dir: ModelDir):
    policy = adapted(model_dir("llama"), "q_proj")
    parts = dict(policy.adapter().tensors)
    (first, a), *_ = parts.items()
    for wrong, changes, message in [
        (parts, {"fingerprint": "0"}, "is not the model that the adapter was trained on. Set sync.lora = merged"),
        (parts, {"base": "/nowhere", "fingerprint": "0"}, f"{model_dir('llama')} is not the model"),
        (parts | {first: a[:1]}, {}, r"q_proj\.lora_A\.weight has shape \[1, \d+\], expected \[2, \d+\]"),
        (parts | {"model.norm.weight": a}, {}, r"model\.norm\.weight is not an adapter of a layer"),
        ({first: a}, {}, "0 of the adapter's 2 layers are complete"),
    ]:
        merger = module.Merger(model_dir("llama"), whole=True)
        with pytest.raises(ValueError, match=message):
            merger.add(header(policy, **changes), wrong.items(), last=True)
