"""What the engine and its runner need of a model: `EngineModel`, or any other with this interface.

B sequences · V vocabulary · L layers · k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from slimectl.engines.embedded.model import Inputs, Prefix
    from slimectl.engines.embedded.pictures import Pictures
    from slimectl.engines.embedded.prefix_tree import Node, PrefixTree
    from slimectl.engines.embedded.token_scores import TokenScores
    from slimectl.engines.embedded.weight_loader import WeightStore


class SequenceModel(Protocol):
    """Weights and forward passes over prompts, over running sequences and over given texts.

    `new_cache` returns the cache of the running sequences, one slot each. Its methods are those of `kv_cache.Cache`
    that the runner calls: `reserve`, `put`, `put_state`, `move` and, for prompts up to `reusable_tokens`, `copy` and
    `state`. `put` takes the `keys_values` of a Prefix.
    """

    @property
    def weights(self) -> WeightStore: ...

    @property
    def vocabulary(self) -> int:
        """Number of tokens for which the model has logits."""
        ...

    @property
    def expert_choices(self) -> int:
        """Number of experts per token that the model reports. 0 in a dense model."""
        ...

    @property
    def pictures(self) -> Pictures | None:
        """The vision tower. None if the model does not read images."""
        ...

    @property
    def reusable_tokens(self) -> float:
        """Maximum prompt length at which prompts can share keys and values. 0: they never do."""
        ...

    def new_cache(self) -> Any:
        """Create an empty cache of running sequences."""
        ...

    def new_tree(self, capacity: int) -> PrefixTree:
        """Create a prefix tree of at most `capacity` bytes."""
        ...

    def prefill(self, prompts: list[tuple[int, ...]], nodes: Sequence[Node | None]) -> list[Prefix]:
        """Compute prompts, each starting after its node of the prefix tree."""
        ...

    def padded_rows(self, rows: int) -> int:
        """Return the cheapest number of rows for a step of at least `rows` rows."""
        ...

    def decode(self, inputs: Inputs, cache: Any, *, rows: int) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, V] after one more token in each of the first B slots, and the tokens' experts [B, L, k]."""
        ...

    def sequence_scores(self, sequences: list[tuple[int, ...]], starts: list[int], *, top: int) -> list[TokenScores]:
        """Score the tokens after position `start` of each sequence, with the `top` likeliest at each."""
        ...
