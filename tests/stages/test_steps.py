"""Rounds become steps of whole rollouts; nothing is lost, nothing counts twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.train import TrainState, train_batches
from slimectl.types import RolloutBatch, Sample, Status, StepReport, TrainingSample

rounds = st.lists(st.lists(st.integers(1, 3), max_size=7), max_size=4)
"""Of every round, how many samples each of its rollouts fanned out into."""


class Recording:
    """What a policy is asked to learn, step by step; it learns nothing."""

    weight_version = "0"

    def __init__(self) -> None:
        self.steps: list[list[TrainingSample]] = []

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return [[-1.0] * row.response_length for row in rows]

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Any) -> dict[str, float]:
        self.steps.append(list(rows))
        return {"loss": 0.0}

    def optim_step(self) -> dict[str, float]:
        return {"grad_norm": 0.0, "lr": 0.0}


@settings(deadline=None)
@given(rounds, st.integers(1, 5))
def test_steps_are_full_until_the_last_and_hold_every_sample_once(fan_outs: list[list[int]], size: int):
    given_rounds, number = [], 0
    for round_number, fan_out in enumerate(fan_outs):
        samples = []
        for rollout, count in enumerate(fan_out):
            execution = 100 * round_number + rollout
            for _ in range(count):
                samples.append(
                    Sample(execution, number, execution, tokens=[1, number], response_length=1, reward=float(number),
                           status=Status.COMPLETED)
                )  # fmt: skip
                number += 1
        if samples:
            given_rounds.append(samples)
    policy, state = Recording(), TrainState()
    chosen = Settings.model_validate(
        {"algorithm": {"name": "reinforce_plus_plus"}, "train": {"global_batch_size": size}}
    )
    reports = list(train_batches(map(RolloutBatch, given_rounds), Models(policy), chosen, state=state))  # type: ignore[arg-type]
    total = sum(map(len, fan_outs))
    assert sorted(row.tokens[1] for rows in policy.steps for row in rows) == list(range(number))
    sizes = [len({row.group for row in rows}) for rows in policy.steps]
    assert sizes == [size] * (total // size) + [total % size] * (total % size > 0)
    made = [report for report in reports if report.is_step]
    assert [report.metrics["train/global_batch_size"] for report in made] == sizes
    assert [report.step for report in made] == list(range(1, len(sizes) + 1))
    rest = [report for report in reports if not report.is_step]  # of rounds that fill no step: they use up no number
    assert not {"train/step", "train/loss"} & {name for report in rest for name in report.metrics}
    assert [report.metrics["rollout/step"] for report in rest] == [report.rollout_id for report in rest]
    over = [report.metrics.get("train/rollouts_left_over", 0.0) for report in reports if report.last_step_of_round]
    kept = [rolled % size for rolled in accumulate(map(len, filter(None, fan_outs)))]
    assert over == kept + [0.0] * bool(kept and kept[-1])
    assert state.pending == []
    assert all(abs(sum(sum(row.loss_weights) for row in rows) - 1) < 1e-9 for rows in policy.steps)


def test_later_epochs_deal_the_rollouts_of_a_round_into_new_steps():
    samples = [
        Sample(i, 2 * i + part, i, tokens=[1, 2 * i + part], response_length=1, reward=float(i),
               status=Status.COMPLETED)
        for i in range(5) for part in range(2)
    ]  # fmt: skip
    chosen = Settings.model_validate(
        {"algorithm": {"name": "reinforce_plus_plus"}, "train": {"global_batch_size": 2, "ppo_epochs": 3}}
    )

    def steps() -> tuple[list[list[int]], list[StepReport]]:
        policy = Recording()
        reports = list(train_batches([RolloutBatch(samples)], Models(policy), chosen))  # type: ignore[arg-type]
        return [[row.tokens[1] for row in rows] for rows in policy.steps], reports

    tokens, reports = steps()
    # Two full steps and their four rollouts twice again. The fifth rollout is a step of each epoch at the end.
    assert tokens[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [sorted(tokens[2 * epoch] + tokens[2 * epoch + 1]) for epoch in range(3)] == [list(range(8))] * 3
    assert all(rows[0::2] == [token - 1 for token in rows[1::2]] for rows in tokens)  # both parts of each rollout
    assert len({str(tokens[2 * epoch : 2 * epoch + 2]) for epoch in range(3)}) > 1
    assert tokens[6:] == [[8, 9]] * 3
    assert [report.metrics["train/ppo_epoch"] for report in reports] == [1, 1, 2, 2, 3, 3, 1, 2, 3]
    assert [report.last_step_of_round for report in reports] == [False] * 5 + [True, False, False, True]
    assert [report.step for report in reports] == list(range(1, 10))
    assert chosen.steps_of(5) == 9
    assert steps()[0] == tokens
    shuffled = chosen.model_copy(update={"run": chosen.run.model_copy(update={"seed": 7})})
    policy = Recording()
    list(train_batches([RolloutBatch(samples)], Models(policy), shuffled))  # type: ignore[arg-type]
    assert [[row.tokens[1] for row in rows] for rows in policy.steps][:2] == tokens[:2]
    assert [[row.tokens[1] for row in rows] for rows in policy.steps] != tokens


def test_one_epoch_is_not_a_metric():
    sample = Sample(0, 0, tokens=[1, 2], response_length=1, reward=1.0, status=Status.COMPLETED)
    chosen = Settings.model_validate({"algorithm": {"name": "reinforce_plus_plus"}})
    (report,) = train_batches([RolloutBatch([sample])], Models(Recording()), chosen)  # type: ignore[arg-type]
    assert "train/ppo_epoch" not in report.metrics


def test_demonstrations_are_passed_over_once():
    sample = Sample(0, 0, tokens=[1, 2], response_length=1, status=Status.COMPLETED)
    warm_up = Settings.model_validate({"algorithm": {"name": "sft"}, "train": {"ppo_epochs": 3}})
    policy = Recording()
    list(train_batches([RolloutBatch([sample])], Models(policy), warm_up))  # type: ignore[arg-type]
    assert len(policy.steps) == warm_up.steps_of(1) == 1
