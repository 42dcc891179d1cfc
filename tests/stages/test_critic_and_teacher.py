"""What a critic, a teacher and a reference add to a step: by hand, and that they are learnt from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from stages.passes import set_loss_weights, training_batch
from transformers import AutoModelForCausalLM

from slimectl.algorithms import registry
from slimectl.algorithms.estimators import TrainingBatch
from slimectl.algorithms.registry import Algorithm, policy_loss
from slimectl.algorithms.scoring import REFERENCE, ScoringPass
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import RecordError
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.settings import Settings
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.needs import Need
from slimectl.settings.policy_gradient import ClippedRatio
from slimectl.stages.advantages import Models
from slimectl.stages.score import attach_log_probs
from slimectl.stages.train import train
from slimectl.types import Sample, Status, TrainingSample

ModelDir = Callable[..., Path]
OPTIONS = OptimizerOptions(lr=2e-3, weight_decay=0.0)


def attempts(groups: int = 4, size: int = 2, seed: int = 0) -> list[Sample]:
    """Answers of 3 to 6 random tokens; odd prompts' answers get reward 1, of each group the first one 0.5 more."""
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = [65 + group % 2] * 4
        for i in range(size):
            length = draw.randint(3, 6)
            tokens = prompt + [draw.randrange(256) for _ in range(length)]
            reward = group % 2 + (0.5 if i == 0 else 0.0)
            made.append(
                Sample(group, group * size + i, tokens=tokens, response_length=length, reward=reward,
                       status=Status.COMPLETED, weight_versions=["0"])
            )  # fmt: skip
    return made


def settings(name: str, *, groups: int = 4, size: int = 2, **algorithm: Any) -> Settings:
    rounds = {"run": {"rollout_batch_size": groups}, "rollout": {"n_samples_per_prompt": size}}
    return Settings.model_validate({"algorithm": {"name": name, **algorithm}, **rounds})


def algorithm(name: str, **changes: Any) -> Any:
    return ALGORITHMS[name].model_validate({"name": name, **changes})


def new(kind: Callable[..., Any], folder: Path) -> Any:
    return kind(folder, HFCheckpoint(), TrainerOptions(optimizer=OPTIONS))


class Expecting:
    """A critic of one opinion."""

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return [[0.5] * row.response_length for row in rows]


def test_ppo_compares_returns_with_the_critic_and_whitens():
    samples = [
        Sample(i, i, tokens=[1, 2, 3], response_length=2, reward=reward, status=Status.COMPLETED)
        for i, reward in enumerate((1.0, 0.0))
    ]
    critic: Any = Expecting()
    rows = training_batch(samples, algorithm("ppo", lambd=0.5), critic=critic)[0].rows
    # delta 0 and 0.5, or 0 and -0.5: advantages ±(0.25, 0.5), of mean 0 and variance 2 (1/16 + 1/4) / 3
    std = (0.625 / 3) ** 0.5
    assert [row.returns for row in rows] == [[0.75, 1.0], [0.25, 0.0]]
    assert rows[0].advantages == pytest.approx([0.25 / std, 0.5 / std])
    assert rows[1].advantages == pytest.approx([-0.25 / std, -0.5 / std])


