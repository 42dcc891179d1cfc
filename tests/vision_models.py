"""Vision models of a few layers with random weights, images for them, and transformers' answers to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimectl.checkpoints.create import create_model
from slimectl.data.images import ImageProcessor, processor_of
from slimectl.types import TrainingSample

CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen2_5_vl_text", "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "window_size": 16, "out_hidden_size": 32, "fullatt_block_indexes": [1],
    },
}  # fmt: skip
"""A token is 8 by 8 pixels, a window 16 by 16; the first layer of the tower attends within windows."""
QWEN3_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text", "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2], "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "out_hidden_size": 32, "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
}  # fmt: skip
"""A token is 8 by 8 pixels; learned positions are a square of 5 by 5, two of three blocks feed the decoder's layers."""
CONFIGS = {"qwen2_5_vl": CONFIG, "qwen3_vl": QWEN3_CONFIG}
IMAGE = 261
"""The placeholder token."""


def vision_model(folder: Path, family: str = "qwen2_5_vl") -> Path:
    """Write a model with weights that make the tower matter (fresh ones are nearly zero)."""
    from transformers import AutoModelForImageTextToText

    create_model(CONFIGS[family], folder, seed=1)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.ndim > 1 else parameter + 0.05 * noise)
    model.save_pretrained(folder)
    return folder


def image_file(path: Path, *, width: int = 32, height: int = 32, seed: int = 0) -> str:
    """Write an image of random pixels; return its path."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def image_prompt(processor: ImageProcessor, images: Sequence[str], text: str = "what?") -> list[int]:
    """Tokens of the images, each between its marks, and the text."""
    tokens: list[int] = []
    for image in images:
        tokens += [259, *[IMAGE] * processor.tokens.count(processor.grid(image)), 260]
    return [*tokens, *text.encode()]


def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def reference_logits(model: Any, tokens: Sequence[int], images: Sequence[str], folder: Path) -> Tensor:
    """Logits [T, V] of transformers' model, which places the images and counts the positions itself."""
    if not images:
        return model(input_ids=torch.tensor([list(tokens)])).logits[0]
    patches = [processor_of(str(folder)).patches(image) for image in images]
    input_ids = torch.tensor([list(tokens)])
    return model(
        input_ids=input_ids,
        pixel_values=torch.from_numpy(np.concatenate([each.pixels_PW for each in patches])),
        image_grid_thw=torch.tensor([each.grid for each in patches]),
        mm_token_type_ids=(input_ids == IMAGE).int(),
    ).logits[0]


def reference_log_probs(model: Any, row: TrainingSample, folder: Path) -> Tensor:
    """Log-probability of every response token of a row."""
    images = [image for image in row.images if isinstance(image, str)]
    logits_TV = reference_logits(model, row.tokens, images, folder)[row.prompt_length - 1 : -1]
    targets_R1 = torch.tensor(row.tokens[row.prompt_length :])[:, None]
    return torch.log_softmax(logits_TV, -1).gather(1, targets_R1)[:, 0]
