"""return_routed_experts: a server's clients get the experts that the engine in process reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.http.client import HttpEngine, ServedModel
from slimectl.engines.sglang.api import SglangApi
from slimectl.errors import SettingsError
from slimectl.types import Completion, SamplingParams

PROMPT = list(b"once upon a time")
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
ModelDir = Callable[[str], Path]


def asked(url: str, **options: Any) -> Completion:
    async def generated() -> Completion:
        engine = HttpEngine([url], api=SglangApi(**options), model=ServedModel(259, 256))
        try:
            return await engine.generate(PROMPT, params=PARAMS)
        finally:
            await engine.close()

    return asyncio.run(generated())


def test_the_experts_of_an_answer_are_those_of_the_engine_in_process(serving: Callable[..., Any], model_dir: ModelDir):
    folder = model_dir("qwen3_moe")
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(config, tokenizer, EngineOptions(reports_experts=True))
    engine.load_weights(HFCheckpoint().read(folder), version="0")
    expected = asyncio.run(engine.generate(PROMPT, params=PARAMS))
    with serving(folder) as server:
        answer, unasked = asked(server.url, routed_experts=(2, 2)), asked(server.url)
        with pytest.raises(SettingsError, match=r"rejects the request: routed_experts: another form. Start SGLang"):
            asked(server.url, routed_experts=(7, 2))
    assert answer.tokens == expected.tokens
    assert answer.extras["routed_experts"] == expected.extras["routed_experts"]
    assert "routed_experts" not in unasked.extras


def test_a_dense_model_has_none_to_report(server: Any):
    status, answer = server.ask("/generate", {"input_ids": PROMPT, "return_routed_experts": True})
    assert (status, "this is a dense model" in str(answer)) == (400, True)
