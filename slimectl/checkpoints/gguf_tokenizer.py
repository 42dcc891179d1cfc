"""Builds the tokenizer of a GGUF file from its metadata.

transformers 5.12 builds one, too, but sets the start token as its end token, and splits words the same way for every
`tokenizer.ggml.pre` ("x  1" becomes four tokens for SmolLM2 instead of three). Delete this when it does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimectl.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE,
}
"""Pre-tokenizer patterns of Llama 3 and Qwen 2/2.5/3, from their published tokenizer.json."""

KNOWN = ("gpt-2", "smollm", *SPLITS)


def tokenizer_of(path: Path, reader: Any) -> Any:
    """Build the fast tokenizer, with special tokens and chat template.

    Raises CheckpointError for types other than byte-level BPE with a known pre-tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    fields = {name.removeprefix("tokenizer.ggml."): field for name, field in reader.fields.items()}

    def read(name: str, default: Any = None) -> Any:
        return fields[name].contents() if name in fields else default

    if read("model") != "gpt2":
        raise CheckpointError(
            f"{path}: a tokenizer of kind {read('model')} is not read yet, only byte-level BPE (gpt2); convert from "
            f"the model's original checkpoint instead"
        )
    tokens = read("tokens")
    core = _byte_level_bpe(tokens, read("merges"), read("pre"), path)
    _add_special_tokens(core, tokens, read("token_type", []))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: read(f"{field}_token_id") for role, field in named.items()}
    specials = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if "eos_token" not in specials:
        raise CheckpointError(f"{path}: names no end token; convert from the model's original checkpoint instead")
    specials.setdefault("pad_token", specials["eos_token"])
    if read("add_bos_token", False):
        _prepend_token(core, specials["bos_token"], ids["bos"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **specials)
    template = reader.fields.get("tokenizer.chat_template")
    tokenizer.chat_template = template.contents() if template else None
    return tokenizer


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str | None, path: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if pre not in KNOWN:
        raise CheckpointError(
            f"{path}: cuts words in the way {pre!r}, known are {', '.join(KNOWN)}; convert from the model's original "
            f"checkpoint instead"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    if pre in SPLITS:
        first = [pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")]
    else:
        first = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _add_special_tokens(core: Any, tokens: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        marked = [token for token, its_kind in zip(tokens, kinds, strict=False) if its_kind == kind]
        add = core.add_special_tokens if special else core.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in marked])


def _prepend_token(core: Any, token: str, token_id: int) -> None:
    from tokenizers import processors

    core.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )
