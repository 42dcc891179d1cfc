"""A trained reward model as a verifier: its numbers are those that it learnt to give."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.policies.fsdp.policy import FsdpCritic
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.rewards import verifier
from slimectl.rewards.reward_model import _Model
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.score import Grader, score
from slimectl.stages.train import train
from slimectl.types import Sample, Status, TrainingSample

ModelDir = Callable[..., Path]
ANSWERS = ["a", "bbbb", "", "a longer answer, with an end<|end|>", "\ud800 half a pair", "x" * 700]


def answer(i: int, text: str) -> Sample:
    prompt, tokens = list(b"say it: "), [*text.encode(errors="replace"), 256]
    return Sample(i, i, prompt="say it: ", tokens=prompt + tokens, response=text, response_length=len(tokens),
                  status=Status.COMPLETED)  # fmt: skip


@pytest.fixture(scope="module")
def trained(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FsdpCritic]:
    """A reward model after a few steps, saved."""
    critic = FsdpCritic(
        model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-2, weight_decay=0.0))
    )
    pairs = [answer(i // 2, text) for i, text in enumerate(ANSWERS[:4])]
    for i, sample in enumerate(pairs):
        sample.index, sample.rollout_id, sample.reward = i, i, float(i % 2)
    settings = Settings.model_validate({"algorithm": {"name": "reward_model"}, "run": {"rollout_batch_size": 2}})
    for _ in train(pairs * 3, Models(critic, critic), settings):
        pass
    folder = tmp_path_factory.mktemp("models") / "judge"
    folder.mkdir()
    critic.save(folder)
    return folder, critic


def graded(folder: Path, samples: list[Sample], *, workers: int = 0, **options: object) -> list[float]:
    given = {"rm_type": "reward_model", "rm_options": {"path": str(folder), **options}, "workers": workers}
    if workers:
        given["timeout_s"] = 0.5  # for a call; reading the model takes longer, and is not counted
    settings = Settings.model_validate({"score": given})
    found = score(samples, Grader(settings), settings.score, executor=LocalExecutor())
    return [float(sample.reward) for sample in found]  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rewards_are_the_values_after_the_last_token_whatever_stands_beside(
    trained: tuple[Path, FsdpCritic], batch_size: int
):
    folder, critic = trained
    samples = [answer(i, text) for i, text in enumerate(ANSWERS[:5])]
    rows = [TrainingSample([*s.tokens, 0], 1, [1.0]) for s in samples]
    expected = [values[0] for values in critic.values(rows)]
    assert graded(folder, samples, batch_size=batch_size) == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.1


@pytest.mark.slow
def test_a_worker_process_reads_the_model_once_and_in_its_own_time(trained: tuple[Path, FsdpCritic]):
    samples = [answer(i, text) for i, text in enumerate(ANSWERS[:4])]
    assert graded(trained[0], samples, workers=1) == pytest.approx(graded(trained[0], samples), abs=1e-5)


def test_a_sum_grades_in_batches_of_the_model_and_a_bad_record_costs_only_itself(
    trained: tuple[Path, FsdpCritic], monkeypatch: pytest.MonkeyPatch
):
    folder, sizes = trained[0], list[int]()
    rewards_of_model = _Model.rewards

    def count_and_pass_on(model: _Model, sequences: Sequence[Sequence[int]]) -> list[float]:
        sizes.append(len(sequences))
        return rewards_of_model(model, sequences)

    samples = [answer(i, text) for i, text in enumerate(ANSWERS[:5])]
    for sample in samples:
        sample.label = "bbbb"
    alone = graded(folder, samples)
    monkeypatch.setattr(_Model, "rewards", count_and_pass_on)
    parts = [
        {"type": "reward_model", "weight": 2.0, "path": str(folder), "batch_size": 4},
        {"type": "exact"},
        {"type": "length_penalty", "weight": -0.1, "limit": 100},
    ]
    settings = Settings.model_validate({"score": {"rm": parts, "workers": 0}})

    def totals(**options: Any) -> dict[int, float]:
        scored = score(samples, Grader(settings), settings.score, executor=LocalExecutor(), **options)
        return {sample.index: sample.reward["score"] for sample in scored}

    lengths = [sample.response_length for sample in samples]
    expected = [2 * value + (i == 1) - 0.1 * lengths[i] / 100 for i, value in enumerate(alone)]
    assert list(totals().values()) == pytest.approx(expected, abs=1e-4)
    assert sizes == [4, 1]
    samples[2].label = None
    skipped: list[int] = []
    scored = totals(skip=lambda sample, error: skipped.append(sample.index))
    assert (list(scored), skipped) == ([0, 1, 3, 4], [2])
    assert scored[3] == pytest.approx(expected[3], abs=1e-4)


def test_a_classifier_from_elsewhere_gives_what_transformers_gives(
    model_dir: ModelDir, tmp_path: Path, trained: tuple[Path, FsdpCritic]
):
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir(), num_labels=1, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "yes"}], tokenize=False)
    tokens = torch.tensor([tokenizer.encode(text)])
    assert graded(tmp_path, [Sample(prompt=chat, response="yes")]) == pytest.approx([model(tokens).logits.item()])
    # With other tokens than its own it is asked by text.
    foreign = Sample(prompt=chat, response="yes", tokens=[9000, 4], response_length=1)
    assert graded(tmp_path, [foreign], input="text") == pytest.approx([model(tokens).logits.item()])
    with pytest.raises(SettingsError, match=r'token 9000 of sample 0 is outside the vocabulary .* Set input = "text"'):
        graded(tmp_path, [foreign])


@pytest.mark.parametrize("source", ["tokens", "text"])
def test_nothing_that_a_model_wrote_is_too_much(trained: tuple[Path, FsdpCritic], source: str):
    samples = [answer(i, text) for i, text in enumerate(ANSWERS)] + [Sample(index=9, response="no tokens")]
    rewards = graded(trained[0], samples, input=source)
    assert len(rewards) == 7
    assert all(abs(reward) < 1e3 for reward in rewards)


def test_it_explains_travels_and_has_no_bounds(trained: tuple[Path, FsdpCritic]):
    made = verifier("reward_model", path=str(trained[0]))
    assert pickle.loads(pickle.dumps(made)) == made
    verdict = made.explain(answer(0, "a"))
    assert verdict.why == f"{trained[0]} gives {verdict.reward:.4g}"
    assert made.bounds == (-float("inf"), float("inf"))


def test_what_is_no_reward_model_is_refused_in_one_line(model_dir: ModelDir, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"score.rm_options.path: missing"):
        verifier("reward_model")
    with pytest.raises(SettingsError, match=re.escape(f"{tmp_path} is not a model directory. Make one with")):
        verifier("reward_model", path=str(tmp_path))
    with pytest.raises(SettingsError, match=r"has no score.weight, so it is not a reward model"):
        verifier("reward_model", path=str(model_dir()))(answer(0, "a"))
    with pytest.raises(SettingsError, match=r"batch_size: 0 is below 1"):
        verifier("reward_model", path=str(model_dir()), batch_size=0)
