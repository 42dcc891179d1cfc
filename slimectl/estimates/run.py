"""The training step that is planned for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slimectl.layouts import ParallelLayout

Recompute = Literal["none", "selective", "full"]

# Constants of the policies, which this floor cannot import; tests/estimates/test_run.py holds them equal.
DENSE_SCORES = 2**26
"""Most attention scores that are held in memory at once, on a CPU in bfloat16."""
CHUNK_LOGITS = 2**23
"""Logits that the head computes at once."""
KEPT_LOGITS = 2**25
"""Log-probabilities that the head keeps from forward for backward."""


@dataclass(frozen=True)
class Run:
    """Who trains, in what, and how much at a time.

    A pack is what one forward pass takes: `max_tokens_per_gpu` tokens for every context-parallel rank, or one sequence
    where that is longer. `distributed_optimizer` is Megatron's; FSDP always shards.
    """

    world: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    policy: Literal["fsdp", "megatron"] = "megatron"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: Recompute = "none"
    seq_len: int = 8192
    max_tokens_per_gpu: int = 8192
    response_share: float = 1.0
    device: Literal["cpu", "cuda"] = "cuda"
    distributed_optimizer: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of a number that forward and backward compute with."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def data(self) -> int:
        """Copies of the model that work on different packs."""
        return self.layout.data(self.world) if self.policy == "megatron" else self.world

    @property
    def pack(self) -> int:
        """Tokens of a pack."""
        return max(self.max_tokens_per_gpu * self.layout.context, self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens of a pack that one rank holds between its matrices' parts."""
        return -(-self.pack // self.layout.context)

    @property
    def responses(self) -> int:
        """Tokens of those that the head is asked about."""
        return round(self.tokens * self.response_share)

    def holds_scores(self, heads: int) -> bool:
        """Whether the policy's attention keeps its scores: where flash attention is slow."""
        sequences = max(1, self.pack // self.seq_len)
        scores = sequences * heads * self.seq_len**2
        return self.device == "cpu" and self.bytes == 2 and scores <= DENSE_SCORES
