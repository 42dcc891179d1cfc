"""What of a round is trained on, what is left out and counted, and that nothing is pulled too early."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from workshop import Workshop

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.train import train
from slimectl.types import Sample, Status, StepReport, TrainingSample

ModelDir = Callable[..., Path]
Make = Callable[[], FsdpPolicy]
CHATML = "<|im_start|>user\nwhat now<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def new_policy(model_dir: ModelDir) -> Make:
    return lambda: FsdpPolicy(
        model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.0))
    )


DROPPED = {"drop_zero_std_groups": True}


def given(*, prompts: int, n: int = 2, algorithm: dict[str, Any] | None = None, **sections: Any) -> Settings:
    """Rounds of so many prompts with n answers each."""
    rounds = {"run": {"rollout_batch_size": prompts, **sections.pop("run", {})}, "rollout": {"n_samples_per_prompt": n}}
    return Settings.model_validate({"algorithm": {"name": "grpo", **(algorithm or {})}, **rounds, **sections})


def attempts(*rewards: Sequence[float], first: int = 0) -> list[Sample]:
    """One group for each sequence of rewards, answers of 2 to 9 random tokens, numbered from group `first` on."""
    made = []
    for group, group_rewards in enumerate(rewards, start=first):
        draw = random.Random(group)
        prompt = [draw.randrange(256) for _ in range(6)]
        for i, reward in enumerate(group_rewards):
            length = draw.randint(2, 9)
            tokens = prompt + [draw.randrange(256) for _ in range(length)]
            made.append(
                Sample(
                    group_index=group,
                    index=group * len(group_rewards) + i,
                    tokens=tokens,
                    response_length=length,
                    reward=reward,
                    status=Status.COMPLETED,
                    weight_versions=["0"],
                )
            )
    return made


def only(reports: Iterator[StepReport]) -> dict[str, float]:
    (report,) = reports
    return report.metrics


def weights(policy: FsdpPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def test_groups_without_signal_are_left_out_and_counted_by_the_reward_that_they_share(new_policy: Make):
    good, flat = [(1.0, 0.0), (0.5, 0.0)], [(0.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    policy, other = new_policy(), new_policy()
    metrics = only(train(attempts(*good, *flat), Models(policy), given(prompts=5, algorithm=DROPPED)))
    assert metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 2
    assert metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 1
    assert metrics["rollout/zero_std/count_0"] == 2
    assert metrics["rollout/zero_std/count_1"] == 1
    assert metrics["rollout/raw_reward"] == pytest.approx(3.5 / 10)
    assert metrics["train/global_batch_size"] == 4
    alone = only(train(attempts(*good), Models(other), given(prompts=2)))
    assert [metrics[name] for name in ("train/loss", "train/grad_norm")] == [
        alone[name] for name in ("train/loss", "train/grad_norm")
    ]
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(policy).items())


def test_samples_without_a_reward_are_left_out_of_groups_and_of_training(new_policy: Make):
    """The second of three siblings has none: baseline, loss and gradient are those of the other two."""
    samples = attempts((1.0, 0.3, 0.0), (0.5, 0.7, 0.7))
    for silent in (samples[1], samples[4]):
        silent.reward, silent.metadata["no_reward"] = None, "returned None"
    policy, other = new_policy(), new_policy()
    metrics = only(train(samples, Models(policy), given(prompts=2, n=3)))
    left = only(train([s for s in samples if s.reward is not None], Models(other), given(prompts=2)))
    assert metrics["rollout/dynamic_filter/drop_no_reward"] == 2
    assert metrics["rollout/raw_reward"] == metrics["rollout/avg_reward"] == pytest.approx(2.2 / 4)
    assert metrics["train/global_batch_size"] == 4
    same = ("train/loss", "train/grad_norm", "rollout/advantages", "rollout/rewards/max")
    assert [metrics[name] for name in same] == [left[name] for name in same]
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(policy).items())


def test_a_round_without_any_reward_makes_no_step(new_policy: Make):
    samples = attempts((1.0, 0.0))
    for sample in samples:
        sample.reward, sample.metadata["no_reward"] = None, "returned None"
    (report,) = train(samples, Models(new_policy()), given(prompts=1))
    assert not report.is_step
    assert report.metrics["rollout/no_signal"] == 1
    assert "rollout/raw_reward" not in report.metrics


@pytest.mark.parametrize("fan_out", [False, True])
def test_samples_may_be_numbered_within_their_groups(new_policy: Make, fan_out: bool):
    """Three groups of two, numbered 0 and 1 in each: six rollouts in steps of four and two, as numbered through."""

    def numbered(within: bool) -> list[Sample]:
        samples = attempts((1.0, 0.0), (0.5, 0.0), (0.0, 1.0))
        for i, sample in enumerate(samples):
            sample.index = i % 2 if within else i
            sample.rollout_id = sample.index if fan_out else None
        return samples

    reports = []
    for within in (False, True):
        settings = given(prompts=3, train={"global_batch_size": 4})
        reports.append([report.metrics for report in train(numbered(within), Models(new_policy()), settings)])
    through, restarted = reports
    assert [each["train/global_batch_size"] for each in through] == [4.0, 2.0]
    assert restarted == through


def test_groups_without_signal_that_are_kept_weigh_in_the_mean(new_policy: Make):
    good, flat = [(1.0, 0.0), (0.5, 0.0)], [(0.0, 0.0), (1.0, 1.0)]
    dropped, kept = (
        only(
            train(
                attempts(*good, *flat), Models(new_policy()), given(prompts=4, algorithm={"drop_zero_std_groups": drop})
            )
        )
        for drop in (True, False)
    )
    assert (dropped["train/global_batch_size"], kept["train/global_batch_size"]) == (4, 8)
    assert kept["train/grad_norm"] == pytest.approx(dropped["train/grad_norm"] / 2, rel=1e-5)
    assert not any("dynamic_filter" in name for name in kept)


def test_a_round_without_any_signal_takes_no_step_and_reports(new_policy: Make):
    policy = new_policy()
    before = weights(policy)
    rounds = [*attempts((0.0, 0.0), (1.0, 1.0)), *attempts((1.0, 0.0), (0.0, 1.0), first=2)]
    reports = train(rounds, Models(policy), given(prompts=2, algorithm=DROPPED))
    idle = next(reports)
    assert (idle.step, idle.rollout_id, idle.weight_version, idle.last_step_of_round) == (0, 1, "0", True)
    assert idle.metrics["rollout/raw_reward"] == 0.5
    assert not {"train/loss", "train/grad_norm", "train/lr"} & set(idle.metrics)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(policy).items())
    learning = next(reports)
    assert (learning.step, learning.rollout_id, learning.weight_version) == (1, 2, "1")
    assert learning.metrics["train/grad_norm"] > 0


def test_failed_attempts_and_groups_left_with_one_answer_are_no_reason_to_stop(new_policy: Make):
    samples = attempts((1.0, 0.0), (1.0, 0.0))
    for index in (1, 2):
        samples[index].status, samples[index].remove_sample = Status.FAILED, True
        samples[index].metadata["error"] = "TimeoutError: too slow"
    metrics = only(train(samples, Models(new_policy()), given(prompts=2, algorithm=DROPPED)))
    assert metrics["rollout/error/TimeoutError"] == 2
    assert "train/grad_norm" not in metrics


def versions_of(samples: list[Sample], *versions: list[str]) -> list[Sample]:
    for sample, each in zip(samples, versions, strict=True):
        sample.weight_versions = each
    return samples


def test_staleness_counts_versions_since_the_oldest_part_of_an_answer(new_policy: Make):
    policy = new_policy()
    for _ in range(2):
        policy.optim_step()
    stale = versions_of(attempts((1.0, 0.0), (1.0, 0.0)), ["0"], ["2"], ["1", "2"], ["2"])
    metrics = only(train(stale, Models(policy), given(prompts=2)))
    assert (metrics["rollout/staleness/mean"], metrics["rollout/staleness/max"]) == (0.75, 2.0)
    elsewhere = versions_of(attempts((1.0, 0.0)), ["default"], [])
    assert not any("staleness" in name for name in only(train(elsewhere, Models(policy), given(prompts=1))))


def test_what_is_staler_than_allowed_is_dropped_and_counted(new_policy: Make):
    policy, other = new_policy(), new_policy()
    for each in (policy, other):
        each.optim_step()
        each.optim_step()
    groups = ((1.0, 0.0, 0.5), (1.0, 0.0, 0.25))
    fresh = [["2"], ["1", "2"], ["2"], ["2"], ["2"]]
    allowed = given(prompts=2, n=3, run={"max_staleness": 1, "async_level": 1})
    metrics = only(train(versions_of(attempts(*groups), ["0", "2"], *fresh), Models(policy), allowed))
    assert metrics["rollout/dynamic_filter/drop_stale"] == 1
    assert metrics["train/global_batch_size"] == 5
    assert metrics["rollout/staleness/max"] == 2
    without = only(train(versions_of(attempts(*groups)[1:], *fresh), Models(other), given(prompts=2, n=3)))
    assert metrics["train/grad_norm"] == pytest.approx(without["train/grad_norm"], rel=1e-6)


def test_a_removed_sample_counts_in_the_statistics_and_moves_no_weight(new_policy: Make):
    def step(change: Callable[[Sample], None]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        samples, policy = attempts((1.0, 0.0, 0.0)), new_policy()
        change(samples[1])
        return only(train(samples, Models(policy), given(prompts=1, n=3))), weights(policy)

    def remove(sample: Sample) -> None:
        sample.remove_sample = True

    def remove_and_garble(sample: Sample) -> None:
        sample.remove_sample = True
        sample.tokens = sample.tokens[: sample.prompt_length] + [7] * sample.response_length

    whole, _ = step(lambda sample: None)
    removed, moved = step(remove)
    garbled, moved_too = step(remove_and_garble)
    assert removed["rollout/raw_reward"] == whole["rollout/raw_reward"] == pytest.approx(1 / 3)
    assert removed["train/global_batch_size"] == whole["train/global_batch_size"] == 3
    assert removed["train/grad_norm"] != pytest.approx(whole["train/grad_norm"], rel=1e-2)
    # Advantages over three: 1, 0, 0 has mean 1/3 and std sqrt(1/3); on-policy the loss is minus their mean.
    bad = -(1 / 3) / (1 / 3) ** 0.5
    assert whole["train/loss"] == pytest.approx(0.0, abs=1e-5)
    assert removed["train/loss"] == pytest.approx(bad / 3, rel=1e-4)
    for name, tensor in moved.items():
        torch.testing.assert_close(moved_too[name], tensor, rtol=0, atol=2e-5)
    assert garbled["train/grad_norm"] == pytest.approx(removed["train/grad_norm"], rel=1e-5)


def test_in_several_steps_a_round_the_ratio_is_against_the_policy_before_the_first(new_policy: Make):
    samples = attempts((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 1.0))
    policy, other = new_policy(), new_policy()
    two_steps = given(prompts=4, train={"num_steps_per_rollout": 2})
    first, second = (r.metrics for r in train(samples, Models(policy), two_steps))
    # The recomputed log-probabilities are the first step's own, so that step is the one without recomputation.
    assert first["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["train/ois"] == pytest.approx(1.0, abs=1e-5)
    alone = only(train(attempts((1.0, 0.0), (0.0, 1.0)), Models(other), given(prompts=2)))
    for name in ("train/loss", "train/grad_norm"):
        assert first[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)
    assert abs(second["train/ppo_kl"]) > 1e-3
    assert abs(second["train/ois"] - 1) > 1e-3


def test_the_optimizer_starts_again_with_every_round_if_asked(new_policy: Make):
    groups = [(1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 1.0)]
    updates, seconds = {}, {}
    for resets in (False, True):
        policy = new_policy()
        settings = given(prompts=2, train={"num_steps_per_rollout": 2, "reset_optimizer_states": resets})
        reports = list(train(attempts(*groups), Models(policy), settings))
        updates[resets] = [int(slots["step"]) for slots in policy.optimizer.state.values()]
        seconds[resets] = [report.metrics["train/grad_norm"] for report in reports]
    assert set(updates[False]) == {4}
    assert set(updates[True]) == {2}  # of the second round
    assert seconds[True][:3] == seconds[False][:3]  # the third step has a gradient before its update differs
    assert seconds[True][3] != seconds[False][3]


def test_rollouts_left_over_from_before_a_step_keep_the_log_probabilities_of_their_round(new_policy: Make):
    flat, good = (1.0, 1.0), (1.0, 0.0)
    samples = [
        *attempts(flat, good),  # 2 rollouts with signal: no step of 4 yet
        *attempts(good, good, first=2),  # a step with 2 + 2 of them, 2 left over
        *attempts(good, good, first=4),  # whose policy is no longer this one
    ]
    settings = given(prompts=2, train={"global_batch_size": 4}, algorithm=DROPPED)
    reports = [report.metrics for report in train(samples, Models(new_policy()), settings)]
    assert [metrics.get("train/global_batch_size") for metrics in reports] == [None, 4, 4, 2]
    assert [metrics.get("train/rollouts_left_over") for metrics in reports] == [2, 2, 2, None]
    assert reports[1]["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(reports[2]["train/ppo_kl"]) > 1e-3
    assert abs(reports[3]["train/ppo_kl"]) > 1e-3


def test_nothing_beyond_a_round_is_pulled_before_its_steps_are_done(new_policy: Make):
    policy = new_policy()
    seen: list[str] = []

    def sampled() -> Iterator[Sample]:
        for sample in attempts((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.0)):
            seen.append(policy.weight_version)
            yield sample

    for report in train(sampled(), Models(policy), given(prompts=2)):
        assert len(seen) == 4 * report.rollout_id
    assert seen == ["0"] * 4 + ["1"] * 4


def test_a_round_is_whole_rollouts_however_many_samples_each_became(new_policy: Make):
    samples = attempts((1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.5, 1.0, 1.0))
    for sample in samples:
        sample.rollout_id = sample.group_index * 2 + (sample.index % 3 > 0)  # the second and third are one rollout
    reports = list(train(samples, Models(new_policy()), given(prompts=2)))
    assert [len(report.samples) for report in reports] == [6, 6]
    assert [report.metrics["train/global_batch_size"] for report in reports] == [4, 4]


def losses(workshop: Workshop, file: str) -> list[float]:
    out = workshop.slimectl(
        "train", file, "--model", str(workshop.model), "--algorithm", "sft", "--lr", "3e-3",
        "-s", "train.global_batch_size=4",
    )  # fmt: skip
    reports = [json.loads(line) for line in out.splitlines()]
    assert [report["step"] for report in reports] == list(range(1, 9))
    assert {report["metrics"]["train/global_batch_size"] for report in reports} == {4}
    return [report["metrics"]["train/loss"] for report in reports]


def test_sft_learns_from_prompts_with_labels(workshop: Workshop):
    lines = [{"prompt": f"say {word}: ", "label": word} for word in ("one", "two") * 16]
    (workshop.folder / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    falling = losses(workshop, "labels.jsonl")
    assert falling[-1] < 0.6 * falling[0]


def test_sft_learns_from_chats_what_the_assistant_said(workshop: Workshop):
    chat = [{"role": "user", "content": "what now"}, {"role": "assistant", "content": "four"}]
    (workshop.folder / "chats.jsonl").write_text((json.dumps({"prompt": chat}) + "\n") * 32)
    falling = losses(workshop, "chats.jsonl")
    # The first loss is that of the assistant's words and end token alone.
    policy = FsdpPolicy(workshop.model, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=0.0)))
    tokenizer = AutoTokenizer.from_pretrained(workshop.model)
    answer = tokenizer.encode("four<|im_end|>")
    assert len(answer) == 5
    (log_probs,) = policy.log_probs([TrainingSample(tokenizer.encode(CHATML) + answer, 5, [0.0] * 5)])
    assert falling[0] == pytest.approx(-sum(log_probs) / 5, rel=1e-4)
    assert falling[-1] < 0.6 * falling[0]


def test_every_epoch_measures_ratios_from_before_the_first(new_policy: Make):
    samples, settings = attempts((1.0, 0.0), (0.5, 0.0)), given(prompts=2, train={"ppo_epochs": 2})
    policy = new_policy()
    rows = [TrainingSample(s.tokens, s.response_length, [1.0] * s.response_length) for s in samples]
    before = policy.log_probs(rows)
    reports = train(samples, Models(policy), settings)
    assert next(reports).metrics["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    middle = policy.log_probs(rows)
    second = next(reports).metrics
    ratios = [math.exp(b - a) for old, new in zip(before, middle, strict=True) for a, b in zip(old, new, strict=True)]
    assert second["train/ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert second["train/ratio_min"] == pytest.approx(min(ratios), rel=1e-4)
    assert max(ratios) > 1.001
