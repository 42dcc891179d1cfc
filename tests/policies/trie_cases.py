"""Rows that share any of their tokens, and what a pass over them computes; both trainers are asked with them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimectl.checkpoints.create import create_model
from slimectl.types import TrainingSample

CALM = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.05,
}  # fmt: skip
"""With weights as small as a fresh model's, so that float32 rounds by less than is asked for."""


def calm_model(folder: Path, **config: Any) -> Path:
    create_model(CALM | {"model_type": "qwen3"} | config, folder, seed=7)
    return folder


def padded(tokens: int, multiple: int) -> int:
    """Tokens of a pack that a policy pads to a multiple."""
    return -(-tokens // multiple) * multiple


def forked_rows(seed: int) -> list[TrainingSample]:
    """Twelve rows, most of which leave an earlier one at any of its tokens, in prompt or answer; one is there twice."""
    draw = random.Random(seed)
    sequences = [[draw.randrange(256) for _ in range(draw.randint(8, 30))] for _ in range(2)]
    while len(sequences) < 11:
        base = draw.choice(sequences)
        sequences.append(base[: draw.randint(1, len(base))] + [draw.randrange(256) for _ in range(draw.randint(0, 20))])
    sequences.append(sequences[3])
    return [_row(tokens, draw) for tokens in sequences]


def _row(tokens: list[int], draw: random.Random) -> TrainingSample:
    length = draw.randint(0, len(tokens) - 1)

    def column(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(length)]

    return TrainingSample(tokens, length, column(0, 0.02), column(-1, 1), column(-6, -5), reward=draw.random())


def unique_tokens(rows: Sequence[TrainingSample]) -> int:
    """Number of different prefixes of what the model reads."""
    return len({tuple(row.tokens[:end]) for row in rows for end in range(1, row.input_length + 1)})


@contextmanager
def counted_tokens(embedding: nn.Module) -> Iterator[list[int]]:
    """The number of tokens of every forward pass of a model."""
    counts: list[int] = []
    hook = embedding.register_forward_hook(lambda _module, _inputs, output: counts.append(output.shape[:2].numel()))
    try:
        yield counts
    finally:
        hook.remove()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Of all gradients together, and of each where it is not a sum of nothing but rounding."""
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm().item()
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm().item() <= tolerance * max(grad.norm().item(), 0.1 * norm), name


def assert_same_step(shared: Any, alone: Any, rows: list[TrainingSample], loss: Any, gradients: Any) -> None:
    """Outputs, loss, metrics and gradients to 1e-6."""
    for name in ("log_probs", "values"):
        for found, expected in zip(
            *(getattr(each, name, lambda rows: [])(rows) for each in (shared, alone)), strict=True
        ):
            assert found == pytest.approx(expected, abs=1e-6 * 6)  # relative to log-probabilities of -6
    found, expected = (each.forward_backward(rows, loss) for each in (shared, alone))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert_close(gradients(shared), gradients(alone))
