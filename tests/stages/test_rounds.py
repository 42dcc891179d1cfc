"""What a round is filled with: filters, refills, surplus groups, answers that go on in the next round."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_run_stage import Bytes, Echo, settings

from slimectl.data.difficulty_pools import DifficultyPools, PoolOptions
from slimectl.data.records import sampler_state_from_json, sampler_state_to_json
from slimectl.errors import HookError, RecordError, SlimectlError
from slimectl.executors.local import LocalExecutor
from slimectl.stages.generation import GroupGenerator, single_turn
from slimectl.stages.hooks import Hooks
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rounds import sampled_rounds
from slimectl.types import Completion, Prompt, RolloutBatch, Sample, SamplerState, SamplingParams, Status


def copy_through_json(state: SamplerState) -> SamplerState:
    return sampler_state_from_json(json.loads(json.dumps(sampler_state_to_json(state))))


class Slow(Echo):
    """Writes a token a turn of the loop, as many as the prompt's last byte says; an abort ends it with what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.aborts = 0
        self.asked: list[tuple[list[int], int | None]] = []

    async def generate(self, tokens: list[int], *, params: SamplingParams) -> Completion:
        aborts, written = self.aborts, []
        begun = tokens.index(0) if 0 in tokens else len(tokens)
        self.asked.append((list(tokens), params.seed))
        for _ in range(min(tokens[begun - 1] - (len(tokens) - begun), params.max_tokens)):
            await asyncio.sleep(0)
            if self.aborts != aborts:
                return Completion(written, [-0.5] * len(written), "", "abort", [self.version])
            written.append(0)
        return Completion(written, [-0.5] * len(written), "", "stop", [self.version])

    async def abort(self) -> None:
        self.aborts += 1


def lengths(*counts: int) -> Iterator[Prompt]:
    """One prompt a count: its number, then how many tokens its answer takes."""
    for i, count in enumerate(counts):
        yield Prompt(chr(i + 1) + chr(count), label="", index=i)


def rounds(prompts: Any, engine: Echo, *, rollout: dict[str, Any] | None = None, state: Any = None, **more: Any) -> Any:
    run = {key: more.pop(key) for key in ("num_rollout", "rollout_batch_size", "async_level") if key in more}
    given = settings(**run)
    chosen = given.rollout.model_copy(update=rollout or {})
    reward = more.pop("reward", lambda sample: 1.0)
    hooks = Hooks(**{key: more.pop(key) for key in ("keep_group", "take_from_buffer") if key in more})
    generator = GroupGenerator(engine, Bytes(), chosen, more.pop("agent", single_turn), hooks)
    source = PromptSource(prompts, generator, state, pools=more.pop("pools", None))
    given = given.model_copy(update={"rollout": chosen})
    return sampled_rounds(source, reward, given, executor=LocalExecutor(), **more)


def numbers(made: RolloutBatch) -> list[int]:
    return [sample.group_index for sample in made.samples]


def odd(samples: list[Sample]) -> tuple[bool, str]:
    return samples[0].group_index % 2 == 1, "even"


def test_a_filter_with_a_fallback_keeps_groups_that_would_need_further_prompts():
    def prefers_odd(samples: list[Sample]) -> tuple[bool, str, bool]:
        return *odd(samples), True

    # Two groups make a round. Of three that are submitted one can be dropped: group 0. Groups 2 and 4 are needed.
    rollout = {"over_sampling_batch_size": 3}
    first = next(rounds(lengths(*[1] * 8), Slow(), keep_group=prefers_odd, rollout_batch_size=2, rollout=rollout))
    assert sorted(set(numbers(first))) == [1, 2]
    assert first.metrics["rollout/dynamic_filter/drop_even"] == 1
    # Without over-sampling no group can be dropped.
    first = next(rounds(lengths(*[1] * 8), Slow(), keep_group=prefers_odd, rollout_batch_size=2))
    assert sorted(set(numbers(first))) == [0, 1]


def test_every_group_that_a_filter_drops_is_replaced_by_the_next_prompt():
    engine = Slow()
    first, second = rounds(lengths(*[1] * 8), engine, keep_group=odd, num_rollout=2)
    assert [numbers(first), numbers(second)] == [[1, 3], [5, 7]]
    assert first.metrics == {"rollout/dynamic_filter/drop_even": 2.0}
    assert (first.state.position, second.state.position) == (4, 8)
    assert len(engine.asked) == 8  # not one more than was needed


