"""The rows of one step as tensors; kept from step to step until a sequence joins or leaves.

B rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimectl.engines.embedded.sequence import Sequence
from slimectl.types import SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Batch:
    """Inputs of the model and parameters of the draw, one row a sequence."""

    def __init__(self, sequences: list[Sequence], *, device: torch.device, vocabulary: int) -> None:
        self.sequences = sequences
        self.device = device
        ids = [(sequence.tokens[-1] if sequence.tokens else 0, sequence.length - 1) for sequence in sequences]
        self.tokens_B, self.positions_B = torch.tensor(ids, device=device).t().contiguous()
        self.longest = max(position for _, position in ids) + 1
        self._drawn = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.uint64)
        self._seeds = _mixed(np.array([sequence.seed for sequence in sequences], dtype=np.uint64))
        self._min_tokens = max(sequence.params.min_tokens - len(sequence.tokens) for sequence in sequences)
        params = [sequence.params for sequence in sequences]
        self.all_greedy = all(each.temperature == 0 for each in params)
        self.greedy_B1 = self._column(params, lambda each: each.temperature == 0, neutral=False)
        self.temperature_B1 = self._column(params, lambda each: each.temperature or 1.0, neutral=1.0)
        self.top_k_B1 = self._column(
            params, lambda each: each.top_k if 0 < each.top_k < vocabulary else vocabulary, neutral=vocabulary
        )
        self.top_p_B1 = self._column(params, lambda each: each.top_p, neutral=1.0)
        self.min_p_B1 = self._column(params, lambda each: each.min_p, neutral=0.0)

    def _column(self, params: list[SamplingParams], value: Callable[[SamplingParams], Any], *, neutral: Any) -> Any:
        """One value a row as [B, 1]; None where no row asks for anything."""
        values = [value(each) for each in params]
        if all(each == neutral for each in values):
            return None
        return torch.tensor(values, device=self.device).unsqueeze(1)

    def advance(self, tokens_B: Tensor) -> None:
        """The sampled tokens become the next step's inputs."""
        self.tokens_B = tokens_B
        self.positions_B += 1
        self.longest += 1
        self._drawn += np.uint64(1)
        self._min_tokens -= 1

    def banned(self) -> tuple[Tensor, Tensor] | None:
        """Index pairs of the end tokens that may not be drawn yet."""
        if self._min_tokens <= 0:
            return None
        pairs = [
            (row, token)
            for row, sequence in enumerate(self.sequences)
            if len(sequence.tokens) < sequence.params.min_tokens
            for token in sequence.end_tokens
        ]
        if not pairs:
            return None
        rows, tokens = torch.tensor(pairs, device=self.device).unbind(1)
        return rows, tokens

    def uniforms_B1(self) -> Tensor:
        """A number in [0, 1) for each row, a function of its seed and of how many tokens it has drawn: nothing else."""
        bits = _mixed(self._seeds + GOLDEN * (self._drawn + np.uint64(1)))
        # 24 bits: every value and its product with a total near 1 is exact enough in float32 to stay below the total.
        values = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(values).to(self.device).unsqueeze(1)


def _mixed(state: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finaliser of SplitMix64 (Steele et al. 2014): neighbouring counters become unrelated bits."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
