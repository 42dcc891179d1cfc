"""A prompt that cannot be answered is left out, counted and named; it ends nothing, unless there is no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_rounds import Slow, numbers, rounds
from test_run_stage import Bytes, settings

from slimectl.data.chat import Conversation
from slimectl.data.preferences import Preference
from slimectl.errors import RecordError
from slimectl.executors.local import LocalExecutor
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages import long_prompts
from slimectl.stages.evaluate import HeldOutDataset
from slimectl.stages.generation import GroupGenerator, single_turn
from slimectl.stages.preferences import preferred
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rollout import demonstrations, rollout
from slimectl.types import Metrics, Prompt, Sample, Status

CONTEXT = 10


class Narrow(Slow):
    """Reads ten tokens, prompt and answer together."""

    max_context = CONTEXT


@pytest.fixture(autouse=True)
def _names_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "_named", set())


def prompts(*counts: int, epochs: int = 1) -> Iterator[Prompt]:
    """Prompts of so many tokens, each asking for one token of an answer."""
    for i in range(len(counts) * epochs):
        line, count = i % len(counts), counts[i % len(counts)]
        yield Prompt("a" * (count - 1) + "\x01", label="", index=i, source_location=f"p.jsonl:{line + 1}")


def sampled(*counts: int, evaluation: bool = False, agent: Any = single_turn, **given: Any) -> list[Sample]:
    chosen = RolloutSettings(n_samples_per_prompt=1, **given)
    generator = GroupGenerator(Narrow(), Bytes(), chosen, agent, evaluation=evaluation)
    return list(rollout(PromptSource(prompts(*counts), generator)))


def test_the_longest_prompt_that_is_asked_leaves_room_for_one_token(caplog: pytest.LogCaptureFixture):
    assert [sample.group_index for sample in sampled(2, 9, 10, 11, 3)] == [0, 1, 4]
    assert caplog.messages == [
        "p.jsonl:3: skipped: 10 tokens leave no room for a response in a context of 10",
        "p.jsonl:4: skipped: 11 tokens leave no room for a response in a context of 10",
    ]


def test_the_nearer_of_two_limits_is_named(caplog: pytest.LogCaptureFixture):
    assert [sample.group_index for sample in sampled(2, 6, 12, max_prompt_len=5)] == [0]
    assert caplog.messages == [
        "p.jsonl:2: skipped: 6 tokens, and rollout.max_prompt_len is 5",
        "p.jsonl:3: skipped: 12 tokens leave no room for a response in a context of 10",
    ]


def test_lines_are_named_once_and_only_a_few_of_them(caplog: pytest.LogCaptureFixture):
    made = rounds(prompts(2, *[12] * 7, epochs=3), Narrow(), num_rollout=1, rollout_batch_size=3)
    assert next(made).metrics["rollout/prompts_too_long"] == 14.0
    words = caplog.messages
    assert [line.split(":")[1] for line in words[:-1]] == ["2", "3", "4", "5", "6"]
    assert words[-1] == "skipping more prompts, which are only counted from now on"


@pytest.mark.parametrize("epochs", [1, 10**9])
def test_prompts_of_which_none_can_be_answered_are_an_error_and_no_endless_loop(epochs: int):
    with pytest.raises(RecordError, match=r"(2|7) prompts read, all too long \(the last one: 1\d tokens leave no"):
        list(rounds(prompts(11, 12, epochs=epochs), Narrow()))


def test_a_single_prompt_that_fits_is_found_among_many_epochs():
    made = rounds(prompts(*[12] * 50, 2, *[12] * 50, epochs=9), Narrow(), num_rollout=2, rollout_batch_size=2)
    assert [numbers(each) for each in made] == [[50, 151], [252, 353]]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_resumed_run_counts_them_as_an_undisturbed_one(ahead: int):
    def source(start: int = 0) -> Iterator[Prompt]:
        return (prompt for prompt in prompts(2, 12, 12, 3, 12, epochs=9) if prompt.index >= start)

    options = {"num_rollout": 6, "rollout_batch_size": 2, "async_level": ahead}
    undisturbed = list(rounds(source(), Narrow(), **options))
    for cut in range(1, 6):
        state = undisturbed[cut - 1].state
        resumed = list(rounds(source(state.position), Narrow(), state=state.snapshot(), **options))
        assert [numbers(each) for each in resumed] == [numbers(each) for each in undisturbed[cut:]]
        assert [each.metrics for each in resumed] == [each.metrics for each in undisturbed[cut:]]


def agent_of(turns: int, *, looks: bool) -> Any:
    """An agent that adds four tokens between turns; one that does not look at it goes on for ever."""

    async def agent(offered: dict[str, Any]) -> Sample:
        sample, turn = offered["sample"], 0
        while turn < turns:
            answer = await offered["generate"](sample.tokens, offered["sampling_params"])
            sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)
            if looks and answer.finish == "length":  # the earlier name, which agents may use
                sample.status = Status.TRUNCATED
                break
            sample.append_response_tokens([1] * 4, trainable=False)
            turn += 1
        return sample

    return agent


def test_an_agent_whose_turn_finds_no_room_is_cut_off_and_asked_again_it_has_failed():
    (cut,) = sampled(4, agent=agent_of(99, looks=True))
    assert (cut.status, cut.response_length) == (Status.TRUNCATED, 9)
    (failed,) = sampled(4, agent=agent_of(99, looks=False))
    assert failed.status is Status.FAILED
    assert failed.metadata["error"] == "ContextFullError: 17 tokens leave no room for a response in a context of 10"


def test_a_conversation_ends_truncated_where_its_context_is_full():
    async def talking(offered: dict[str, Any]) -> Sample:
        talk = Conversation(offered["sample"], Bytes(), offered["generate"], offered["sampling_params"], max_turns=9)
        while await talk.ask() is not None:
            talk.tell_text("ab\x01")
        return talk.sample

    (sample,) = sampled(4, agent=talking)
    assert (sample.status, len(sample.tokens)) == (Status.TRUNCATED, 11)


def test_an_evaluation_leaves_them_out_and_says_so():
    given, metrics = settings(), Metrics()
    chosen = given.rollout.model_copy(update={"max_prompt_len": 3})
    dataset = HeldOutDataset("a", given.model_copy(update={"rollout": chosen}), lambda sample: 1.0)
    generator = GroupGenerator(Narrow(), Bytes(), chosen)
    samples = dataset.evaluate(prompts(2, 12, 9), generator, metrics, executor=LocalExecutor())
    assert len(list(samples)) == 2  # max_prompt_len is not for it
    assert metrics["eval/a/prompts_too_long"] == 1.0
    assert metrics["eval/a_samples"] == 2.0


def test_demonstrations_and_preferences_that_are_longer_than_the_context_are_left_out():
    class Tokens(Bytes):
        eos_token_id = 0

    def row(i: int, text: str, label: str) -> Prompt:
        return Prompt(text, label=label, index=i, source_location=f"d.jsonl:{i + 1}")

    dropped: list[Prompt] = []
    rows = [row(0, "abc", "123456"), row(1, "abc", "1234567"), row(2, "abcdef", "1")]
    chosen = RolloutSettings(max_prompt_len=5)
    made = list(demonstrations(rows, Tokens(), chosen, context=CONTEXT, on_skipped=dropped.append))
    assert [(sample.index, len(sample.tokens)) for sample in made] == [(0, 10)]
    assert [prompt.source_location for prompt in dropped] == ["d.jsonl:2", "d.jsonl:3"]
    with pytest.raises(RecordError, match="1 prompt read, all too long"):
        list(demonstrations([row(0, "abc", "1234567")], Tokens(), RolloutSettings(), context=CONTEXT))
    pairs = [Preference(rows[0], rows[1], 0), Preference(row(1, "abc", "12"), row(1, "abc", "1"), 0)]
    assert [sample.index for sample in preferred(pairs, Tokens(), RolloutSettings(), context=CONTEXT)] == [2, 3]