@pytest.mark.parametrize(("ahead", "begun"), [(0, 4), (2, 7)])
def test_filters_hold_for_rounds_worked_ahead(ahead: int, begun: int):
    engine = Slow()
    coming = rounds(lengths(*[1] * 8), engine, keep_group=odd, num_rollout=2, async_level=ahead)
    first = next(coming)
    assert (numbers(first), first.state.position) == ([1, 3], 4)
    assert len(engine.asked) <= begun
    assert [numbers(made) for made in coming] == [[5, 7]]


def test_prompts_that_end_leave_a_smaller_round():
    made = list(rounds(lengths(1, 1, 1, 1, 1, 1), Slow(), keep_group=odd, num_rollout=4))
    assert [numbers(each) for each in made] == [[1, 3], [5]]


def test_a_filter_that_nothing_passes_ends_with_its_reasons():
    endless = (Prompt("a\x01", index=i) for i in iter(range(10**9)))
    with pytest.raises(SlimectlError, match=r"round 1: 128 groups dropped \(too easy 128\), 0 of 2 kept\. Loosen"):
        next(rounds(endless, Slow(), keep_group=lambda samples: (False, "too easy")))


def test_prompts_that_end_before_any_group_passes_are_no_success():
    with pytest.raises(
        SlimectlError, match=r"round 1: 3 groups dropped \(easy 3\), and then the prompts ended\. Loosen"
    ):
        next(rounds(lengths(1, 1, 1), Slow(), keep_group=lambda samples: (False, "easy")))


def test_a_round_whose_attempts_all_fail_ends_the_run():
    def broken(offered: dict[str, Any]) -> Sample:
        if offered["sample"].index:
            raise ConnectionError("gone")
        return offered["sample"]

    made = rounds(lengths(*[1] * 4), Slow(), agent=broken, num_rollout=2)
    assert [sample.status for sample in next(made).samples] == [Status.COMPLETED, Status.FAILED]
    with pytest.raises(
        SlimectlError, match=r"round 2: 2 of 2 attempts failed, the first with ConnectionError: gone. F"
    ):
        next(made)


def test_a_filter_answers_yes_or_no():
    with pytest.raises(HookError, match=r"returned 0\.5\. Return True, False or"):
        next(rounds(lengths(1, 1), Slow(), keep_group=lambda samples: 0.5))


def test_surplus_groups_wait_for_the_next_round_finished():
    engine, graded = Slow(), []

    def reward(sample: Sample) -> float:
        graded.append(sample.group_index)
        return 1.0

    coming = rounds(lengths(*[1] * 9), engine, reward=reward, rollout={"over_sampling_batch_size": 3}, num_rollout=3)
    made = [next(coming)]
    assert numbers(made[0]) == [0, 1]
    assert [sample.group_index for group in made[0].state.buffer for sample in group] == [2]
    made += coming
    assert [numbers(each) for each in made] == [[0, 1], [2, 3], [4, 5]]
    assert [each.metrics for each in made] == [{"rollout/waiting_groups": count} for count in (1.0, 1.0, 1.0)]
    assert graded == sorted(set(graded))  # once each


def test_rounds_from_a_saved_state_are_those_of_an_undisturbed_run():
    options: dict[str, Any] = {"rollout": {"over_sampling_batch_size": 4}, "keep_group": odd, "num_rollout": 4}
    whole = list(rounds(lengths(*[1] * 30), Slow(), **options))
    for k in range(1, 4):
        state = copy_through_json(whole[k - 1].state)
        rest = list(rounds(list(lengths(*[1] * 30))[state.position :], Slow(), state=state, **options))
        assert [made.samples for made in rest] == [made.samples for made in whole[k:]]
        assert [made.metrics for made in rest] == [made.metrics for made in whole[k:]]


