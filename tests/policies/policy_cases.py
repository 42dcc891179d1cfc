"""What the policy tests share: rows of random tokens, small losses, a value head, the plain padded way to compare with.

Importable by name, so that the processes of a group find the losses.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.architectures.lora import halves, merged
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies import lm_head
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.protocols import Adapter
from slimectl.types import TrainingSample

FAMILIES = ("llama", "llama_untied", "llama3_rope", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "glm4_moe")
SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class WeightedNegativeLogProb:
    needs_entropy: bool = False

    def __call__(self, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(pack.weights_T * pack.logprobs_T).sum()
        if self.needs_entropy:
            loss = loss - 0.5 * (pack.weights_T * pack.entropy_T).sum()
        return loss, {"weight": pack.weights_T.sum()}


@dataclass(frozen=True)
class Clipped:
    needs_entropy: bool = False

    def __call__(self, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
        ratio_T = torch.exp(pack.logprobs_T - pack.old_logprobs_T)
        surrogate_T = torch.minimum(ratio_T * pack.advantages_T, ratio_T.clamp(0.8, 1.2) * pack.advantages_T)
        return -(pack.weights_T * surrogate_T).sum(), {"ratio": (pack.weights_T * ratio_T).sum()}


@dataclass(frozen=True)
class Failing:
    needs_entropy: bool = False

    def __call__(self, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
        raise ZeroDivisionError("a loss that fails")


def random_rows(*, groups: int = 3, answers: int = 3, seed: int = 0) -> list[TrainingSample]:
    """Answers of 1 to 12 tokens to prompts of 1 to 15, all tokens weighted 0.02, advantages ±1 a row."""
    draw = random.Random(seed)
    rows = []
    for group in range(groups):
        prompt = [draw.randrange(256) for _ in range(draw.randint(1, 15) if group else 12)]
        for _ in range(answers):
            length = draw.randint(1, 12)
            rows.append(
                TrainingSample(
                    tokens=prompt + [draw.randrange(256) for _ in range(length)],
                    response_length=length,
                    loss_weights=[0.02] * length,
                    advantages=[draw.choice([-1.0, 1.0])] * length,
                    old_log_probs=[-6 + draw.random() for _ in range(length)],
                    group=group,
                )
            )
    return rows


def train(policy: Any, steps: range) -> list[dict[str, float]]:
    """Make a step for each seed, and return the reports."""
    made = []
    for step in steps:
        rows = random_rows(groups=4, seed=step)
        made.append(policy.forward_backward(rows, Clipped()) | policy.optim_step())
    return made


def rows_with_returns() -> list[TrainingSample]:
    """Every answer returns 1 or -1 from each of its tokens."""
    rows = random_rows()
    for row in rows:
        row.values, row.returns = [0.0] * row.response_length, row.advantages
    return rows


def add_value_head(source: Path, folder: Path) -> Path:
    """The model at `source` with a random value head, in `folder`; `folder`/plain is the model without it."""
    weights = load_file(source / "model.safetensors")
    width = weights["model.norm.weight"].shape[0]
    head = torch.randn(1, width, generator=torch.Generator().manual_seed(3)) * 0.1
    save_file(weights | {"score.weight": head}, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    (folder / "plain").symlink_to(source)
    return folder


def padded_log_probs(model: torch.nn.Module, rows: list[TrainingSample], temperature: float = 1.0) -> list[Tensor]:
    """One padded batch, full logits, log_softmax; the R log-probabilities of each row."""
    width = max(len(row.tokens) for row in rows)
    ids = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
    mask = torch.tensor([[1] * len(row.tokens) + [0] * (width - len(row.tokens)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return [logprobs[i, row.prompt_length - 1 : len(row.tokens) - 1] for i, row in enumerate(rows)]


def write_random_model(folder: Path, model_type: str, **config: Any) -> Path:
    """Write a model of transformers with large random weights, and return its folder."""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32)
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    hf.save_pretrained(folder)
    return folder


def plain_loop(
    folder: Path, rows: list[TrainingSample], *, temperature: float, **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Log-probabilities of each row alone by transformers' logits, and the gradients of their weighted sum."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    found = []
    for row in rows:
        tokens_1T = torch.tensor([row.tokens])
        log_p_TV = (hf(tokens_1T[:, :-1], use_cache=False).logits[0].float() / temperature).log_softmax(-1)
        found.append(log_p_TV.gather(1, tokens_1T[0, 1:, None])[-row.response_length :, 0])
    logprobs_R = torch.cat(found)
    weights_R = torch.tensor([weight for row in rows for weight in row.loss_weights])
    (-(weights_R * logprobs_R).sum()).backward()
    return logprobs_R.detach(), {name: parameter.grad for name, parameter in hf.named_parameters()}


def flat_log_probs(policy: Any, rows: list[TrainingSample]) -> Tensor:
    """Log-probabilities of all rows, one after the other."""
    return torch.tensor([value for values in policy.log_probs(rows) for value in values])


def new_policy(model_dir: Path, **options: Any) -> FsdpPolicy:
    return FsdpPolicy(model_dir, HFCheckpoint(), TrainerOptions(**({"optimizer": OptimizerOptions(lr=1e-3)} | options)))


def adapter_parts(adapter: Adapter) -> tuple[float, dict[str, Tensor]]:
    """Scale and tensors of an adapter, copied where the weights are."""
    parts = {name: tensor.clone() for name, tensor in adapter.tensors}
    assert list(parts) == [half for layer in adapter.layers for half in halves(layer)]
    return adapter.alpha / adapter.rank, parts


def assert_merged_are_weights(policy: Any, folder: Path) -> None:
    """The adapter that a policy streams, merged into the model of a folder, has every bit of its weights."""
    scale, parts = policy.consume_adapter(adapter_parts)
    base = dict(HFCheckpoint().read(folder))
    for name, tensor in policy.weights():
        a, b = halves(name.removesuffix(".weight"))
        expected = merged(base[name], parts.pop(a), parts.pop(b), scale) if a in parts else base[name]
        assert torch.equal(tensor, expected), name
    assert not parts


def assert_chunks_are_exact(
    gradients: Callable[[torch.dtype], list[Tensor]], monkeypatch: pytest.MonkeyPatch, kept_logits: int
) -> None:
    """Assert that gradients of 1024 states and 13 tokens in bfloat16 lose no more in chunks than in one product."""
    exact, once = gradients(torch.float64), gradients(torch.bfloat16)
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 8 * 13)  # 128 chunks, or 13 slabs of a token
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", kept_logits)
    for of_once, of_many, true in zip(once, gradients(torch.bfloat16), exact, strict=True):
        assert (of_many - true).norm() <= 1.4 * (of_once - true).norm()
        assert (of_many - true).norm() <= 0.01 * true.norm()
