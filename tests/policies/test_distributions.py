"""Distillation from distributions: values and gradients of rows alone, in packs, on ranks and chunk by chunk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.distillation_cases import (
    ENDS,
    TEMPERATURE,
    Distilled,
    assert_named,
    distilled_policy,
    plain_distillation,
    rows_to_distill,
    with_likeliest,
)
from policies.policy_cases import SHAPE, assert_chunks_are_exact, new_policy, write_random_model
from policies.trie_cases import calm_model

from slimectl.algorithms.distillation import Divergence
from slimectl.errors import RecordError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.policies import lm_head
from slimectl.policies.lm_head import HeadOptions, TeacherStates, linear_log_probs, linear_top_log_probs
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.types import TopTokens

OWN_HEAD = {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a wider teacher with the same vocabulary."""
    new = tmp_path_factory.mktemp
    wide = {"hidden_size": 48, "num_hidden_layers": 1, "initializer_range": 0.2}
    return calm_model(new("student"), initializer_range=0.2), calm_model(new("teacher"), **wide)


def assert_step(policy: Any, rows: Any, divergence: Divergence, expected: Any) -> None:
    assert policy.forward_backward(rows, Distilled(divergence)) == pytest.approx(expected.metrics, rel=1e-5)
    for name, gradient in expected.gradients.items():
        found = policy.masters.parameters[name].grad
        torch.testing.assert_close(
            found.double(), gradient, rtol=1e-4, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("top_k", [5, None])
@pytest.mark.parametrize("divergence", ENDS, ids=lambda each: each.kind)
def test_packs_learn_what_rows_alone_learn(
    folders: tuple[Path, Path], divergence: Divergence, top_k: int | None, share: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 259 * 7)  # seven states a chunk, and two chunks of a pack are kept
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", 259 * 14)
    student, teacher = folders
    rows, policy = rows_to_distill(), distilled_policy(student, None if top_k else teacher, share_prefixes=share)
    expected = plain_distillation(student, teacher, rows, divergence, top_k)
    if top_k is not None:
        with_likeliest(rows, new_policy(teacher, temperature=TEMPERATURE, trains=False), top_k)
        assert_named(rows, expected)
    assert_step(policy, rows, divergence, expected)


@pytest.mark.parametrize("top_k", [5, None])
def test_a_model_with_a_head_of_its_own_in_padded_rows(
    top_k: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 256 * 7)
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", 256 * 7)
    student, teacher = (
        write_random_model(tmp_path / name, "gemma2", **SHAPE | OWN_HEAD | {"num_hidden_layers": layers})
        for name, layers in (("student", 2), ("teacher", 1))
    )
    divergence, rows = Divergence("jsd", 0.3), rows_to_distill()
    expected = plain_distillation(student, teacher, rows, divergence, top_k, attn_implementation="eager")
    policy = distilled_policy(student, None if top_k else teacher)
    assert not policy.model.causal.is_plain
    if top_k is not None:
        with_likeliest(rows, new_policy(teacher, temperature=TEMPERATURE, trains=False), top_k)
        assert_named(rows, expected)
    assert_step(policy, rows, divergence, expected)


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [5, None])
def test_two_ranks_equal_rows_alone(folders: tuple[Path, Path], top_k: int | None):
    (student, teacher), divergence, rows = folders, ENDS[1], rows_to_distill()
    expected = plain_distillation(student, teacher, rows, divergence, top_k)
    build = partial(distilled_policy, student, None if top_k else teacher, max_tokens_per_pack=60)
    group = DistributedPolicy(LocalExecutor(), build, ranks=2)
    try:
        if top_k is not None:
            alone = new_policy(student, temperature=TEMPERATURE).top_log_probs(rows, 3)
            assert flat(group.top_log_probs(rows, 3)) == pytest.approx(flat(alone), abs=1e-5)
            with_likeliest(rows, new_policy(teacher, temperature=TEMPERATURE, trains=False), top_k)
        assert group.forward_backward(rows, Distilled(divergence)) == pytest.approx(expected.metrics, rel=1e-5)
        assert group.optim_step()["grad_norm"] == pytest.approx(expected.norm, rel=1e-5)
        assert group.forward_backward(rows[:1], Distilled(divergence))["divergence"] > 0  # a rank has no rows
        assert group.optim_step()["grad_norm"] > 0
    finally:
        group.close()


def flat(lists: list[list[TopTokens]]) -> list[float]:
    return [number for row in lists for pairs in row for pair in pairs for number in pair]


