"""What can be drawn, how often, and when a stop string is seen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import RepetitionPenaltyLogitsProcessor

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.engines.embedded import token_sampler
from slimectl.engines.embedded.detokenizer import Detokenizer, StopScanner
from slimectl.engines.embedded.scheduler import RunningSequence
from slimectl.engines.embedded.token_sampler import SamplingBatch, sample_tokens
from slimectl.types import SamplingParams

PROBS = [0.05, 0.4, 0.1, 0.25, 0.2]


def batch_of(*params: SamplingParams, vocabulary: int = 5, ends: frozenset[int] = frozenset()) -> SamplingBatch:
    loop = asyncio.new_event_loop()
    sequences = [RunningSequence((0,), each, each.seed or 0, 10, ends, loop.create_future()) for each in params]
    loop.close()
    return SamplingBatch(sequences, device=torch.device("cpu"), vocabulary=vocabulary)


def draws(count: int, probs: list[float] = PROBS, **filters: Any) -> torch.Tensor:
    """How often each token is drawn in `count` rows of different seeds, as fractions."""
    params = [SamplingParams(seed=seed, **filters) for seed in range(count)]
    logits = torch.tensor(probs).log().repeat(count, 1)
    tokens, *_ = sample_tokens(logits, batch_of(*params, vocabulary=len(probs)))
    return tokens.bincount(minlength=len(probs)) / count


def test_the_draw_inverts_the_cumulative_distribution() -> None:
    batch = batch_of(*(SamplingParams(seed=seed) for seed in range(50)))
    uniforms = batch.uniforms_B1().squeeze(1)
    tokens, log_probs, *_ = sample_tokens(torch.tensor(PROBS).log().repeat(50, 1), batch)
    edges = [0.05, 0.45, 0.55, 0.80]  # by hand: the running sum of PROBS
    assert tokens.tolist() == [sum(u >= edge for edge in edges) for u in uniforms.tolist()]
    torch.testing.assert_close(log_probs, torch.tensor(PROBS).log()[tokens])


def test_a_wide_vocabulary_is_drawn_as_its_cumulative_distribution_says_and_never_a_token_without_weight() -> None:
    torch.manual_seed(0)
    weights = torch.rand(200, 8192)
    weights[:, torch.randperm(8192)[:8000]] = 0
    weights[0] = 0
    weights[0, 5000] = 1  # of the whole block no other token can be drawn
    uniforms = torch.rand(200, 1)
    uniforms[1], uniforms[2] = 0.0, 1 - 2.0**-24
    tokens = token_sampler._draw(weights, uniforms)
    assert (weights.gather(1, tokens) > 0).all()
    assert tokens[0].item() == 5000
    for row in (1, 2):
        drawable = weights[row].nonzero().squeeze(1)
        assert tokens[row].item() == drawable[0 if row == 1 else -1]
    edges = weights.double().cumsum(-1)
    wanted = uniforms * edges[:, -1:]
    before = torch.where(tokens > 0, edges.gather(1, (tokens - 1).clamp(min=0)), 0.0)
    assert (before - 1e-3 <= wanted).all()
    assert (wanted <= edges.gather(1, tokens) + 1e-3).all()
    assert torch.equal(token_sampler._draw(weights[7:9], uniforms[7:9]), tokens[7:9])  # whatever the other rows are


def test_frequencies_pass_a_chi_square_test() -> None:
    counts, expected = draws(20_000) * 20_000, torch.tensor(PROBS) * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # the 99.9th percentile for 4 degrees of freedom


def test_uniforms_of_one_seed_fill_the_interval_evenly() -> None:
    batch = batch_of(SamplingParams(seed=42))
    values = []
    for _ in range(4000):
        values.append(batch.uniforms_B1().item())
        batch.advance(batch.tokens_B)
    assert len(set(values)) == pytest.approx(4000, abs=3)
    assert sum(values) / 4000 == pytest.approx(0.5, abs=0.015)
    assert 0 <= min(values) < 0.002
    assert 0.998 < max(values) < 1


@pytest.mark.parametrize(
    ("filters", "support"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {1, 3}),  # .4 < .6, .65 reaches it
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.6}, {1, 3}),  # at least .6 of .4
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"min_p": 0.2}, {1, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # of .85 left after top-k, .65 is 76 %
        ({"top_k": 1}, {1}),
    ],
)
def test_filters_leave_their_support_in_proportion(filters: dict[str, Any], support: set[int]) -> None:
    seen = draws(4000, **filters)
    assert set(seen.nonzero().flatten().tolist()) == support
    mass = sum(PROBS[token] for token in support)
    for token in support:
        assert seen[token].item() == pytest.approx(PROBS[token] / mass, abs=0.03)


def test_filters_of_one_row_do_not_touch_another_and_log_probs_stay_whole() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    rows = [
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_p=0.999),  # needs more than the window: sorts the vocabulary
        SamplingParams(seed=1, top_k=3),
        SamplingParams(seed=1, temperature=0.0),
    ]
    tokens, log_probs, *_ = sample_tokens(logits, batch_of(*rows, vocabulary=5000))
    for row, params in enumerate(rows):
        alone, alone_log_prob, *_ = sample_tokens(logits[:1], batch_of(params, vocabulary=5000))
        assert alone.item() == tokens[row]
        assert alone_log_prob.item() == log_probs[row]
    torch.testing.assert_close(log_probs, logits[0].log_softmax(-1)[tokens])
    assert tokens[3] == logits[0].argmax()


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 1500}, {"min_p": 0.001}, {"top_k": 3000, "top_p": 0.5}])
def test_filters_beyond_the_window_match_a_full_sort(filters: dict[str, Any]) -> None:
    from slimectl.engines.embedded.token_sampler import _filter

    probs = torch.randn(2, 4000, generator=torch.Generator().manual_seed(1)).softmax(-1)
    kept = _filter(probs, batch_of(*[SamplingParams(**filters)] * 2, vocabulary=4000)) > 0
    for row in range(2):
        ordered = probs[row].sort(descending=True)
        within = torch.arange(4000) < filters.get("top_k", 4000)
        mass = (ordered.values * within).cumsum(0)
        within &= mass - ordered.values < filters.get("top_p", 1.0) * mass[-1] + 1e-12
        within &= ordered.values >= filters.get("min_p", 0.0) * ordered.values[0]
        assert abs(int(kept[row].sum()) - int(within.sum())) <= 1  # the edge of top-p, to rounding
        assert kept[row, ordered.indices[: int(within.sum()) - 1]].all()


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    params = [SamplingParams(seed=seed, min_tokens=1) for seed in range(500)]
    batch = batch_of(*params, ends=frozenset({1, 3}))
    logits = torch.tensor(PROBS).log().repeat(500, 1)
    tokens, log_probs, *_ = sample_tokens(logits, batch)
    assert set(tokens.tolist()) == {0, 2, 4}
    torch.testing.assert_close(log_probs, torch.tensor(PROBS).log()[tokens])  # of the whole distribution


def test_banned_end_tokens_that_hold_all_the_mass_leave_something_to_draw() -> None:
    logits = torch.tensor([[500.0, 1.0, 0.0]])
    for temperature, expected in ((1.0, -499.0), (0.0, -499.0)):
        params = SamplingParams(temperature=temperature, top_p=0.5, min_tokens=1)
        tokens, log_probs, *_ = sample_tokens(logits, batch_of(params, vocabulary=3, ends=frozenset({0})))
        assert tokens.tolist() == [1]
        assert expected < log_probs.item() < -80  # underflowed, and finite


def test_penalties_count_the_answer_alone_and_biases_come_last() -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5, 0.0]])
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=((3, 1.5), (3, 0.25)),
    )
    plain = SamplingParams(temperature=0.0)
    batch = batch_of(plain, params)
    for written in (0, 2, 0):
        batch.advance(torch.tensor([0, written]))
    # By hand: token 0, twice: (2 - .5 - 2 * .25) / 2; token 2, once: (-1 - .5 - .25) * 2; token 3: 0.5 + 1.5 + 0.25
    adjusted = torch.tensor([[0.5, 1.0, -3.5, 2.25, 0.0]])
    tokens, log_probs, *_ = sample_tokens(logits.repeat(2, 1), batch)
    assert tokens.tolist() == [0, 3]
    torch.testing.assert_close(log_probs, torch.stack((logits.log_softmax(-1)[0, 0], adjusted.log_softmax(-1)[0, 3])))
    rebuilt = batch_of(params)  # as after another sequence has left
    rebuilt.sequences[0].tokens[:] = [0, 2, 0]
    tokens, again, *_ = sample_tokens(
        logits, SamplingBatch(rebuilt.sequences, device=torch.device("cpu"), vocabulary=5)
    )
    assert (tokens.item(), again.item()) == (3, log_probs[1].item())


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_is_that_of_transformers_over_the_response(penalty: float) -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5, -0.25]])
    batch = batch_of(SamplingParams(temperature=0.0, repetition_penalty=penalty))
    for written in (0, 2, 0):
        batch.advance(torch.tensor([written]))
    reference = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[0, 2, 0]]), logits.clone())  # type: ignore[arg-type]
    tokens, log_probs, *_ = sample_tokens(logits, batch)
    torch.testing.assert_close(log_probs, reference.log_softmax(-1).max(-1).values)
    assert tokens.item() == reference.argmax().item()


def scan(text: bytes, *stop: str, least: int = 0) -> tuple[int, str]:
    """How many of the bytes were taken when a stop string was seen, and the text then."""
    scanner = StopScanner(Detokenizer(byte_tokenizer()), stop)
    for count in range(1, len(text) + 1):
        if scanner.scan(list(text[:count]), stopping=count >= least):
            return count, scanner.text
    return len(text), scanner.text


def test_stop_strings_across_tokens_and_inside_multi_byte_text() -> None:
    assert scan(b"one two three", "two") == (7, "one ")
    assert scan("a€b€c".encode(), "b€") == (8, "a€")  # € is three bytes: seen with the last of them
    assert scan("日本語。".encode(), "。") == (12, "日本語")
    assert scan(b"abc", "x") == (3, "abc")
    assert scan(b"aab", "ab", "aab") == (3, "")  # the match that starts first
    assert scan(b"x.y.z", ".", least=3) == (4, "x.y")  # what comes before min_tokens does not stop


def test_special_tokens_leave_the_text_unless_asked_and_the_one_that_ends_an_answer_always() -> None:
    tokenizer = byte_tokenizer(["</think>"])
    end, thought = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("</think>")
    tokens = [*b"so", thought, *b"4", end]
    plain, kept = Detokenizer(tokenizer), Detokenizer(tokenizer, keep_special=True)
    assert plain.response_text(tokens, ended=True) == "so4"
    assert kept.response_text(tokens, keep_special=True, ended=True) == "so</think>4"
    assert kept.response_text(tokens, keep_special=True) == "so</think>4<|end|>"  # at the limit of tokens, ignore_eos
    assert kept.response_text([*b"ab"], keep_special=True, ended=True) == "ab"  # a stop token that is text stays
    for detokenizer in (plain, kept):  # a stop string that is one special token is found by its token
        scanner = StopScanner(detokenizer, ("</think>",))
        assert [scanner.scan(tokens[: count + 1], stopping=True) for count in range(3)] == [False, False, True]
        assert scanner.text == "so"


def test_broken_bytes_do_not_hold_the_text_back_for_ever() -> None:
    count, text = scan(b"\xff" * 40 + b"stop", "stop")
    assert count == 44
    assert text == "\N{REPLACEMENT CHARACTER}" * 40


def test_a_blank_behind_a_skipped_special_token_is_text_like_any_other() -> None:
    backend = Tokenizer(models.BPE(vocab={"▁a": 0, "▁b": 1, "c": 2}, merges=[]))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<tool>"])
    pieces = ["▁a", "<tool>", "▁b", "<tool>", "<tool>", "c", "▁b"]
    tokens = [backend.token_to_id(piece) for piece in pieces]
    scanner = StopScanner(Detokenizer(SimpleNamespace(backend_tokenizer=backend)), stop=())
    for end in range(1, len(tokens) + 1):
        scanner.scan(tokens[:end], stopping=False)
        assert scanner.text == backend.decode(tokens[:end])
    assert scanner.text == "a bc b"
