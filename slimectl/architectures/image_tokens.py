"""Tokens of images in a sequence: where they stand, and the rotary positions of all tokens around them.

T tokens of a sequence · an image is a grid of patches, of which `merge` by `merge` make one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimectl.errors import RecordError

if TYPE_CHECKING:  # commands that grade samples read records with images, without numpy
    import numpy as np

Grid = tuple[int, int, int]
"""Patches of an image along time, height and width; a still image has one along time."""

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""Values of model_type whose images are read."""


@dataclass(frozen=True)
class ImageTokens:
    """How a model family represents images: the id of its placeholder token, and patches per token and side."""

    token: int
    merge: int

    @classmethod
    def of(cls, config: Any) -> ImageTokens | None:
        """Return that of a Hugging Face configuration (an object); None for a model that reads no images."""
        if config.model_type not in MODEL_TYPES:
            return None
        return cls(int(config.image_token_id), int(config.vision_config.spatial_merge_size))

    def count(self, grid: Grid) -> int:
        """Return the number of tokens of an image.

        >>> ImageTokens(token=261, merge=2).count((1, 4, 6))
        6
        """
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def spans(self, tokens: Sequence[int], grids: Sequence[Grid]) -> list[tuple[int, int]]:
        """Return start and end of every image in `tokens`, in their order.

        Later placeholders are ordinary tokens: a model may sample one. Raises RecordError if tokens and images differ,
        also where the last image is smaller than its places.

        >>> ImageTokens(token=9, merge=2).spans([1, 9, 9, 2, 9], [(1, 2, 4)])
        [(1, 3)]
        """
        spans, end = list[tuple[int, int]](), 0
        for number, grid in enumerate(grids):
            count = self.count(grid)
            start = next((i for i in range(end, len(tokens)) if tokens[i] == self.token), None)
            following = None if start is None else next(iter(tokens[start + count : start + count + 1]), None)
            is_smaller = following == self.token and number == len(grids) - 1
            if start is None or is_smaller or any(token != self.token for token in tokens[start : start + count]):
                raise RecordError(
                    f"image {number} is {count} tokens for this model, and the tokens have another number of places"
                    " for it: they were made by another image processor; sample them anew"
                )
            end = start + count
            if end > len(tokens):
                raise RecordError(f"image {number} is {count} tokens, and the tokens end within it; sample them anew")
            spans.append((start, end))
        return spans

    def positions(self, length: int, spans: Sequence[tuple[int, int]], grids: Sequence[Grid]) -> np.ndarray:
        """Return rotary positions [3, T]: time, height and width of each token of an image, one number for text.

        Wang et al. 2024, arXiv:2409.12191, section 2.1: an image takes as many positions as its longer side has
        tokens, and text goes on behind them.

        >>> ImageTokens(token=9, merge=2).positions(7, [(1, 5)], [(1, 4, 4)]).tolist()
        [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
        """
        import numpy as np

        pieces, end, position = [], 0, 0
        for (start, stop), (frames, height, width) in zip(spans, grids, strict=True):
            pieces.append(np.tile(np.arange(position, position + start - end), (3, 1)))
            position += start - end
            rows, columns = height // self.merge, width // self.merge
            pieces.append(np.indices((frames, rows, columns)).reshape(3, -1) + position)
            position += max(rows, columns)
            end = stop
        pieces.append(np.tile(np.arange(position, position + length - end), (3, 1)))
        return np.concatenate(pieces, axis=1)
