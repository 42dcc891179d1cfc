"""A user's own advantages and loss: equal to ours where they compute the same, refused where they do not fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import HookError
from slimectl.hooks import check_hooks
from slimectl.hooks.loss import CustomLoss
from slimectl.hooks.user_hooks import UserHooks
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.train import train
from slimectl.types import Sample, Status

ModelDir = Callable[..., Path]
FUNCTIONS = '''
def centred(args, rollout_data):
    """Dr. GRPO's advantages, by hand."""
    made = []
    for reward, group, length in zip(
        rollout_data["rewards"], rollout_data["group_indices"], rollout_data["response_lengths"]
    ):
        siblings = [r for r, g in zip(rollout_data["rewards"], rollout_data["group_indices"]) if g == group]
        made.append([reward - sum(siblings) / len(siblings)] * length)
    rollout_data["advantages"] = made

def reinforce(args, batch, log_probs, sum_of_sample_mean):
    """The gradient of a ratio of 1."""
    return sum_of_sample_mean(-batch.advantages_T * log_probs), {"mean_logp": sum_of_sample_mean(log_probs.detach())}

def silent(args, rollout_data):
    pass

def short(args, rollout_data):
    rollout_data["advantages"] = [[1.0] for _ in rollout_data["tokens"]]

def number(batch):
    return 1.0

def from_logits(batch, logits, log_probs, sum_of_sample_mean):
    """The same once more: a token's log-probability is its logit less the logarithm of the sum over all."""
    chosen = logits.gather(1, batch.targets_T[:, None])[:, 0] - logits.logsumexp(1)
    assert (chosen - log_probs).abs().max() < 1e-5
    return sum_of_sample_mean(-batch.advantages_T * chosen), {}

def wants_hidden(batch, hidden):
    return hidden.sum(), {}
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return str(tmp_path / "own.py")


def attempts() -> list[Sample]:
    return [
        Sample(i // 2, i, tokens=[65, 66, 70 + i, *range(80, 80 + i)], response_length=i + 1, reward=float(i % 2),
               status=Status.COMPLETED, weight_versions=["0"])
        for i in range(4)
    ]  # fmt: skip


def settings(**keys: Any) -> Settings:
    algorithm = {"name": "dr_grpo", "fixed_length": 10}
    rounds = {"run": {"rollout_batch_size": 2}, "rollout": {"n_samples_per_prompt": 2}}
    return Settings.model_validate({"algorithm": algorithm, "train": keys, **rounds})


def metrics(model: Path, **keys: Any) -> dict[str, float]:
    policy = FsdpPolicy(model, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3)))
    chosen = settings(**keys)
    (report,) = train(attempts(), Models(policy), chosen, hooks=UserHooks(chosen))
    return report.metrics


def test_what_computes_the_same_learns_the_same(model_dir: ModelDir, functions: str):
    ours = metrics(model_dir())
    advantages = metrics(model_dir(), custom_advantage_function_path=f"{functions}:centred")
    loss = metrics(model_dir(), custom_loss_function_path=f"{functions}:reinforce")
    logits = metrics(model_dir(), custom_loss_function_path=f"{functions}:from_logits")
    assert advantages["train/grad_norm"] == pytest.approx(ours["train/grad_norm"], rel=1e-5)
    assert advantages["train/pg_loss"] == pytest.approx(ours["train/pg_loss"], rel=1e-5)
    assert loss["train/grad_norm"] == pytest.approx(ours["train/grad_norm"], rel=1e-5)
    assert loss["train/mean_logp"] < 0
    assert logits["train/grad_norm"] == pytest.approx(ours["train/grad_norm"], rel=1e-5)


def test_a_loss_keeps_the_metrics_of_log_probs(model_dir: ModelDir, functions: str):
    def measured(**keys: Any) -> dict[str, float]:
        samples = attempts()
        for sample in samples:
            sample.rollout_log_probs = [-6.0 + 0.1 * i for i in range(sample.response_length)]
        policy = FsdpPolicy(model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3)))
        chosen = settings(**keys)
        (report,) = train(samples, Models(policy), chosen, hooks=UserHooks(chosen))
        return report.metrics

    ours = measured()
    loss = measured(custom_loss_function_path=f"{functions}:reinforce")
    logits = measured(custom_loss_function_path=f"{functions}:from_logits")
    assert ours.keys() - loss.keys() == {"train/pg_loss"}
    assert loss.keys() - ours.keys() == {"train/mean_logp"}
    # Where the loss takes logits, an entropy would cost a graph over the vocabulary.
    assert loss.keys() - logits.keys() == {"train/mean_logp", "train/entropy_loss", "rollout/entropy"}
    for name in ours.keys() & logits.keys() - {"train/loss"}:
        for found in (loss, logits):
            assert found[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name
    assert loss["train/train_rollout_logprob_abs_diff"] > 0
    assert loss["rollout/entropy"] == pytest.approx(ours["rollout/entropy"])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"custom_advantage_function_path": "silent"}, r'wrote no rollout_data\["advantages"\]'),
        ({"custom_advantage_function_path": "short"}, "advantages of sample 1: must be 2 finite numbers"),
        ({"custom_loss_function_path": "number"}, "returned a loss of type float. Return a scalar tensor"),
    ],
)
def test_what_does_not_fit_is_refused(model_dir: ModelDir, functions: str, keys: dict[str, str], said: str):
    with pytest.raises(HookError, match=said):
        metrics(model_dir(), **{key: f"{functions}:{name}" for key, name in keys.items()})


def test_a_wrong_signature_is_refused_before_anything_is_loaded(functions: str):
    with pytest.raises(
        HookError,
        match=r"asks for hidden. Functions of this setting can ask for args, settings, batch, logits, log_probs",
    ):
        check_hooks(settings(custom_loss_function_path=f"{functions}:wants_hidden"))


def test_the_loss_travels_to_ranks(functions: str):
    loss = CustomLoss(settings(custom_loss_function_path=f"{functions}:reinforce"))
    assert pickle.loads(pickle.dumps(loss)) == loss
