"""Multi-head latent attention (DeepSeek-V2 and later): queries, keys and values through low-rank projections.

T tokens · N tokens of this sequence-parallel rank · H heads of this tensor-parallel rank · R latent width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from slimectl.policies.megatron.attention import PackedCoreAttention, recomputable
from slimectl.policies.megatron.batch import PackedSequences
from slimectl.policies.megatron.indexer import Indexer
from slimectl.policies.megatron.norms import RMSNorm
from slimectl.policies.megatron.rotary import rotated


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank replicates, applied to the rank's part of the tokens."""

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight)


class LatentAttention(MegatronModule):
    """mcore's MLASelfAttention with the same parameter names and replicated down-projections.

    mcore's own (0.16.1, without TransformerEngine) shards them, and with tensor parallelism silently loses a part of
    the gradient of the rotary key.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        norm_epsilon: float | None = None,
        selecting_layer: int | None = None,
        **_: Any,
    ) -> None:
        """`selecting_layer` is the number of the layer whose indexer chooses the keys of this one."""
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.heads = config.num_attention_heads // self.tp_group.size()
        self.query_width = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.checkpoint_core_attention = (
            config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        )
        H, hidden = config.num_attention_heads, config.hidden_size
        eps = norm_epsilon or config.layernorm_epsilon
        if config.q_lora_rank:
            self.linear_q_down_proj = ReplicatedLinear(hidden, config.q_lora_rank, config)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, eps=eps)
            self.linear_q_up_proj = self._column(config.q_lora_rank, H * self.query_width)
        else:
            self.linear_q_proj = self._column(hidden, H * self.query_width)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, eps=eps)
        self.linear_kv_up_proj = self._column(config.kv_lora_rank, H * (config.qk_head_dim + config.v_head_dim))
        self.core_attention = PackedCoreAttention(
            config, softmax_scale=config.softmax_scale, pg_collection=pg_collection
        )
        self.core_attention.selecting_layer = selecting_layer
        if selecting_layer == layer_number:
            self.core_attention.indexer = Indexer(config, pg_collection)
        self.linear_proj = RowParallelLinear(
            H * config.v_head_dim, hidden, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True, tp_group=self.tp_group,
        )  # fmt: skip

    def _column(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs, outputs, config=self.config, init_method=self.config.init_method, bias=False,
            gather_output=False, skip_bias_add=False, tp_group=self.tp_group,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[Tensor, None]:
        """Map [N, 1, hidden] to the same shape. Also returns None for the bias that mcore expects."""
        config, angles = self.config, packed_seq_params.angles
        assert angles is not None
        query_THD = self._query(hidden_states, packed_seq_params).squeeze(1).unflatten(-1, (self.heads, -1))
        latent, rotary_key = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        if config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.tp_group)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key, value_THV = (
            up.squeeze(1).unflatten(-1, (self.heads, -1)).split([config.qk_head_dim, config.v_head_dim], -1)
        )
        plain, rotary = query_THD.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        shared_key = rotated(rotary_key, angles).expand(-1, self.heads, -1)
        query_THD = torch.cat([plain, rotated(rotary, angles)], dim=-1)
        key_THD = torch.cat([key, shared_key], dim=-1)
        output_TW = recomputable(self, query_THD, key_THD, value_THV, packed_seq_params)
        output, _ = self.linear_proj(output_TW[:, None])
        return output, None

    def _query(self, hidden_states: Tensor, packed: PackedSequences) -> Tensor:
        if self.config.q_lora_rank:
            latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            if hasattr(self.core_attention, "indexer"):
                indexer: Any = self.core_attention.indexer
                packed.selections[self.layer_number] = indexer(hidden_states, latent, packed)
            query, _ = self.linear_q_up_proj(latent)
        else:
            query, _ = self.linear_q_proj(hidden_states)
        return query
