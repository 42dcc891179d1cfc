"""A new model from a card: random weights, config and tokenizer as one Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimectl.errors import SettingsError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def create_model(config: dict[str, Any], path: Path, *, seed: int, tokenizer: str = "byte") -> None:
    """Write a model of random weights for the Hugging Face `config` (with its `model_type`) into the folder `path`.

    The same seed gives the same weights, bit for bit. Raises SettingsError for a config that transformers refuses.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if tokenizer != "byte":
        raise SettingsError(f"tokenizer {tokenizer!r}: a new model can be given the tokenizer 'byte' only")
    text = byte_tokenizer()
    defaults = {"vocab_size": len(text), "eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id}
    try:
        hf_config = AutoConfig.for_model(**{**defaults, "bos_token_id": None, **config})
    except Exception as error:
        raise SettingsError(f"model config: {error}") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    # A text ends with <|end|>, a turn of the chat template with <|im_end|>.
    model.generation_config.eos_token_id = [text.eos_token_id, text.convert_tokens_to_ids("<|im_end|>")]
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    text.save_pretrained(path)


def byte_tokenizer() -> Any:
    """Build a tokenizer of one token per byte (ids 0..255 are the bytes), <|end|> (end and padding), <|im_start|>
    and <|im_end|>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # GPT-2's table of printable characters for bytes: id = byte, so that token ids are readable.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    stand_ins |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in stand_ins)}
    core = Tokenizer(models.BPE(vocab={stand_ins[byte]: byte for byte in range(256)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    core.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>", additional_special_tokens=specials[1:]
    )
    tokenizer.chat_template = CHATML
    return tokenizer
