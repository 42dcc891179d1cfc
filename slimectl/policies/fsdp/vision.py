"""Images of a pack: their patches, their places among its tokens, and the decoder input that contains them.

T input tokens · F tokens of images · P patches · W values of a patch · H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slimectl.data.images import ImageProcessor, Patches
from slimectl.errors import RecordError
from slimectl.policies.pack_plan import PackPlan


@dataclass(frozen=True)
class ImageBatch:
    """The images of a pack. An image that rows share is listed once."""

    pixels_PW: Tensor
    grids_I3: Tensor
    places_F: Tensor
    """Input position of each token of an image."""
    positions_3T: Tensor
    """Rotary positions along time, height and width."""


def image_batch(
    plan: PackPlan, processor: Callable[[], ImageProcessor] | None, *, dtype: torch.dtype, device: torch.device
) -> ImageBatch | None:
    """Return the images of a pack, or None if it has none. Raises RecordError for rows that do not fit their images."""
    if processor is None or not any(row.images for row in plan.rows):
        return None
    reader = processor()
    positions_3T = np.zeros((3, len(plan.tokens_T)), dtype=np.int64)
    images: list[Patches] = []
    places: list[np.ndarray] = []
    seen: set[int] = set()
    for i, row, path in zip(plan.members, plan.rows, plan.paths, strict=True):
        row_images = [reader.patches(source) for source in row.images]
        grids = [image.grid for image in row_images]
        try:
            spans = reader.tokens.spans(row.tokens[: row.prompt_length], grids)
        except RecordError as error:
            name = f"row {i}" if row.index is None else f"sample {row.index}"
            raise RecordError(f"{name}: {error}") from None
        positions_3T[:, path] = reader.tokens.positions(len(row.tokens), spans, grids)[:, : len(path)]
        for (start, end), image in zip(spans, row_images, strict=True):
            if path[start] not in seen:
                seen.add(path[start])
                images.append(image)
                places.append(path[start:end])
    pixels_PW = np.concatenate([image.pixels_PW for image in images])
    return ImageBatch(
        torch.from_numpy(pixels_PW).to(device, dtype),
        torch.tensor([image.grid for image in images], device=device),
        torch.from_numpy(np.concatenate(places)).to(device),
        torch.from_numpy(positions_3T).to(device),
    )


def tower_of(hf: Any) -> nn.Module | None:
    """Return the vision tower of a Hugging Face model, or None for a text model."""
    tower: nn.Module | None = getattr(hf.base_model, "visual", None)
    return tower


def decoder_of(hf: Any) -> Any:
    """Return the decoder of a Hugging Face model. In a vision model it is a part of the base model."""
    return getattr(hf.base_model, "language_model", hf.base_model)


def tower_parameters(hf: Any) -> set[str]:
    """Return the names of parameters for other inputs than text, in models whose images are not trained here."""
    if tower_of(hf) is not None or hf.config is hf.config.get_text_config():
        return set()
    parts = [hf.get_decoder(), hf.get_input_embeddings(), hf.get_output_embeddings()]
    text = {parameter for part in parts if part is not None for parameter in part.parameters()}
    return {name for name, parameter in hf.named_parameters() if parameter not in text}


def decoder_input(hf: Any, tokens_T: Tensor, positions_T: Tensor, images: ImageBatch | None) -> dict[str, Any]:
    """Return the decoder's arguments for a pack: tokens, or token embeddings with image embeddings among them.

    If the tower has features for the first layers (DeepStack), they are included with their places.
    """
    tower = tower_of(hf)
    if tower is None or (images is None and not _is_trained(tower)):
        return {"input_ids": tokens_T[None], "position_ids": positions_T[None]}
    embeddings_TH = hf.get_input_embeddings()(tokens_T)
    if images is None:
        # Ranks reduce the gradients of all trained weights together, so a rank without images adds zeros.
        features_FH, deepstack = _features(hf, *_blank(hf.config.vision_config, embeddings_TH))
        nothing = sum(layer_FH.sum() for layer_FH in (features_FH, *deepstack)) * 0.0
        return {"inputs_embeds": (embeddings_TH + nothing)[None], "position_ids": positions_T[None]}
    features_FH, deepstack = _features(hf, images.pixels_PW, images.grids_I3)
    embeddings_TH = embeddings_TH.index_copy(0, images.places_F, features_FH.to(embeddings_TH.dtype))
    arguments = {"inputs_embeds": embeddings_TH[None], "position_ids": images.positions_3T[:, None]}
    if not deepstack:
        return arguments
    # transformers' decoder takes a mask of the places, and features in token order.
    order_F = images.places_F.argsort()
    mask_T = torch.zeros_like(tokens_T, dtype=torch.bool).index_fill_(0, images.places_F, True)
    features = [layer_FH.index_select(0, order_F) for layer_FH in deepstack]
    return arguments | {"visual_pos_masks": mask_T[None], "deepstack_visual_embeds": features}


def _features(hf: Any, pixels_PW: Tensor, grids_I3: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the embeddings [F, H] of images, and the tensors [F, H] that join the first layers' outputs."""
    output = hf.base_model.visual(pixels_PW, grid_thw=grids_I3)
    # Ranks with and without images must have gradients of the same weights, so use only features that feed a layer.
    return output.pooler_output, list(getattr(output, "deepstack_features", None) or ())[: len(decoder_of(hf).layers)]


def _is_trained(tower: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in tower.parameters())


def _blank(vision: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a blank image of one token, and its grid."""
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return like.new_zeros(merge**2, width), torch.tensor([[1, merge, merge]], device=like.device)
