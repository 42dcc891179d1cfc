"""Real models, converted from the GGUF of a package, answer here as in transformers: SmolLM2-135M, Gemma 3 270M."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimectl.runtime.builders.engines import AutoBackend
from slimectl.settings import Settings
from slimectl.types import Completion, SamplingParams

pytestmark = pytest.mark.slow

TEXTS = (
    "Gravity is",
    "Question: I have seven apples and eat two of them. How many are left?\nAnswer:",
    "The following is a letter from a lighthouse keeper to his daughter, who has moved to a city far from the sea. "
    "He writes of the winter storms, of the ships that pass without stopping, and of the lamp that he lights every "
    "evening, as his father did before him.\n\nMy dear Anna,\n",
)
TOKENS = 16


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_greedy_answers_and_their_log_probabilities_are_those_of_transformers(
    name: str, request: pytest.FixtureRequest
):
    folder, _ = request.getfixturevalue(name)
    text = AutoTokenizer.from_pretrained(folder)
    prompts = [text.encode(each) for each in TEXTS]
    assert [len(tokens) for tokens in prompts] == sorted({len(tokens) for tokens in prompts})
    found = answers(folder, text, prompts)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, found, strict=True):
        tokens, log_probs = greedy(reference, prompt)
        assert answer.tokens == tokens
        assert answer.log_probs == pytest.approx(log_probs, abs=1e-4)
    # Not the babble of damaged weights: a trained model is rather sure of what it writes.
    assert sum(found[1].log_probs) / TOKENS > -1.5


def answers(folder: Path, text: Any, prompts: list[list[int]]) -> list[Completion]:
    """All prompts at once."""
    settings = Settings.model_validate({"model": {"path": str(folder)}})
    engine = AutoBackend().engine(settings, folder, text, load=True)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    async def gathered() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(tokens, params=params) for tokens in prompts))

    return asyncio.run(gathered())


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """What `generate` writes, and log_softmax of its logits at each token."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, len(prompt) :].tolist()
    logprobs = torch.cat(made.logits).float().log_softmax(-1)
    return tokens, logprobs[torch.arange(TOKENS), tokens].tolist()
