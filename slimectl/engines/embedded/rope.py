"""Rotary position embeddings with every scaling that transformers implements.

N rows · D head dimension · P positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimectl.errors import CheckpointError

BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose frequencies depend on the sequence length."""


class Rope:
    """Cosines and signed sines by position; tables grow with the longest sequence seen.

    For scalings that depend on the length, a decoded token is rotated for the length that it ends, and a prompt for its
    own length, as transformers does with a single sequence.
    """

    def __init__(self, config: Any, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._head_dim = head_dim
        self._dtype = dtype
        self._device = device
        self._kind = config.rope_parameters.get("rope_type", "default")
        original = config.rope_parameters.get("original_max_position_embeddings")
        self._native_length = int(original or config.max_position_embeddings)
        self._cos_P1D = torch.empty(0)
        self._sin_P1D = torch.empty(0)
        self._frequencies(1)

    def rows(self, positions_N: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for tokens that each end their sequence; all positions are below `longest`."""
        if longest > self._cos_P1D.shape[0]:
            self._grow(max(longest, 2 * self._cos_P1D.shape[0], 256))
        return self._cos_P1D[positions_N], self._sin_P1D[positions_N]

    def prompt_rows(self, positions_N: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, D] for whole prompts, concatenated."""
        cos_N1D, sin_N1D = self.rows(positions_N, max(lengths))
        if self._kind in BY_LENGTH:
            start = 0
            for length in lengths:
                if length > self._native_length:
                    cos, sin = self._table(torch.arange(length), *self._frequencies(length))
                    cos_N1D[start : start + length], sin_N1D[start : start + length] = cos, sin
                start += length
        return cos_N1D, sin_N1D

    def _grow(self, size: int) -> None:
        positions_P = torch.arange(size)
        if self._kind not in BY_LENGTH or size <= self._native_length:
            self._cos_P1D, self._sin_P1D = self._table(positions_P, *self._frequencies(min(size, self._native_length)))
            return
        native_P = positions_P[: self._native_length]
        pieces = [self._table(native_P, *self._frequencies(self._native_length))]
        for position in range(self._native_length, size):
            pieces.append(self._table(positions_P[position : position + 1], *self._frequencies(position + 1)))
        self._cos_P1D, self._sin_P1D = (torch.cat(tables) for tables in zip(*pieces, strict=True))

    def _table(self, positions_P: Tensor, inverse_D2: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        angles_PD2 = positions_P.float()[:, None] * inverse_D2
        cos_PD2, sin_PD2 = angles_PD2.cos() * scale, angles_PD2.sin() * scale
        # x * cos + roll(x, D/2) * sin is the rotation when the first half of the sines carries the minus.
        cos_PD, sin_PD = torch.cat((cos_PD2, cos_PD2), -1), torch.cat((-sin_PD2, sin_PD2), -1)
        return (
            cos_PD[:, None].to(self._device, self._dtype),
            sin_PD[:, None].to(self._device, self._dtype),
        )

    def _frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return inverse frequencies [D/2] and the factor on cos and sin, for a sequence of this length."""
        if self._kind == "default":
            exponents_D2 = torch.arange(0, self._head_dim, 2, dtype=torch.int64).float() / self._head_dim
            return 1.0 / (self._config.rope_parameters["rope_theta"] ** exponents_D2), 1.0
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if self._kind not in ROPE_INIT_FUNCTIONS:
            types = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise CheckpointError(f"config.json: rope_type {self._kind!r} is not known; known are {types}")
        inverse_D2, scale = ROPE_INIT_FUNCTIONS[self._kind](self._config, torch.device("cpu"), seq_len=length)
        return inverse_D2.float(), float(scale)
