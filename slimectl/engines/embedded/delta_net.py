"""Gated delta nets: linear attention whose memory of a sequence has a fixed size (Qwen3-Next, Qwen3.5).

Yang et al. 2024, arXiv:2412.06464. N rows · B sequences · H value heads · K key width · V value width · W channels of
the convolution · S its taps · L delta nets · E hidden size · O outputs of the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.gated_delta import Chunks, gated_delta_rule, l2_normalize
from slimectl.architectures.qwen_next import Sizes
from slimectl.engines.embedded.linear import Linear
from slimectl.engines.embedded.states import SlotStates, State


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of a delta net.

    `projection` maps to query, key, value, z, beta and alpha, in the order `order_O` if its outputs are not in theirs.
    """

    sizes: Sizes
    projection: Linear
    order_O: Tensor | None
    kernel_W1S: Tensor
    decay_log_H: Tensor
    decay_bias_H: Tensor
    norm_V: Tensor
    out: Linear

    def added_to(self, stream_NE: Tensor, rows_NE: Tensor, recall: Recall, *, eps: float) -> Tensor:
        """Return stream + self(rows). `recall` computes the convolution and the delta rule over the sequences."""
        net, projected_NO = self.sizes, self.projection(rows_NE)
        if self.order_O is not None:
            projected_NO = projected_NO.index_select(1, self.order_O)
        channels = sum(net.blocks[:3])
        inputs_NW, z, beta_NH, alpha_NH = projected_NO.split([channels, *net.blocks[3:]], dim=-1)
        decay_NH = -self.decay_log_H.float().exp() * F.softplus(alpha_NH.float() + self.decay_bias_H.float())
        output_NHV = recall(self, inputs_NW, decay_NH, beta_NH.float().sigmoid())
        normed_NHV = F.rms_norm(output_NHV, self.norm_V.shape, self.norm_V.float(), eps)
        gated = normed_NHV.flatten(1) * F.silu(z.float())
        return self.out.added_to(stream_NE, gated.to(stream_NE.dtype))

    def heads(self, convolved_NW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [N, H, K], key [N, H, K] and value [N, H, V] of every value head, in float32."""
        net = self.sizes
        query, key, value = F.silu(convolved_NW).split(net.blocks[:3], dim=-1)
        share = net.value_heads // net.key_heads
        query, key = (
            l2_normalize(part.unflatten(-1, (net.key_heads, net.key_dim))).repeat_interleave(share, dim=1)
            for part in (query, key)
        )
        return query * net.key_dim**-0.5, key, value.unflatten(-1, (net.value_heads, net.value_dim))


Recall = Callable[[DeltaNet, Tensor, Tensor, Tensor], Tensor]
"""(net, inputs of its convolution [N, W], decay [N, H], beta [N, H]) -> output [N, H, V] in float32.

Must be called for every delta net of the model, in order.
"""


class PromptMemory:
    """The delta nets' pass over concatenated prompts. `before` has the state before each prompt, None at its start."""

    def __init__(self, lengths: Sequence[int], before: Sequence[State | None], device: torch.device) -> None:
        self._lengths, self._before = lengths, before
        self._chunks = Chunks(lengths, device)
        self._inputs: list[tuple[Tensor, ...]] = []
        self._memories: list[Tensor] = []

    def __call__(self, net: DeltaNet, inputs_NW: Tensor, decay_NH: Tensor, beta_NH: Tensor) -> Tensor:
        layer, taps, sizes = len(self._memories), net.kernel_W1S.shape[-1], net.sizes
        start_SW = inputs_NW.new_zeros(taps - 1, inputs_NW.shape[1])
        starts = [start_SW if state is None else state.inputs_LSW[layer] for state in self._before]
        parts = inputs_NW.split(list(self._lengths))
        padded = [torch.cat(pair) for pair in zip(starts, parts, strict=True)]
        self._inputs.append(tuple(part[len(part) - taps + 1 :] for part in padded))
        memory_HKV = decay_NH.new_zeros(sizes.value_heads, sizes.key_dim, sizes.value_dim)
        memories = [memory_HKV if state is None else state.memory_LHKV[layer] for state in self._before]
        heads = net.heads(torch.cat([_convolution(part, net) for part in padded]))
        output_NHV, after_BHKV = gated_delta_rule(*heads, decay_NH, beta_NH, self._chunks, torch.stack(memories))
        self._memories.append(after_BHKV)
        return output_NHV

    def states(self) -> list[State]:
        """Return the state after each prompt."""
        inputs = [torch.stack(layers) for layers in zip(*self._inputs, strict=True)]
        memories = [torch.stack(layers) for layers in zip(*self._memories, strict=True)]
        return [State(*parts) for parts in zip(inputs, memories, strict=True)]


def _convolution(padded_NW: Tensor, net: DeltaNet) -> Tensor:
    """Convolve one sequence, which begins with the inputs before it. Returns float32."""
    convolved = F.conv1d(padded_NW.float().T, net.kernel_W1S.float(), groups=padded_NW.shape[1])
    return convolved.T


class StepMemory:
    """The delta nets' pass over one new token for each of the first B slots, whose states it updates."""

    def __init__(self, states: SlotStates) -> None:
        self._states = states
        self._layer = 0

    def __call__(self, net: DeltaNet, inputs_BW: Tensor, decay_BH: Tensor, beta_BH: Tensor) -> Tensor:
        rows, layer, sizes = inputs_BW.shape[0], self._layer, net.sizes
        self._layer += 1
        earlier_BSW = self._states.inputs[layer, :rows]
        window_BSW = torch.cat((earlier_BSW, inputs_BW[:, None]), 1)
        earlier_BSW.copy_(window_BSW[:, 1:])
        query, key, value = net.heads(torch.einsum("bsw,ws->bw", window_BSW.float(), net.kernel_W1S[:, 0].float()))
        memory_XKV = self._states.memory[layer, :rows].flatten(0, 1)  # X is B times H
        decay_X11 = decay_BH.exp().view(-1, 1, 1)
        # One product reads the memory for key and query. o = q' S_t = e^g q' S_(t-1) + q' k delta.
        read = torch.bmm(torch.stack((key, query), 2).flatten(0, 1), memory_XKV).mul_(decay_X11)
        read = read.view(rows, sizes.value_heads, 2, sizes.value_dim)
        delta_BHV = (value - read[:, :, 0]) * beta_BH[..., None]
        memory_XKV.mul_(decay_X11).baddbmm_(key.flatten(0, 1)[..., None], delta_BHV.flatten(0, 1)[:, None])
        return read[:, :, 1] + (query * key).sum(-1, keepdim=True) * delta_BHV