@pytest.mark.parametrize("kept_logits", [0, 200, 10**6])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_many_chunks_in_bfloat16_are_as_exact_as_one_product(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, kind: Any
):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 24, generator=draw).bfloat16() for size in (1024, 13))
    of_teacher = [torch.randn(size, 16, generator=draw).bfloat16() for size in (1024, 13)]
    targets, scale = torch.randint(13, (1024,), generator=draw), torch.randn(2, 1024, generator=draw)

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [part.to(dtype).requires_grad_() for part in (hidden, weight)]
        teacher = TeacherStates(*(part.to(dtype) for part in of_teacher), 0.7)
        options = HeadOptions(0.7, divergence=Divergence(kind, 0.3), teacher=teacher)
        logprobs, _, divergences = linear_log_probs(*inputs, targets, options)
        assert divergences is not None
        loss = (scale[0] * logprobs).sum() + (scale[1] * divergences).sum()
        return [part.double() for part in torch.autograd.grad(loss, inputs)]

    assert_chunks_are_exact(gradients, monkeypatch, kept_logits)


def most_bytes(vocabulary: int, states: int) -> int:
    """The largest sum of bytes that tensors made by forward and backward hold at once, without the weights' own."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight, of_teacher = (torch.randn(n, 8, generator=draw) for n in (states, vocabulary, vocabulary))
    teacher = TeacherStates(torch.randn(states, 8, generator=draw), of_teacher, 1.0)
    options = HeadOptions(divergence=Divergence("jsd"), teacher=teacher)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        outputs = linear_log_probs(*inputs, torch.zeros(states, dtype=torch.long), options)
        torch.autograd.grad(outputs.divergence.sum(), inputs)  # type: ignore[union-attr]
    held = largest = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            largest = max(largest, held)
    return largest - weight.nbytes  # the weight's gradient


def test_memory_of_the_full_vocabulary_does_not_grow_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 2**16)
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", 2**16)
    small, large = (most_bytes(vocabulary, 64) for vocabulary in (2**12, 2**16))
    assert large <= 1.02 * small
    assert large < 64 * 2**16 * 4 / 5  # the logits of one model


def test_the_likeliest_tokens_come_in_order_and_no_more_than_there_are():
    hidden, weight = torch.eye(2), torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 5.0]])
    tokens, logprobs = linear_top_log_probs(hidden, weight, 9, HeadOptions())
    assert tokens.tolist() == [[1, 2, 0], [2, 0, 1]]
    torch.testing.assert_close(logprobs.exp().sum(1), torch.ones(2))


def test_a_teacher_of_another_vocabulary_and_missing_or_wrong_tokens_are_one_line(
    folders: tuple[Path, Path], tmp_path: Path
):
    student, _ = folders
    small = write_random_model(tmp_path / "small", "llama", **SHAPE)
    policy, rows = distilled_policy(student), rows_to_distill()
    with pytest.raises(SettingsError, match=r"the teacher has 256 tokens and that of the policy 259. Set .*opd_top_k"):
        policy.set_teacher(new_policy(small, trains=False))
    with pytest.raises(SettingsError, match="opd_divergence needs teacher_top_log_probs, which these samples lack"):
        policy.forward_backward(rows, Distilled(ENDS[0]))
    rows[1].teacher_top_log_probs = [[(3, -0.5)]] * (rows[1].response_length + 1)
    with pytest.raises(RecordError, match=r"^row 0: teacher_top_log_probs: 0 values for"):
        policy.forward_backward(rows, Distilled(ENDS[0]))
    rows[0].teacher_top_log_probs = [[]] * rows[0].response_length
    with pytest.raises(RecordError, match=r"^row 1: teacher_top_log_probs: \d+ values for"):
        policy.forward_backward(rows[:2], Distilled(ENDS[0]))


def test_a_token_that_the_policy_does_not_have_is_one_of_the_others(folders: tuple[Path, Path]):
    student, _ = folders
    results = []
    for beyond in ([], [(300, -1.0)]):
        policy, rows = distilled_policy(student), rows_to_distill()
        for row in rows:
            row.teacher_top_log_probs = [[(3, -0.5), *beyond]] * row.response_length
        results.append(policy.forward_backward(rows, Distilled(ENDS[0])))
    assert results[0] == results[1]


def test_positions_without_a_teacher_are_not_distilled(folders: tuple[Path, Path]):
    policy, rows = distilled_policy(folders[0]), rows_to_distill()
    for row in rows:
        row.teacher_top_log_probs = [[]] * row.response_length
    assert policy.forward_backward(rows, Distilled(ENDS[2]))["divergence"] == pytest.approx(0.0, abs=1e-7)
