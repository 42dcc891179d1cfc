"""Where the scores of teachers come from: several by domain, the policy itself, another tokenizer, a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from slimectl.checkpoints.create import create_model
from slimectl.cli.app import app
from slimectl.errors import RecordError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.advantages import Models, attach_scores
from slimectl.stages.hooks import NO_HOOKS
from slimectl.stages.train import train
from slimectl.stages.training_batch import build_training_batch
from slimectl.types import Sample, Status

ModelDir = Callable[..., Path]


def answers(*domains: str | None, response: bytes = b"five") -> list[Sample]:
    """One response per domain, with log-probabilities of an engine."""
    return [
        Sample(
            i, i, prompt="2+3=", tokens=[*b"2+3=", *response], response=response.decode(), label="5",
            reward=float(i % 2), response_length=len(response),
            rollout_log_probs=[-1.0 - j / 8 for j in range(len(response))], status=Status.COMPLETED,
            metadata={} if domain is None else {"domain": domain},
        )
        for i, domain in enumerate(domains)
    ]  # fmt: skip


def settings(name: str = "opd", **algorithm: Any) -> Settings:
    return Settings.model_validate({"algorithm": {"name": name, **algorithm}})


def scored(settings: Settings, folder: Path, samples: list[Sample]) -> list[Sample]:
    """The samples with the scores of the models that a training from samples builds."""
    with closing(builders.trainable_models(settings, folder, executor=LocalExecutor())) as made:
        attach_scores(samples, Models(made.policy, None, made.frozen, render=made.render), settings)
    return samples


def of_transformers(folder: Path, prompt: list[int], response: list[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log_p_TV = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return log_p_TV.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()


def test_each_teacher_scores_the_prompts_of_its_domains(model_dir: ModelDir):
    folders = {"math": model_dir(), "rest": model_dir("llama_untied")}
    chosen = settings(opd_teachers={
        "math": {"load": str(folders["math"]), "domains": ["math", "physics"], "weight": 0.25},
        "rest": {"load": str(folders["rest"])},
    })  # fmt: skip
    samples = scored(chosen, model_dir(), answers("math", "code", "physics", None))
    known = {name: of_transformers(folder, list(b"2+3="), list(b"five")) for name, folder in folders.items()}
    for sample, name in zip(samples, ("math", "rest", "math", "rest"), strict=True):
        assert sample.teacher_log_probs == pytest.approx(known[name], abs=1e-4)
    batch, _ = build_training_batch(samples, chosen, NO_HOOKS, version=0)
    assert [row.teacher_weight for row in batch.rows] == [0.25, 1.0, 0.25, 1.0]


def test_the_weight_of_a_teacher_multiplies_its_divergence(model_dir: ModelDir):
    losses = {}
    for weight in (1.0, 0.5):
        teachers = {"math": {"load": str(model_dir("llama_untied")), "domains": ["math"], "weight": weight}}
        chosen = settings(opd_teachers=teachers).model_copy(
            update={
                "run": Settings().run.model_copy(update={"rollout_batch_size": 1}),
                "rollout": Settings().rollout.model_copy(update={"n_samples_per_prompt": 2}),
            }
        )
        with closing(builders.trainable_models(chosen, model_dir(), executor=LocalExecutor())) as made:
            (report,) = train(answers("math", "math"), Models(made.policy, None, made.frozen), chosen)
        losses[weight] = report.metrics["train/pg_loss"]
        assert report.metrics["train/opd_reverse_kl"] != 0.0
    assert losses[0.5] == pytest.approx(losses[1.0] / 2, rel=1e-5)


def test_a_domain_without_a_teacher_is_an_error_unless_there_are_rewards_to_learn_from(model_dir: ModelDir):
    teachers = {"math": {"load": str(model_dir()), "domains": ["math"]}}
    alone, mixed = (
        settings(opd_teachers=teachers),
        settings("reinforce_plus_plus", opd_kl_coef=1.0, opd_teachers=teachers),
    )
    samples = scored(alone, model_dir(), answers("math", "code"))
    with pytest.raises(
        RecordError, match=r"sample 1: domain 'code' in 'domain' that a teacher of algorithm\.opd_teachers"
    ):
        build_training_batch(samples, alone, NO_HOOKS, version=0)
    batch, _ = build_training_batch(samples, mixed, NO_HOOKS, version=0)
    assert [row.teacher_weight for row in batch.rows] == [1.0, 0.0]
    with pytest.raises(RecordError, match=r"sample 0: no domain in 'domain'"):
        build_training_batch(answers(None), alone, NO_HOOKS, version=0)


@pytest.mark.parametrize("weights", ["current", "start"])
def test_the_policy_teaches_itself_on_a_prompt_with_the_label(weights: str, model_dir: ModelDir):
    chosen = settings(opd_self_teacher=weights, opd_teacher_template="It is {label}. {prompt}")
    samples = answers(None, None)
    samples[1].label = None
    first, second = scored(chosen, model_dir(), samples)
    known = of_transformers(model_dir(), list(b"It is 5. 2+3="), list(b"five"))
    assert first.teacher_log_probs == pytest.approx(known, abs=1e-4)
    assert second.teacher_log_probs is None
    batch, _ = build_training_batch(samples, chosen, NO_HOOKS, version=0)
    assert [row.teacher_weight for row in batch.rows] == [1.0, 0.0]


def test_a_demonstration_of_a_sibling_is_shown_to_the_teacher(model_dir: ModelDir):
    chosen = settings(opd_self_teacher="current", opd_teacher_template="{demonstration} {prompt}")
    wrong, right = answers(None, None)
    right.group_index, right.response = 0, "5"
    scored(chosen, model_dir(), [wrong, right])
    known = of_transformers(model_dir(), list(b"5 2+3="), list(b"five"))
    assert wrong.teacher_log_probs == pytest.approx(known, abs=1e-4)
    assert right.teacher_log_probs is None


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose tokens are parts of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["five fifty-five fever forever 2+3=5"] * 9, trainer)
    folder = tmp_path_factory.mktemp("other")
    config = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e4,
    }  # fmt: skip
    create_model(config, folder, seed=3)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def test_tokens_of_another_vocabulary_share_the_log_ratio_of_the_text_that_both_end(
    other_vocabulary: Path, model_dir: ModelDir
):
    chosen = settings(opd_teacher_load=str(other_vocabulary), opd_align="text")
    (sample,) = scored(chosen, model_dir(), answers(None, response=b"five fever"))
    tokenizer = builders.tokenizer(other_vocabulary)
    tokens = tokenizer.encode("five fever")
    assert len(tokens) < 10
    values = of_transformers(other_vocabulary, tokenizer.encode("2+3="), tokens)
    own, expected, start = sample.rollout_log_probs or [], [], 0
    for token, value in zip(
        tokens, values, strict=True
    ):  # the policy's tokens are bytes: every token of the teacher ends one
        chunk = own[start : start + len(tokenizer.decode([token]))]
        expected += [each + (value - sum(chunk)) / len(chunk) for each in chunk]
        start += len(chunk)
    assert sample.teacher_log_probs == pytest.approx(expected, abs=1e-4)
    assert sum(expected) == pytest.approx(sum(values))


def test_another_vocabulary_is_refused_unless_aligned_and_special_tokens_cannot_be(
    other_vocabulary: Path, model_dir: ModelDir
):
    message = r"opd_teacher_load: .* has another vocabulary than .*algorithm\.opd_align = text"
    with pytest.raises(SettingsError, match=message):
        builders.trainable_models(
            settings(opd_teacher_load=str(other_vocabulary)), model_dir(), executor=LocalExecutor()
        )
    chosen = settings(opd_teacher_load=str(other_vocabulary), opd_align="text")
    (special,), (bare,) = answers(None), answers(None)
    special.tokens[-2] = builders.tokenizer(model_dir()).eos_token_id
    with pytest.raises(RecordError, match="sample 0: special tokens within the response"):
        scored(chosen, model_dir(), [special])
    bare.rollout_log_probs = None
    with pytest.raises(RecordError, match=r"sample 0: no rollout_log_probs, which algorithm\.opd_align"):
        scored(chosen, model_dir(), [bare])


def test_a_student_learns_from_a_file_of_its_teachers_samples(
    model_dir: ModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    prompts, taught = tmp_path / "prompts.jsonl", tmp_path / "taught.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)))
    made = CliRunner().invoke(app, [
        "rollout", "--model", str(model_dir("llama_untied")), "--data", str(prompts), "-n", "2", "--out", str(taught),
        "-s", "rollout.top_log_probs=8", "-s", "rollout.max_response_len=6", "-s", "rollout.temperature=0.8",
    ])  # fmt: skip
    assert made.exit_code == 0, made.output
    for sample in map(json.loads, taught.read_text().splitlines()):
        columns = zip(sample["tokens"][-sample["response_length"] :], sample["rollout_log_probs"],
                      sample["teacher_top_log_probs"], strict=True)  # fmt: skip
        for token, log_prob, top in columns:
            assert len(top) == 8
            assert log_prob == pytest.approx(dict(top).get(token, log_prob), abs=1e-6)
    made = CliRunner().invoke(app, [
        "train", *[str(taught)] * 6, "--model", str(model_dir()), "--algorithm", "opd", "--lr", "2e-3",
        "-s", "algorithm.opd_divergence=forward_kl", "-s", "algorithm.opd_top_k=8", "-s", "run.rollout_batch_size=4",
        "-s", "rollout.n_samples_per_prompt=2", "-s", "rollout.temperature=0.8",
    ])  # fmt: skip
    assert made.exit_code == 0, made.output
    kl = [line["metrics"]["train/opd_kl"] for line in map(json.loads, made.stdout.splitlines())]
    assert len(kl) == 6
    assert kl[-1] < kl[0] / 2
    assert "log-probabilities of the samples and the model differ" not in caplog.text


CONFLICTS = [
    ({"opd_self_teacher": "current"}, "opd_self_teacher: current teaches nothing"),
    ({"opd_self_teacher": "current", "opd_teacher_template": "{prompt}!"}, "shows nothing more than the prompt"),
    (
        {"opd_self_teacher": "current", "opd_teacher_template": "{prompt}{lable}"},
        "{lable}: unknown field. Did you mean {label}?",
    ),
    ({"opd_self_teacher": "current", "opd_teacher_template": "{label}{metadata}"}, "Did you mean {metadata.KEY}?"),
    ({"opd_self_teacher": "start", "opd_teacher_load": "a"}, "opd_self_teacher and algorithm.opd_teacher_load cannot"),
    ({"opd_teachers": {"a": {"load": "x"}}, "opd_teacher_load": "y"}, "opd_teachers and a single teacher cannot"),
    ({"opd_teachers": {"a": {"load": "x"}, "b": {"load": "y"}}}, "a and teacher/b both have all other domains"),
    ({"opd_teachers": {"a": {"load": "x", "domains": ["m"]}, "b": {"load": "y", "domains": ["m"]}}}, "domain 'm'"),
    ({"opd_teachers": {"a": {"domains": ["m"]}, "b": {"load": "y"}}}, "every teacher needs load or url"),
    ({"opd_teachers": {"a": {"url": ["localhost:1"]}}}, "opd_teachers.a.url: 'localhost:1' is not an address"),
    ({"opd_align": "text", "opd_teacher_url": ["http://a:1"]}, "opd_align: text needs the teacher's directory"),
    ({"opd_align": "text", "opd_teacher_load": "a", "opd_divergence": "jsd", "opd_top_k": 4}, "no distribution over"),
    ({"opd_divergence": "jsd", "opd_self_teacher": "start"}, "over the full vocabulary needs one teacher"),
]


@pytest.mark.parametrize(("algorithm", "message"), CONFLICTS)
def test_settings_that_contradict_each_other_are_named(algorithm: dict[str, Any], message: str):
    lines = list(settings(**algorithm).algorithm.conflicts(temperature=1.0))
    assert any(message in line for line in lines), lines
    assert json.dumps(lines)
