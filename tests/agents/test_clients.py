"""Unmodified clients and agent frameworks ask SmolLM2: their episodes are samples of what the engine sampled."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from slimectl.agents.command import CommandAgent, CommandOptions
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.protocols import OnTokens
from slimectl.types import Completion, Sample, SamplingParams

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("AGENT_CLIENTS_PYTHON", "")
"""Python of an environment with tests/agents/requirements.txt, for the frameworks."""
CLIENTS = sorted((Path(__file__).parent / "clients").glob("with_*.py"))
INSTALLED = ("with_openai", "with_anthropic")
"""Clients of the extra `test`."""


@pytest.fixture(scope="module")
def engine(smollm2: tuple[Path, dict[str, Any]]) -> EmbeddedEngine:
    folder, _ = smollm2
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    engine.load_weights(HFCheckpoint().read(folder), version="0")
    return engine


@pytest.mark.parametrize("client", CLIENTS, ids=lambda path: path.stem)
def test_its_episode_becomes_samples_of_the_tokens_that_the_engine_sampled(
    client: Path, engine: EmbeddedEngine, smollm2: tuple[Path, dict[str, Any]]
):
    python = PYTHON or (sys.executable if client.stem in INSTALLED else None)
    if python is None:
        pytest.skip("needs tests/agents/requirements.txt in an environment that AGENT_CLIENTS_PYTHON names")
    log: list[tuple[list[int], Completion]] = []

    async def generate(tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None) -> Completion:
        completion = await engine.generate(tokens, params=params, on_tokens=on_tokens)
        log.append((list(tokens), completion))
        return completion

    agent = CommandAgent(CommandOptions(command=shlex.join([python, str(client)]), retries=0))
    question = "What is 2 plus 5?"
    arguments = {
        "sample": Sample(prompt=[{"role": "user", "content": question}], label="7"), "generate": generate,
        "tokenizer": AutoTokenizer.from_pretrained(smollm2[0]), "context": 2048,
        "sampling_params": SamplingParams(max_tokens=600, seed=3, stop=(".", "\n")),
    }  # fmt: skip
    samples = asyncio.run(agent(arguments))
    assert samples[0].metadata["agent"]["exit_code"] == 0, samples[0].metadata["agent"]["stderr"]
    assert len(log) >= 2
    taught: list[list[int]] = []
    for sample in samples:
        # The engine read and wrote this branch, token for token.
        assert any(sample.tokens == prompt + completion.tokens for prompt, completion in log)
        start = sample.prompt_length
        for begin, end in sample.metadata["agent"]["turns"]:
            if all(sample.mask()[begin:end]):
                taught.append(sample.tokens[start + begin : start + end])
        scored = [p for p, mask in zip(sample.rollout_log_probs or [], sample.mask(), strict=True) if mask]
        assert all(log_prob <= 0 for log_prob in scored)
    assert sorted(taught) == sorted(completion.tokens for _, completion in log)
