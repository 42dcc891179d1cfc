"""Tokenizers, processors, loss masks of chats, and images of messages."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from slimectl.chats.template import Template
from slimectl.chats.tokenizer import tokenizer_of
from slimectl.data.chat import as_chat
from slimectl.data.images import image_source, read_image
from slimectl.data.supervised import assistant_mask
from slimectl.errors import RecordError, requiring
from slimectl.types import Prompt


@cache
def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """Load the tokenizer of a model folder. Code in that folder is never run, whatever the options are."""
    return tokenizer_of(name_or_path)


@cache
def load_processor(name_or_path: str, **options: Any) -> Any:
    """Load the processor of a model folder, or return None if the model reads text only. Its code is never run."""
    import transformers

    if not any((Path(name_or_path) / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    processor = transformers.AutoProcessor.from_pretrained(name_or_path, local_files_only=True, trust_remote_code=False)
    return processor if isinstance(processor, transformers.ProcessorMixin) else None


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments for calling a processor: tokens as lists, and media as tensors."""
    arguments = {**(multimodal_inputs or {}), "return_tensors": None}
    for kind in ("images_kwargs", "videos_kwargs", "audio_kwargs"):
        arguments[kind] = {**arguments.get(kind, {}), "return_tensors": "pt"}
    return arguments


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a Pillow image as a data: URL of a PNG file, the form that engines read."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def process_vision_info(prompt: Any, processor: Any = None) -> dict[str, Any]:
    """Return the images of a chat as Pillow images, in order, or None if it has none.

    Paths are relative to the current folder. Raises RecordError for a video, because engines here do not read videos.
    """
    with requiring("pillow", extra="vision", wanted_by="process_vision_info"):
        from PIL import Image
    images = []
    for part in (part for message in as_chat(prompt) for part in _parts(message.get("content"))):
        if part.get("type") in ("video", "video_url") or "video" in part:
            raise RecordError("prompt: it has a video, and only images are read. Give frames as images.")
        if part.get("type") in ("image", "image_url", "input_image") or "image" in part:
            value = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key)), None)
            images.append(_opened(Image, value))
    return {"images": images or None, "videos": None}


def _parts(content: Any) -> list[Mapping[str, Any]]:
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _opened(pillow: Any, value: Any) -> Any:
    """Return an image of a message as a Pillow image. Raises RecordError if the value is not an image."""
    if isinstance(value, pillow.Image):
        return value
    try:
        source = image_source(value, Path())
    except ValueError as error:
        raise RecordError(f"prompt: {error}") from None
    return pillow.open(io.BytesIO(read_image(source)))


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of tokens from the first 1 of each mask to the end of the mask."""
    return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Tokens and loss masks of chats, from the tokenizer's own chat template. `tokenizer_type` is ignored.

    The mask is 1 for the assistant's turns, including their end token. A message with `step_loss_mask` 0 is masked out.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type

    def get_loss_mask(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        """Return the tokens of the chat and a mask of the same length. Raises RecordError if it is not a chat."""
        chat = as_chat(messages)
        template = Template(self.tokenizer, Prompt(text=chat, tools=tools), None)
        return assistant_mask(chat, self.tokenizer, template)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of tokens from the first 1 of each mask to the end of the mask."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the texts that are trained on: each run of tokens whose mask is 1."""
        runs: list[list[int]] = [[]]
        for token, mask in zip(token_ids, loss_masks, strict=True):
            if mask:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return [self.tokenizer.decode(tokens) for tokens in runs if tokens]
