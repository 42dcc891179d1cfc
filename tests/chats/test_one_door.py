"""The same conversation gives the same tokens, or a refusal, as a row, to agents and to a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_families.families import TOOL, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.agents.chat_request import EndpointError
from slimectl.agents.openai_chat import read_chat, read_completions
from slimectl.agents.trajectory_tree import TrajectoryTree
from slimectl.chats.messages import MessageError, normalized_chat
from slimectl.chats.requests import RequestBody
from slimectl.data.chat import render
from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import prompt_of
from slimectl.data.supervised import sft_sample
from slimectl.engines.server.errors import RequestError
from slimectl.errors import RecordError
from slimectl.types import Prompt

FAMILIES = ["qwen2.5", "qwen3", "llama3.1", "glm4.5", "deepseek-v2.5", "gpt-oss", "mistral-v3", "smollm2", "gemma3"]
KEYS = PromptOptions()
TEXTS = st.sampled_from(["", "a", "Sunny.", "<think>\nb\n</think>\n\nc", "€ \n", 'd {"e": 1}', None])
PARTS = st.lists(
    st.one_of(st.builds(lambda text: {"type": "text", "text": text or "f"}, TEXTS), st.just({"type": "video"})),
    max_size=2,
)
ARGUMENTS = st.sampled_from(
    [{}, {"city": "Paris"}, {"city": None, "n": [1, 2.5]}, None, "", '{"city": "Paris"}', '{"ci']
)
CALLS = st.one_of(
    st.none(),
    st.lists(
        ARGUMENTS.map(lambda arguments: {"id": "call00001", "function": {"name": "lookup", "arguments": arguments}}),
        max_size=2,
    ),
)  # fmt: skip
ROLES = st.sampled_from(["system", "developer", "user", "user", "assistant", "assistant", "tool", "function", "User"])


@st.composite
def messages(draw: Callable[..., Any]) -> dict[str, Any]:
    role = draw(ROLES)
    message: dict[str, Any] = {"role": role, "content": draw(st.one_of(TEXTS, PARTS))}
    if role == "assistant":
        message |= {"tool_calls": draw(CALLS), draw(st.sampled_from(["reasoning", "thinking"])): draw(TEXTS)}
    if role in ("tool", "function"):
        message |= {"name": "lookup", "tool_call_id": "call00001"}
    return message


def outcome(tokens: Callable[[], list[int]]) -> list[int] | str:
    try:
        return tokens()
    except (RecordError, EndpointError, RequestError, MessageError):
        return "refused"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(messages(), min_size=1, max_size=5), st.booleans(), st.sampled_from(FAMILIES))
def test_rows_agents_and_servers_agree(chat: list[dict[str, Any]], has_tools: bool, family: str):
    given_tokenizer = tokenizer(family)
    row = {"prompt": chat, **({"tools": [TOOL]} if has_tools else {})}
    body = json.loads(json.dumps({"messages": chat, **({"tools": [TOOL]} if has_tools else {})}))

    def of_server() -> list[int]:
        fields = RequestBody(body)
        prompt = Prompt(normalized_chat(fields.objects("messages") or []), tools=fields.objects("tools") or None)
        return render(prompt, given_tokenizer)

    of_row = outcome(lambda: render(prompt_of(("rows.jsonl:1", row), 0, KEYS), given_tokenizer))
    assert outcome(lambda: TrajectoryTree(given_tokenizer).continuation(read_chat(body)).tokens) == of_row
    assert outcome(of_server) == of_row


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "llama2"])
@pytest.mark.parametrize("text", ["hi", " hi\n", "<think>hi", "日本"])
def test_a_raw_text_has_the_tokens_of_its_tokenizer_everywhere(family: str, text: str):
    given_tokenizer = tokenizer(family)
    wanted = given_tokenizer.encode(text)
    assert render(Prompt(text), given_tokenizer) == wanted
    assert TrajectoryTree(given_tokenizer).continuation(read_completions({"prompt": text})[0]).tokens == wanted
    tokens, length, _ = sft_sample(Prompt(text, label="there"), given_tokenizer)
    assert tokens[:-length] == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_some_of_them_are_answered(family: str):
    chat = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    assert outcome(lambda: render(Prompt(chat), tokenizer(family))) != "refused"
