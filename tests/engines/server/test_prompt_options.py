"""Options of requests that decide which tokens a prompt has: the end of a chat, its arguments, truncation."""

from __future__ import annotations

from typing import Any

import pytest

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3=?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
}
OPEN_TURN = [*CHAT, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize(
    ("chat", "flags", "rendered"),
    [
        (OPEN_TURN, {}, {"continue_final_message": True}),
        (OPEN_TURN, {"continue_final_message": True}, {"continue_final_message": True}),
        (OPEN_TURN, {"continue_final_message": True, "add_generation_prompt": False}, {"continue_final_message": True}),
        (OPEN_TURN, {"continue_final_message": False}, {"add_generation_prompt": True}),
        (OPEN_TURN, {"add_generation_prompt": True}, {"add_generation_prompt": True}),
        (OPEN_TURN, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
        (CHAT, {"continue_final_message": False}, {"add_generation_prompt": True}),
        (CHAT, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
def test_the_end_of_a_rendered_chat_is_that_of_transformers(
    chat: list[dict[str, str]], flags: dict[str, bool], rendered: dict[str, bool], server: Any
) -> None:
    tokenizer = server.service.served.tokenizer
    text = tokenizer.apply_chat_template(chat, tokenize=False, **rendered)
    body = {"messages": chat, "max_tokens": 1, "return_token_ids": True, **flags}
    answer = server.good("/v1/chat/completions", body)
    assert answer["choices"][0]["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("chat", "flags"),
    [
        (CHAT, {"continue_final_message": True}),
        (OPEN_TURN, {"continue_final_message": True, "add_generation_prompt": True}),  # vLLM refuses it, too
    ],
)
def test_a_chat_that_cannot_be_continued_is_refused(chat: list[Any], flags: dict[str, bool], server: Any) -> None:
    status, answer = server.ask("/v1/chat/completions", {"messages": chat, "max_tokens": 1, **flags})
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


def test_documents_and_effort_reach_a_template_that_reads_them(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ reasoning_effort }}{% for d in documents %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(server.service.served.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True}
    asked = body | {"documents": [{"text": "one"}, {"text": "two"}], "reasoning_effort": "low"}
    tokens = server.good("/v1/chat/completions", asked)["choices"][0]["prompt_token_ids"]
    assert bytes(tokens) == b"low[one][two]hi"


def test_a_text_is_tokenized_with_or_without_the_tokens_before_it(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.service.served.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, add_special_tokens=True: [256] * add_special_tokens + [*encode(text)]
    )
    for specials, tokens in ((True, [256, *b"hi"]), (False, [*b"hi"])):
        body = {"prompt": "hi", "max_tokens": 1, "return_token_ids": True, "add_special_tokens": specials}
        assert server.good("/v1/completions", body)["choices"][0]["prompt_token_ids"] == tokens


def test_a_prompt_is_truncated_at_the_side_that_is_asked_for(server: Any) -> None:
    def kept(path: str = "/v1/completions", **body: Any) -> list[int]:
        asked = BODIES[path] | {"return_token_ids": True, **body}
        tokens: list[int] = server.good(path, asked)["choices"][0]["prompt_token_ids"]
        return tokens

    assert kept(prompt="abcdef", truncate_prompt_tokens=2) == [*b"ef"]
    assert kept(prompt=[1, 2, 3], truncate_prompt_tokens=2, truncation_side="right") == [1, 2]
    assert kept(prompt="abc", truncate_prompt_tokens=9) == [*b"abc"]
    assert kept(prompt="a" * 300, truncate_prompt_tokens=-1) == [*b"a" * 255]  # of a context of 256
    whole = kept("/v1/chat/completions")
    assert kept("/v1/chat/completions", truncate_prompt_tokens=5) == whole[-5:]
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
    assert server.good("/v1/completions", body)["choices"][0]["text"] == "ef"
