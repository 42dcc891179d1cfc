"""Recorded conversations in the format of every family of the cards: sampled ids, and what was newly tokenised."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from agents.chat_templates import FAMILIES, Family
from agents.sessions import TOOL, ScriptedEngine, merging_tokenizer, session_of
from agents.test_trajectory_tree import ask, split_at_random, user

from slimectl.chats.messages import function_call
from slimectl.types import Sample

WORDS = ["the", "sum", "of", "numbers", "is", "seven", "result", "more", "日本", "é", "{a}", "tool"]
NAMES = [*FAMILIES]


def some_words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))


class Policy:
    """Writes answers as the family's template shows them, in tokens that are seldom those of the tokenizer."""

    def __init__(self, family: Family, tokenizer: Any, rng: random.Random) -> None:
        self.family, self.tokenizer, self.rng = family, tokenizer, rng
        self.messages: list[dict[str, Any]] = []
        self.call_count = 0

    def sample(self, _: int) -> list[int]:
        family, rng = self.family, self.rng
        numbers = range(self.call_count, self.call_count + rng.randint(0, family.calls))
        self.call_count = numbers.stop
        calls = [function_call("add", {"a": n}, f"functions.add:{n}") for n in numbers]
        content = "" if calls and (not family.says_and_calls or rng.random() < 0.5) else some_words(rng)
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        end = (family.end_of_calls if calls else "") or family.end
        text = self.text([*self.messages, message])
        if family.shows_answers:
            written = text.removeprefix(self.text(self.messages, header=True))
            assert len(written) < len(text)
        else:  # the template has opened the reasoning, which it does not show later
            before = self.text(self.messages)
            written = some_words(rng) + "\n</think>\n\n" + text.removeprefix(before).split("\n", 1)[1]
        tokens: list[int] = []
        for piece in self.pieces(written.split(end)[0]):
            is_special = piece in family.special
            tokens += self.tokenizer.encode(piece) if is_special else split_at_random(self.tokenizer, piece, rng)
        return [*tokens, self.tokenizer.convert_tokens_to_ids(end)]

    def pieces(self, text: str) -> list[str]:
        """The text divided at its special tokens."""
        pieces = [text]
        for token in self.family.special:
            pieces = [
                part
                for piece in pieces
                for part in ([piece] if piece in self.family.special else divided(piece, token))
            ]
        return [piece for piece in pieces if piece]

    def text(self, messages: list[dict[str, Any]], *, header: bool = False) -> str:
        return str(self.tokenizer.apply_chat_template(
            messages, tools=[TOOL] if self.family.calls else None, add_generation_prompt=header, tokenize=False
        ))  # fmt: skip


def divided(text: str, token: str) -> list[str]:
    parts = text.split(token)
    return [parts[0], *(piece for part in parts[1:] for piece in (token, part))]


def conversation(family: Family, seed: int) -> tuple[Policy, ScriptedEngine, list[Sample]]:
    """Four to six turns with the policy, in which results of tools and the user's messages follow its answers."""
    rng = random.Random(seed)
    tokens = tuple(dict.fromkeys((*family.special, family.end)))
    tokenizer = merging_tokenizer(family.template, special=tokens)
    tokenizer.eos_token = family.end
    policy = Policy(family, tokenizer, rng)
    engine = ScriptedEngine(policy.sample, tokenizer)
    session = session_of(engine, tokenizer)
    policy.messages = [{"role": "system", "content": "be brief"}] if rng.random() < 0.5 else []
    policy.messages.append(user(some_words(rng)))
    for _ in range(rng.randint(4, 6)):
        before = policy.call_count
        message = ask(session, policy.messages, **({"tools": [TOOL]} if family.calls else {}))
        calls = message.get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] == [
            f'{{"a": {n}}}' for n in range(before, policy.call_count)
        ]
        template_calls = [function_call("add", call["function"]["arguments"], call["id"]) for call in calls]
        shown = {"role": "assistant", "content": (message["content"] or "").strip()}  # as clients may
        policy.messages.append(shown | ({"tool_calls": template_calls} if calls else {}))
        policy.messages += [{"role": "tool", "content": some_words(rng), "tool_call_id": call["id"]} for call in calls]
        if not calls:
            policy.messages.append(user(some_words(rng)))
    return policy, engine, session.samples(Sample())


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_conversation_is_what_was_sampled_and_what_was_newly_tokenised(name: str):
    family = FAMILIES[name]
    differs = 0
    for seed in range(3):
        policy, engine, [sample] = conversation(family, seed)
        spans = [range(start, end) for start, end in sample.metadata["agent"]["turns"]]
        start = len(engine.log[0][0])
        assert sample.tokens == engine.log[-1][0] + engine.log[-1][1]
        sampled = [sample.tokens[start + span.start : start + span.stop] for span in spans]
        assert sampled == [answer for _, answer, _ in engine.log]
        taught = {i for span in spans for i in span}
        assert sample.loss_mask == [int(i in taught) for i in range(sample.response_length)]
        for (prompt, answer, _), (following, _, _) in zip(engine.log, engine.log[1:], strict=False):
            assert following[: len(prompt) + len(answer)] == prompt + answer
        # Between the answers stands what the template writes there: tokenised as it tokenises it, and nothing else.
        prompt = engine.log[-1][0]
        shown = policy.text(policy.messages[: last_answer(policy.messages)], header=True)
        again = policy.tokenizer.encode(shown, add_special_tokens=False)
        if family.shows_answers:
            assert policy.tokenizer.decode(prompt) == shown
        differs += prompt != again
    assert differs > 0  # tokenising the conversation again gives other tokens than those that were sampled


def last_answer(messages: list[dict[str, Any]]) -> int:
    """The place of the last message of the assistant."""
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def test_every_card_has_a_format():
    cards = [path.stem for path in (Path(__file__).parents[2] / "models").glob("*.toml")]
    beginnings = tuple(beginning for family in FAMILIES.values() for beginning in family.cards.split())
    assert [card for card in cards if not card.startswith(beginnings)] == []
