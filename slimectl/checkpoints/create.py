"""Creates a model from a card: random weights, config and tokenizer in one Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slimectl.architectures.registry import tower_of
from slimectl.errors import SettingsError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


VISION_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
"""Special tokens around images and in place of them, by their key in config.json."""


def create_model(
    config: dict[str, Any],
    path: Path,
    *,
    seed: int,
    tokenizer: str = "byte",
    image_processor: Mapping[str, int] | None = None,
) -> None:
    """Write a model with random weights for the Hugging Face `config` (with its `model_type`) into the folder `path`.

    The same seed gives the same weights, bit for bit. A model with a vision_config gets image tokens, and a processor
    with the sizes in `image_processor` (min_pixels, max_pixels). Raises SettingsError for a config that transformers
    rejects.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if tokenizer != "byte":
        raise SettingsError(f"tokenizer {tokenizer!r}: a new model can only have the tokenizer 'byte'")
    sees = "vision_config" in config
    byte_level = byte_tokenizer(tuple(VISION_TOKENS.values()) if sees else ())
    defaults = {
        "vocab_size": len(byte_level),
        "eos_token_id": byte_level.eos_token_id,
        "pad_token_id": byte_level.pad_token_id,
    }
    defaults |= {"bos_token_id": None}
    if sees:
        byte_level.chat_template = VISION_CHATML
        ids = {name: byte_level.convert_tokens_to_ids(token) for name, token in VISION_TOKENS.items()}
        config = {**ids, **config, "text_config": {**defaults, **config["text_config"]}}
        defaults = {}
    try:
        hf_config = AutoConfig.for_model(**{**defaults, **config})
    except Exception as error:
        raise SettingsError(f"model config: {error}") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = auto.from_config(hf_config, dtype=torch.float32)
    # A text ends with <|end|>, a chat turn with <|im_end|>.
    model.generation_config.eos_token_id = [byte_level.eos_token_id, byte_level.convert_tokens_to_ids("<|im_end|>")]
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    byte_level.save_pretrained(path)
    if sees:
        _write_image_processor(path, hf_config, image_processor or {})


def _write_image_processor(path: Path, config: Any, sizes: Mapping[str, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower, vision = tower_of(config.model_type), config.vision_config
    by_half = tower is not None and tower.normalized_by_half
    cell = (vision.patch_size * vision.spatial_merge_size) ** 2
    Qwen2VLImageProcessorPil(
        **({"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if by_half else {}),
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={
            "shortest_edge": sizes.get("min_pixels", cell),
            "longest_edge": sizes.get("max_pixels", 256 * cell),
        },
    ).save_pretrained(path)


def byte_tokenizer(more_specials: Sequence[str] = ()) -> Any:
    """Build a tokenizer with one token per byte (ids 0..255) and special tokens.

    The special tokens are <|end|> (end and padding), <|im_start|>, <|im_end|> and `more_specials`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's table of printable characters for bytes, with id = byte, so that token ids are readable.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in stand_ins)}
    core = Tokenizer(models.BPE(vocab={stand_ins[byte]: byte for byte in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|im_start|>", "<|im_end|>", *more_specials]
    core.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>", additional_special_tokens=specials[1:]
    )
    tokenizer.chat_template = CHATML
    return tokenizer
