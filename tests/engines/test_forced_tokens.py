"""Tokens that a grammar forces: nothing is learned from them, in every way from the engine to a training row."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimectl.agents.answer import AnswerReader
from slimectl.agents.session import Session, SessionLimits
from slimectl.chats.requests import ChatRequest
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages.generation import GroupGenerator
from slimectl.types import Completion, JsonGrammar, Prompt, Sample, SamplingParams

END = 256
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SCHEMA = json.dumps({"enum": WORDS})
OBJECTS = [{"a": a, "b": b} for a in "xyz" for b in (True, False, None)]


def written(values: list[Any]) -> list[list[int]]:
    """Return values as JSON, a byte a token, each with the end token."""
    return [[*json.dumps(value).encode(), END] for value in values]


ANSWERS = written(WORDS)
PROMPT = list(b"say a word: ")
PARAMS = SamplingParams(max_tokens=20, grammar=JsonGrammar(SCHEMA))

Make = Callable[..., EmbeddedEngine]
Ask = Callable[..., list[Completion]]


def allowed(answer: list[int], answers: list[list[int]]) -> list[list[int]]:
    """Return the tokens that were allowed in place of each of an answer's, read off all answers that there are."""
    return [sorted({other[i] for other in answers if other[:i] == answer[:i]}) for i in range(len(answer))]


def chosen(answer: list[int], answers: list[list[int]] = ANSWERS) -> list[int]:
    """Return the loss mask of an answer: 1 where another token was allowed."""
    return [int(len(tokens) > 1) for tokens in allowed(answer, answers)]


def test_the_loss_mask_by_hand():
    assert chosen([*b'"three"', END]) == [0, 1, 1, 0, 0, 0, 0, 0]  # t of o t f s e n; h or w
    assert chosen([*b'"six"', END]) == [0, 1, 1, 0, 0, 0]  # s of the same; i or e
    assert chosen([*b'"one"', END]) == [0, 1, 0, 0, 0, 0]


def test_the_engine_says_which_tokens_a_grammar_forced_and_nothing_without_one(make_engine: Make, answers: Ask):
    params = [dataclasses.replace(PARAMS, seed=seed, temperature=2.0) for seed in range(200)]
    drawn = answers(make_engine(), *((PROMPT, each) for each in params))
    assert {tuple(each.tokens) for each in drawn} == set(map(tuple, ANSWERS))
    assert [each.loss_mask for each in drawn] == [chosen(each.tokens) for each in drawn]
    [free] = answers(make_engine(), (PROMPT, SamplingParams(max_tokens=3)))
    assert free.loss_mask is None


def session_samples(engine: EmbeddedEngine, tokenizer: Any) -> list[Sample]:
    params = SamplingParams(max_tokens=40, seed=3)

    def generate(tokens: list[int], params: SamplingParams, **options: Any) -> Awaitable[Completion]:
        return engine.generate(tokens, params=params, **options)

    session = Session(tokenizer, AnswerReader(tokenizer), generate, params, SessionLimits(9, 99))
    asyncio.run(session.answer(ChatRequest(prompt=PROMPT, json_schema=SCHEMA)))
    return session.samples(Sample())


def agent_samples(engine: EmbeddedEngine, tokenizer: Any) -> list[Sample]:
    async def agent(offered: dict[str, Any]) -> Sample:
        """Ask for a word, and say nothing of the mask to the sample."""
        sample = offered["sample"]
        params = dataclasses.replace(offered["sampling_params"], grammar=JsonGrammar(SCHEMA))
        answer = await offered["generate"](sample.tokens, params)
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        return sample

    settings = RolloutSettings(n_samples_per_prompt=1, max_response_len=40)
    attempts = GroupGenerator(engine, tokenizer, settings, agent)
    return asyncio.run(attempts.complete(attempts.new_group(Prompt("say a word: "))))


@pytest.mark.parametrize("samples_of", [session_samples, agent_samples])
def test_rows_of_sessions_and_agents_have_loss_mask_0_for_forced_tokens(
    samples_of: Callable[[EmbeddedEngine, Any], list[Sample]], make_engine: Make, model_dir: Callable[[str], Path]
):
    [sample] = samples_of(make_engine(), AutoTokenizer.from_pretrained(model_dir("llama")))
    response = sample.tokens[-sample.response_length :]
    assert response in ANSWERS
    assert sample.loss_mask == chosen(response)
    assert all(log_prob < 0 for log_prob in sample.rollout_log_probs or [])  # those of the policy, forced or not