def test_a_broken_off_answer_goes_on_with_its_tokens():
    engine = Slow()
    coming = rounds(lengths(60, 2, 3, 2, 2), engine, rollout={"partial_rollout": True, "over_sampling_batch_size": 3})
    first = next(coming)
    assert sorted(numbers(first)) == [1, 2]
    assert first.metrics == {"rollout/waiting_groups": 1.0, "rollout/continued_samples": 0.0}
    (waiting,) = first.state.buffer
    assert (waiting[0].group_index, waiting[0].status) == (0, Status.ABORTED)
    so_far = waiting[0].response_length
    assert 0 < so_far < 60
    engine.version = "1"
    went_on = next(sample for made in coming for sample in made.samples if sample.group_index == 0)
    assert (went_on.response_length, went_on.status) == (60, Status.COMPLETED)
    assert went_on.loss_mask == [1] * 60
    assert went_on.weight_versions[0] == "0"
    assert went_on.weight_versions[-1] == "1"
    spans = went_on.metadata["weight_version_spans"]
    assert spans[0] == ["0", 0, so_far]
    assert [end for _, _, end in spans] == [*(start for _, start, _ in spans[1:]), 60]
    seeds = [seed for tokens, seed in engine.asked if tokens[0] == 1]
    assert len(set(seeds)) == len(seeds) >= 2  # the rest is drawn anew, not with the draws of the beginning
    assert waiting[0].response_length == so_far  # the saved state did not move


def test_what_older_weights_wrote_can_be_masked():
    options = {"partial_rollout": True, "over_sampling_batch_size": 3, "mask_offpolicy_in_partial_rollout": True}
    coming = rounds(lengths(60, 2, 3, 2, 2), Slow(), rollout=options)
    so_far = next(coming).state.buffer[0][0].response_length
    went_on = next(sample for made in coming for sample in made.samples if sample.group_index == 0)
    assert went_on.loss_mask is not None
    assert went_on.loss_mask[:so_far] == [0] * so_far
    assert went_on.loss_mask[-1] == 1
    assert went_on.rollout_log_probs[:so_far] == [0.0] * so_far


def test_partial_rounds_from_a_saved_state_are_those_of_an_undisturbed_run():
    options: dict[str, Any] = {
        "rollout": {"partial_rollout": True, "over_sampling_batch_size": 4}, "num_rollout": 5,
    }  # fmt: skip
    counts = [60, 2, 3, 47, 2, 5, 38, 1, 2, 3, 9, 1, 4, 4, 2, 6, 3, 1, 2, 5]
    whole = list(rounds(lengths(*counts), Slow(), **options))
    waiting = [sample for made in whole for group in made.state.buffer for sample in group]
    assert any(sample.status is Status.ABORTED and sample.response_length for sample in waiting)
    for k in range(1, 5):
        state = copy_through_json(whole[k - 1].state)
        rest = list(rounds(list(lengths(*counts))[state.position :], Slow(), state=state, **options))
        assert [made.samples for made in rest] == [made.samples for made in whole[k:]]
    seen = [number for made in whole for number in numbers(made)]
    assert len(seen) == len(set(seen)) == 10


async def two_turns(offered: dict[str, Any]) -> Sample:
    sample, generate = offered["sample"], offered["generate"]
    sample.metadata["turns"] = sample.metadata.get("turns", 0)
    for _ in range(2):
        answer = await generate(sample.tokens)
        sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs)
        sample.metadata["turns"] += 1
    return sample


@pytest.mark.parametrize("resumes", [False, True])
def test_an_agent_that_cannot_go_on_begins_again(resumes: bool):
    def agent(offered: dict[str, Any]) -> Any:
        return two_turns(offered)

    agent.resumes = resumes  # type: ignore[attr-defined]
    options = {"partial_rollout": True, "over_sampling_batch_size": 3}
    coming = rounds(lengths(60, 2, 3, 2, 2), Slow(), rollout=options, agent=agent)
    (waiting,) = next(coming).state.buffer[0]
    assert waiting.status is Status.ABORTED
    assert (waiting.response_length > 0) == resumes
    assert waiting.metadata == ({"turns": 2} if resumes else {})


def test_a_hook_picks_from_the_buffer():
    def newest(buffer: list[list[Sample]], count: int, rollout_id: int) -> list[list[Sample]]:
        picked.append(rollout_id)
        return [buffer.pop() for _ in range(min(1, len(buffer)))]

    picked: list[int] = []
    options = {"over_sampling_batch_size": 4}
    made = list(rounds(lengths(*[1] * 20), Slow(), rollout=options, take_from_buffer=newest, num_rollout=2))
    assert picked == [1, 2]
    assert [numbers(each) for each in made] == [[0, 1], [3, 4]]
    assert 2 in [group[0].group_index for group in made[1].state.buffer]


