"""Generation of groups: every request of an agent draws its own random numbers, and the same ones in every run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_run_stage import Bytes, Echo, settings

from slimectl.rewards import verifier
from slimectl.stages.generation import GroupGenerator, single_turn
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rollout import rollout
from slimectl.types import Completion, Prompt, Sample, SamplingParams


class Recording(Echo):
    """Records the seed of every request."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int | None] = []

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        self.seeds.append(params.seed)
        return await super().generate(tokens, params=params)


async def three_turns(offered: dict[str, Any]) -> Sample:
    """Asks twice as it was told to, and once without any parameters."""
    sample, params = offered["sample"], offered["sampling_params"]
    for each in (params, dataclasses.replace(params, temperature=0.5), None):
        answer = await offered["generate"](sample.tokens, *([each] if each else []))
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
    return sample


async def chosen_seed(offered: dict[str, Any]) -> Sample:
    sample, params = offered["sample"], dataclasses.replace(offered["sampling_params"], seed=7)
    for _ in range(2):
        answer = await offered["generate"](sample.tokens, params)
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
    return sample


def seeds_of(agent: Any = None) -> list[int | None]:
    engine = Recording()
    prompts = [Prompt("a", label="a", index=i) for i in range(2)]
    generator = GroupGenerator(engine, Bytes(), settings().rollout, agent or single_turn)
    assert len(list(rollout(PromptSource(prompts, generator)))) == 2
    return engine.seeds


def test_the_turns_of_an_attempt_are_independent_draws_and_the_same_in_every_run():
    seeds = seeds_of(three_turns)
    assert None not in seeds
    assert len(set(seeds)) == 6
    assert sorted(seeds_of(three_turns)) == sorted(seeds)
    assert set(seeds_of()) < set(seeds)  # the first turn draws as a single one does


def test_a_seed_that_the_agent_chose_is_used():
    assert seeds_of(chosen_seed) == [7] * 4


class Opened(Echo):
    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        return Completion([65], [-0.5], "Paris", "stop", ["0"])


class Opening(Bytes):
    """A tokenizer whose chat template opens a thought, or opens and closes it."""

    chat_template = "{{ enable_thinking }}"

    def apply_chat_template(self, chat: list[dict[str, str]], enable_thinking: bool = True, **_: Any) -> str:
        return f"{chat[-1]['content']}<think>\n" + ("" if enable_thinking else "\n</think>\n\n")


class Special(Opening):
    """A tokenizer whose tags are special tokens."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        text = super().decode(tokens)
        return text.replace("<think>", "") if skip_special_tokens else text


def test_a_thought_whose_end_no_response_shows_is_not_noted():
    for prompt in ([{"role": "user", "content": "Capital?"}], "Capital?<think>"):
        for hidden, reward in ((True, 1.0), (False, 0.0)):
            chosen = settings().rollout.model_copy(update={"skip_special_tokens": hidden})
            (sample,) = rollout(
                PromptSource([Prompt(prompt, label="Paris")], GroupGenerator(Opened(), Special(), chosen))
            )
            assert verifier("exact")(sample) == reward


@pytest.mark.parametrize(("thinking", "reward"), [(True, 0.0), (False, 1.0)])
def test_a_rollout_notes_the_thought_that_the_chat_template_opens(thinking: bool, reward: float):
    chosen = settings().rollout.model_copy(update={"apply_chat_template_kwargs": {"enable_thinking": thinking}})
    prompts = iter([Prompt([{"role": "user", "content": "Capital?"}], label="Paris")])
    (sample,) = rollout(PromptSource(prompts, GroupGenerator(Opened(), Opening(), chosen)))
    assert sample.metadata.get("opened_thought", "") == ("<think>" if thinking else "")
    assert verifier("exact")(sample) == reward
    assert verifier("exact")(dataclasses.replace(sample, response="Lyon?</think>Paris")) == 1.0