def test_a_free_answer_is_not_masked_for_a_forced_one_that_begins_alike(
    make_engine: Make, model_dir: Callable[[str], Path]
):
    quote = ord('"')

    async def agent(offered: dict[str, Any]) -> Sample:
        """Ask for a word, drop it, and take two quotation marks that no grammar asked for."""
        sample, params = offered["sample"], offered["sampling_params"]
        dropped = await offered["generate"](sample.tokens, dataclasses.replace(params, grammar=JsonGrammar(SCHEMA)))
        assert (dropped.tokens[0], (dropped.loss_mask or [])[0]) == (quote, 0)
        free = dataclasses.replace(params, logit_bias=((quote, 1000.0),), max_tokens=2)
        answer = await offered["generate"](sample.tokens, free)
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
        return sample

    settings = RolloutSettings(n_samples_per_prompt=1, max_response_len=40)
    attempts = GroupGenerator(make_engine(), AutoTokenizer.from_pretrained(model_dir("llama")), settings, agent)
    [sample] = asyncio.run(attempts.complete(attempts.new_group(Prompt("say a word: "))))
    assert (sample.response, sample.loss_mask) == ('""', [1, 1])


def test_a_mask_of_another_length_is_refused_and_a_servers_is_taken():
    sample = Sample(tokens=[1])
    with pytest.raises(ValueError, match="2 trainable tokens need as many values of loss_mask, got 1"):
        sample.append_response_tokens([5, 6], log_probs=[-1.0, -1.0], loss_mask=[1])
    sample.append_response_tokens([5, 6], log_probs=[-1.0, -1.0], meta_info={"loss_mask": [0, 1]})
    sample.append_response_tokens([7], trainable=False)
    assert sample.loss_mask == [0, 1, 0]


def gradients(model: Any, rewards: torch.Tensor, answers: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Return dE[R] of the policy that acts, and the expected policy gradient with and without loss mask.

    Exact, over all answers y: the policy that acts is q(token) = pi(token) / pi(allowed). The trainer's is the sum over
    y of q(y) (R(y) - E[R]) grad log pi, over the tokens that are taught.
    """
    log_q, log_pi, log_pi_chosen = [], [], []
    for answer in answers:
        log_probs = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        taken = log_probs[torch.arange(len(answer)), answer]
        mass = [log_probs[i, tokens].logsumexp(0) for i, tokens in enumerate(allowed(answer, answers))]
        log_q.append((taken - torch.stack(mass)).sum())
        log_pi.append(taken.sum())
        log_pi_chosen.append((taken * torch.tensor(chosen(answer, answers))).sum())
    q = torch.stack(log_q).exp()
    assert q.sum().item() == pytest.approx(1.0)
    weights = (q * (rewards - (q * rewards).sum())).detach()
    taught = [(weights * torch.stack(each)).sum() for each in (log_pi_chosen, log_pi)]
    parameters = list(model.parameters())
    parts = [torch.autograd.grad(each, parameters, retain_graph=True) for each in ((q * rewards).sum(), *taught)]
    return tuple(torch.cat([part.flatten() for part in each]) for each in parts)


@pytest.mark.parametrize("answers", [written(WORDS), written(OBJECTS)], ids=["words", "objects"])
def test_without_forced_tokens_the_expected_gradient_points_along_that_of_the_policy_that_acts(
    answers: list[list[int]], model_dir: Callable[[str], Path]
):
    model = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float64)
    cosines, lengths = [], []
    for seed in range(4):
        rewards = torch.rand(len(answers), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        true, *estimates = gradients(model, rewards, answers)
        cosines.append([torch.cosine_similarity(true, each, dim=0) for each in estimates])
        lengths.append([each.norm() / true.norm() for each in estimates])
    masked_cosine, unmasked_cosine = torch.tensor(cosines).mean(0).tolist()
    masked_length, unmasked_length = torch.tensor(lengths).mean(0).tolist()
    assert masked_cosine > 0.9
    assert unmasked_cosine < 0.6
    assert masked_length < 1.2
    assert unmasked_length > 1.8
