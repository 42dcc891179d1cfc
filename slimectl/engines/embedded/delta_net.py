"""Gated delta nets: linear attention whose memory of a sequence has a fixed size (Qwen3-Next, Qwen3.5).

Yang et al. 2024, arXiv:2412.06464. N rows · B sequences · H value heads · K key width · V value width · W channels of
the convolution · S its taps · L delta nets · E hidden size · O outputs of the projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.gated_delta import Chunks, gated_delta_rule, l2_normalize
from slimectl.architectures.qwen_next import Sizes
from slimectl.engines.embedded.linear import Linear
from slimectl.engines.embedded.native import DeltaWeights, Kernels
from slimectl.engines.embedded.states import SlotStates


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The weights of a delta net.

    `projection` maps to query, key, value, z, beta and alpha, in the order `order_O` if its outputs are not in theirs.
    """

    sizes: Sizes
    projection: Linear
    order_O: Tensor | None
    weights: DeltaWeights
    out: Linear

    @property
    def taps(self) -> int:
        return self.weights.kernel_W1S.shape[-1]

    def added_to(self, stream_NE: Tensor, rows_NE: Tensor, recall: Recall) -> Tensor:
        """Return stream + self(rows). `recall` computes what is between the projections."""
        projected_NO = self.projection(rows_NE)
        if self.order_O is not None:
            projected_NO = projected_NO.index_select(1, self.order_O)
        return self.out.added_to(stream_NE, recall(self, projected_NO))

    def split(self, projected_NO: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs of the convolution [N, W], z [N, H * V], decay [N, H] and beta [N, H]."""
        net, weights = self.sizes, self.weights
        inputs_NW, z, beta_NH, alpha_NH = projected_NO.split([sum(net.blocks[:3]), *net.blocks[3:]], dim=-1)
        rate_NH = F.softplus(alpha_NH.float() + weights.decay_bias_H.float())
        return inputs_NW, z, -weights.decay_log_H.float().exp() * rate_NH, beta_NH.float().sigmoid()

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

    def gated(self, output_NHV: Tensor, z: Tensor) -> Tensor:
        """Return the normalized outputs times silu(z) [N, H * V], in the dtype of z."""
        norm_V = self.weights.norm_V.float()
        normed_NHV = F.rms_norm(output_NHV, norm_V.shape, norm_V, self.weights.eps)
        return (normed_NHV.flatten(1) * F.silu(z.float())).to(z.dtype)


class Recall:
    """The delta nets' pass over new tokens of the sequences in the first slots of `states`, which it updates.

    `lengths` counts the new tokens of each sequence. If `kernels` are given, they compute heads of suitable widths.
    Call it for every delta net of the model, in order.
    """

    def __init__(self, states: SlotStates, lengths: Sequence[int], kernels: Kernels | None) -> None:
        self._states, self._lengths, self._kernels = states, list(lengths), kernels
        self._ends = list(accumulate(lengths))
        self._layer = 0

    def __call__(self, net: DeltaNet, projected_NO: Tensor) -> Tensor:
        """Return the normalized and gated outputs [N, H * V] of projected rows [N, O]."""
        layer, batch, sizes = self._layer, len(self._lengths), net.sizes
        self._layer += 1
        earlier_BSW, memory_BHKV = self._states.inputs[layer, :batch], self._states.memory[layer, :batch]
        if self._kernels is not None and sizes.key_dim % 16 == sizes.value_dim % 16 == 0:
            return self._kernels.delta_net(projected_NO, self._ends, net.weights, earlier_BSW, memory_BHKV)
        inputs_NW, z, decay_NH, beta_NH = net.split(projected_NO)
        if len(projected_NO) == batch:
            window_BSW = torch.cat((earlier_BSW, inputs_NW[:, None]), 1)
            earlier_BSW.copy_(window_BSW[:, 1:])
            heads = net.heads(torch.einsum("bsw,ws->bw", window_BSW.float(), net.weights.kernel_W1S[:, 0].float()))
            return net.gated(_stepped(*heads, decay_NH.exp(), beta_NH, memory_BHKV), z)
        windows = map(torch.cat, zip(earlier_BSW, inputs_NW.split(self._lengths), strict=True))
        convolved = []
        for earlier_SW, window in zip(earlier_BSW, windows, strict=True):
            convolved.append(F.conv1d(window.float().T, net.weights.kernel_W1S.float(), groups=window.shape[1]).T)
            earlier_SW.copy_(window[len(convolved[-1]) :])
        heads = net.heads(torch.cat(convolved))
        output_NHV, after_BHKV = gated_delta_rule(*heads, decay_NH, beta_NH, self._chunks, memory_BHKV)
        memory_BHKV.copy_(after_BHKV)
        return net.gated(output_NHV, z)

    @cached_property
    def _chunks(self) -> Chunks:
        return Chunks(self._lengths, self._states.memory.device)


def _stepped(
    query: Tensor, key: Tensor, value: Tensor, decay_BH: Tensor, beta_BH: Tensor, memory_BHKV: Tensor
) -> Tensor:
    """Apply the delta rule to one token of each sequence. Return the outputs [B, H, V], and update the memories.

    `decay_BH` is the e^g of `gated_delta_rule`. One product reads a memory for key and query, because
    q' S_t = e^g q' S_(t-1) + q' k delta.
    """
    memory_XKV, decay_X11 = memory_BHKV.flatten(0, 1), decay_BH.reshape(-1, 1, 1)  # X is B times H
    read_X2V = torch.bmm(torch.stack((key, query), 2).flatten(0, 1), memory_XKV).mul_(decay_X11)
    by_key, by_query = read_X2V.view(*value.shape[:2], 2, -1).unbind(2)
    delta_BHV = (value - by_key) * beta_BH[..., None]
    memory_XKV.mul_(decay_X11).baddbmm_(key.flatten(0, 1)[..., None], delta_BHV.flatten(0, 1)[:, None])
    return by_query + (query * key).sum(-1, keepdim=True) * delta_BHV
