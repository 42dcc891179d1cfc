"""mcore's GPTModel over packed sequences, from an architecture; one chunk per virtual pipeline stage.

T tokens of this rank · H hidden width · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from slimectl.layouts import ParallelLayout
from slimectl.policies.megatron.config import Recompute, transformer_config
from slimectl.policies.megatron.packed import PackedSequences
from slimectl.policies.megatron.rotary import Rotary
from slimectl.policies.megatron.spec import block_spec
from slimectl.weights.architecture import Architecture


class PackedGPT(GPTModel):
    """GPTModel that returns hidden states: the caller applies the head, to few of the tokens.

    Its parameters, and so its checkpoints, are those of GPTModel.
    """

    def __init__(self, architecture: Architecture, config: Any, *, vocab_size: int, virtual_stage: int | None) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(architecture, config, virtual_stage=virtual_stage),
            vocab_size=vocab_size,
            max_sequence_length=architecture.max_positions,
            pre_process=_is_first(virtual_stage),
            post_process=_is_last(virtual_stage),
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        head_dim = config.qk_pos_emb_head_dim if architecture.mla else config.kv_channels
        self.rotary = Rotary(
            architecture.rope, head_dim=head_dim, max_positions=architecture.max_positions, device=device()
        )

    def forward(self, tokens_T: Tensor | None, packed: PackedSequences) -> Tensor:
        """Hidden states of the rank's tokens, [T, 1, H].

        `tokens_T` are the tokens at `packed.index_T`, None except on the first stage. On the last stage the final norm
        is applied; under tensor parallelism each rank returns its part of the tokens (T / tensor rows).
        """
        packed.angles = self.rotary(packed.positions_T)
        return super().forward(
            input_ids=None if tokens_T is None else tokens_T[None],
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed,
            padding_mask=self._padding(packed) if self.config.num_moe_experts else None,
        )

    def _padding(self, packed: PackedSequences) -> Tensor:
        """Padding mask for the routers' token counts, [1, T].

        mcore (0.16.1) splits it for sequence parallelism on the first pipeline stage only.
        """
        padding_1T = packed.padding_T[None]
        if self.pre_process or not self.config.sequence_parallel:
            return padding_1T
        group = self.pg_collection.tp
        return padding_1T.chunk(group.size(), dim=1)[group.rank()]

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> nn.Parameter:
        """Rows of the head on this tensor-parallel rank, [V / tensor, H]; the embedding if they are tied.

        On the last stage only. In a pipeline of several stages a tied head is the last stage's copy of the embedding
        (`output_layer.weight`), whose gradient mcore adds to the first stage's.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def device() -> torch.device:
    """Device of the models: the current GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def padded_vocabulary(architecture: Architecture, layout: ParallelLayout) -> int:
    """Rows of embedding and head: the vocabulary size, rounded up to a multiple of the tensor-parallel size."""
    return -(-architecture.vocab_size // layout.tensor) * layout.tensor


Provide = Callable[..., PackedGPT]
"""(build, pre_process, post_process, vp_stage) -> a chunk of the model; `build()` returns the default one."""


def build(
    architecture: Architecture,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    args: Mapping[str, Any] | None = None,
    recompute: Recompute | None = None,
    provide: Provide | None = None,
    **fields: Any,
) -> list[PackedGPT]:
    """Build this rank's chunks of the model, one per virtual pipeline stage; matrices are uninitialized.

    Call `parallel.start(layout, …)` first. `provide` replaces the construction of a chunk. Raises SettingsError for a
    configuration that megatron-core refuses.
    """
    config = transformer_config(architecture, layout, dtype=dtype, args=args, recompute=recompute, **fields)
    vocab_size = padded_vocabulary(architecture, layout)
    stages: list[int | None] = list(range(layout.virtual_pipeline)) if layout.virtual_pipeline else [None]
    chunks = []
    for stage in stages:
        make = partial(PackedGPT, architecture, config, vocab_size=vocab_size, virtual_stage=stage)
        first, last = _is_first(stage), _is_last(stage)
        chunks.append(provide(make, pre_process=first, post_process=last, vp_stage=stage) if provide else make())
    # The whole chunk is moved: mcore builds routers on the CPU and moves them when they first run.
    return [chunk.to(device()) for chunk in chunks]


def _is_first(virtual_stage: int | None) -> bool:
    return parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage)


def _is_last(virtual_stage: int | None) -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage)
