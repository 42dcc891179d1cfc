"""Recorded conversations in the format of every family of the cards: sampled ids, and what was newly tokenised."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from agents.sessions import TOOL, ScriptedEngine, merging_tokenizer, session_of
from agents.test_trajectory_tree import ask, split_at_random, user
from chat_families.families import FAMILIES, Family

from slimectl.chats.messages import function_call
from slimectl.chats.template import Template
from slimectl.types import Prompt, Sample

WORDS = ["the", "sum", "of", "numbers", "is", "seven", "result", "more", "日本", "é", "{a}", "tool"]
CARDS = {
    "chatml": "tiny", "smollm2": "", "qwen2.5": "qwen2.5 mimo", "qwen3": "qwen3-", "qwen3.5": "qwen3.5",
    "glm4": "glm4-", "glm4.5": "glm4.5 glm4.7 glm5", "deepseek-v3.1": "deepseek-v3", "kimi-k2": "kimi-k2 moonlight",
    "minimax-m2": "minimax-m2", "llama3.1": "llama3", "gemma3": "gemma3",
}  # fmt: skip
"""Families, and the beginnings of the names of their cards."""


def some_words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))


class Policy:
    """Writes answers as the family's template shows them, in tokens that are seldom those of the tokenizer."""

    def __init__(self, family: Family, tokenizer: Any, rng: random.Random) -> None:
        self.family, self.tokenizer, self.rng = family, tokenizer, rng
        self.template = Template(tokenizer, Prompt("", tools=[TOOL] if family.calls else None), family.template_kwargs)
        self.messages: list[dict[str, Any]] = []
        self.call_count = 0

    def sample(self, _: int) -> list[int]:
        family, rng = self.family, self.rng
        numbers = range(self.call_count, self.call_count + rng.randint(0, family.calls_a_turn if family.calls else 0))
        self.call_count = numbers.stop
        calls = [function_call("add", {"a": n}, f"functions.add:{n}") for n in numbers]
        content = "" if calls and (not family.says_and_calls or rng.random() < 0.5) else some_words(rng)
        message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        end = end_of(family, "calls" if calls else "chat")
        text, before = self.text([*self.messages, message]), self.text(self.messages, header=True)
        written = text.removeprefix(before)
        if written == text:  # the template has opened the reasoning, which it does not show later
            opened = self.text(self.messages)
            written = some_words(rng) + "\n</think>\n\n" + text.removeprefix(opened).split("\n", 1)[1]
        tokens: list[int] = []
        for piece in self.pieces(written.split(end)[0]):
            is_special = piece in family.special
            tokens += self.tokenizer.encode(piece) if is_special else split_at_random(self.tokenizer, piece, rng)
        return [*tokens, self.tokenizer.convert_tokens_to_ids(end)]

    def text(self, messages: list[dict[str, Any]], *, header: bool = False) -> str:
        return self.template.text(self.template.fit(messages), header=header)

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


def end_of(family: Family, kind: str) -> str:
    """The token with which the first turn of a conversation ends."""
    [first, *_] = family.rendering(kind).taught
    return next(stop for stop in family.stops if first.endswith(stop))


def divided(text: str, token: str) -> list[str]:
    parts = text.split(token)
    return [parts[0], *(piece for part in parts[1:] for piece in (token, part))]


def conversation(family: Family, seed: int) -> tuple[Policy, ScriptedEngine, list[Sample]]:
    """Four to six turns with the policy, in which results of tools and the user's messages follow its answers."""
    rng = random.Random(seed)
    tokenizer = merging_tokenizer(family.template, special=[*dict.fromkeys((*family.special, *family.stops))])
    tokenizer.bos_token, tokenizer.eos_token = family.bos or None, end_of(family, "chat")
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


@pytest.mark.parametrize("name", CARDS)
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
        if family.earlier != "dropped":  # the next prompt has the answer as the policy wrote it
            assert policy.tokenizer.decode(prompt) == shown
        differs += prompt != again
    assert differs > 0  # tokenising the conversation again gives other tokens than those that were sampled


def last_answer(messages: list[dict[str, Any]]) -> int:
    """The place of the last message of the assistant."""
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def test_every_card_has_a_format():
    cards = [path.stem for path in (Path(__file__).parents[2] / "models").glob("*.toml")]
    beginnings = tuple(beginning for names in CARDS.values() for beginning in names.split())
    beginnings += ("gpt-oss",)  # in channels, which the policy of these tests does not write
    assert [card for card in cards if not card.startswith(beginnings)] == []
