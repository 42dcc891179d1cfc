"""The embedded engine: what it writes, when it stops, and that neighbours do not matter."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_limit import MemoryLimit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.errors import BackendError, OutOfMemoryError, SettingsError
from slimectl.types import Completion, JsonGrammar, SamplingParams

END = 256
PROMPTS = [list(b"H"), list(b"2+3="), list(b"once upon a time there was"), [3] * 40, list(b"12*9=")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
FREE = SamplingParams(max_tokens=20, ignore_eos=True)
FAMILIES = ["llama", "llama_untied", "llama3_rope", "qwen2", "qwen3", "qwen3_moe"]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}

Make = Callable[..., EmbeddedEngine]
Ask = Callable[..., list[Completion]]


def reference_log_probs(model: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)[torch.arange(len(tokens)), tokens]


def greedy_reference(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    made = model.generate(tokens, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=END)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_log_probs_are_those_of_transformers(
    family: str, make_engine: Make, answers: Ask, model_dir: Callable[[str], Path]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32)
    made = answers(make_engine(family), *((prompt, GREEDY) for prompt in PROMPTS))
    for prompt, answer in zip(PROMPTS, made, strict=True):
        assert answer.tokens == greedy_reference(reference, prompt, 20)
        expected = reference_log_probs(reference, prompt, answer.tokens)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_are_those_of_transformers_within_and_beyond_the_original_context(
    scaling: str, model_dir: Callable[[str], Path], answers: Ask
) -> None:
    config = AutoConfig.from_pretrained(model_dir("llama"))
    config.rope_parameters = {"rope_theta": 10000.0} | SCALINGS[scaling]
    config.max_position_embeddings = 64
    reference = AutoModelForCausalLM.from_pretrained(model_dir("llama"), config=config, dtype=torch.float32)
    engine = EmbeddedEngine(config, AutoTokenizer.from_pretrained(model_dir("llama")), EngineOptions(max_context=128))
    engine.load_weights(HFCheckpoint().read(model_dir("llama")), version="0")
    prompts = [list(b"short"), list(range(50)), list(range(100))]
    for prompt, answer in zip(prompts, answers(engine, *((prompt, GREEDY) for prompt in prompts)), strict=True):
        assert answer.tokens == greedy_reference(reference, prompt, 20)


def test_a_seeded_sample_is_the_same_alone_and_among_64(make_engine: Make, answers: Ask) -> None:
    engine = make_engine("qwen3", max_running=48)  # fewer than asked for: some join while others decode
    prompt = list(b"alone?")
    params = dataclasses.replace(FREE, seed=11, max_tokens=40)
    alone = answers(engine, (prompt, params))[0]
    others = [
        (PROMPTS[i % 5], dataclasses.replace(FREE, max_tokens=3 + i % 17, top_p=0.5 + 0.5 * (i % 2))) for i in range(64)
    ]
    among = answers(engine, *others[:30], (prompt, params), *others[30:])[30]
    assert among.tokens == alone.tokens
    torch.testing.assert_close(torch.tensor(among.log_probs), torch.tensor(alone.log_probs), atol=1e-5, rtol=0)


def test_seeds_decide_and_no_seed_is_fresh(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    state = torch.get_rng_state()
    seeded = [dataclasses.replace(FREE, seed=seed) for seed in (1, 1, 2)] + [FREE, FREE]
    first, again, other, fresh, fresher = answers(engine, *((PROMPTS[1], params) for params in seeded))
    assert first.tokens == again.tokens
    assert len({tuple(answer.tokens) for answer in (first, other, fresh, fresher)}) == 4
    assert torch.equal(torch.get_rng_state(), state)  # torch's own randomness is not touched


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_log_probs_are_tempered_and_not_renormalised_by_filters(
    temperature: float, make_engine: Make, answers: Ask, model_dir: Callable[[str], Path]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_dir("llama"), dtype=torch.float32)
    params = dataclasses.replace(FREE, temperature=temperature, top_k=5, top_p=0.8, seed=3)
    answer = answers(make_engine(), (PROMPTS[2], params))[0]
    expected = reference_log_probs(reference, PROMPTS[2], answer.tokens, temperature)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=1e-4, rtol=0)


def test_the_end_token_ends_the_answer_and_belongs_to_it(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    whole = answers(engine, (PROMPTS[1], GREEDY))[0]
    third = whole.tokens[2]
    first_at = whole.tokens.index(third)
    stopped = answers(engine, (PROMPTS[1], dataclasses.replace(GREEDY, stop_token_ids=(third,))))[0]
    assert (stopped.tokens, stopped.finish_reason) == (whole.tokens[: first_at + 1], "stop")
    assert len(stopped.log_probs) == first_at + 1


def test_eos_of_the_tokenizer_ends_the_answer_unless_ignored(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    many = [(PROMPTS[i % 5], SamplingParams(max_tokens=200, temperature=3.0, seed=i)) for i in range(64)]
    ended = [answer for answer in answers(engine, *many) if answer.finish_reason == "stop"]
    assert ended
    assert all(answer.tokens.count(END) == 1 and answer.tokens[-1] == END for answer in ended)
    assert all("<|end|>" not in answer.text for answer in ended)


def test_no_end_token_before_min_tokens(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    every = tuple(range(128, 259))  # half the vocabulary ends the answer
    params = [SamplingParams(max_tokens=64, min_tokens=12, stop_token_ids=every, seed=i) for i in range(16)]
    made = answers(engine, *((PROMPTS[0], each) for each in params))
    assert min(len(answer.tokens) for answer in made) == 13  # the next token after twelve, at the earliest
    assert all(set(answer.tokens[:12]).isdisjoint(every) for answer in made)


def test_special_tokens_are_text_where_they_are_asked_for(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    plain = dataclasses.replace(GREEDY, max_tokens=3, logit_bias=((END, 100.0),))  # nothing but <|end|>
    kept = dataclasses.replace(plain, skip_special_tokens=False)
    stops = dataclasses.replace(kept, stop=("<|end|><|end|>",))
    ends = dataclasses.replace(kept, ignore_eos=False)
    made = answers(engine, *((PROMPTS[0], params) for params in (plain, kept, stops, ends)))
    assert [(answer.text, len(answer.tokens), answer.finish_reason) for answer in made] == [
        ("", 3, "length"), ("<|end|>" * 3, 3, "length"), ("", 2, "stop"), ("", 1, "stop"),
    ]  # fmt: skip


def test_stop_string_is_cut_from_the_text_not_from_the_tokens(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    letters = tuple(range(97, 123))
    for seed in range(8):
        params = SamplingParams(max_tokens=200, temperature=5.0, stop=("zz", "q", "ab"), seed=seed)
        answer = answers(engine, (PROMPTS[0], params))[0]
        if answer.finish_reason == "stop" and answer.tokens[-1] != END:
            break
    else:
        pytest.fail("no stop string in eight samples")
    written = bytes(token for token in answer.tokens if token < 256).decode(errors="replace")
    assert written.endswith(("zz", "q", "ab"))
    assert written.startswith(answer.text)
    assert not any(stop in answer.text for stop in ("zz", "q", "ab"))
    assert answer.tokens[-1] in letters


def test_max_tokens_and_the_end_of_the_context_end_with_length(make_engine: Make, answers: Ask) -> None:
    engine = make_engine(max_context=50)
    short, long = answers(engine, (PROMPTS[3], GREEDY), (PROMPTS[3], dataclasses.replace(GREEDY, max_tokens=3)))
    assert (len(short.tokens), short.finish_reason) == (10, "length")  # 50 - 40
    assert (len(long.tokens), long.finish_reason) == (3, "length")


def test_requests_that_cannot_be_answered_are_refused(make_engine: Make, answers: Ask) -> None:
    engine = make_engine(max_context=40)
    with pytest.raises(
        SettingsError, match=r"40 tokens leave no room in a context of 40\. Shorten the prompt or raise"
    ):
        answers(engine, (PROMPTS[3], GREEDY))
    with pytest.raises(SettingsError, match="empty"):
        answers(engine, ([], GREEDY))
    with pytest.raises(SettingsError, match="token 300 is outside the vocabulary of 259"):
        answers(engine, ([300], GREEDY))
    every = dataclasses.replace(GREEDY, stop_token_ids=tuple(range(259)), min_tokens=1)
    with pytest.raises(SettingsError, match="min_tokens: every token is a stop token"):
        answers(engine, (PROMPTS[0], every))
    with pytest.raises(SettingsError, match="min_tokens: cannot be combined with a grammar"):
        answers(engine, (PROMPTS[0], dataclasses.replace(GREEDY, min_tokens=1, grammar=JsonGrammar("{}"))))


def test_a_shared_prompt_is_computed_once_even_if_siblings_are_admitted_later(make_engine: Make, answers: Ask) -> None:
    engine = make_engine(max_running=4)
    siblings = [(PROMPTS[2], dataclasses.replace(FREE, seed=i, max_tokens=4 + i)) for i in range(8)]
    made = answers(engine, *siblings, (PROMPTS[4], FREE))
    assert engine.stats.prefill_tokens == len(PROMPTS[2]) + len(PROMPTS[4])
    assert [answer.cached_tokens for answer in made] == [0] + [len(PROMPTS[2])] * 7 + [0]
    alone = [answers(make_engine(), sibling)[0] for sibling in siblings]
    assert [answer.tokens for answer in made[:8]] == [answer.tokens for answer in alone]


def test_prompts_in_the_queue_are_computed_ahead_once(make_engine: Make, answers: Ask) -> None:
    engine = make_engine(max_running=2)
    prompts = [list(range(i, i + 10)) for i in range(6)]
    made = answers(engine, *((prompt, GREEDY) for prompt in prompts))
    assert engine.stats.prefill_tokens == 60
    assert [answer.cached_tokens for answer in made] == [0] * 6
    assert made[5].tokens == answers(make_engine(), (prompts[5], GREEDY))[0].tokens
    assert not engine._runner._prefixes


def test_abort_returns_what_there_is(make_engine: Make) -> None:
    engine = make_engine(max_running=2, max_context=250)

    async def interrupted() -> list[Completion]:
        endless = dataclasses.replace(FREE, max_tokens=10_000)
        tasks = [asyncio.create_task(engine.generate(prompt, params=endless)) for prompt in PROMPTS[:3]]
        for _ in range(12):
            await asyncio.sleep(0)
        await engine.abort()
        return await asyncio.gather(*tasks)

    first, second, waiting = asyncio.run(interrupted())
    assert [answer.finish_reason for answer in (first, second, waiting)] == ["abort"] * 3
    assert 0 < len(first.tokens) == len(second.tokens) < 20
    assert len(first.log_probs) == len(first.tokens)
    assert waiting.tokens == []
    assert asyncio.run(engine.generate(PROMPTS[0], params=GREEDY)).finish_reason == "length"  # it lives on


def test_a_cancelled_request_leaves_the_others_alone(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    params = dataclasses.replace(FREE, seed=5)
    expected = answers(engine, (PROMPTS[1], params))[0]

    async def one_cancelled() -> Completion:
        doomed = asyncio.create_task(engine.generate(PROMPTS[2], params=FREE))
        kept = asyncio.create_task(engine.generate(PROMPTS[1], params=params))
        for _ in range(6):
            await asyncio.sleep(0)
        doomed.cancel()
        return await kept

    assert asyncio.run(one_cancelled()).tokens == expected.tokens

    async def cancelled_before_the_first_step() -> None:
        doomed = asyncio.create_task(engine.generate(PROMPTS[2], params=FREE))
        await asyncio.sleep(0)
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)

    asyncio.run(cancelled_before_the_first_step())
    assert answers(engine, (PROMPTS[1], params))[0].tokens == expected.tokens


def test_too_many_responses_for_the_memory_are_computed_in_turn(
    make_engine: Make, answers: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [(PROMPTS[i % 5], dataclasses.replace(FREE, seed=i, max_tokens=60)) for i in range(12)]
    with MemoryLimit() as memory:
        expected = answers(make_engine(), *asked)
    engine = make_engine()
    with MemoryLimit(0.5 * memory.peak) as memory:
        found = answers(engine, *asked)
    assert memory.faults
    assert [completion.tokens for completion in found] == [completion.tokens for completion in expected]
    assert caplog.messages[0].startswith("out of memory in the embedded engine with 12 responses at once.")
    with MemoryLimit(100), pytest.raises(OutOfMemoryError, match="with one response"):
        answers(engine, asked[0])
    assert answers(engine, asked[0])[0].tokens == expected[0].tokens


def follows(error: Exception) -> Callable[[int, list[int]], None]:
    """Return a function that follows an answer, and fails at its third token."""

    def follow(start: int, tokens: list[int]) -> None:
        if start == 2:
            raise error

    return follow


def test_what_fails_one_request_within_a_step_ends_that_one_alone(make_engine: Make, answers: Ask) -> None:
    engine = make_engine()
    params = [dataclasses.replace(FREE, seed=seed, top_k=40 * seed) for seed in (1, 2)]
    expected = [answer.tokens for answer in answers(engine, *((PROMPTS[1], each) for each in params))]
    error = RuntimeError("its reader has failed")
    cold = dataclasses.replace(FREE, temperature=1e-40)  # logits divided by it overflow

    async def together() -> list[Any]:
        # As if its parameters had passed the checks: its row cannot be sampled.
        unchecked = engine.request(PROMPTS[0], dataclasses.replace(FREE, min_tokens=2))
        unchecked.end_tokens = frozenset({999})
        asked = [asyncio.create_task(engine.generate(PROMPTS[1], params=each)) for each in params]
        asked.append(asyncio.create_task(engine.generate(PROMPTS[2], params=cold)))
        asked.append(asyncio.create_task(engine.generate(PROMPTS[2], params=FREE, on_tokens=follows(error))))
        engine.submit(unchecked)
        return await asyncio.gather(*asked, unchecked.future, return_exceptions=True)

    first, second, overflown, followed, failed = asyncio.run(together())
    assert [first.tokens, second.tokens] == expected
    assert "the probabilities overflow" in str(overflown)
    assert followed is error
    assert isinstance(failed, IndexError)
    assert engine.running == engine.waiting == 0
    assert answers(engine, (PROMPTS[1], params[0]))[0].tokens == expected[0]


def test_an_end_token_beyond_the_models_vocabulary_is_never_drawn_and_no_error(make_engine: Make, answers: Ask) -> None:
    engine = make_engine(end_token_ids=[999])
    params = SamplingParams(max_tokens=5, min_tokens=3)
    schema = dataclasses.replace(params, min_tokens=0, max_tokens=60, grammar=JsonGrammar('{"enum": ["ab", "cd"]}'))
    first, second = answers(engine, (PROMPTS[0], params), (PROMPTS[0], schema))
    assert len(first.tokens) >= 4
    assert second.text in ('"ab"', '"cd"')


def test_several_event_loops_one_after_another_and_one_inside_a_pause_of_another(
    make_engine: Make, answers: Ask
) -> None:
    engine = make_engine()
    expected = answers(engine, (PROMPTS[1], GREEDY))[0]
    paused = asyncio.new_event_loop()
    task = paused.create_task(engine.generate(PROMPTS[1], params=GREEDY))
    paused.run_until_complete(asyncio.sleep(0))
    assert answers(engine, (PROMPTS[1], GREEDY))[0].tokens == expected.tokens  # drives the paused one's request, too
    assert paused.run_until_complete(task).tokens == expected.tokens
    paused.close()


def test_weights_that_arrive_from_another_thread_are_used_while_it_writes(
    make_engine: Make, model_dir: Callable[[str], Path]
) -> None:
    engine = make_engine()
    started = threading.Event()

    def sync() -> None:
        started.wait(timeout=300)
        engine.load_weights(HFCheckpoint().read(model_dir("llama")), version="1")

    async def drive() -> Completion:
        task = asyncio.create_task(engine.generate(PROMPTS[0], params=dataclasses.replace(GREEDY, max_tokens=200)))
        while engine.stats.steps < 5:
            await asyncio.sleep(0)
        started.set()
        return await task

    thread = threading.Thread(target=sync)
    thread.start()
    answer = asyncio.run(drive())
    thread.join()
    assert answer.weight_versions == ["0", "1"]
    (old, start, place), (new, next_place, end) = answer.version_spans()
    assert (old, start, new, end) == ("0", 0, "1", 200)
    assert 5 <= place == next_place < 200
    undisturbed = make_engine().generate(PROMPTS[0], params=dataclasses.replace(GREEDY, max_tokens=200))
    assert answer.tokens == asyncio.run(undisturbed).tokens


def test_generating_before_weights_arrive_is_an_error(model_dir: Callable[[str], Path], answers: Ask) -> None:
    folder = model_dir("llama")
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    with pytest.raises(BackendError, match="no weights"):
        answers(engine, (PROMPTS[0], GREEDY))
