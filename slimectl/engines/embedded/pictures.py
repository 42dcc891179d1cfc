"""Images in prompts: the vision tower, the marks of placeholder tokens, and the inputs of a prefill.

N rows (one per token) · R rows of images · E hidden size · C tokens of images · O width of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from slimectl.architectures.image_tokens import ImageTokens
from slimectl.data.images import Patches


def new_tower(config: Any, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build the vision tower of a configuration: the module of transformers, with memory for its weights."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    without_decoder = deepcopy(config)
    without_decoder.get_text_config().num_hidden_layers = 0
    with no_init_weights(), torch.device(device):
        model = AutoModel.from_config(without_decoder, dtype=dtype, attn_implementation="sdpa")
    tower: nn.Module = model.visual.requires_grad_(False).eval()
    return tower


class Features(NamedTuple):
    """Outputs of the tower: embeddings [C, O], and features to add after each of the first decoder layers."""

    embeddings_CO: Tensor
    deepstack: tuple[Tensor, ...] = ()
    """One tensor [C, O] per layer (DeepStack, Meng et al. 2024, arXiv:2406.04334)."""


class PictureInputs(NamedTuple):
    """Inputs of a pass with images: positions [3, N], and the features of the image rows."""

    positions_3N: Tensor
    rows_R: Tensor
    features: Features
    """Embeddings [R, E] of the image rows, and the deepstack features for the first layers. Empty without rows."""


class Pictures:
    """The images of prompts in flight.

    Each placeholder token of an image is replaced by the image's id, a negative number derived from its content. Two
    prompts then share a prefix only where both tokens and images are equal. An image is kept as long as a sequence
    holds its patches.
    """

    def __init__(self, tokens: ImageTokens, tower: nn.Module) -> None:
        self.tokens = tokens
        self._tower = tower
        parameter = next(tower.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        self._patches: WeakValueDictionary[int, Patches] = WeakValueDictionary()

    def shared(self, images: Sequence[Patches]) -> tuple[Patches, ...]:
        """Return the images for a sequence to hold. Images with equal content are the same object in all sequences."""
        return tuple(self._patches.setdefault(_id(image), image) for image in images)

    def marked(self, tokens: Sequence[int], images: Sequence[Patches]) -> tuple[tuple[int, ...], int]:
        """Return the tokens with the ids of `shared` images, and the shift of rotary positions after them.

        Raises RecordError if tokens and images do not match.
        """
        grids = [image.grid for image in images]
        spans = self.tokens.spans(tokens, grids)
        marked = list(tokens)
        for (start, end), image in zip(spans, images, strict=True):
            marked[start:end] = [_id(image)] * (end - start)
        positions_3T = self.tokens.positions(len(tokens), spans, grids)
        return tuple(marked), int(positions_3T.max()) + 1 - len(tokens) if images else 0

    def inputs(self, prompts: Sequence[tuple[int, ...]], starts: Sequence[int]) -> PictureInputs | None:
        """Return the image inputs of a pass over the prompts from `starts` on, or None if no prompt has images."""
        if not any(min(prompt) < 0 for prompt in prompts):
            return None
        positions: list[np.ndarray] = []
        rows: list[int] = []
        chosen: list[Patches] = []
        cells: list[int] = []
        first = total = 0
        for prompt, start in zip(prompts, starts, strict=True):
            images, spans = self._images(prompt)
            grids = [image.grid for image in images]
            positions.append(self.tokens.positions(len(prompt), spans, grids)[:, start:])
            for (begin, end), image in zip(spans, images, strict=True):
                if end > start:
                    skipped = max(0, start - begin)
                    rows += range(first + begin + skipped - start, first + end - start)
                    cells += range(total + skipped, total + end - begin)
                    total += end - begin
                    chosen.append(image)
            first += len(prompt) - start
        positions_3N = torch.from_numpy(np.concatenate(positions, axis=1)).to(self._device)
        return PictureInputs(positions_3N, torch.tensor(rows, device=self._device), self._features(chosen, cells))

    def _features(self, images: Sequence[Patches], cells: Sequence[int]) -> Features:
        """Return the features of some tokens of the images, each of which has its own pass, whatever the others are."""
        if not images:
            return Features(torch.empty(0, device=self._device))
        cells_R = torch.tensor(cells, device=self._device)
        outputs = []
        for image in images:
            pixels_PW = torch.from_numpy(image.pixels_PW).to(self._device, self._dtype)
            output = self._tower(pixels_PW, grid_thw=torch.tensor([image.grid], device=self._device))
            outputs.append((output.pooler_output, *(getattr(output, "deepstack_features", None) or ())))
        embeddings, *deepstack = (torch.cat(parts)[cells_R] for parts in zip(*outputs, strict=True))
        return Features(embeddings, tuple(deepstack))

    def _images(self, prompt: tuple[int, ...]) -> tuple[list[Patches], list[tuple[int, int]]]:
        """Return the images of a prompt and their token ranges."""
        images, spans, place = [], [], 0
        while place < len(prompt):
            if prompt[place] < 0:
                image = self._patches[prompt[place]]
                end = place + self.tokens.count(image.grid)
                images.append(image)
                spans.append((place, end))
                place = end
            else:
                place += 1
        return images, spans


def _id(image: Patches) -> int:
    return -1 - image.key
