"""Distillation in steps and runs: what the settings of a teacher change, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policies.distillation_cases import between, rest
from stages.test_critic_and_teacher import attempts, new, settings
from transformers import AutoModelForCausalLM
from workshop import Workshop, set_up

from slimectl.algorithms.distillation import Divergence
from slimectl.errors import RecordError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.settings import Settings
from slimectl.settings.checks import conflicts
from slimectl.stages.advantages import Models
from slimectl.stages.train import train
from slimectl.types import Sample

ModelDir = Callable[..., Path]
JSD = {"opd_divergence": "jsd", "opd_jsd_beta": 0.3}


def distances(
    folders: tuple[Path, Path], samples: list[Sample], divergence: Divergence, top_k: int | None
) -> list[float]:
    """The mean divergence of each response's tokens, from transformers' logits."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]
    found = []
    for sample in samples:
        tokens_1T = torch.tensor([sample.tokens])
        with torch.no_grad():
            q, p = (model(tokens_1T[:, :-1]).logits[0, -sample.response_length :].log_softmax(-1) for model in models)
        if top_k is not None:
            top = p.topk(top_k, dim=1).indices
            p, q = (torch.cat([part.gather(1, top).exp(), rest(part, top)], 1).log() for part in (p, q))
        found.append(float(between(divergence, p.exp(), q.exp()).mean()))
    return found


@pytest.mark.parametrize("top_k", [4, None])
def test_a_divergence_is_added_to_the_loss_beside_rewards(model_dir: ModelDir, top_k: int | None):
    folders = model_dir(), model_dir("llama_untied")
    samples, policy, teacher = attempts(), new(FsdpPolicy, folders[0]), new(FsdpPolicy, folders[1])
    if top_k is None:
        policy.set_teacher(teacher)
    expected = distances(folders, samples, Divergence("jsd", 0.3), top_k)
    chosen = settings("grpo", opd_kl_coef=0.5, opd_top_k=top_k, opd_teacher_load="teacher", **JSD)
    (report,) = train(samples, Models(policy, frozen={} if top_k is None else {"teacher": teacher}), chosen)
    mean = sum(expected) / len(expected)  # grpo weighs every response alike
    assert report.metrics["train/opd_kl"] == pytest.approx(mean, rel=1e-5)
    assert report.metrics["train/loss"] == pytest.approx(report.metrics["train/pg_loss"] + 0.5 * mean, rel=1e-5)
    assert "train/opd_reverse_kl" not in report.metrics
    assert all(sample.teacher_log_probs is None for sample in samples)
    if top_k is not None:
        assert [len(pairs) for pairs in samples[0].teacher_top_log_probs or ()] == [4] * samples[0].response_length


def test_distillation_alone_moves_a_policy_towards_its_teacher(model_dir: ModelDir):
    policy, teacher, samples = new(FsdpPolicy, model_dir()), new(FsdpPolicy, model_dir("llama_untied")), attempts()
    for sample in samples:
        sample.reward = None
    chosen = settings("opd", opd_divergence="forward_kl", opd_top_k=8)
    reports = list(train(samples * 8, Models(policy, frozen={"teacher": teacher}), chosen))
    assert all("rollout/no_signal" not in report.metrics for report in reports)
    falling = [report.metrics["train/opd_kl"] for report in reports]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.8 * falling[0]
    assert reports[0].metrics["train/pg_loss"] == 0.0


def test_more_tokens_than_asked_for_are_not_compared(model_dir: ModelDir):
    losses = []
    for kept in (3, 6):
        policy, samples = new(FsdpPolicy, model_dir()), attempts()
        for sample in samples:
            sample.teacher_top_log_probs = [[(token, -1.0 - token) for token in range(kept)]] * sample.response_length
        (report,) = train(samples, Models(policy), settings("opd", opd_divergence="reverse_kl", opd_top_k=3))
        losses.append(report.metrics["train/loss"])
    assert losses[0] == losses[1]


def test_a_weight_of_a_row_scales_its_divergence():
    """In the loss and in the advantages alike."""
    from slimectl.algorithms.losses import PolicyLoss
    from slimectl.types import TokenBatch

    pack = TokenBatch(
        torch.zeros(2), None, torch.tensor([0, 1]), 2, torch.tensor([0.5, 0.5]), advantages_T=torch.zeros(2),
        divergence_T=torch.tensor([2.0, 4.0]), teacher_weights_T=torch.tensor([1.0, 0.25]),
    )  # fmt: skip
    loss, metrics = PolicyLoss(opd_kl_coef=0.1, opd_divergence="forward_kl")(pack)
    assert loss.item() == pytest.approx(0.1 * (0.5 * 2 + 0.5 * 1))
    assert metrics["opd_kl"].item() == pytest.approx(3.0)  # the mean itself


def test_missing_tokens_of_a_teacher_are_one_line(model_dir: ModelDir):
    with pytest.raises(RecordError, match=r"sample 0: no teacher_top_log_probs, which algorithm.opd_top_k needs. Set"):
        list(train(attempts(), Models(new(FsdpPolicy, model_dir())), settings("opd", **JSD, opd_top_k=2)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"custom_loss_function_path": "f.py:loss"}},
            "custom_loss_function_path and algorithm.opd_divergence",
        ),
        (
            {"train": {"backend": "megatron"}, "megatron": {"pipeline_model_parallel_size": 2}},
            "2 stages cannot compare",
        ),
    ],
)
def test_what_cannot_compare_distributions_is_refused(changes: dict[str, Any], message: str):
    algorithm = {"name": "opd", "opd_teacher_load": "teacher", **JSD}
    assert any(message in line for line in conflicts(Settings.model_validate({"algorithm": algorithm, **changes})))


@pytest.mark.slow
def test_runs_hold_a_teacher_in_the_trainer_or_ask_it_for_tokens(model_dir: ModelDir, tmp_path: Path):
    workshop: Workshop = set_up(tmp_path, model_dir("llama"))
    opd = [
        "-s", "algorithm.name=opd", "-s", "run.num_rollout=1", "-s", "algorithm.opd_divergence=reverse_kl",
        "-s", f"algorithm.opd_teacher_load={model_dir('llama_untied')}", "-s", "eval.before_train=false",
        "-s", "eval.interval=none",
    ]  # fmt: skip
    bounds = {}
    for name, chosen in (
        ("full", []),
        ("all", ["-s", "algorithm.opd_top_k=259"]),
        ("few", ["-s", "algorithm.opd_top_k=4"]),
    ):
        workshop.slimectl("run", *opd, *chosen, "--name", name)
        bounds[name] = next(line["metrics"]["train/opd_kl"] for line in workshop.metrics(name))
    assert bounds["all"] == pytest.approx(bounds["full"], rel=1e-4)
    assert 0 < bounds["few"] < bounds["full"]
