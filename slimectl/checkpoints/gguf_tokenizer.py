"""Builds a fast tokenizer from the vocabulary in a GGUF file, by the rules of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimectl.errors import CheckpointError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE,
}
"""Pre-tokenizer patterns of Llama 3 and Qwen 2/2.5/3, from their published tokenizer.json."""

KNOWN = ("gpt-2", "smollm", *SPLITS)
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens at which llama.cpp ends a response in any file. Files of Gemma do not name theirs."""
SPACE = "\u2581"
"""The character that stands for a space in a SentencePiece vocabulary."""


class Vocabulary:
    """The keys `tokenizer.ggml.*` of a file."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._fields = {name.removeprefix("tokenizer.ggml."): field for name, field in reader.fields.items()}
        self.tokens: list[str] = self.read("tokens")
        kinds: list[int] = self.read("token_type", [])
        self.kinds = {
            token: CONTROL if token in TURN_ENDS else kind for token, kind in zip(self.tokens, kinds, strict=False)
        }

    def read(self, name: str, default: Any = None) -> Any:
        return self._fields[name].contents() if name in self._fields else default

    def of_kind(self, kind: int) -> list[str]:
        """Return the tokens of a kind, in the order of their numbers."""
        return [token for token, its_kind in self.kinds.items() if its_kind == kind]


def tokenizer_of(path: Path, reader: Any) -> Any:
    """Build the fast tokenizer, with special tokens and chat template.

    Raises CheckpointError for anything but SentencePiece BPE, and byte-level BPE with a known pre-tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    vocabulary = Vocabulary(path, reader)
    read, tokens, kind = vocabulary.read, vocabulary.tokens, vocabulary.read("model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{path}: a tokenizer of kind {kind} is not supported, only byte-level BPE (gpt2) and SentencePiece BPE "
            "(llama). Convert from the model's original checkpoint instead."
        )
    core = _byte_level_bpe(vocabulary) if kind == "gpt2" else _sentencepiece_bpe(vocabulary)
    _add_special_tokens(core, vocabulary)
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: read(f"{field}_token_id") for role, field in named.items()}
    specials = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if "eos_token" not in specials:
        raise CheckpointError(f"{path}: has no end token. Convert from the model's original checkpoint instead.")
    specials.setdefault("pad_token", specials["eos_token"])
    if read("add_bos_token", kind == "llama"):
        _prepend_token(core, specials["bos_token"], ids["bos"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **specials)
    template = reader.fields.get("tokenizer.chat_template")
    tokenizer.chat_template = template.contents() if template else None
    return tokenizer


def turn_ends(tokenizer: Any, reader: Any) -> list[int]:
    """Return the other tokens at which llama.cpp ends a response: end of a turn, end of a message to a tool."""
    fields = [reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    named = [int(field.contents()) for field in fields if field is not None]
    known = tokenizer.get_added_vocab()
    matches = [*named, *(known[token] for token in TURN_ENDS if token in known)]
    return [token for token in dict.fromkeys(matches) if token != tokenizer.eos_token_id]


def _byte_level_bpe(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = vocabulary.read("pre")
    if pre not in KNOWN:
        raise CheckpointError(
            f"{vocabulary.path}: the pre-tokenizer {pre!r} is not supported, only {', '.join(KNOWN)}. Convert from the "
            "model's original checkpoint instead."
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.read("merges"))]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary.tokens)}, merges=pairs))
    if pre in SPLITS:
        first: list[Any] = [pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")]
    else:
        first = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    core.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    if pre == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _sentencepiece_bpe(vocabulary: Vocabulary) -> Any:
    """Merge the pair with the best score first. What the vocabulary lacks becomes tokens of its UTF-8 bytes.

    transformers (5.12) reads such a vocabulary of Gemma as a unigram model, which segments some texts differently.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import generate_merges

    numbers = {token: i for i, token in enumerate(vocabulary.tokens)}
    scores = dict(zip(vocabulary.tokens, vocabulary.read("scores"), strict=True))
    merged = {token: scores[token] for token in vocabulary.of_kind(NORMAL)}
    unknown = vocabulary.tokens[vocabulary.read("unknown_token_id", 0)]
    core = Tokenizer(
        models.BPE(
            vocab=numbers,
            merges=generate_merges({token: numbers[token] for token in merged}, merged),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.read("add_space_prefix", True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decoding.append(decoders.Strip(content=" ", left=1))
    else:
        core.normalizer = spaces
    core.decoder = decoders.Sequence(decoding)
    return core


def _add_special_tokens(core: Any, vocabulary: Vocabulary) -> None:
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        add = core.add_special_tokens if special else core.add_tokens
        add([AddedToken(token, normalized=False, special=special) for token in vocabulary.of_kind(kind)])


def _prepend_token(core: Any, token: str, token_id: int) -> None:
    from tokenizers import processors

    core.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )
