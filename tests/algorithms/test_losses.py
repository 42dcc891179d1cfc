"""Losses on packs made by hand. T tokens."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.algorithms.losses import PolicyLoss, SftLoss, WatchedLoss
from slimectl.algorithms.surrogates import PpoClip
from slimectl.errors import SettingsError
from slimectl.policies.metrics import merge_metrics
from slimectl.types import TokenBatch


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


COLUMNS = (
    "logprobs_T",
    "weights_T",
    "advantages_T",
    "old_logprobs_T",
    "ref_logprobs_T",
    "rollout_logprobs_T",
    "entropy_T",
)


def batch_of(**columns_T):
    """A pack of rows of one token each."""
    rows = len(columns_T["logprobs_T"])
    return TokenBatch(**({"entropy_T": None, "row_T": torch.arange(rows), "rows": rows} | columns_T))


def part_of(batch, keep_T):
    columns = {name: getattr(batch, name) for name in COLUMNS}
    return batch_of(**{name: None if value is None else value[keep_T] for name, value in columns.items()})


def pack(**given_T):
    """Three tokens with ratios 1.5, 1 and 1/2 to the policy that sampled, every one weighing 1/4, 1/4 and 1/2."""
    defaults = {
        "logprobs_T": tensor(1.5, 1.0, 0.5).log().requires_grad_(),
        "weights_T": tensor(0.25, 0.25, 0.5),
        "advantages_T": tensor(1.0, 1.0, -1.0),
        "old_logprobs_T": tensor(0.0, 0.0, 0.0),
    }
    return batch_of(**(defaults | given_T))


def numbers(metrics):
    return {name: value.item() for name, value in metrics.items()}


def test_policy_loss_is_the_weighted_sum_of_the_clipped_surrogate():
    loss, metrics = PolicyLoss()(pack())
    # tokens: -1.2, -1.0, 0.8; weighted: -0.3 - 0.25 + 0.4
    assert loss.item() == pytest.approx(-0.15)
    assert numbers(metrics) == pytest.approx(
        {
            "pg_loss": -0.15,
            "pg_clipfrac": 0.75,  # first and last token: 1/4 + 1/2
            "ppo_kl": -0.25 * math.log(1.5) + 0.5 * math.log(2),  # old - logp
            "approxkl": (0.25 * math.log(1.5) ** 2 + 0.5 * math.log(2) ** 2) / 2,
            "ois": 0.25 * 1.5 + 0.25 * 1 + 0.5 * 0.5,
            "ratio_high_clipfrac": 0.25,
            "ratio_low_clipfrac": 0.5,
            "ratio_max": 1.5,
            "ratio_min": 0.5,
            "sft_loss": -0.25 * math.log(1.5) + 0.5 * math.log(2),
        }
    )


def test_upper_bound_of_its_own_and_dual_clip_are_passed_on():
    assert PolicyLoss(PpoClip(eps_clip_high=0.28))(pack())[0].item() == pytest.approx(-0.25 * 1.28 - 0.25 + 0.4)
    bad = pack(logprobs_T=tensor(5.0).log(), weights_T=tensor(1.0), advantages_T=tensor(-1.0), old_logprobs_T=tensor(0))
    assert PolicyLoss(PpoClip(eps_clip_c=3.0))(bad)[0].item() == pytest.approx(3.0)


def test_without_old_logprobs_the_gradient_is_advantage_times_weight():
    on_policy = pack(old_logprobs_T=None)
    loss, metrics = PolicyLoss()(on_policy)
    loss.backward()
    assert on_policy.logprobs_T.grad.tolist() == pytest.approx([-0.25, -0.25, 0.5])  # -A w, ratio 1
    assert loss.item() == pytest.approx(-0.25 - 0.25 + 0.5)
    zeros = dict.fromkeys(("pg_loss", "pg_clipfrac", "ppo_kl", "approxkl"), 0.0)
    zeros |= dict.fromkeys(("ratio_high_clipfrac", "ratio_low_clipfrac"), 0.0)
    zeros["sft_loss"] = -0.25 * math.log(1.5) + 0.5 * math.log(2)
    assert numbers(metrics) == pytest.approx(zeros | dict.fromkeys(("ois", "ratio_max", "ratio_min"), 1.0))


def test_what_makes_up_the_loss_is_reduced_as_it_is_and_all_else_is_a_mean():
    scaled = pack(weights_T=tensor(0.25, 0.25, 0.5) / 10, ref_logprobs_T=tensor(1.5, 0.5, 0.5).log())
    loss, metrics = PolicyLoss(kl_loss_coef=0.1, report_scale=10.0)(scaled)
    assert loss.item() == pytest.approx(-0.015 + 0.1 * 0.025 * math.log(2))  # all by a constant length, say
    assert metrics["pg_loss"].item() == pytest.approx(-0.015)
    assert metrics["kl_loss"].item() == pytest.approx(0.025 * math.log(2))
    assert (metrics["pg_clipfrac"].item(), metrics["ratio_low_clipfrac"].item()) == pytest.approx((0.75, 0.5))


def test_tokens_without_weight_have_no_say_in_the_extremes():
    masked = pack(logprobs_T=tensor(5.0, 1.1, 0.1).log(), weights_T=tensor(0.0, 1.0, 0.0))
    metrics = PolicyLoss()(masked)[1]
    assert (metrics["ratio_max"].item(), metrics["ratio_min"].item()) == pytest.approx((1.1, 1.1))
    for known in (None, False):
        assert "ratio_max" not in PolicyLoss()(pack(weights_T=tensor(0, 0, 0), has_weight=known))[1]


def test_divergence_enters_the_loss_with_its_coefficient():
    with_reference = pack(ref_logprobs_T=tensor(1.5, 0.5, 0.5).log())
    loss, metrics = PolicyLoss(kl_loss_coef=0.1, kl_loss_type="k2")(with_reference)
    kl = 0.25 * math.log(2) ** 2 / 2  # only the middle token differs, r = log 2
    assert metrics["kl_loss"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(-0.15 + 0.1 * kl)


def test_unbiased_divergence_weighs_by_the_ratio():
    with_reference = pack(ref_logprobs_T=tensor(3.0, 1.0, 0.5).log())
    _, metrics = PolicyLoss(kl_loss_coef=1.0, use_unbiased_kl=True)(with_reference)
    assert metrics["kl_loss"].item() == pytest.approx(0.25 * 1.5 * -math.log(2))  # first token: ratio 1.5, r = -log 2


def test_with_coefficient_zero_the_divergence_is_reported_and_leaves_the_gradient_alone():
    plain, with_reference = pack(), pack(ref_logprobs_T=tensor(-9.0, -9.0, -9.0))
    for each in (plain, with_reference):
        PolicyLoss()(each)[0].backward()
    assert with_reference.logprobs_T.grad.tolist() == plain.logprobs_T.grad.tolist()
    assert PolicyLoss()(with_reference)[1]["kl_loss"].item() == pytest.approx(
        9 + 0.25 * math.log(1.5) - 0.5 * math.log(2)
    )


def test_entropy_bonus_lowers_the_loss():
    with_entropy = pack(entropy_T=tensor(1.0, 2.0, 0.5).requires_grad_())
    loss, metrics = PolicyLoss(entropy_coef=0.01)(with_entropy)
    assert metrics["entropy_loss"].item() == pytest.approx(1.0)  # 0.25 + 0.5 + 0.25
    assert loss.item() == pytest.approx(-0.15 - 0.01)
    loss.backward()
    assert with_entropy.entropy_T.grad.tolist() == pytest.approx([-0.0025, -0.0025, -0.005])


def test_entropy_is_asked_for_only_where_it_is_used_or_reported():
    assert [loss.needs_entropy for loss in (PolicyLoss(), SftLoss())] == [False, False]
    assert [PolicyLoss(entropy_coef=0.1).needs_entropy, PolicyLoss(report_entropy=True).needs_entropy] == [True, True]
    reported = pack(entropy_T=tensor(1.0, 2.0, 0.5))
    loss, metrics = PolicyLoss(report_entropy=True)(reported)
    assert (loss.item(), metrics["entropy_loss"].item()) == (pytest.approx(-0.15), pytest.approx(1.0))


def test_entropy_is_also_summed_over_the_tokens_that_are_trained_on():
    reported = pack(entropy_T=tensor(1.0, 2.0, 0.5), weights_T=tensor(0.25, 0.0, 0.5))
    assert PolicyLoss(report_entropy=True)(reported)[1]["token_entropy"].item() == 1.5


def test_imitation_is_measured_of_good_answers_and_of_the_others():
    metrics = numbers(PolicyLoss(report_scale=4.0)(pack(rewards_T=tensor(1.0, 0.5, 0.0)))[1])
    good, bad = -0.25 * math.log(1.5) - 0.25 * math.log(1.0), 0.5 * math.log(2)
    assert metrics["positive_sft_loss"] == pytest.approx(good)  # reduced as the loss is: report_scale leaves it alone
    assert metrics["negative_sft_loss"] == pytest.approx(bad)
    assert metrics["sft_loss"] == pytest.approx(good + bad)
    assert "positive_sft_loss" not in PolicyLoss()(pack())[1]


def test_mismatch_is_reported_whenever_the_engine_gave_log_probabilities():
    loss, metrics = PolicyLoss()(pack(rollout_logprobs_T=tensor(1 / 4, 1.0, 2.0).log()))
    assert loss.item() == pytest.approx(-0.15)  # reported, not applied
    got = numbers(metrics)
    assert got["tis"] == pytest.approx(0.25 * 4 + 0.25 * 1 + 0.5 * 0.5)
    assert got["tis_clipfrac"] == pytest.approx(0.25)
    assert got["train_rollout_logprob_abs_diff"] == pytest.approx(0.25 * math.log(4) + 0.5 * math.log(2))
    assert got["train_rollout_k1"] == pytest.approx(-0.25 * math.log(4) + 0.5 * math.log(2))
    assert got["train_rollout_k3"] == pytest.approx(0.25 * (3 - math.log(4)) + 0.5 * (-0.5 + math.log(2)))


def test_mismatch_compares_the_policy_where_the_engine_s_log_probabilities_are_the_old_ones():
    rollout_T = tensor(1.0, 1.0, 2.0).log()
    same = {"old_logprobs_T": rollout_T, "rollout_logprobs_T": rollout_T}
    loss, metrics = PolicyLoss(use_rollout_logprobs=True)(pack(**same))
    assert metrics["train_rollout_logprob_abs_diff"].item() == pytest.approx(0.25 * math.log(1.5) + 0.5 * math.log(4))
    assert loss.item() == PolicyLoss()(pack(**same))[0].item()


def test_truncated_importance_multiplies_the_surrogate():
    loss, metrics = PolicyLoss(use_tis=True)(pack(rollout_logprobs_T=tensor(1 / 4, 1.0, 2.0).log()))
    # weights min(4, 2), 1, 1/2 on tokens -1.2, -1.0, 0.8: -0.3 * 2 - 0.25 + 0.4 / 2
    assert loss.item() == pytest.approx(-0.65)
    assert metrics["pg_loss"].item() == pytest.approx(-0.65)


def test_sft_is_the_weighted_negative_log_likelihood():
    loss, metrics = SftLoss()(pack())
    assert loss.item() == metrics["sft_loss"].item() == pytest.approx(-0.25 * math.log(1.5) + 0.5 * math.log(2))


def test_what_a_coefficient_asks_for_must_be_there():
    with pytest.raises(SettingsError, match=r"use_tis needs rollout_log_probs"):
        PolicyLoss(use_tis=True)(pack())
    with pytest.raises(SettingsError, match=r"kl_loss_coef needs ref_log_probs"):
        PolicyLoss(kl_loss_coef=0.1)(pack())
    with pytest.raises(SettingsError, match="advantages"):
        PolicyLoss()(pack(advantages_T=None))


def test_losses_travel_and_compare_as_values():
    for loss in (PolicyLoss(PpoClip(eps_clip_high=0.28), use_tis=True), SftLoss()):
        assert pickle.loads(pickle.dumps(loss)) == loss


def test_zero_weight_silences_a_token_whatever_its_numbers():
    wild = pack(
        logprobs_T=tensor(1.5, -1e4, 0.5).requires_grad_(),
        weights_T=tensor(0.5, 0.0, 0.5),
        ref_logprobs_T=tensor(0, 0, 0),
        rollout_logprobs_T=tensor(0, -1e4, 0),
    )
    loss, metrics = PolicyLoss(use_tis=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_unbiased_kl=True)(wild)
    loss.backward()
    assert math.isfinite(loss.item())
    assert wild.logprobs_T.grad[1].item() == 0.0
    assert all(math.isfinite(value) for value in numbers(metrics).values())


values = st.floats(-3, 3)


@settings(deadline=None)
@given(st.lists(st.tuples(*[values] * 6), min_size=2, max_size=8), st.data())
def test_loss_metrics_and_gradient_do_not_depend_on_how_tokens_are_packed(tokens, data):
    logprobs_T, old_T, ref_T, rollout_T, advantages_T, weights_T = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    inputs_T = (logprobs_T.clone().requires_grad_(), weights_T, advantages_T, old_T, ref_T, rollout_T, old_T.abs())
    whole = batch_of(**dict(zip(COLUMNS, inputs_T, strict=True)))
    parted = replace(whole, logprobs_T=logprobs_T.clone().requires_grad_())
    loss = PolicyLoss(kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01, use_tis=True)
    first_T = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
    value, metrics = loss(whole)
    value.backward()
    total, parts = 0.0, []
    for keep_T in (first_T, ~first_T):
        part, part_metrics = loss(part_of(parted, keep_T))
        part.backward()
        total += part.item()
        parts.append(numbers(part_metrics))
    assert total == pytest.approx(value.item(), abs=1e-9)
    assert merge_metrics(parts) == pytest.approx(numbers(metrics), abs=1e-9)
    assert parted.logprobs_T.grad.tolist() == pytest.approx(whole.logprobs_T.grad.tolist(), abs=1e-9)


def test_rejected_tokens_have_no_loss_and_weights_are_scaled():
    # Ratios exp(old - rollout) are 4, 1 and 1/4, each token a row of its own.
    rollout_T = -tensor(4.0, 1.0, 0.25).log()
    rejecting = PolicyLoss(use_rs=True, rs_level="token", rs_clip_low=0.5, rs_clip=2.0)
    _, metrics = rejecting(pack(rollout_logprobs_T=rollout_T))
    assert metrics["pg_loss"].item() == pytest.approx(-1 * 0.25)  # the second alone: ratio 1, advantage 1
    assert metrics["tis_masked"].item() == pytest.approx(0.25 + 0.5)
    assert metrics["tis_max"].item() == pytest.approx(4.0)
    _, plain = PolicyLoss(use_tis=True)(pack(rollout_logprobs_T=rollout_T))
    _, halved = PolicyLoss(use_tis=True, tis_scale=0.5)(pack(rollout_logprobs_T=rollout_T))
    assert halved["pg_loss"].item() == pytest.approx(plain["pg_loss"].item() / 2)
    with pytest.raises(SettingsError, match=r"algorithm\.use_rs needs rollout_log_probs"):
        rejecting(pack())


def test_a_loss_of_the_user_keeps_the_metrics_of_log_probabilities():
    watched = pack()
    loss, metrics = WatchedLoss(SftLoss(), PolicyLoss())(watched)
    loss.backward()
    assert watched.logprobs_T.grad.tolist() == pytest.approx([-0.25, -0.25, -0.5])  # of the user's loss alone
    by_hand = {"pg_clipfrac": 0.75, "ratio_max": 1.5, "ois": 0.25 * 1.5 + 0.25 + 0.5 * 0.5}  # as of PolicyLoss above
    assert {name: numbers(metrics)[name] for name in by_hand} == pytest.approx(by_hand)
    assert metrics["sft_loss"].item() == pytest.approx(-0.25 * math.log(1.5) + 0.5 * math.log(2))
    assert "pg_loss" not in metrics
