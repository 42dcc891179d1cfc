"""Training stops at the first number that is not finite, names the samples, and leaves the weights as they were."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from workshop import Workshop

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import DivergedError
from slimectl.hooks.user_hooks import UserHooks
from slimectl.policies.fsdp.policy import FsdpCritic, FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.finite_check import FiniteCheck
from slimectl.stages.train import train
from slimectl.types import Sample, Status, TrainingSample

ModelDir = Callable[[str], Path]


def sample(index: int, *, reward: float = 0.0, log_prob: float = -1.0) -> Sample:
    tokens = [65, 66, 67, 68 + index]
    return Sample(
        index=index, group_index=index // 2, tokens=tokens, response_length=2, reward=reward, status=Status.COMPLETED,
        rollout_log_probs=[log_prob, -1.0], ref_log_probs=[-1.0, -1.0], loss_mask=[1, 1],
    )  # fmt: skip


def policy(model: Path, kind: Any = FsdpPolicy) -> Any:
    return kind(model, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-2)))


def settings(**sections: Any) -> Settings:
    return Settings.model_validate(
        {"run": {"rollout_batch_size": 2}, "rollout": {"n_samples_per_prompt": 2}} | sections
    )


def weights(trained: Any) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in trained.weights()]


def refused(samples: Sequence[Sample], trained: Any, chosen: Settings, critic: Any = None) -> str:
    """The words with which training stops; nothing has been learnt."""
    before = weights(trained)
    with pytest.raises(DivergedError) as error:
        list(train(samples, Models(trained, critic), chosen, hooks=UserHooks(chosen)))
    assert all(torch.equal(old, new) for old, new in zip(before, weights(trained), strict=True))
    return str(error.value)


GOOD = [sample(i, reward=float(i % 2)) for i in range(4)]


def test_an_infinite_log_probability_of_a_sample_is_named(model_dir: ModelDir):
    samples = [sample(i, reward=float(i % 2), log_prob=-math.inf if i == 2 else -1.0) for i in range(4)]
    words = refused(samples, policy(model_dir("llama")), settings())
    assert words.startswith(
        "round 1, step 1: rollout log-probabilities that are not finite (not finite: the rollout log-probabilities of "
        "sample 2). The update was not applied. "
    )


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_damaged_weights_stop_before_the_update_and_no_sample_is_blamed(model_dir: ModelDir, name: str):
    trained = policy(model_dir("llama"))
    trained.masters.tensors["model.norm.weight"].data.fill_(math.nan)
    trained.masters.copy_to_model()
    before = trained.optimizer.state_dict()["state"]
    with pytest.raises(
        DivergedError, match=r"the loss is nan \(no single sample is to blame, as .* none of the [24] are"
    ):
        list(train(GOOD, Models(trained), settings(algorithm={"name": name})))
    assert before == trained.optimizer.state_dict()["state"] == {}


def test_a_loss_that_is_nan_for_two_samples_names_them(model_dir: ModelDir, tmp_path: Path):
    """A user's loss; what the model says of the samples is finite."""
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def loss(args, batch, log_probs, sum_of_sample_mean):\n"
        "    bad = (batch.targets_T == 69) | (batch.targets_T == 71)\n"
        "    return sum_of_sample_mean(torch.where(bad, log_probs * torch.nan, log_probs)), {}\n"
    )
    chosen = settings(train={"custom_loss_function_path": f"{tmp_path}/own.py:loss"})
    words = refused(GOOD, policy(model_dir("llama")), chosen)
    assert "the loss is nan (not finite: the losses of samples 1, 3)" in words


