"""Tokens of images in a sequence: their spans, and the rotary positions of all tokens.

T tokens of a sequence · an image is a grid of patches, and `merge` x `merge` patches make one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimectl.architectures.registry import FAMILIES
from slimectl.errors import RecordError

if TYPE_CHECKING:  # commands that grade samples read records with images and do not need numpy
    import numpy as np

Grid = tuple[int, int, int]
"""Patches of an image along time, height and width. A still image has one along time."""

MODEL_TYPES = tuple(name for name, family in FAMILIES.items() if family.tower is not None)
"""Values of model_type that support images."""


@dataclass(frozen=True)
class ImageTokens:
    """Image representation of a model family: the id of its placeholder token, and patches per token and side."""

    token: int
    merge: int

    @classmethod
    def of(cls, config: Any) -> ImageTokens | None:
        """Return the image tokens of a Hugging Face configuration (an object), or None for a model without images."""
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
        """Return start and end of every image in `tokens`, in order.

        Placeholders after the last image are ordinary tokens, because a model may sample one. Raises RecordError if
        the tokens do not match the images, including a last image that is smaller than its placeholders.

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
                    f"image {number} is {count} tokens for this model, but the tokens have another number of "
                    "placeholders for it. They come from another image processor. Sample them again."
                )
            end = start + count
            if end > len(tokens):
                raise RecordError(
                    f"image {number} is {count} tokens, but the sequence ends within it. Sample it again."
                )
            spans.append((start, end))
        return spans

    def positions(self, length: int, spans: Sequence[tuple[int, int]], grids: Sequence[Grid]) -> np.ndarray:
        """Return rotary positions [3, T]: time, height and width for image tokens, one number for text.

        Wang et al. 2024, arXiv:2409.12191, section 2.1. An image takes as many positions as its longer side has
        tokens, and the text after it continues from there.

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
