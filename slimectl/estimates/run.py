"""Description of the planned training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slimectl.layouts import ParallelLayout

Recompute = Literal["none", "selective", "full"]

# Constants of the policies, which this floor cannot import; tests/estimates/test_run.py checks that they are equal.
DENSE_SCORES = 2**26
"""Largest number of attention scores in memory at once, on a CPU in bfloat16."""
CHUNK_LOGITS = 2**23
"""Number of logits that the head computes at once."""
KEPT_LOGITS = 2**25
"""Number of log-probabilities that the head saves from forward for backward."""


@dataclass(frozen=True)
class Run:
    """Policy, ranks, dtype and batch sizes of a training step.

    A pack is the input of one forward pass: `max_tokens_per_gpu` tokens for every context-parallel rank, or one
    sequence if that is longer. `distributed_optimizer` is Megatron's; FSDP always shards.
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
        """Bytes of an element in forward and backward."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def data(self) -> int:
        """Number of data-parallel replicas of the model."""
        return self.layout.data(self.world) if self.policy == "megatron" else self.world

    @property
    def pack(self) -> int:
        """Tokens of a pack."""
        return max(self.max_tokens_per_gpu * self.layout.context, self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens of a pack on one context-parallel rank."""
        return -(-self.pack // self.layout.context)

    @property
    def responses(self) -> int:
        """Response tokens among them: those of the head."""
        return round(self.tokens * self.response_share)

    def holds_scores(self, heads: int) -> bool:
        """Whether the policy's attention keeps its scores in memory, because flash attention is slow."""
        sequences = max(1, self.pack // self.seq_len)
        scores = sequences * heads * self.seq_len**2
        return self.device == "cpu" and self.bytes == 2 and scores <= DENSE_SCORES
