"""Weights come in by name, land in place, and are refused when they do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.errors import CheckpointError, SlimectlError
from slimectl.types import Completion, SamplingParams

Make = Callable[..., EmbeddedEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPT = list(b"weights")


@pytest.fixture
def tensors(model_dir: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    return dict(HFCheckpoint().read(model_dir("llama")))


def answer(engine: EmbeddedEngine) -> Completion:
    return asyncio.run(engine.generate(PROMPT, params=GREEDY))


def pointers(engine: EmbeddedEngine) -> dict[str, int]:
    return {
        name: place.read().data_ptr() for name, place in engine._model.weights.places.items() if place.view is not None
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_new_weights_are_used_and_written_in_place(
    family: str, make_engine: Make, model_dir: Callable[[str], Path]
) -> None:
    engine = make_engine(family)
    before, old = pointers(engine), answer(engine)
    generator = torch.Generator().manual_seed(3)
    changed = [
        (name, tensor + 0.3 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in HFCheckpoint().read(model_dir(family))
    ]
    engine.load_weights(reversed(changed), version="7")  # in any order
    new = answer(engine)
    fresh = EmbeddedEngine(
        AutoConfig.from_pretrained(model_dir(family)), AutoTokenizer.from_pretrained(model_dir(family))
    )
    fresh.load_weights(changed, version="7")
    assert pointers(engine) == before
    assert new.tokens != old.tokens
    assert (new.tokens, new.log_probs) == (answer(fresh).tokens, answer(fresh).log_probs)
    assert (engine.weight_version, new.weight_versions) == ("7", ["7"])


def test_a_tied_head_may_come_or_stay_away(make_engine: Make, tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    expected = answer(engine).tokens
    engine.load_weights((tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}).items(), version="1")
    assert answer(engine).tokens == expected


def test_missing_extra_and_misshapen_tensors_are_named(make_engine: Make, tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine()
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"no tensor for {name}"):
        engine.load_weights([item for item in tensors.items() if item[0] != name], version="1")
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight is not part of this llama"):
        engine.load_weights([("model.layers.9.mlp.up_proj.weight", torch.zeros(1))], version="1")
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[3, 64\], expected \[128, 64\]"):
        engine.load_weights([(name, torch.zeros(3, 64))], version="1")
    engine.load_weights(tensors.items(), version="2")  # a whole set mends it
    assert answer(engine).weight_versions == ["2"]


def test_a_family_that_is_not_known_is_refused_with_those_that_are(model_dir: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir("llama"))
    with pytest.raises(CheckpointError, match=r"'gpt2'\. Supported: llama, qwen2, qwen3"):
        EmbeddedEngine(AutoConfig.for_model("gpt2"), tokenizer)


def test_bf16_is_close_to_fp32(make_engine: Make) -> None:
    exact, coarse = answer(make_engine()), answer(make_engine(dtype=torch.bfloat16))
    assert coarse.log_probs[0] == pytest.approx(exact.log_probs[0], abs=0.3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_numbers_fail_the_request_with_a_reason(
    temperature: float, make_engine: Make, tensors: dict[str, torch.Tensor]
) -> None:
    engine = make_engine()
    broken = tensors | {"model.norm.weight": tensors["model.norm.weight"] * float("nan")}
    engine.load_weights(broken.items(), version="13")
    with pytest.raises(SlimectlError, match=r"weight version '13' are not finite"):
        asyncio.run(engine.generate(PROMPT, params=SamplingParams(temperature=temperature)))
    engine.load_weights(tensors.items(), version="14")
    assert answer(engine).weight_versions == ["14"]
