"""AdamW with both moments in bfloat16, which are rounded stochastically: half the memory of float32 moments.

DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) keeps both moments in bfloat16. Rounded to the nearest value the second
one stands still once its change of (1 - beta2) is below half a unit in its last place, 2^-9: at beta2 = 0.999 it would
stop at once. Stochastic rounding (Gupta et al. 2015, arXiv:1502.02551) is right on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Elements that are updated at once, with about eight temporaries of float32: on a CPU they fit into its cache."""


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
        """Return the indices of `count` elements of the shard, from its element `start` on."""
        elements = torch.arange(start, start + count, device=device)
        if self.run is not None:
            elements += elements.div(self.run, rounding_mode="floor").mul_(self.stride - self.run)
        return elements.add_(self.first)


WHOLE = ShardElements()


class Bfloat16AdamW(torch.optim.AdamW):
    """AdamW on float32 parameters; the update itself is computed in float32, from the moments before rounding.

    The noise of an element is a function of its index in the whole parameter and of the step, so that shards of a
    parameter get the numbers of the whole one, and a resumed run those of an undisturbed one. `shards` says which
    elements a tensor has, if it is not a whole parameter.
    """

    moment_dtype = torch.bfloat16

    def __init__(
        self, params: Iterable[Any], *, shards: Mapping[Tensor, ShardElements] | None = None, **options: Any
    ) -> None:
        super().__init__(params, **options)
        self.shards = dict(shards or {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        for name in ("exp_avg", "exp_avg_sq"):
            moment = state.get(name)
            dtype = self.moment_dtype
            state[name] = torch.zeros_like(parameter, dtype=dtype) if moment is None else moment.to(dtype)
        state["step"] += 1
        step, shard, size = int(state["step"]), self.shards.get(parameter, WHOLE), CHUNK[parameter.device.type]
        tensors = [tensor.view(-1).split(size) for tensor in (parameter, gradient, *_moments(state))]
        for i, (weights, gradients, exp_avg, exp_avg_sq) in enumerate(zip(*tensors, strict=True)):
            first, second = exp_avg.float(), exp_avg_sq.float()
            _adamw(weights, gradients.float(), first, second, group, step)
            noise = _noise(shard.indices(i * size, len(weights), weights.device), step=step)
            exp_avg.copy_(stochastically_rounded(first, noise & 0xFFFF))
            exp_avg_sq.copy_(stochastically_rounded(second, noise >> 16 & 0xFFFF))


def _moments(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def _adamw(weights: Tensor, gradients: Tensor, first: Tensor, second: Tensor, group: dict[str, Any], step: int) -> None:
    """Update weights and moments in place.

    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, with torch's decay of lr times weight_decay.
    """
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    first.lerp_(gradients, 1 - beta1)
    second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    denominator = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weights.mul_(1 - lr * group["weight_decay"]).addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


def stochastically_rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the probability of the part that is cut off.

    `noise` are int32 numbers, uniform from 0 to 2^16 - 1; the result is a float32 tensor of bfloat16 values.
    """
    bits = values.view(torch.int32) + noise
    return bits.bitwise_and_(-0x10000).view(torch.float32)


def _noise(indices: Tensor, *, step: int) -> Tensor:
    """32 random bits for each index, as int32; the same for the same index and step. Overwrites `indices`."""
    numbers = indices.mul_(0x9E3779B1).add_(step * 0x85EBCA77).bitwise_and_(0xFFFFFFFF)
    # Twice a multiplication modulo 2^32 and an exchange of high and low bits (Murmur3's finalizer).
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        numbers.bitwise_xor_(numbers >> 15).mul_(factor).bitwise_and_(0xFFFFFFFF)
    numbers.bitwise_xor_(numbers >> 16)
    return numbers.sub_(2**31).to(torch.int32)
