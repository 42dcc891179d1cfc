"""Rows of a step as tensors, reused from step to step until a sequence joins or leaves.

B rows · C columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimectl.engines.embedded.sequence import Sequence
from slimectl.types import SamplingParams

Array = np.ndarray[Any, np.dtype[Any]]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Batch:
    """Inputs of the model and sampling parameters, one row per sequence."""

    def __init__(self, sequences: list[Sequence], *, device: torch.device, vocabulary: int) -> None:
        self.sequences = sequences
        self._device = device
        state_BC = np.array([_state(sequence) for sequence in sequences])
        self.tokens_B, self.positions_B = torch.from_numpy(state_BC[:, :2].T.copy()).to(device)
        self.longest = int(state_BC[:, 1].max()) + 1  # tokens, those that the step feeds included
        self._drawn_B, self._seeds_B = state_BC[:, 2].astype(np.uint64), _mix_bits(state_BC[:, 3].astype(np.uint64))
        self._steps_to_ban = int((state_BC[:, 4] - state_BC[:, 2]).max())
        knobs_BC = np.array([_sampling_values(sequence.params) for sequence in sequences], dtype=np.float32)
        knobs_BC[(knobs_BC[:, 1] <= 0) | (knobs_BC[:, 1] > vocabulary), 1] = vocabulary
        greedy_B = knobs_BC[:, 0] == 0
        self.all_greedy = bool(greedy_B.all())
        knobs_BC[greedy_B, 0] = 1.0
        self.greedy_B1 = self._column(greedy_B, neutral=False)
        self.temperature_B1 = self._column(knobs_BC[:, 0], neutral=1.0)
        self.top_k_B1 = self._column(knobs_BC[:, 1], neutral=vocabulary)
        self.top_p_B1 = self._column(knobs_BC[:, 2], neutral=1.0)
        self.min_p_B1 = self._column(knobs_BC[:, 3], neutral=0.0)

    def _column(self, values_B: Array, *, neutral: float) -> Tensor | None:
        """Return a column of one value per row; None if all rows have the neutral value."""
        if (values_B == neutral).all():
            return None
        return torch.from_numpy(values_B.copy()).to(self._device).unsqueeze(1)

    def advance(self, tokens_B: Tensor) -> None:
        """Make the sampled tokens the next step's inputs."""
        self.tokens_B = tokens_B
        self.positions_B += 1
        self.longest += 1
        self._drawn_B += np.uint64(1)
        self._steps_to_ban -= 1

    def banned(self) -> tuple[Tensor, Tensor] | None:
        """Return the index pairs (row, token) of the end tokens that may not be drawn yet."""
        if self._steps_to_ban <= 0:
            return None
        pairs = [
            (row, token)
            for row, sequence in enumerate(self.sequences)
            if len(sequence.tokens) < sequence.params.min_tokens
            for token in sequence.end_tokens
        ]
        if not pairs:
            return None
        rows, tokens = torch.tensor(pairs, device=self._device).unbind(1)
        return rows, tokens

    def uniforms_B1(self) -> Tensor:
        """Return a number in [0, 1) for each row, a function of its seed and number of drawn tokens alone."""
        bits = _mix_bits(self._seeds_B + GOLDEN * (self._drawn_B + np.uint64(1)))
        # 24 bits: every value and its product with a total near 1 is exact enough in float32 to stay below the total.
        values = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(values).to(self._device).unsqueeze(1)


def _state(sequence: Sequence) -> tuple[int, int, int, int, int]:
    """Return last token, its position, tokens drawn, seed, minimum tokens before an end token."""
    tokens = sequence.tokens
    drawn = len(tokens)
    last = tokens[-1] if tokens else sequence.prompt[-1]
    return last, len(sequence.prompt) + drawn - 1, drawn, sequence.seed, sequence.params.min_tokens


def _sampling_values(params: SamplingParams) -> tuple[float, float, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


def _mix_bits(state: Array) -> Array:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014), which decorrelates neighbouring counters."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = state ^ (state >> np.uint64(31))
    return mixed
