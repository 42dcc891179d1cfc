"""The experts that the engine chose travel with samples to the trainer: through files, turns, interrupted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workshop as workshops
from transformers import AutoConfig, AutoTokenizer
from workshop import Workshop

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.routed_experts import decoded, encoded
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.errors import HookError, RecordError
from slimectl.settings import Settings
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.hooks import Hooks
from slimectl.stages.training_batch import build_training_batch
from slimectl.types import Completion, Prompt, Sample, SamplingParams, Status

ModelDir = Callable[[str], Path]
REPLAY = ("-s", "train.use_rollout_routing_replay=true")
FILE = ("-c", "slimectl.toml")
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


@pytest.fixture
def experts(model_dir: ModelDir, tmp_path: Path) -> Workshop:
    return workshops.set_up(tmp_path, model_dir("qwen3_moe"))


@pytest.mark.slow
def test_experts_travel_through_files_to_the_trainer_which_uses_them(experts: Workshop):
    experts.slimectl("rollout", *FILE, *REPLAY, "-o", "samples.jsonl")
    experts.slimectl("score", "samples.jsonl", *FILE, "-o", "scored.jsonl")
    samples = [json.loads(line) for line in (experts.folder / "scored.jsonl").read_text().splitlines()]
    assert {tuple(sample["rollout_routed_experts"]["shape"][1:]) for sample in samples} == {(2, 2)}

    def difference(change: Callable[[dict[str, Any]], Any], code: int = 0) -> float:
        """Of trainer and engine, where so changed samples are trained on."""
        changed = [{**sample, **change(sample)} for sample in samples]
        (experts.folder / "changed.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in changed))
        reports = experts.slimectl(
            "train", "changed.jsonl", *FILE, *REPLAY, "--save", f"to-{code}", "--force", code=code
        )
        return json.loads(reports.splitlines()[0])["metrics"][DIFFERENCE] if reports else 0.0

    def others(sample: dict[str, Any]) -> dict[str, Any]:
        return {"rollout_routed_experts": encoded((decoded(sample["rollout_routed_experts"]) + 1) % 5)}

    assert difference(lambda sample: {}) < 1e-5
    assert difference(others) > 0.05
    difference(lambda sample: {"rollout_routed_experts": None}, code=3)
    assert "sample 0: rollout_routed_experts has none of the 18 tokens before the last trained one" in experts.stderr
    assert not (experts.folder / "to-3").exists()


def test_a_run_replays_what_it_sampled(experts: Workshop):
    experts.slimectl("run", "--name", "a", "-s", "run.num_rollout=1", *REPLAY)
    steps = [line["metrics"] for line in experts.metrics("a") if DIFFERENCE in line["metrics"]]
    assert [metrics[DIFFERENCE] < 1e-5 for metrics in steps] == [True]
    kept = (experts.folder / "runs/a/step_000001/samples.jsonl").read_text().splitlines()
    assert all("rollout_routed_experts" in json.loads(line) for line in kept)
    assert "rollout_routed_experts" not in (experts.folder / "runs/a/eval/small-000001.jsonl").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["algorithm.name=sft"], "train.use_rollout_routing_replay: sft does not train on sampled responses"),
        (
            ["train.backend=megatron", "megatron.use_routing_replay=true"],
            "train.use_rollout_routing_replay and megatron.use_routing_replay cannot be combined",
        ),
    ],
)
def test_settings_that_contradict_it_are_refused(experts: Workshop, options: list[str], words: str):
    settings = [word for option in options for word in ("-s", option)]
    experts.slimectl("run", "--dry-run", *settings, *REPLAY, code=2)
    assert words in experts.stderr


def test_a_dense_model_is_refused(model_dir: ModelDir, tmp_path: Path):
    dense = workshops.set_up(tmp_path, model_dir("qwen3"))
    dense.slimectl("rollout", *FILE, *REPLAY, code=2)
    assert "train.use_rollout_routing_replay: this model has no experts to route to" in dense.stderr


def reporting_engine(folder: Path) -> EmbeddedEngine:
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(config, tokenizer, EngineOptions(reports_experts=True))
    engine.load_weights(HFCheckpoint().read(folder), version="0")
    return engine


def generated(engine: Any, tokenizer: Any, agent: Any = None, **rollout: Any) -> list[Sample]:
    settings = Settings.model_validate(
        {"rollout": {"n_samples_per_prompt": 1, "max_response_len": 8, "ignore_eos": True, **rollout}}
    )
    agents = {} if agent is None else {"agent": agent}
    generator = GroupGenerator(engine, tokenizer, settings.rollout, **agents)
    return asyncio.run(generator.complete(generator.new_group(Prompt("say nine", label="9", index=0))))


def experts_of(engine: EmbeddedEngine, tokens: list[int]) -> np.ndarray:
    """Experts of all tokens but the last, in one pass over them."""
    read = SamplingParams(max_tokens=1, ignore_eos=True)
    answer: Completion = asyncio.run(engine.generate(tokens[:-1], params=read))
    return decoded(answer.extras["routed_experts"])


async def two_turns(offered: dict[str, Any]) -> Sample:
    """An answer, a tool's result, an answer of which two tokens are dropped, and another result."""
    sample = offered["sample"]
    for tool in (b"tool:", b"end"):
        answer = await offered["generate"](sample.tokens)
        tokens = answer.tokens[:-2] if tool == b"end" else answer.tokens
        sample.append_response_tokens(tokens, log_probs=answer.log_probs[: len(tokens)])
        sample.append_response_tokens(list(tool), trainable=False)
    return sample