def test_the_critic_of_ppo_comes_to_explain_returns_and_the_policy_waits_for_it(model_dir: ModelDir):
    policy, critic = new(FsdpPolicy, model_dir()), new(FsdpCritic, model_dir())
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    source = [sample for _ in range(20) for sample in attempts()]
    reports = train(source, Models(policy, critic), settings("ppo", num_critic_only_steps=2, value_clip=10.0))
    first, second = islice(reports, 2)
    assert first.metrics["train/critic-explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert "train/pg_loss" not in second.metrics
    assert (second.weight_version, critic.weight_version) == ("0", "2")
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
    *_, last = reports
    assert last.metrics["train/critic-explained_variance"] > 0.3
    assert last.metrics["train/critic-value_loss"] < first.metrics["train/critic-value_loss"]
    assert last.metrics["train/grad_norm"] > 0
    assert (last.weight_version, critic.weight_version) == ("18", "20")


def test_a_shared_critic_comes_to_explain_returns_while_the_policy_learns(model_dir: ModelDir):
    policy = new(FsdpActorCritic, model_dir())
    source = [sample for _ in range(20) for sample in attempts()]
    chosen = settings("ppo", critic="shared", value_coef=0.5, value_clip=10.0)
    reports = [report.metrics for report in train(source, Models(policy), chosen)]
    assert reports[0]["train/critic-explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert reports[-1]["train/critic-explained_variance"] > 0.3
    assert reports[-1]["train/critic-value_loss"] < reports[0]["train/critic-value_loss"]
    whole = reports[0]["train/pg_loss"] + 0.5 * reports[0]["train/critic-value_loss"]
    assert reports[0]["train/loss"] == pytest.approx(whole)
    assert policy.weight_version == "20"


def test_distillation_takes_the_distance_from_the_teacher_off_any_advantage():
    samples = attempts(groups=1)
    for sample in samples:
        sample.teacher_log_probs = [-3.0] * sample.response_length
    batches = {
        coefficient: training_batch(samples, algorithm("grpo", opd_kl_coef=coefficient), old=-1.0)
        for coefficient in (0.0, 0.5)
    }
    for plain, distilled in zip(batches[0.0][0].rows, batches[0.5][0].rows, strict=True):  # 0.5 (-1 + 3)
        assert distilled.advantages == pytest.approx([value - 1.0 for value in plain.advantages])
    assert batches[0.5][1]["train/opd_reverse_kl"] == pytest.approx(2.0)


def test_distillation_moves_a_policy_towards_its_teacher_without_rewards(model_dir: ModelDir, tmp_path: Path):
    policy, teacher = new(FsdpPolicy, model_dir()), new(FsdpPolicy, model_dir())
    for _ in train(attempts(8), Models(teacher), settings("sft", groups=8)):
        pass
    samples = attempts()
    for sample in samples:
        sample.reward = None
    with pytest.raises(RecordError, match=r"no teacher_log_probs.*opd_teacher_load"):
        list(train(samples, Models(policy), settings("opd")))
    samples = list(attach_log_probs(samples, teacher, ScoringPass("teacher", "teacher_log_probs")))
    kls = [report.metrics["train/opd_reverse_kl"] for report in train(samples * 12, Models(policy), settings("opd"))]
    # The teacher likes these tokens better: the difference begins below 0 and closes.
    assert kls[0] < -0.01
    assert abs(kls[-1]) < abs(kls[0]) / 2


class SelfDistillation(ClippedRatio):
    """An algorithm in one file: the policy that saw the best response to a prompt teaches the policy that did not."""

    learns_from_rewards: ClassVar[bool] = False
    name: Literal["self_distillation"] = "self_distillation"
    calculate_per_token_loss: bool = True

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {Need.OLD_LOG_PROBS}


def after_the_best(samples: Sequence[Sample]) -> list[list[int] | None]:
    """Every response but the best of its group, with the best one before its prompt."""
    best: dict[int, Sample] = {}
    for sample in sorted(samples, key=lambda sample: sample.reward, reverse=True):
        best.setdefault(sample.group_index, sample)
    shown = [best[sample.group_index] for sample in samples]
    return [
        None if seen is sample else [*seen.tokens[-seen.response_length :], *sample.tokens]
        for seen, sample in zip(shown, samples, strict=True)
    ]


def towards_itself(batch: TrainingBatch, algorithm: SelfDistillation) -> list[torch.Tensor]:
    return [
        torch.zeros(row.response_length) if sample.teacher_log_probs is None
        else torch.tensor(sample.teacher_log_probs) - torch.tensor(row.old_log_probs)
        for row, sample in zip(batch.rows, batch.row_samples, strict=True)
    ]  # fmt: skip


def test_an_algorithm_may_let_the_policy_score_responses_on_another_prompt(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
):
    scoring = (ScoringPass("policy", "teacher_log_probs", after_the_best),)
    added = Algorithm(SelfDistillation, policy_loss, towards_itself, scoring=lambda _: scoring)
    monkeypatch.setitem(registry.ALGORITHMS, "self_distillation", added)
    policy, samples = new(FsdpPolicy, model_dir()), attempts(groups=1)
    best, other = samples
    chosen = settings("grpo", groups=1).model_copy(update={"algorithm": SelfDistillation()})
    (report,) = train(samples, Models(policy), chosen)

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)

    def of_transformers(tokens: list[int], length: int) -> torch.Tensor:
        log_probs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[:-1]
        return log_probs.gather(-1, torch.tensor(tokens[1:])[:, None])[-length:, 0]

    length = other.response_length
    taught = of_transformers([*best.tokens[4:], *other.tokens], length)
    assert best.teacher_log_probs is None
    assert other.teacher_log_probs == pytest.approx(taught.tolist(), abs=1e-4)
    # The ratio of the only step is 1: the loss is minus the mean advantage of all tokens. Those of the best are 0.
    gained = (taught - of_transformers(other.tokens, length)).sum().item()
    assert report.metrics["train/pg_loss"] == pytest.approx(-gained / (length + best.response_length), abs=1e-4)
    assert report.metrics["train/grad_norm"] > 0
    assert "perf/teacher_log_probs_time" in report.timings


def test_what_a_sample_has_is_not_asked_for_again(model_dir: ModelDir):
    policy, samples = new(FsdpPolicy, model_dir()), attempts(1)
    samples[0].ref_log_probs = known = [-9.0] * samples[0].response_length
    first, second = attach_log_probs(samples, policy, REFERENCE)
    assert first.ref_log_probs is known
    assert second.ref_log_probs is not None
    assert len(second.ref_log_probs) == second.response_length


def test_the_gradient_of_dpo_is_that_of_its_equation(model_dir: ModelDir):
    from policies.policy_cases import padded_log_probs
    from torch.nn.functional import logsigmoid
    from transformers import AutoModelForCausalLM

    policy, samples = new(FsdpPolicy, model_dir()), attempts()
    for sample in samples:
        sample.ref_log_probs = [-5.0 - sample.index / 8] * sample.response_length
    (report,) = train(samples, Models(policy), settings("dpo", beta=0.2))
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    rows = [TrainingSample(s.tokens, s.response_length, []) for s in samples]
    implied = [
        0.2 * (each.sum() - sum(s.ref_log_probs or []))
        for each, s in zip(padded_log_probs(model, rows), samples, strict=True)
    ]
    loss = torch.stack([-logsigmoid(better - worse) for better, worse in zip(implied[::2], implied[1::2], strict=True)])
    loss.mean().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
    assert report.metrics["train/loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
    assert report.metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_dpo_widens_the_margin_from_its_reference(model_dir: ModelDir):
    policy = new(FsdpPolicy, model_dir())
    samples = list(attach_log_probs(attempts(), policy, REFERENCE))
    reports = [report.metrics for report in train(samples * 8, Models(policy), settings("dpo"))]
    assert len(reports) == 8
    assert reports[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert reports[0]["train/reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert reports[-1]["train/reward_margin"] > 0.05
    assert reports[-1]["train/pair_accuracy"] == 1.0
    assert reports[-1]["train/loss"] < reports[0]["train/loss"]


def test_pairs_stay_together_over_steps_of_a_fixed_size(model_dir: ModelDir):
    policy = new(FsdpPolicy, model_dir())
    samples = list(attach_log_probs(attempts(5, size=3), policy, REFERENCE))
    sized = settings("dpo", size=3, pairs="all").model_copy(
        update={"train": Settings().train.model_copy(update={"global_batch_size": 2})}
    )
    reports = [report.metrics["train/global_batch_size"] for report in train(samples, Models(policy), sized)]
    # In each group the first answer is better than the two others, which are equal: 10 pairs in steps of 2.
    assert reports == [2.0] * 5


def test_a_reward_model_learns_which_answer_was_better_from_its_last_token_on(model_dir: ModelDir):
    model = new(FsdpCritic, model_dir())
    reports = [report.metrics for report in train(attempts() * 15, Models(model, model), settings("reward_model"))]
    assert reports[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert reports[-1]["train/pair_accuracy"] == 1.0
    assert reports[-1]["train/loss"] < 0.3
    assert reports[-1]["train/chosen_reward"] > reports[-1]["train/rejected_reward"]


def test_normalised_importance_weights_have_mean_one():
    rows = [
        TrainingSample([1, 2, 3], 2, [1.0, 1.0], old_log_probs=[0.0, 0.0], rollout_log_probs=[-0.6931472, 0.0]),
        TrainingSample([1, 2, 3], 2, [1.0, 1.0], old_log_probs=[0.0, 0.0], rollout_log_probs=[-0.6931472, 0.0]),
    ]
    chosen = algorithm("grpo", use_tis=True, tis_batch_normalize=True)
    set_loss_weights(rows, [0, 1], chosen)
    loss: Any = policy_loss(chosen, rows)
    assert loss.tis_scale == pytest.approx(1 / 1.5)  # weights 2, 1, 2, 1
