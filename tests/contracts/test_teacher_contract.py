"""What every teacher promises: a checkpoint, `slimectl serve`, SGLang and vLLM say the same of given tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import serving
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from slimectl.algorithms.scoring import ScoringPass
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.http.log_prob_client import RemoteLogProbModel
from slimectl.errors import BackendError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.score import attach_log_probs
from slimectl.stages.train import train
from slimectl.types import Sample, Status, StepReport, TrainingSample

pytestmark = pytest.mark.slow

ModelDir = Callable[..., Path]


@pytest.fixture(params=serving.SERVERS)
def url(request: pytest.FixtureRequest, model_dir: ModelDir) -> str:
    """A server with the weights of the small model."""
    found: str = request.getfixturevalue(request.param)
    serving.client([found], model_dir()).load_weights(HFCheckpoint().read(model_dir()), version="0")
    return found


def answers() -> Iterator[Sample]:
    """More than one request's worth, of many lengths."""
    for i in range(20):
        prompt, answer = list(b"say " + bytes([65 + i]) * (1 + i % 5)), [(7 * i + k) % 256 for k in range(1 + i % 7)]
        yield Sample(i // 2, i, tokens=prompt + answer, response_length=len(answer), status=Status.COMPLETED)


def distilled(folder: Path, **teacher: Any) -> tuple[list[list[float]], StepReport]:
    """What the teacher says of the answers, and the step that is made of it."""
    rounds = {"run": {"rollout_batch_size": 10}, "rollout": {"n_samples_per_prompt": 2}}
    settings = Settings.model_validate({"algorithm": {"name": "opd", **teacher}, **rounds})
    with closing(builders.trainable_models(settings, folder, executor=LocalExecutor())) as by:
        samples = list(answers())
        if settings.algorithm.opd_divergence == "token":
            scoring = ScoringPass("teacher", "teacher_log_probs")
            samples = list(attach_log_probs(samples, by.frozen["teacher"], scoring))
        (report,) = train(samples, Models(by.policy, None, by.frozen), settings)
    return [sample.teacher_log_probs or [] for sample in samples], report


def test_a_server_teaches_as_its_checkpoint_does(url: str, model_dir: ModelDir):
    student = model_dir("llama_untied")
    api = "vllm" if url in serving.vllm_urls else "sglang"
    likeliest = {"opd_divergence": "jsd", "opd_top_k": 12}
    _, step = distilled(student, opd_teacher_url=url, opd_teacher_api=api, **likeliest)
    _, own = distilled(student, opd_teachers={"only": {"load": str(model_dir())}}, **likeliest)
    for name in ("opd_kl", "loss", "grad_norm"):
        assert step.metrics[f"train/{name}"] == pytest.approx(own.metrics[f"train/{name}"], rel=1e-4, abs=1e-6)
    assert own.metrics["train/grad_norm"] > 0
    told, step = distilled(student, opd_teacher_url=url, opd_teacher_api=api)
    known, own = distilled(student, opd_teacher_load=str(model_dir()))
    for one, other in zip(told, known, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    for name in ("opd_reverse_kl", "pg_loss", "grad_norm"):
        assert step.metrics[f"train/{name}"] == pytest.approx(own.metrics[f"train/{name}"], rel=1e-4, abs=1e-6)
    assert own.metrics["train/grad_norm"] > 0


def test_a_server_names_the_likeliest_tokens_in_place_of_each(url: str, model_dir: ModelDir):
    rows = [TrainingSample(sample.tokens, sample.response_length, []) for sample in answers()]
    teacher = RemoteLogProbModel([url], api=serving.api([url]), setting="SETTING", timeout_s=60, tries=2)
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    count = 5 if url in serving.vllm_urls else 30  # vLLM's default limit is 20
    for row, tops in zip(rows, teacher.top_log_probs(rows, count), strict=True):
        log_p_TV = model(torch.tensor([row.tokens])).logits[0].log_softmax(-1)[row.prompt_length - 1 : -1]
        assert len(tops) == row.response_length
        for log_p_V, top in zip(log_p_TV, tops, strict=True):
            assert [value for _, value in top] == pytest.approx(log_p_V.topk(count).values.tolist(), abs=1e-4)
            assert [log_p_V[token].item() for token, _ in top] == pytest.approx([value for _, value in top], abs=1e-4)
            assert len({token for token, _ in top}) == count


def test_a_server_that_died_leaves_its_requests_to_the_others(url: str, caplog: pytest.LogCaptureFixture):
    rows = [TrainingSample(sample.tokens, sample.response_length, [1.0] * len(sample.tokens)) for sample in answers()]
    dead = "http://127.0.0.1:9"

    def teacher(*urls: str) -> RemoteLogProbModel:
        return RemoteLogProbModel(urls, api=serving.api([url]), setting="SETTING", timeout_s=60, tries=2)

    expected = teacher(url).log_probs(rows)
    with caplog.at_level("WARNING", "slimectl"):
        for urls in ([dead, url], [url, dead]):  # one of the two requests begins at each
            for row, of_row in zip(teacher(*urls).log_probs(rows), expected, strict=True):
                assert row == pytest.approx(of_row, abs=1e-4)
    assert caplog.text.count(f"{dead}/") == 2
    assert "Trying the other servers of SETTING" in caplog.text
    with pytest.raises(BackendError, match=r"the teacher at http://127\.0\.0\.1:9/\S+: no answer.*\(2 tries"):
        teacher(dead, dead).log_probs(rows)


def test_a_teacher_of_another_vocabulary_is_refused(url: str, model_dir: ModelDir):
    tokenizer = builders.tokenizer(model_dir())
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    facts["model"]["vocab"] = {text: 255 - i for text, i in facts["model"]["vocab"].items()}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(facts)))
    teacher = RemoteLogProbModel([url], api=serving.api([url]), setting="algorithm.opd_teacher_url", timeout_s=60)
    teacher.check_vocabulary(tokenizer, of="DIR")
    with pytest.raises(SettingsError, match=r"opd_teacher_url: the model at \S+ has a different vocabulary than DIR"):
        teacher.check_vocabulary(other, of="DIR")


def test_what_the_teacher_cannot_read_is_told_in_the_servers_words(url: str):
    teacher = RemoteLogProbModel(
        [url], api=serving.api([url]), setting="algorithm.opd_teacher_url", timeout_s=60, tries=1
    )
    too_long = TrainingSample([1] * 4000, 1, [1.0])
    with pytest.raises(BackendError, match=rf"the teacher at {url}/\S*generate: answered 400: .*\d\d\d.*"):
        teacher.log_probs([too_long])
