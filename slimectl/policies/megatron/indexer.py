"""DeepSeek sparse attention (GLM-5): an indexer chooses the keys that every query attends to.

DeepSeek-V3.2, arXiv:2512.02556. T tokens · N tokens of this sequence-parallel rank · H heads of the indexer · D their
width · R width of the query latent · B sequences of one call · L their length · S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from slimectl.policies.megatron.attention import AttentionCall, calls_of, keys_of
from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.rotary import Angles, rotated

CHUNK = 128
"""Queries whose scores [B, queries, H, S] are in memory at once."""
NORM_EPSILON = 1e-6


class IndexerLinear(nn.Module):
    """A replicated weight without gradient."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__()
        self.weight = _frozen((outputs, inputs), config)

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight)


class IndexerNorm(nn.Module):
    """LayerNorm without gradient."""

    def __init__(self, width: int, config: Any) -> None:
        super().__init__()
        self.weight, self.bias = _frozen((width,), config), _frozen((width,), config)

    def forward(self, states: Tensor) -> Tensor:
        return F.layer_norm(states, self.weight.shape, self.weight, self.bias, NORM_EPSILON)


class Indexer(nn.Module):
    """Chooses `dsa_indexer_topk` keys for each query, with the parameter names of mcore's DSAIndexer.

    The choice has no gradient, so these weights are not trained, as in the Hugging Face model. mcore's own module
    (0.16.1) does not support packing. Its configuration rejects context parallelism.
    """

    def __init__(self, config: Any, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        self.heads, self.width = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.linear_wq_b = IndexerLinear(config.q_lora_rank, self.heads * self.width, config)
        self.linear_wk = IndexerLinear(config.hidden_size, self.width, config)
        self.k_norm = IndexerNorm(self.width, config)
        self.linear_weights_proj = IndexerLinear(config.hidden_size, self.heads, config)

    @torch.no_grad()
    def forward(self, hidden_N1H: Tensor, latent_N1R: Tensor, packed: PackedSequences) -> list[Tensor | None]:
        """Return for each attention call an additive mask [B, 1, L, S], or None if it has no more keys than chosen."""
        calls, topk = list(calls_of(packed)), self.config.dsa_indexer_topk
        counts = [keys_of(packed.positions_T[:, None, None], call).shape[1] for call in calls]
        if max(counts) <= topk:
            return [None] * len(calls)
        query_THD, key_T1D, weights_TH = self._projections(hidden_N1H, latent_N1R, packed)
        sizes = [call.queries.stop - call.queries.start for call in calls]
        parts = zip(calls, query_THD.split(sizes), weights_TH.split(sizes), strict=True)
        dtype = hidden_N1H.dtype
        return [self._mask(call, query, weights, key_T1D, dtype) for call, query, weights in parts]

    def _projections(self, hidden: Tensor, latent: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D] and keys [T, 1, D] of the indexer, rotated, and the weights of its heads [T, H]."""
        parts = self.linear_wq_b(latent), self.k_norm(self.linear_wk(hidden)), self.linear_weights_proj(hidden)
        if self.config.sequence_parallel:
            parts = tuple(gather_from_sequence_parallel_region(part, group=self.groups.tp) for part in parts)
        query, key, weights = (part.squeeze(1) for part in parts)
        assert packed.angles is not None
        # Halves are paired here, unlike in the attention itself.
        angles = Angles(packed.angles.cos, packed.angles.sin, interleaved=False)
        query_THD, key_T1D = query.unflatten(-1, (self.heads, -1)), key[:, None]
        return rotated(query_THD, angles), rotated(key_T1D, angles), weights.float() * self.heads**-0.5

    def _mask(
        self, call: AttentionCall, query: Tensor, weights: Tensor, key_T1D: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        key_BSD = keys_of(key_T1D, call)[:, :, 0].float()
        if key_BSD.shape[1] <= self.config.dsa_indexer_topk:
            return None
        query_BLHD, weights_BLH = (part.unflatten(0, (call.count, -1)) for part in (query.float(), weights))
        return torch.cat(list(self._chunks(query_BLHD, weights_BLH, key_BSD, dtype)), dim=1)[:, None]

    def _chunks(self, query_BLHD: Tensor, weights_BLH: Tensor, key_BSD: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield masks of consecutive queries. Keys after a query are hidden, even if too few others can be chosen."""
        queries, keys = query_BLHD.shape[1], key_BSD.shape[1]
        for start in range(0, queries, CHUNK):
            chunk = slice(start, min(start + CHUNK, queries))
            scores = torch.einsum("blhd,bsd->blhs", query_BLHD[:, chunk], key_BSD) * self.width**-0.5
            scores_BLS = torch.einsum("blhs,blh->bls", F.relu(scores), weights_BLH[:, chunk])
            places_L = torch.arange(keys - queries, keys, device=key_BSD.device)[chunk]
            future_LS = torch.arange(keys, device=key_BSD.device) > places_L[:, None]
            best_BLK = scores_BLS.masked_fill(future_LS, -torch.inf).topk(self.config.dsa_indexer_topk, dim=-1).indices
            mask_BLS = torch.full_like(scores_BLS, -torch.inf, dtype=dtype).scatter_(-1, best_BLK, 0.0)
            yield mask_BLS.masked_fill_(future_LS, -torch.inf)


def _frozen(shape: tuple[int, ...], config: Any) -> nn.Parameter:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device), requires_grad=False)