class Exploding:
    """A loss whose value is finite and whose gradient is not."""

    needs_entropy = False

    def __call__(self, pack: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return ((pack.logprobs_T - pack.logprobs_T.detach()).abs().sqrt() * pack.weights_T).sum(), {}


def test_a_gradient_that_is_not_finite_is_not_applied(model_dir: ModelDir):
    trained = policy(model_dir("llama"))
    before = weights(trained)
    rows = [TrainingSample([65, 66, 67], 2, [0.5, 0.5])]
    check = FiniteCheck(rows, [7], rollout_id=3, step=5)
    with pytest.raises(DivergedError, match=r"^round 3, step 5: the grad_norm is nan \(no single sample is to blame"):
        check.update(trained, Exploding(), of="the", outputs=trained.log_probs)
    assert all(torch.equal(old, new) for old, new in zip(before, weights(trained), strict=True))


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_preferences_of_damaged_weights_stop_too(model_dir: ModelDir, name: str):
    trained = policy(model_dir("llama"), FsdpCritic if name == "reward_model" else FsdpPolicy)
    trained.masters.tensors["model.norm.weight"].data.fill_(math.nan)
    trained.masters.copy_to_model()
    critic = trained if name == "reward_model" else None
    with pytest.raises(DivergedError, match=r"round 1, step 1: the pairs' train/loss is nan"):
        list(train(GOOD, Models(trained, critic), settings(algorithm={"name": name})))


def test_the_critic_of_ppo_stops_before_the_policy_learns(model_dir: ModelDir):
    trained, critic = policy(model_dir("llama")), policy(model_dir("llama"), FsdpCritic)
    critic.masters.tensors["model.norm.weight"].data.fill_(math.nan)
    critic.masters.copy_to_model()
    words = refused(GOOD, trained, settings(algorithm={"name": "ppo"}), critic=critic)
    assert words.startswith("round 1, step 1: ")
    assert "no single sample is to blame" in words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "ranks"), [("fsdp", 1), ("megatron", 1), pytest.param("fsdp", 2, id="fsdp-two-ranks")]
)
def test_a_run_stops_at_the_first_loss_that_is_nan_and_keeps_its_checkpoint(
    workshop: Workshop, trainer: str, ranks: int
):
    (workshop.folder / "own.py").write_text(
        "import torch, pathlib\n"
        "def loss(args, batch, log_probs, sum_of_sample_mean):\n"
        f"    late = pathlib.Path({str(workshop.folder)!r}, 'runs/a/step_000001').exists()\n"
        "    return sum_of_sample_mean(-log_probs * (torch.nan if late else 1.0)), {}\n"
    )
    loss = "train.custom_loss_function_path=own.py:loss"
    options = ["--backend", trainer, "-s", loss, "-s", f"cluster.actor_num_gpus_per_node={ranks}"]
    workshop.slimectl("run", *options, code=1)
    assert "Traceback" not in workshop.stderr
    assert workshop.stderr.splitlines()[-1].startswith("slimectl: round 2, step 2: the loss is nan (not finite: the ")
    assert "the last checkpoint is runs/a/step_000001. Continue with: slimectl run --resume runs/a" in workshop.stderr
    steps = [line["step"] for line in workshop.metrics("a") if "train/step" in line["metrics"]]
    assert steps == [1]
    workshop.slimectl("run", "--resume", "runs/a", "-s", "train.custom_loss_function_path=none")
    assert workshop.metrics("a")[-1]["rollout_id"] == 6


def test_a_stage_saves_nothing_of_a_training_that_diverged(workshop: Workshop):
    records = [
        {"index": i, "group_index": i // 2, "tokens": [65, 66, 67], "response_length": 2, "reward": float(i % 2),
         "status": "completed"} for i in range(4)
    ]  # fmt: skip
    (workshop.folder / "scored.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (workshop.folder / "own.py").write_text(
        "import torch\n"
        "def loss(args, batch, log_probs, sum_of_sample_mean):\n"
        "    return sum_of_sample_mean(log_probs * torch.inf), {}\n"
    )
    options = ["--model", str(workshop.model), "--save", "better", "-s", "train.custom_loss_function_path=own.py:loss"]
    workshop.slimectl("train", "scored.jsonl", *options, code=1)
    assert "step 1: the loss is -inf" in workshop.stderr
    assert sorted(workshop.folder.glob("*better*")) == []
