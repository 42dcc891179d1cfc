"""Gated delta nets (Qwen3-Next, Qwen3.5) over packed sequences, in plain torch.

Yang et al. 2024, arXiv:2412.06464. T tokens · H value heads of this tensor-parallel rank · V value width · W channels
S taps of a convolution, or tokens of the whole row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from slimectl.algorithms.gated_delta import Chunks, causal_convolution, gated_delta_rule, l2_normalize
from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.norms import RMSNorm


class PlainRMSNorm(RMSNorm):
    """RMSNorm with a plain weight, in a model whose other norms add 1 to theirs (zero-centered gamma)."""

    zero_centered = False


class PackedDeltaNet(GatedDeltaNet):
    """mcore's gated delta net with the same parameters and checkpoints.

    mcore's own (0.16.1) does not support packed sequences, and needs flash-linear-attention for its computation.
    Under context parallelism each rank computes a part of the heads over whole sequences, because a head's state passes
    through all of their tokens.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [T, 1, hidden] (sharded under sequence parallelism) to the same shape. Also returns the bias to add."""
        projected, _bias = self.in_proj(hidden_states)
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        heads = self.num_value_heads // self.tp_size
        qkv, z, beta, alpha = projected.squeeze(1).split([2 * keys + values, values, heads, heads], dim=-1)
        kernel, decay_log, decay_bias = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
        if packed_seq_params.context == 1:
            output_THV = self._over_sequences(qkv, beta, alpha, kernel, decay_log, decay_bias, packed_seq_params)
        else:
            widths = [keys, keys, values]
            *projections, beta, alpha = to_heads([*qkv.split(widths, dim=-1), beta, alpha], packed_seq_params)
            *kernels, decay_log, decay_bias = (
                weight.chunk(packed_seq_params.context)[packed_seq_params.rank]
                for weight in (*kernel.split(widths), decay_log, decay_bias)
            )
            output_SHV = self._over_sequences(
                torch.cat(projections, dim=-1), beta, alpha, torch.cat(kernels), decay_log, decay_bias,
                packed_seq_params,
            )  # fmt: skip
            output_THV = to_tokens(output_SHV, packed_seq_params)
        gate_THV = F.silu(z.unflatten(-1, (heads, -1)).float())
        output_THV = self.out_norm(output_THV.to(hidden_states.dtype)) * gate_THV
        return self.out_proj(output_THV.to(hidden_states.dtype).flatten(1)[:, None])

    def _over_sequences(
        self,
        qkv: Tensor,
        beta: Tensor,
        alpha: Tensor,
        kernel: Tensor,
        decay_log: Tensor,
        decay_bias: Tensor,
        packed: PackedSequences,
    ) -> Tensor:
        """Compute heads over whole sequences: convolution, norms and delta rule. Returns [T, H, V], float32.

        `qkv` has the projections of these heads [T, W], `beta` and `alpha` are per head [T, H]. `kernel` belongs to the
        convolution [W, S]. `decay_log` and `decay_bias` are the logarithm of the decay and its bias [H].
        """
        positions_T = packed.positions_T if packed.context == 1 else _row_positions(packed)
        convolved = causal_convolution(qkv, kernel, positions_T)
        keys, values = (size * beta.shape[-1] // self.num_value_heads for size in (self.qk_dim, self.v_dim))
        query, key, value = F.silu(convolved).split([keys, keys, values], dim=-1)
        share = self.num_value_heads // self.num_key_heads
        query, key = (
            l2_normalize(part.unflatten(-1, (-1, self.key_head_dim)).float()).repeat_interleave(share, dim=1)
            for part in (query, key)
        )
        decay_TH = -decay_log.float().exp() * F.softplus(alpha.float() + decay_bias)
        if "chunks" not in packed.cache:
            packed.cache["chunks"] = Chunks(packed.lengths, query.device)
        output_THV, _ = gated_delta_rule(
            query * self.key_head_dim**-0.5, key, value.unflatten(-1, (beta.shape[-1], -1)).float(), decay_TH,
            beta.sigmoid().float(), packed.cache["chunks"],
        )  # fmt: skip
        return output_THV


def to_heads(parts: Sequence[Tensor], packed: PackedSequences) -> list[Tensor]:
    """Exchange all heads [T, …] of this rank's tokens for this rank's heads [S, …] of all tokens, in row order.

    The columns of each part are divided evenly among heads. Context-parallel rank r gets block r.
    """
    blocks = [torch.cat(columns, dim=-1) for columns in zip(*(p.chunk(packed.context, -1) for p in parts), strict=True)]
    by_rank = all_to_all(parallel_state.get_context_parallel_group(), torch.cat(blocks))
    widths = [part.shape[-1] // packed.context for part in parts]
    return list(by_rank[packed.order_S].split(widths, dim=-1))


def to_tokens(heads_SHV: Tensor, packed: PackedSequences) -> Tensor:
    """Exchange this rank's heads of all tokens for all heads [T, H, V] of its tokens: the reverse of `to_heads`."""
    by_rank = torch.empty_like(packed.order_S)
    by_rank[packed.order_S] = torch.arange(len(by_rank), device=by_rank.device)
    exchanged = all_to_all(parallel_state.get_context_parallel_group(), heads_SHV[by_rank].contiguous())
    return torch.cat(exchanged.chunk(packed.context), dim=1)


def _row_positions(packed: PackedSequences) -> Tensor:
    """Return the position of each token of the whole row [S] in its sequence."""
    if "row_positions" not in packed.cache:
        ranges = [torch.arange(length) for length in packed.lengths]
        packed.cache["row_positions"] = torch.cat(ranges).to(packed.order_S.device)
    return packed.cache["row_positions"]
