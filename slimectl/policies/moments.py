"""Precisions in which optimizers keep moments: float32, bfloat16 rounded stochastically, and 8 bits in blocks."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

State = MutableMapping[str, Tensor]
"""An optimizer's state of one parameter."""
StateDtype = Literal["float32", "bfloat16", "int8"]
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments. The second is never negative."""
BLOCK = 256
"""Elements that share a scale in 8 bits."""
SMALLEST = 4096
"""Tensors with fewer elements keep float32 moments instead of 8 bits, as in bitsandbytes and torchao."""


class Moments:
    """Moments in float32. `start` and `stop` are positions in the flat parameter, multiples of BLOCK or its end."""

    dtype = torch.float32
    needs_noise = False
    """Whether `write` needs random bits."""

    def allocate(self, state: State, name: str, parameter: Tensor) -> None:
        """Create the moment as zeros, unless the state has it. One in another precision is converted."""
        moment = state.get(name)
        state[name] = torch.zeros_like(parameter, dtype=self.dtype) if moment is None else moment.to(self.dtype)

    def read(self, state: State, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return flat float32 values, which may be the moment itself."""
        return state[name].view(-1)[start:stop].float()

    def write(self, state: State, name: str, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Store flat float32 values. `noise` has int32 numbers from 0 to 2^16 - 1. None rounds to the nearest."""
        if noise is not None:
            values = stochastically_rounded(values, noise)
        state[name].view(-1)[start : start + len(values)].copy_(values)


class Bfloat16Moments(Moments):
    """Moments in bfloat16, rounded stochastically."""

    dtype = torch.bfloat16
    needs_noise = True


class Int8Moments(Moments):
    """Moments in 8 bits: the nearest of 256 values between -1 and 1 (or 0 and 1), times the scale of its block.

    Dettmers et al. 2022, arXiv:2110.02861, section 2 (block-wise dynamic quantization). A scale has the sign of the
    block's largest element, whose value is then exactly 1. Values that were read are therefore stored unchanged, and
    a checkpoint in float32 restores the same codes and scales.
    """

    dtype = torch.uint8

    def allocate(self, state: State, name: str, parameter: Tensor) -> None:
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=self.dtype)  # any code: the scales are 0
            state[_scale(name)] = parameter.new_zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32)

    def read(self, state: State, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        codes = state[name].view(-1)[start:stop]
        values = _tables(name, codes.device)[0].index_select(0, codes.int())
        scales = state[_scale(name)][start // BLOCK :][: -(-len(codes) // BLOCK)]
        return (_blocks(values) * scales[:, None]).view(-1)[: len(codes)]

    def write(self, state: State, name: str, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        blocks = _blocks(values)
        scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        state[_scale(name)][start // BLOCK :][: len(blocks)].copy_(scales[:, 0])
        relative = (blocks / scales.masked_fill(scales == 0, 1)).view(-1)[: len(values)]
        _, middles, first_codes = _tables(name, values.device)
        # Bits 16 to 31 bound a value to an interval with at most one middle of neighboring values.
        codes = first_codes.index_select(0, relative.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF))
        codes += relative > middles.index_select(0, codes)
        state[name].view(-1)[start : start + len(values)].copy_(codes)


@cache
def _tables(name: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return a moment's map, the middles of neighbors in it, and the lowest code for each value of bits 16 to 31."""
    values = dynamic_map(signed=name != MOMENTS[1])
    middles = (values[1:] + values[:-1]) / 2
    upper = torch.arange(2**16)
    lowest = (upper << 16).where(upper < 2**15, (upper << 16 | 0xFFFF) - 2**32).to(torch.int32).view(torch.float32)
    codes = torch.bucketize(lowest.nan_to_num(1.0), middles, out_int32=True)
    return values.to(device), torch.cat([middles, torch.tensor([torch.inf])]).to(device), codes.to(device)


PRECISIONS: dict[str, Moments] = {"float32": Moments(), "bfloat16": Bfloat16Moments(), "int8": Int8Moments()}


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Moments:
    """Return the precision of a parameter's moments, which is float32 for optimizers of torch."""
    name = getattr(optimizer, "state_dtype", "float32")
    return PRECISIONS["float32" if name == "int8" and parameter.numel() < SMALLEST else name]


def _scale(name: str) -> str:
    return f"{name}_scale"


def _blocks(values: Tensor) -> Tensor:
    """Return flat values as blocks, the last one filled with zeros."""
    return pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of dynamic quantization in ascending order, from -1 or 0 to 1.

    Each decade from 10^-7 to 1 has twice as many values as the one below it, at the centers of equal intervals. 0 and 1
    are added. Dettmers et al. 2022, arXiv:2110.02861, section 1.3.
    """
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        centers = 10.0 ** (decade - 6) * (bounds[1:] + bounds[:-1]) / 2
        values += [centers, -centers] if signed else [centers]
    return torch.cat(values).sort().values


@dataclass(frozen=True)
class ShardElements:
    """Indices of a shard's elements in the whole flat parameter: runs of `run` elements, one every `stride`.

    >>> ShardElements(4, run=2, stride=8).indices(1, 3)  # of 4, 5, 12, 13
    tensor([ 5, 12, 13])
    """

    first: int = 0
    run: int | None = None
    """None: all elements are one run."""
    stride: int = 0

    def indices(self, start: int, count: int, device: torch.device | None = None) -> Tensor:
        """Return the indices of `count` elements of the shard, starting with its element `start`."""
        elements = torch.arange(start, start + count, device=device)
        if self.run is not None:
            elements += elements.div(self.run, rounding_mode="floor").mul_(self.stride - self.run)
        return elements.add_(self.first)


WHOLE = ShardElements()


def stochastically_rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, upward with a probability equal to the truncated fraction.

    `noise` has int32 numbers, uniform from 0 to 2^16 - 1. The result is a float32 tensor of bfloat16 values.
    """
    bits = values.view(torch.int32) + noise
    return bits.bitwise_and_(-0x10000).view(torch.float32)


def random_bits(indices: Tensor, *, step: int) -> Tensor:
    """Return 32 random bits per index, as int32, which depend only on index and step. Overwrites `indices`."""
    numbers = indices.mul_(0x9E3779B1).add_(step * 0x85EBCA77).bitwise_and_(0xFFFFFFFF)
    # Twice a multiplication modulo 2^32 and an exchange of high and low bits (Murmur3's finalizer).
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        numbers.bitwise_xor_(numbers >> 15).mul_(factor).bitwise_and_(0xFFFFFFFF)
    numbers.bitwise_xor_(numbers >> 16)
    return numbers.sub_(2**31).to(torch.int32)