def test_the_turns_of_an_agent_have_the_experts_of_all_that_was_read(model_dir: ModelDir):
    engine = reporting_engine(model_dir("qwen3_moe"))
    [sample] = generated(engine, AutoTokenizer.from_pretrained(model_dir("qwen3_moe")), two_turns)
    assert sample.rollout_routed_experts is not None
    found = decoded(sample.rollout_routed_experts)
    read = len(sample.tokens) - len(b"end")
    assert len(found) == read
    np.testing.assert_array_equal(np.sort(found), np.sort(experts_of(engine, sample.tokens))[:read])


@pytest.mark.parametrize(("shape", "refused"), [((9, 2, 2), ""), ((9, 4), "as the function set it: expected")])
def test_an_agent_may_set_the_array_that_its_server_gave_it(model_dir: ModelDir, shape: tuple[int, ...], refused: str):
    experts = np.arange(36).reshape(shape)

    async def setting(offered: dict[str, Any]) -> Sample:
        sample = offered["sample"]
        sample.append_response_tokens([1, 2], log_probs=[-1.0, -1.0])
        sample.rollout_routed_experts = experts
        return sample

    tokenizer = AutoTokenizer.from_pretrained(model_dir("qwen3_moe"))
    if refused:
        with pytest.raises(HookError, match=refused):
            generated(None, tokenizer, setting)
        return
    [sample] = generated(None, tokenizer, setting)
    assert sample.rollout_routed_experts == encoded(experts)


def test_an_interrupted_answer_goes_on_with_the_experts_that_it_has(model_dir: ModelDir):
    engine = reporting_engine(model_dir("qwen3_moe"))
    tokenizer = AutoTokenizer.from_pretrained(model_dir("qwen3_moe"))
    settings = Settings.model_validate(
        {"rollout": {"n_samples_per_prompt": 1, "max_response_len": 8, "ignore_eos": True, "partial_rollout": True}}
    )
    generator = GroupGenerator(engine, tokenizer, settings.rollout)

    async def interrupted() -> tuple[Sample, np.ndarray]:
        [sample] = group = generator.new_group(Prompt("say nine", label="9", index=0))
        running = asyncio.create_task(generator.complete(group))
        while engine.stats.steps < 4:
            await asyncio.sleep(0)
        generator.interrupting = True
        await engine.abort()
        [sample] = await running
        assert sample.status is Status.ABORTED
        assert sample.rollout_routed_experts is not None
        first = decoded(sample.rollout_routed_experts)
        assert len(first) == len(sample.tokens) - 1
        marked = (first + 1) % 5  # others than any engine would choose now
        sample.rollout_routed_experts = encoded(marked)
        generator.interrupting = False
        [sample] = await generator.complete([sample])
        return sample, marked

    sample, marked = asyncio.run(interrupted())
    assert (sample.response_length, sample.status) == (8, Status.TRUNCATED)
    assert sample.rollout_routed_experts is not None
    found = decoded(sample.rollout_routed_experts)
    assert len(found) == len(sample.tokens) - 1
    np.testing.assert_array_equal(found[: len(marked)], marked)
    np.testing.assert_array_equal(
        np.sort(found[len(marked) :]), np.sort(experts_of(engine, sample.tokens))[len(marked) :]
    )


def attempt(index: int, routed: int | None, mask: list[int]) -> Sample:
    routing = None if routed is None else encoded(np.zeros((routed, 2, 2), dtype=np.int16))
    return Sample(
        0, index, tokens=[1, 2, 3, 4, 5, 6], response_length=4, reward=float(index), loss_mask=mask,
        rollout_log_probs=[-1.0] * 4, rollout_routed_experts=routing,
    )  # fmt: skip


@pytest.mark.parametrize(("routed", "has"), [(4, "4"), (None, "none")])
def test_every_token_before_a_trained_one_needs_experts(routed: int | None, has: str):
    settings = Settings.model_validate({"train": {"use_rollout_routing_replay": True}})
    whole = attempt(0, 5, [1] * 4)
    batch, _ = build_training_batch([whole, attempt(1, 4, [1, 1, 1, 0])], settings, Hooks(), version=0)
    assert [row.routed_experts["shape"][0] for row in batch.rows if row.routed_experts] == [5, 4]
    with pytest.raises(RecordError, match=f"sample 1: rollout_routed_experts has {has} of the 5 tokens before"):
        build_training_batch([whole, attempt(1, routed, [1] * 4)], settings, Hooks(), version=0)
