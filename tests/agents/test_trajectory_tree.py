"""Recorded turns: what the policy sampled stands in the samples as it was sampled, in every branch."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from agents.sessions import TEMPLATES, TOOL, ScriptedEngine, call_text, merging_tokenizer, session_of
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.agents import chat_trie
from slimectl.agents.chat_request import EndpointError
from slimectl.agents.chat_trie import message_key
from slimectl.agents.openai_chat import chat_response, read_chat
from slimectl.agents.session import Session
from slimectl.chats.requests import ChatRequest
from slimectl.types import Sample, Status


def split_at_random(tokenizer: Any, text: str, rng: random.Random) -> list[int]:
    """Token ids of a text, which a model may sample: seldom those that the tokenizer would write."""
    tokens: list[int] = []
    while text:
        length = rng.randint(1, 6)
        tokens += tokenizer.encode(text[:length], add_special_tokens=False)
        text = text[length:]
    return tokens


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(session: Session, messages: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    """The message of the answer to a chat."""
    reply = asyncio.run(session.answer(read_chat({"messages": messages, **values})))
    message: dict[str, Any] = chat_response([reply])["choices"][0]["message"]
    return message


WORDS = st.text(st.sampled_from('the sum of numbers is seven\n{}"é…'), max_size=30)


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=25)
def test_samples_are_what_the_engine_sampled_and_what_was_newly_tokenised(name: str, data: st.DataObject):
    tokenizer = merging_tokenizer(TEMPLATES[name])
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    ends = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
    texts = data.draw(st.lists(WORDS, min_size=8, max_size=8))
    calls = data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))

    def answer(i: int) -> list[int]:
        text = texts[i % 8] + "".join(call_text(a=n) for n in range(calls[i % 8]))
        end = [tokenizer.eos_token_id] if ends[i % 8] or calls[i % 8] else []
        return split_at_random(tokenizer, text or "x", rng) + end

    engine = ScriptedEngine(answer, tokenizer)
    session = session_of(engine, tokenizer)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, user(data.draw(WORDS) or "?")]
    for _ in range(data.draw(st.integers(1, 5))):
        message = ask(session, messages, tools=[TOOL])
        messages = [*messages, message]
        tool_calls = message.get("tool_calls", [])
        messages += [{"role": "tool", "content": data.draw(WORDS), "tool_call_id": call["id"]} for call in tool_calls]
        if not tool_calls:
            messages.append(user(data.draw(WORDS)))
    [sample] = session.samples(Sample())
    prompt, last, _ = engine.log[-1]
    assert sample.tokens == prompt + last
    # The model read, before each answer, exactly the tokens that stand before it in the sample.
    position = 0
    for before, sampled, _ in engine.log:
        position = len(before)
        assert sample.tokens[: position + len(sampled)] == before + sampled
    start = len(sample.tokens) - sample.response_length
    spans = [range(a, b) for a, b in sample.metadata["agent"]["turns"]]
    assert [sample.tokens[start + span.start : start + span.stop] for span in spans] == [
        each for _, each, _ in engine.log
    ]
    taught = {i for span in spans for i in span}
    assert sample.loss_mask == [int(i in taught) for i in range(sample.response_length)]
    assert sample.response_length == len(sample.tokens) - len(engine.log[0][0])


def test_tokenising_the_text_again_would_give_other_tokens():
    tokenizer = merging_tokenizer()
    sampled = [*split_at_random(tokenizer, "the sum is seven", random.Random(1)), tokenizer.eos_token_id]
    engine = ScriptedEngine([sampled], tokenizer)
    session = session_of(engine, tokenizer)
    answer = ask(session, [user("x")])
    ask(session, [user("x"), answer, user("y")])
    again = tokenizer.apply_chat_template([user("x"), answer, user("y")], add_generation_prompt=True)["input_ids"]
    assert engine.log[1][0] != list(again)
    assert tokenizer.decode(engine.log[1][0]) == tokenizer.decode(again)


def taught(sample: Sample) -> list[int]:
    """The response tokens of loss mask 1."""
    return [token for token, mask in zip(sample.tokens[sample.prompt_length :], sample.mask(), strict=True) if mask]


def test_rewritten_history_forks_and_every_sampled_token_is_taught_once():
    tokenizer = merging_tokenizer()
    end = tokenizer.eos_token_id
    answers = [[*tokenizer.encode(text), end] for text in ("one", "two", "three", "four")]
    engine = ScriptedEngine(answers, tokenizer)
    session = session_of(engine, tokenizer)
    first = ask(session, [user("a")])
    ask(session, [user("a"), first, user("b")])
    ask(session, [user("a"), first, user("c")])  # a second way on from the same answer
    ask(session, [user("a, in short: one"), user("d")])  # a compacted history
    compacted, other, branch = session.samples(Sample(index=4))
    assert [sample.response for sample in (compacted, other, branch)] == [
        "four", "one\nuser\nc\nassistant\nthree", "one\nuser\nb\nassistant\ntwo",
    ]  # fmt: skip
    taught = [
        [t for t, m in zip(s.tokens[s.prompt_length :], s.mask(), strict=True) if m] for s in (compacted, other, branch)
    ]
    assert taught == [answers[3], answers[0] + answers[2], answers[1]]
    assert {sample.index for sample in (compacted, other, branch)} == {4}


def test_samples_keep_special_tokens_where_asked_and_the_program_gets_none():
    tokenizer = merging_tokenizer(special=["<|channel|>"])
    end, channel = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|channel|>")
    answers = [[*tokenizer.encode("one"), channel, end], [channel, *tokenizer.encode("two STOP")], [channel, end]]
    session = session_of(ScriptedEngine(answers, tokenizer), tokenizer, skip_special_tokens=False, stop=("STOP",))
    first = ask(session, [user("a")])
    second = ask(session, [user("a"), first, user("b")])
    assert (first["content"], second["content"]) == ("one", "two ")
    (sample,) = session.samples(Sample())
    assert sample.response == (
        "one<|channel|><|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<|channel|>two "
    )
    ask(session, [user("c")])
    assert session.samples(Sample())[0].response == "<|channel|>"


def test_an_answer_is_found_again_without_its_reasoning_its_blanks_and_its_ids():
    tokenizer = merging_tokenizer(TEMPLATES["forgetful"])
    text = "the sum\n</think>\n\nresult \n" + call_text(a=1)
    engine = ScriptedEngine([[*tokenizer.encode(text), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    message = ask(session, [user("x")], tools=[TOOL])
    assert (message["reasoning_content"], message["content"].strip()) == ("the sum", "result")
    [call] = message["tool_calls"]
    own = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{ "a":1 }'}}
    returned = {"role": "assistant", "content": " result", "tool_calls": [own]}
    ask(session, [user("x"), returned, {"role": "tool", "content": "2", "tool_call_id": "mine"}], tools=[TOOL])
    assert engine.log[1][0][: len(engine.log[0][0]) + len(engine.log[0][1])] == engine.log[0][0] + engine.log[0][1]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("is_merged", [True, False])
def test_an_answer_that_continued_a_message_is_found_again_in_one_message_or_two(is_merged: bool):
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode(" seven"), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    begun = {"role": "assistant", "content": "The sum is"}
    answer = ask(session, [user("x"), begun])
    turns = [{**begun, "content": begun["content"] + answer["content"]}] if is_merged else [begun, answer]
    ask(session, [user("x"), *turns, user("y")])
    (prompt, sampled, _), (later, _, _) = engine.log
    assert later[: len(prompt + sampled)] == prompt + sampled
    assert tokenizer.decode(later).count("The sum is seven<|im_end|>") == 1


def test_a_message_that_was_seen_is_not_hashed_and_kept_again(monkeypatch: pytest.MonkeyPatch):
    hashed: list[str] = []

    def counted(message: dict[str, Any]) -> bytes:
        hashed.append(message["content"])
        return message_key(message)

    monkeypatch.setattr(chat_trie, "message_key", counted)
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode("one"), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    messages: list[dict[str, Any]] = []
    counts = []
    for i in range(8):
        messages.append(user(f"question {i}"))
        hashed.clear()
        messages.append(ask(session, json.loads(json.dumps(messages))))
        counts.append(len(hashed))
    assert 0 < min(counts[1:]) == max(counts[1:]) <= 4
    first, last = session.tree.turns[0], session.tree.turns[-1]
    assert last.messages[0] is first.messages[0]
    [sample] = session.samples(Sample())
    assert len(sample.metadata["agent"]["turns"]) == 8


@pytest.mark.parametrize("arguments", ['{"a": 1.0}', '{"a": true}', '{"a": 2}', '{"a": [1]}'])
def test_an_answer_with_other_arguments_of_a_call_is_another_history(arguments: str):
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode(call_text(a=1)), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    message = ask(session, [user("x")], tools=[TOOL])
    result = {"role": "tool", "content": "2", "tool_call_id": message["tool_calls"][0]["id"]}
    ask(session, [user("x"), message, result], tools=[TOOL])
    assert len(session.samples(Sample())) == 1
    message["tool_calls"][0]["function"]["arguments"] = arguments
    ask(session, [user("x"), message, result], tools=[TOOL])
    assert len(session.samples(Sample())) == 2


def test_the_reasoning_that_a_template_drops_stays_in_the_branch():
    tokenizer = merging_tokenizer(TEMPLATES["forgetful"])
    engine = ScriptedEngine([[*tokenizer.encode("the sum\n</think>\n\nseven"), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    message = ask(session, [user("x")])
    ask(session, [user("x"), message, user("more")])
    assert "the sum\n</think>\n\nseven" in tokenizer.decode(engine.log[1][0])


def test_limits_are_errors_that_name_them():
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([tokenizer.encode("numbers")], tokenizer)
    session = session_of(engine, tokenizer, turns=1)
    ask(session, [user("x")])
    with pytest.raises(EndpointError, match="has used its 1 turns"):
        ask(session, [user("x")])
    assert session.is_cut
    session = session_of(engine, tokenizer, context=4)
    with pytest.raises(EndpointError, match="leave no room for a response in a context of 4") as refusal:
        ask(session, [user("x")])
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    session = session_of(engine, tokenizer, response_tokens=2)
    message = ask(session, [user("x")])
    assert engine.log[-1][2].max_tokens == 2
    with pytest.raises(EndpointError, match="has used its 2 response tokens"):
        ask(session, [user("x"), message, user("y")])


def test_a_sample_has_one_temperature_and_tokens_of_another_are_not_taught():
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode("one"), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    session.obeys_requests = True
    message = ask(session, [user("x")], temperature=0.5)
    ask(session, [user("x"), message, user("y")], temperature=0.7)
    [sample] = session.samples(Sample())
    assert sample.rollout_temperature == 0.7
    assert sample.mask()[: len(engine.log[0][1])] == [0] * len(engine.log[0][1])
    assert sum(sample.mask()) == len(engine.log[1][1])
    assert [params.temperature for _, _, params in engine.log] == [0.5, 0.7]


def test_a_rollout_samples_as_its_settings_say_whatever_the_agent_asks_for():
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode("one"), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    ask(session, [user("x")], temperature=0.1, top_p=0.5, seed=3, max_tokens=7, stop="e")
    params = engine.log[0][2]
    assert (params.temperature, params.top_p, params.seed, params.max_tokens, params.stop) == (
        1.0,
        1.0,
        None,
        7,
        ("e",),
    )


def test_each_turn_says_why_it_ended_and_what_its_request_asked_for():
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([[*tokenizer.encode("the sum"), tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    first = ask(session, [user("x")], tools=[TOOL], max_tokens=1)
    second = ask(session, [user("x"), first, user("y")], tools=[TOOL], stop=["um", "!"])
    ask(session, [user("x"), first, user("y"), second, user("z")], tools=[TOOL])
    ask(session, [user("another")])
    plain, sample = session.samples(Sample())
    report = sample.metadata["agent"]
    assert (report["finish_reasons"], report["tools"]) == (["length", "stop", "stop"], [TOOL])
    assert (report["max_tokens"], report["stop"]) == ([1, None, None], [[], ["um", "!"], []])
    assert plain.metadata["agent"]["finish_reasons"] == ["stop"]
    assert not {"tools", "max_tokens", "stop"} & plain.metadata["agent"].keys()


def test_a_completion_goes_on_from_the_text_that_it_begins_with():
    tokenizer = merging_tokenizer()
    engine = ScriptedEngine([split_at_random(tokenizer, "the sum of", random.Random(2))], tokenizer)
    session = session_of(engine, tokenizer)
    asyncio.run(session.answer(ChatRequest(prompt="numbers: ")))
    asyncio.run(session.answer(ChatRequest(prompt="numbers: the sum of seven")))
    assert engine.log[1][0] == [*engine.log[0][0], *engine.log[0][1], *tokenizer.encode(" seven")]
    [sample] = session.samples(Sample(status=Status.PENDING))
    assert (sample.response, sample.status) == ("the sum of seventhe sum of", Status.TRUNCATED)


def test_a_session_gives_the_template_the_arguments_of_the_settings_and_a_request_adds_to_them():
    template = "{{ mood }}{{ day }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = merging_tokenizer(template)
    engine = ScriptedEngine([[tokenizer.eos_token_id]], tokenizer)
    session = session_of(engine, tokenizer)
    session.template_kwargs = {"mood": "calm "}
    ask(session, [user("x")])
    ask(session, [user("y")], chat_template_kwargs={"day": "Monday "})
    assert [tokenizer.decode(tokens) for tokens, _, _ in engine.log] == ["calm x", "calm Monday y"]


def test_a_turn_that_branches_share_has_one_number_and_its_reward_in_each():
    tokenizer = merging_tokenizer()
    session = session_of(ScriptedEngine(lambda i: [*tokenizer.encode("abc"[i % 3]), tokenizer.eos_token_id], tokenizer),
                         tokenizer)  # fmt: skip
    first = [user("?"), ask(session, [user("?")])]
    for text in ("left", "right"):
        ask(session, [*first, user(text)])
    assert [sample.turn_rewards for sample in session.samples(Sample())] == [None, None]
    session.reward_turns([1.0, 2, 3.5])
    right, left = session.samples(Sample())
    for sample, number, reward in ((left, 1, 2.0), (right, 2, 3.5)):
        turns = sample.turn_rewards or []
        assert [(turn["turn"], turn["reward"]) for turn in turns] == [(0, 1.0), (number, reward)]
        assert [[turn["start"], turn["end"]] for turn in turns] == sample.metadata["agent"]["turns"]
