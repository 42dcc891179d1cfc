"""Rotary position embedding as the Hugging Face models compute it.

T tokens · H heads · D head dimension · R rotated dimensions, which have R/2 angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimectl.architectures.config import Rope
from slimectl.errors import CheckpointError


@dataclass(frozen=True)
class Angles:
    """Cosine and sine of every token's angles [T, R/2]. `interleaved` pairs neighbors instead of halves."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def rotated(states_THD: Tensor, angles: Angles) -> Tensor:
    """Rotate the first R dimensions of every head by their angles. The others are unchanged."""
    cos, sin = (part[:, None].to(states_THD.dtype) for part in (angles.cos, angles.sin))
    width = 2 * cos.shape[-1]
    rotary = states_THD[..., :width]
    first, second = (rotary[..., 0::2], rotary[..., 1::2]) if angles.interleaved else rotary.chunk(2, dim=-1)
    rotated_first, rotated_second = first * cos - second * sin, second * cos + first * sin
    parts = (
        [torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)]
        if angles.interleaved
        else [rotated_first, rotated_second]
    )
    if width < states_THD.shape[-1]:
        parts.append(states_THD[..., width:])
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


class Rotary(nn.Module):
    """Maps positions to angles. Has no parameters and stores nothing in a checkpoint."""

    frequencies: Tensor

    def __init__(self, rope: Rope, *, head_dim: int, max_positions: int, device: torch.device) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        frequencies, self.scale = frequencies_of(rope, head_dim, max_positions)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Move to a device, but stay float32, because an angle in bfloat16 is off by whole turns."""
        self.frequencies = self.frequencies.to(fn(torch.empty_like(self.frequencies)).device)
        return self

    def forward(self, positions_T: Tensor) -> Angles:
        angles = positions_T[:, None].float() * self.frequencies
        return Angles(angles.cos() * self.scale, angles.sin() * self.scale, self.interleaved)


def frequencies_of(rope: Rope, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Return radians per position [R/2], and the cosine and sine scale. Raises CheckpointError for unknown scaling."""
    width = int(head_dim * rope.percent)
    plain = 1.0 / (rope.theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))
    scaling = rope.scaling or {}
    match scaling.get("rope_type", "default"):
        case "default" | "mrope":
            return plain, 1.0
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, rope.theta, width, scaling, max_positions)
    raise CheckpointError(
        f"config.json: rope_type {scaling['rope_type']!r} cannot be trained. Supported: default, linear, llama3, yarn"
    )


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Scale low frequencies by `factor`, keep high ones, interpolate linearly between (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    ramp = ((wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * plain / factor + ramp * plain


def _yarn(
    plain: Tensor, theta: float, width: int, scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    """Interpolate the dimensions that turn rarely, and keep the others (Peng et al. 2023, arXiv:2309.00071)."""
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or max_positions / original

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (torch.arange(width // 2).float() - first) / (last - first if last != first else 0.001)
    extrapolation = 1 - ramp.clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = yarn_scale(factor, scaling.get("mscale"), scaling.get("mscale_all_dim"))
    return plain / factor * (1 - extrapolation) + plain * extrapolation, float(attention)


def yarn_scale(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor of cosine and sine in YaRN."""
    if mscale and mscale_all_dim:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all_dim)
    return _temperature(factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(rope: Rope, head_dim: int, max_positions: int) -> float:
    """Return the softmax scale of latent attention, including the square of YaRN's `mscale_all_dim` factor."""
    scaling = rope.scaling or {}
    if scaling.get("rope_type") != "yarn" or not scaling.get("mscale_all_dim"):
        return head_dim**-0.5
    factor = scaling.get("factor") or max_positions / scaling["original_max_position_embeddings"]
    return head_dim**-0.5 * _temperature(factor, scaling["mscale_all_dim"]) ** 2
