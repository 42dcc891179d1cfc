"""The embedded engine around the small models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.types import Completion, SamplingParams

Request = tuple[list[int], SamplingParams]


@pytest.fixture
def make_engine(model_dir: Callable[[str], Path]) -> Callable[..., EmbeddedEngine]:
    """`make_engine("qwen3", max_running=4)` holds the weights of that family under version "0"."""

    def make(family: str = "llama", **options: Any) -> EmbeddedEngine:
        folder = model_dir(family)
        config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        engine = EmbeddedEngine(config, tokenizer, EngineOptions(**options))
        engine.load_weights(HFCheckpoint().read(folder), version="0")
        return engine

    return make


def answers(engine: EmbeddedEngine, *requests: Request) -> list[Completion]:
    """All requests at once, in an event loop of their own."""

    async def gathered() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(tokens, params=params) for tokens, params in requests))

    return asyncio.run(gathered())


@pytest.fixture(name="answers")
def answers_fixture() -> Callable[..., list[Completion]]:
    return answers
