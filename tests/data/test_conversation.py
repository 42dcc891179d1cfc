"""Dialogues in tokens: what was sampled stays as it was, what others say is masked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slimectl.checkpoints.create import CHATML, byte_tokenizer
from slimectl.data.chat import BROKEN_OFF, Conversation, following, render
from slimectl.data.records import sample_from_json, sample_to_json
from slimectl.data.turn_rewards import policy_turns
from slimectl.errors import SettingsError
from slimectl.types import Completion, Prompt, Sample, SamplingParams, Status

CHAT = [{"role": "user", "content": "2*21?"}]


def tokenizer(template: str | None = CHATML) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def end_of_turn(text: Any) -> int:
    return int(text.convert_tokens_to_ids("<|im_end|>"))


class Scripted:
    """Says its lines one after another; a line that ends with ~ was cut there, all others end with the end token."""

    def __init__(self, text: Any, *lines: str) -> None:
        self.text, self.lines = text, list(lines)
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def __call__(self, tokens: list[int], params: SamplingParams) -> Completion:
        self.asked.append((list(tokens), params))
        line = self.lines.pop(0)
        finish = "length" if line.endswith("~") else "stop"
        written = self.text.encode(line.rstrip("~"), add_special_tokens=False)
        written += [end_of_turn(self.text)] if finish == "stop" else []
        return Completion(written, [-0.5] * len(written), line.rstrip("~"), finish)


def conversation(text: Any, says: Scripted, **more: Any) -> Conversation:
    tokens = render(Prompt(CHAT), text)
    sample = Sample(prompt=CHAT, tokens=tokens)
    params = {name: more.pop(name) for name in ("max_tokens", "skip_special_tokens") if name in more}
    return Conversation(sample, text, says, SamplingParams(**{"max_tokens": 200, "seed": 5, **params}), **more)


def test_a_dialogue_is_what_the_template_would_have_made_of_the_whole_chat():
    text = tokenizer()
    says = Scripted(text, "<calc>2*21</calc>", "It is 42.")

    async def talked() -> Sample:
        talk = conversation(text, says)
        assert await talk.ask() == "<calc>2*21</calc>"
        talk.tell({"role": "user", "content": "42"})
        assert await talk.ask() == "It is 42."
        return talk.sample

    sample = asyncio.run(talked())
    whole = [*CHAT, {"role": "assistant", "content": "<calc>2*21</calc>"}, {"role": "user", "content": "42"}]
    assert says.asked[1][0] == render(Prompt(whole), text)  # with the header of the second turn
    taught = [t for t, bit in zip(sample.tokens[sample.prompt_length :], sample.mask(), strict=True) if bit]
    assert text.decode(taught) == "<calc>2*21</calc><|im_end|>It is 42.<|im_end|>"
    read = [t for t, bit in zip(sample.tokens[sample.prompt_length :], sample.mask(), strict=True) if not bit]
    assert text.decode(read) == "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    assert sample.status is Status.COMPLETED


def test_a_response_that_keeps_special_tokens_has_those_of_the_template_too():
    text = tokenizer()
    says = Scripted(text, "<calc>2*21</calc>", "It is 42.")

    async def talked() -> Sample:
        talk = conversation(text, says, skip_special_tokens=False)
        await talk.ask()
        talk.tell({"role": "user", "content": "42"})
        await talk.ask()
        return talk.sample

    assert asyncio.run(talked()).response == (
        "<calc>2*21</calc><|im_end|>\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\nIt is 42."
    )


def test_sampled_tokens_are_never_tokenised_again():
    """The model may write "42" as any tokens; here one that its own text would not become."""
    text = tokenizer()
    odd = [0xE2, 0x28, end_of_turn(text)]  # no valid UTF-8: its text is not these bytes

    async def says(tokens: list[int], params: SamplingParams) -> Completion:
        return Completion(list(odd), [-1.0] * 3, text.decode(odd[:2]), "stop")

    async def talked() -> Sample:
        talk = conversation(text, says)  # type: ignore[arg-type]
        await talk.ask()
        talk.tell({"role": "user", "content": "hm"})
        await talk.ask()
        return talk.sample

    sample = asyncio.run(talked())
    written = [t for t, bit in zip(sample.tokens[sample.prompt_length :], sample.mask(), strict=True) if bit]
    assert written == odd * 2


def test_each_turn_has_draws_of_its_own_and_what_room_is_left():
    text = tokenizer()
    says = Scripted(text, "a", "b")

    async def talked() -> None:
        talk = conversation(text, says, max_tokens=100)
        await talk.ask()
        talk.tell({"role": "user", "content": "x"})
        await talk.ask()

    asyncio.run(talked())
    (_, first), (asked, second) = says.asked
    assert (first.max_tokens, first.seed) == (100, 5)
    assert second.max_tokens == 100 - (len(asked) - len(render(Prompt(CHAT), text)))
    assert second.seed == 6


@pytest.mark.parametrize(("lines", "turns"), [(["cut~"], 1), (["a", "b", "c"], 2)])
def test_a_dialogue_ends_when_it_is_cut_or_has_had_its_turns(lines: list[str], turns: int):
    text = tokenizer()

    async def talked() -> Conversation:
        talk = conversation(text, Scripted(text, *lines), max_turns=2)
        while await talk.ask() is not None and not talk.over:
            talk.tell({"role": "user", "content": "go on"})
        return talk

    talk = asyncio.run(talked())
    assert (talk.turns, talk.sample.status) == (turns, Status.TRUNCATED)


def test_what_would_leave_no_room_is_not_told():
    text = tokenizer()

    async def talked() -> Conversation:
        talk = conversation(text, Scripted(text, "a"), max_tokens=50)
        await talk.ask()
        talk.tell({"role": "user", "content": "x" * 50})
        assert await talk.ask() is None
        return talk

    talk = asyncio.run(talked())
    assert (talk.sample.response_length, talk.sample.status) == (2, Status.TRUNCATED)


def test_half_a_character_of_a_tool_is_read_as_a_question_mark():
    text = tokenizer()

    async def talked() -> Sample:
        talk = conversation(text, Scripted(text, "a", "b"))
        await talk.ask()
        talk.tell({"role": "user", "content": "c\ud83d"})
        talk.tell_text("d\ud83d")
        return talk.sample

    read = text.decode(asyncio.run(talked()).tokens)
    assert "user\nc?<|im_end|>" in read
    assert read.endswith("d?")


def test_what_follows_an_answer_needs_a_template():
    with pytest.raises(SettingsError, match="no chat template"):
        following(tokenizer(None), [{"role": "user", "content": "x"}])


def test_text_can_be_told_without_a_template():
    text = tokenizer(None)

    async def talked() -> Sample:
        says = Scripted(text, "a", "b")
        talk = Conversation(Sample(tokens=[65]), text, says, SamplingParams(max_tokens=50))
        await talk.ask()
        talk.tell_text(" tool: 7 ")
        await talk.ask()
        return talk.sample

    sample = asyncio.run(talked())
    assert sample.mask() == [1, 1] + [0] * 9 + [1, 1]


def test_a_turn_that_was_broken_off_goes_on_where_it_stopped():
    text = tokenizer()

    async def broken(tokens: list[int], params: SamplingParams) -> Completion:
        return Completion(text.encode("<calc>2", add_special_tokens=False), [-0.5] * 7, "<calc>2", "abort")

    async def talked() -> Conversation:
        talk = conversation(text, broken)  # type: ignore[arg-type]
        assert await talk.ask() is None
        assert talk.sample.status is Status.ABORTED
        rest = Conversation(talk.sample, text, Scripted(text, "*21</calc>"), SamplingParams(max_tokens=200))
        assert await rest.ask() == "<calc>2*21</calc>"
        return rest

    talk = asyncio.run(talked())
    assert (talk.turns, talk.sample.metadata, talk.sample.status) == (1, {}, Status.COMPLETED)
    assert talk.sample.mask() == [1] * 18


def test_turns_are_rewarded_and_those_without_a_reward_get_0():
    text = tokenizer()

    async def talked() -> Conversation:
        talk = conversation(text, Scripted(text, "a", "b", "c"))
        with pytest.raises(ValueError, match="has not taken a turn"):
            talk.reward(1.0)
        await talk.ask()
        assert talk.sample.turn_rewards is None
        talk.tell({"role": "user", "content": "go on"})
        await talk.ask()
        talk.reward(1, state="room 3")
        talk.tell({"role": "user", "content": "go on"})
        await talk.ask()
        return talk

    sample = asyncio.run(talked()).sample
    turns = sample.turn_rewards or []
    assert [(turn["reward"], turn.get("state")) for turn in turns] == [(0.0, None), (1.0, "room 3"), (0.0, None)]
    assert [(turn["start"], turn["end"]) for turn in turns] == policy_turns(sample)


def test_rewards_of_turns_survive_an_interruption():
    text = tokenizer()

    async def talked() -> Sample:
        talk = conversation(text, Scripted(text, "a", "b"))
        await talk.ask()
        talk.reward(0.5)
        talk.tell({"role": "user", "content": "go on"})

        async def broken(tokens: list[int], params: SamplingParams) -> Completion:
            return Completion([70], [-0.5], "F", "abort")

        talk._generate = broken
        assert await talk.ask() is None
        kept = sample_from_json(json.loads(json.dumps(sample_to_json(talk.sample))))
        rest = Conversation(kept, text, Scripted(text, "b"), SamplingParams(max_tokens=200))
        await rest.ask()
        rest.reward(1.0)
        return rest.sample

    sample = asyncio.run(talked())
    turns = sample.turn_rewards or []
    assert [turn["reward"] for turn in turns] == [0.5, 1.0]
    assert [(turn["start"], turn["end"]) for turn in turns] == policy_turns(sample)


def test_a_sample_that_was_interrupted_before_turns_had_rewards_goes_on():
    text = tokenizer()
    sample = Sample(tokens=[1, 65, 66], response_length=2, loss_mask=[1, 1], rollout_log_probs=[-1.0, -1.0],
                    metadata={BROKEN_OFF: [1, "B"]})  # fmt: skip
    talk = Conversation(sample, text, Scripted(text, "b"), SamplingParams(max_tokens=50))
    assert asyncio.run(talk.ask()) == "Bb"
    talk.reward(1.0)
    assert [turn["reward"] for turn in sample.turn_rewards or []] == [1.0]