def test_prompts_that_are_too_long_are_left_out_and_counted():
    prompts = [Prompt("a" * n + "\x01", index=i) for i, n in enumerate([1, 9, 2, 9, 9, 3, 1])]
    made = list(rounds(iter(prompts), Slow(), rollout={"max_prompt_len": 5}))
    assert [numbers(each) for each in made] == [[0, 2], [5, 6]]
    assert [each.metrics["rollout/prompts_too_long"] for each in made] == [1.0, 2.0]


def test_prompts_that_are_all_too_long_end_the_run():
    endless = (Prompt("abcdef\x01", index=i) for i in iter(range(10**9)))
    with pytest.raises(
        RecordError,
        match=r"10000 prompts read, all too long \(the last one: 7 tokens, and rollout\.max_prompt_len is 5",
    ):
        next(rounds(endless, Slow(), rollout={"max_prompt_len": 5}))


@pytest.mark.parametrize("attribute", ["per_group", "together"])
def test_an_agent_may_take_a_whole_group_under_the_present_name_and_the_earlier_one(attribute: str):
    sizes: list[int] = []

    def agent(offered: dict[str, Any]) -> list[Sample]:
        sizes.append(len(offered["samples"]))
        for sample in offered["samples"]:
            sample.append_response_tokens([1], log_probs=[-0.5])
        return offered["samples"]

    setattr(agent, attribute, True)
    options = {"n_samples_per_prompt": 3}
    made = next(rounds(lengths(1, 1), Slow(), rollout=options, agent=agent, rollout_batch_size=2))
    assert (sizes, numbers(made)) == ([3, 3], [0, 0, 0, 1, 1, 1])


def pooled(state: SamplerState, **more: Any) -> Any:
    """Rounds of two of five prompts, of which the last two are always solved and then retired."""
    pools = DifficultyPools(PoolOptions(retire_after=1), state.source, position=state.position)

    def prompts() -> Iterator[Prompt]:
        for number in itertools.count(state.position):
            if (row := pools.draw(number, range(5))) is None:
                return
            yield Prompt(chr(row + 1) + chr(1), label="", index=number)

    def solved(sample: Sample) -> float:
        return float(ord(sample.prompt[0]) > 3)

    return rounds(prompts(), Echo(), state=state, pools=pools, reward=solved, rollout_batch_size=2, **more)


def rows(made: RolloutBatch) -> list[int]:
    return [ord(sample.prompt[0]) - 1 for sample in made.samples]


@pytest.mark.parametrize("filtered", [False, True], ids=["all groups", "a filter"])
def test_results_of_a_round_decide_what_the_next_ones_draw(filtered: bool):
    # With the filter, prompt 1 is dropped and replaced by the next one each time.
    hooks = {"keep_group": lambda samples: samples[0].prompt[0] != chr(2)} if filtered else {}
    made = list(pooled(SamplerState(), num_rollout=4, **hooks))
    alone = [sorted(set(rows(batch))) for batch in made]
    assert alone == ([[0, 2], [3, 4], [0, 2], [0, 2]] if filtered else [[0, 1], [2, 3], [0, 4], [1, 2]])
    retired = [batch.metrics["rollout/pool/retired"] for batch in made]
    assert retired == ([0, 2, 2, 2] if filtered else [0, 1, 2, 2])
    for done in range(1, 4):
        assert made[done - 1].state is not None
        rest = pooled(copy_through_json(made[done - 1].state), num_rollout=4, **hooks)
        assert [(rows(batch), numbers(batch), batch.metrics) for batch in rest] == [
            (rows(batch), numbers(batch), batch.metrics) for batch in made[done:]
        ]


def test_rounds_end_when_every_prompt_is_retired():
    pools = DifficultyPools(PoolOptions(retire_after=1))

    def prompts() -> Iterator[Prompt]:
        for number in itertools.count():
            if (row := pools.draw(number, range(3))) is None:
                return
            yield Prompt(chr(row + 1) + chr(1), label="", index=number)

    made = list(rounds(prompts(), Echo(), pools=pools, rollout_batch_size=3, num_rollout=9))
    assert len(made) == 1
    assert made[0].metrics["rollout/pool/retired"] == 3
