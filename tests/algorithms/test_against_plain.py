"""Tensors against floats: every definition agrees with plain.py on whatever numbers come."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import fields, replace
from statistics import fmean, stdev

import pytest
import torch
from algorithms import plain
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slimectl.algorithms.baselines import group_advantages
from slimectl.algorithms.estimators import reinforce_returns, whitened
from slimectl.algorithms.importance_sampling import (
    engine_mismatch_metrics,
    importance_weights,
    rejection_mask,
    self_normalization,
)
from slimectl.algorithms.kl import KINDS, kl_estimate, unbiased_kl_estimate
from slimectl.algorithms.losses import PolicyLoss, SftLoss
from slimectl.algorithms.preferences import preference_loss
from slimectl.algorithms.reductions import token_weights
from slimectl.algorithms.surrogates import SURROGATES, TokenRows
from slimectl.algorithms.value_loss import ValueLoss, explained_variance, generalized_advantages
from slimectl.types import TokenBatch

SAME = {"rel": 1e-9, "abs": 1e-9}
number = st.floats(-3, 3)
share = st.floats(0, 1)
answers = st.lists(
    st.lists(st.tuples(number, number, st.integers(0, 1)), min_size=1, max_size=6), min_size=1, max_size=4
)
"""Of each token two numbers and a mask."""

tokens = st.builds(
    plain.Token, number, number, number, number, st.just(0.0), st.sampled_from([0.0, 0.25, 0.5]), st.floats(0, 5)
)
rows = st.lists(
    st.tuples(number, st.lists(tokens, min_size=1, max_size=4)).map(
        lambda row: [replace(token, advantage=row[0]) for token in row[1]]
    ),
    min_size=1,
    max_size=3,
)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pack(given_rows: list[plain.Row]) -> TokenBatch:
    flat = [token for row in given_rows for token in row]
    return TokenBatch(
        logprobs_T=tensor([token.logp for token in flat]).requires_grad_(),
        entropy_T=tensor([token.entropy for token in flat]),
        row_T=torch.tensor([i for i, row in enumerate(given_rows) for _ in row]),
        rows=len(given_rows),
        weights_T=tensor([token.weight for token in flat]),
        advantages_T=tensor([token.advantage for token in flat]),
        old_logprobs_T=tensor([token.old for token in flat]),
        ref_logprobs_T=tensor([token.ref for token in flat]),
        rollout_logprobs_T=tensor([token.rollout for token in flat]),
    )


@settings(deadline=None)
@given(answers, number, share, share, share)
def test_returns_and_generalized_advantages(given_answers, reward, gamma, lambd, kl_coef):
    for answer in given_answers:
        kl, values, mask = (list(column) for column in zip(*answer, strict=True))
        kept = [t for t, bit in enumerate(mask) if bit]
        rewards = [-kl_coef * k * m for k, m in zip(kl, mask, strict=True)] if kept else [0.0] * len(mask)
        if kept:
            rewards[kept[-1]] += reward
        found_T = reinforce_returns(reward, tensor(kl), tensor(mask), kl_coef=kl_coef, gamma=gamma)
        expected = plain.at_actions(plain.returns([rewards[t] for t in kept], gamma), mask)
        assert found_T.tolist() == pytest.approx(expected, **SAME)
        found_T = generalized_advantages(tensor(rewards), tensor(values), tensor(mask), gamma=gamma, lambd=lambd)
        of_actions = plain.advantages([rewards[t] for t in kept], [values[t] for t in kept], gamma, lambd)
        assert found_T.tolist() == pytest.approx(plain.at_actions(of_actions, mask), **SAME)


@settings(deadline=None)
@given(answers)
def test_whitening_and_explained_variance(given_answers):
    values = [[a for a, _, _ in answer] for answer in given_answers]
    masks = [[m for _, _, m in answer] for answer in given_answers]
    kept = [a for answer in given_answers for a, _, m in answer if m]
    assume(len(kept) < 2 or min(kept) == max(kept) or stdev(kept) > 1e-3)  # below, rounding of the mean is the result
    found = whitened([tensor(row) for row in values], [tensor(row) for row in masks])
    for row_T, expected in zip(found, plain.whitened(values, masks), strict=True):
        assert row_T.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    spread = math.fsum((a - fmean(kept)) ** 2 for a in kept) if kept else 0.0
    assume(spread > 1e-3)
    left = [a - b for answer in given_answers for a, b, m in answer if m]
    unexplained = math.fsum((d - fmean(left)) ** 2 for d in left)
    estimates = [tensor([b for _, b, _ in answer]) for answer in given_answers]
    found_share = explained_variance(estimates, [tensor(row) for row in values], [tensor(row) for row in masks])
    assert found_share == pytest.approx(1 - unexplained / spread, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(number, number, number, st.sampled_from(KINDS))
def test_divergences(logp, ref, old, kind):
    expected = plain.divergence(kind, logp, ref)
    assert kl_estimate(tensor([logp]), tensor([ref]), kind).item() == pytest.approx(expected, **SAME)
    found_T = unbiased_kl_estimate(tensor([logp]), tensor([ref]), tensor([old]), kind)
    product = math.exp(logp - old) * (plain.divergence("k3", logp, ref) if kind == "low_var_kl" else expected)
    assert found_T.item() == pytest.approx(min(product, 10.0) if kind == "low_var_kl" else product, **SAME)


corrections = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["token", "sequence", "geometric"]),
        "mode": st.sampled_from(["clip", "truncate", "mask"]),
        "low": st.floats(0, 0.9),
        "high": st.floats(1.1, 5),
        "veto": st.none() | st.floats(0.01, 0.5),
    }
)


@settings(deadline=None)
@given(rows, corrections)
def test_importance_weights_rejection_and_their_mean(given_rows, how):
    made = pack(given_rows)
    mask_T = made.weights_T != 0
    token_rows = TokenRows(mask_T, made.row_T, made.rows)
    where = (made.old_logprobs_T, made.rollout_logprobs_T, token_rows)
    weights_T, changed_T = importance_weights(*where, **how)
    pairs = [plain.weights(row, **how) for row in given_rows]
    assert weights_T.tolist() == pytest.approx([w for made_R, _ in pairs for w in made_R], **SAME)
    assert changed_T.tolist() == [c for _, changed_R in pairs for c in changed_R]
    bounds = {name: how[name] for name in ("level", "low", "high")}
    kept = [float(how["low"] <= w <= how["high"]) for row in given_rows for w in plain.raw_weights(row, how["level"])]
    assert rejection_mask(*where, **bounds).tolist() == kept
    if how["level"] == "token":
        counted = [w for (ws, _), row in zip(pairs, given_rows, strict=True)
                   for w, token in zip(ws, row, strict=True) if token.kept]  # fmt: skip
    else:
        counted = [ws[0] for (ws, _), row in zip(pairs, given_rows, strict=True) if any(token.kept for token in row)]
    expected = fmean(counted) if counted else 0.0
    found = self_normalization(weights_T, token_rows, level=how["level"])
    assert found == pytest.approx(expected or 1.0, **SAME)


@settings(deadline=None)
@given(number, number)
def test_what_is_reported_of_the_mismatch(old, rollout):
    d = old - rollout
    found = {
        name: value_T.item() for name, value_T in engine_mismatch_metrics(tensor([old]), tensor([rollout])).items()
    }
    assert found == pytest.approx(
        {
            "train_rollout_logprob_abs_diff": abs(d),
            "tis": math.exp(d),
            "train_rollout_k1": -d,
            "train_rollout_k3": math.exp(d) - 1 - d,
        },
        **SAME,
    )


SURROGATE_OPTIONS = {
    "eps_clip": st.floats(0.05, 1),
    "eps_clip_high": st.none() | st.floats(0.05, 3),
    "eps_clip_c": st.none() | st.floats(1.1, 4),
    "tau_pos": st.floats(0.5, 2),
    "tau_neg": st.floats(0.5, 2),
    "topr_level": st.sampled_from(["token", "sequence", "geometric"]),
    "topr_clip": st.floats(0.3, 2),
    "topr_positive_weight": st.floats(0, 2),
    "topr_negative_weight": st.floats(0, 2),
}
surrogates = st.one_of(
    st.builds(surrogate, **{field.name: SURROGATE_OPTIONS[field.name] for field in fields(surrogate)})
    for surrogate in SURROGATES.values()
)
losses = st.builds(
    PolicyLoss,
    surrogate=surrogates,
    kl_loss_coef=st.just(0.0) | st.floats(0.01, 1),
    kl_loss_type=st.sampled_from(KINDS),
    use_unbiased_kl=st.booleans(),
    entropy_coef=st.just(0.0) | st.floats(0.01, 1),
    use_tis=st.booleans(),
    tis_clip=st.floats(1.1, 5),
    tis_clip_low=st.floats(0, 0.9),
    tis_level=st.sampled_from(["token", "sequence", "geometric"]),
    tis_mode=st.sampled_from(["clip", "truncate", "mask"]),
    tis_veto=st.none() | st.floats(0.01, 0.5),
    tis_scale=st.floats(0.5, 2),
    use_rs=st.booleans(),
    rs_level=st.sampled_from(["token", "sequence", "geometric"]),
    rs_clip=st.floats(1.1, 5),
    rs_clip_low=st.floats(0, 0.9),
    use_opsm=st.booleans(),
    opsm_delta=st.floats(0.0001, 1),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(losses, rows)
def test_the_policy_loss_and_its_gradient(loss, given_rows):
    made = pack(given_rows)
    value, metrics = loss(made)
    value.backward()
    expected, gradient = plain.policy_loss(loss, given_rows)
    assert value.item() == pytest.approx(expected["loss"], **SAME)
    assert made.logprobs_T.grad.tolist() == pytest.approx(gradient, rel=1e-7, abs=1e-7)
    for name in ("pg_loss", "kl_loss", "entropy_loss"):
        assert metrics[name].item() == pytest.approx(expected[name], **SAME)


@settings(deadline=None)
@given(rows)
def test_the_supervised_loss(given_rows):
    value, _ = SftLoss()(pack(given_rows))
    assert value.item() == pytest.approx(-math.fsum(t.weight * t.logp for row in given_rows for t in row), **SAME)


@settings(deadline=None)
@given(rows, st.floats(0.05, 2))
def test_the_value_loss(given_rows, clip):
    flat = [token for row in given_rows for token in row]
    made = replace(pack(given_rows), values_T=tensor([t.old for t in flat]), returns_T=tensor([t.ref for t in flat]))
    value, metrics = ValueLoss(value_clip=clip)(made)
    free = [(t.logp - t.ref) ** 2 for t in flat]
    bounded = [(t.old + plain.held(t.logp - t.old, -clip, clip) - t.ref) ** 2 for t in flat]
    expected = math.fsum(t.weight * max(a, b) for t, a, b in zip(flat, free, bounded, strict=True))
    assert value.item() == metrics["value_loss"].item() == pytest.approx(expected, **SAME)


@settings(deadline=None)
@given(number, st.floats(0, 0.45))
def test_the_loss_of_a_pair(margin, smoothing):
    losses_P, slopes_P = preference_loss(tensor([margin]), label_smoothing=smoothing)
    better = 1 / (1 + math.exp(-margin))
    assert losses_P.item() == pytest.approx(
        -(1 - smoothing) * math.log(better) - smoothing * math.log(1 - better), **SAME
    )
    assert slopes_P.item() == pytest.approx(-(1 - smoothing) * (1 - better) + smoothing * better, **SAME)


samples = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 4), st.integers(0, 8).map(lambda eighths: eighths / 8), st.integers(1, 9)
    ),
    min_size=1,
    max_size=10,
)
"""(group, execution, reward, length) of each."""


@settings(deadline=None)
@given(samples, st.sampled_from(["group_mean", "leave_one_out", "length_weighted", "mean_normalized"]), st.booleans())
def test_advantages_of_groups(given_samples, baseline, std_normalization):
    found = group_advantages(
        [reward for _, _, reward, _ in given_samples],
        [group for group, _, _, _ in given_samples],
        [execution for _, execution, _, _ in given_samples],
        baseline=baseline,
        std_normalization=std_normalization,
        lengths=[length for _, _, _, length in given_samples],
    )
    assert found == pytest.approx(
        plain.group_advantages(given_samples, baseline, std_normalization), rel=1e-6, abs=1e-6
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=5)), min_size=1, max_size=6),
    st.sampled_from(["rollout_mean", "per_token", "fixed_length"]),
)
def test_reductions(given_samples, kind):
    """The weighted sum of any values is what one gets by averaging them as the definition says."""
    executions, masks = [e for e, _ in given_samples], [mask for _, mask in given_samples]
    values = [[math.sin(i + 10 * j) for i in range(len(mask))] for j, mask in enumerate(masks)]
    weights = token_weights(masks, executions, kind=kind, fixed_length=7)
    found = math.fsum(w * v for ws, vs in zip(weights, values, strict=True) for w, v in zip(ws, vs, strict=True))
    sums, counts = defaultdict(float), defaultdict(int)
    for execution, mask, vs in zip(executions, masks, values, strict=True):
        sums[execution] += math.fsum(v for v, m in zip(vs, mask, strict=True) if m)
        counts[execution] += sum(mask)
    if kind == "per_token":
        expected = math.fsum(sums.values()) / max(1, sum(counts.values()))
    else:
        expected = fmean(sums[e] / (7 if kind == "fixed_length" else max(1, counts[e])) for e in counts)
    assert found == pytest.approx(expected, **SAME)
