"""The engine with transformers' forward pass: log-probabilities of the model, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.errors import CheckpointError, SettingsError
from slimectl.runtime.builders.engines import engine, engine_path
from slimectl.settings.layers import Layer
from slimectl.settings.loading import resolve
from slimectl.types import Completion, SamplingParams

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 6},
    "gpt_oss": {"sliding_window": 6, **EXPERTS},
    "falcon_h1": MAMBA,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA, **EXPERTS, "shared_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                     "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
    "mixtral": EXPERTS,
    "mamba": {"state_size": 4},
    "bloom": {},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "openai-gpt": {},
}  # fmt: skip
"""Windows shorter than the prompts and soft caps, sinks, states beside and in place of attention, converted experts, no
positions, a cache class of a model's own, and no cache at all."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> Callable[[str], Path]:
    """A random model of a family with the byte tokenizer, as transformers saves it."""

    def saved(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        known = AutoConfig.for_model(family)
        shape = {key: value for key, value in SHAPE.items() if hasattr(known, key)}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **CONFIGS[family]))
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_dir()).save_pretrained(folder)
        return folder

    return saved


def built(folder: Path, backend: str = "transformers", **options: Any) -> EmbeddedEngine:
    settings = resolve([Layer("file", {"engine": {"backend": backend, **options}})]).settings
    made = engine(settings, folder, AutoTokenizer.from_pretrained(folder), load=True)
    assert isinstance(made, EmbeddedEngine)
    return made


PROMPTS = [[5, 6, 7], [*range(20, 33)], [*range(20, 33)], [40, 41, 42], [*range(50, 59)]]
LONG = SamplingParams(max_tokens=14, ignore_eos=True)


def disturbed(engine: EmbeddedEngine) -> list[Completion]:
    """Responses to prompts of three lengths that join one after another, with an abort and a retraction in between."""

    async def scene() -> list[Completion]:
        tasks = []
        for i, prompt in enumerate(PROMPTS):
            params = dataclasses.replace(LONG, seed=i, max_tokens=LONG.max_tokens - i % 3)
            tasks.append(asyncio.create_task(engine.generate(prompt, params=params)))
            while engine.stats.steps < 2 * i:
                await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        engine.pause("test", retract=True)
        engine.resume("test")
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return [answer for answer in ended if isinstance(answer, Completion)]

    return asyncio.run(scene())


@pytest.mark.parametrize("family", CONFIGS)
def test_sampled_log_probs_are_those_of_a_plain_forward(family: str, folder_of: Callable[[str], Path]):
    folder = folder_of(family)
    made = built(folder)
    answers = disturbed(made)
    assert len(answers) == 4
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [PROMPTS[i] for i in (0, 1, 2, 4)]
    scores = made.scores(
        [[*p, *a.tokens] for p, a in zip(prompts, answers, strict=True)], [len(p) - 1 for p in prompts]
    )
    for prompt, answer, score in zip(prompts, answers, scores, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(len(answer.tokens)), answer.tokens]
        assert answer.log_probs == pytest.approx(expected.tolist(), abs=2e-5)
        assert score.log_probs == pytest.approx(expected.tolist(), abs=2e-5)


def test_the_same_seeds_give_the_same_responses_as_the_embedded_engine(model_dir: Callable[..., Path]):
    mine, embedded = (disturbed(built(model_dir(), backend)) for backend in ("transformers", "embedded"))
    assert [answer.tokens for answer in mine] == [answer.tokens for answer in embedded]


def test_converted_tensors_arrive_alone_in_parts_of_a_session_or_as_a_whole(folder_of: Callable[[str], Path]):
    folder = folder_of("mixtral")
    tensors = dict(HFCheckpoint().read(folder))
    changed = {name: tensor + 0.1 for name, tensor in tensors.items()}
    whole, parts, alone = (built(folder) for _ in range(3))
    before = stored(whole)
    whole.load_weights(changed.items(), version="1")
    after = stored(whole)
    assert after.keys() == before.keys() == tensors.keys()
    assert all(torch.equal(after[name], changed[name]) for name in changed)

    parts.begin_update()
    for item in changed.items():
        parts.update_weights([item], version="1")
    parts.end_update()
    assert all(torch.equal(tensor, after[name]) for name, tensor in stored(parts).items())

    expert = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    alone.update_weights([(expert, changed[expert])])
    assert {name for name, tensor in stored(alone).items() if not torch.equal(tensor, before[name])} == {expert}
    with pytest.raises(CheckpointError, match=r"weights: lm_head.weight has shape \[2, 2\], expected \[96, 32\]"):
        alone.update_weights([("lm_head.weight", torch.zeros(2, 2))])
    with pytest.raises(CheckpointError, match=r"weights: model.x is not part of this mixtral model"):
        alone.load_weights([("model.x", torch.zeros(2))], version="2")
    with pytest.raises(CheckpointError, match=r"weights: no tensor for model.norm.weight \(1 missing\)"):
        alone.load_weights([item for item in changed.items() if item[0] != "model.norm.weight"], version="2")


def stored(engine: EmbeddedEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine._model.weights.tensors()}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model_type": "llama"}, "embedded"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "transformers"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "transformers"),
        ({"model_type": "gemma2"}, "transformers"),
    ],
)
def test_auto_takes_the_embedded_engine_where_it_knows_the_model(config: dict[str, Any], path: str):
    settings = [resolve([Layer("file", {"engine": {"backend": name}})]).settings for name in ("transformers", "vllm")]
    assert [engine_path(each, config) for each in (resolve([]).settings, *settings)] == [path, "transformers", "vllm"]


def test_models_and_settings_that_do_not_fit_are_refused(folder_of: Callable[[str], Path], tmp_path: Path):
    folder = folder_of("mamba")
    made = built(folder)
    assert made.max_context == 32768  # no limit in config.json
    tokenizer = AutoTokenizer.from_pretrained(folder)
    routing = resolve([Layer("file", {"train": {"use_rollout_routing_replay": True}})]).settings
    with pytest.raises(SettingsError, match="does not report experts of models that transformers computes"):
        engine(routing, folder, tokenizer, load=False)
    AutoConfig.for_model("bert").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"this model is an encoder \(is_decoder is false\)"):
        engine(resolve([]).settings, tmp_path, tokenizer, load=False)
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="cannot build a causal language model of model_type 'vit'"):
        engine(resolve([]).settings, tmp_path, tokenizer, load=False)
