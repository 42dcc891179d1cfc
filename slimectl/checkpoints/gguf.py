"""Reads GGUF files: validates the header, dequantizes the weights, and converts config and tokenizer.

The header is validated first, because gguf (0.19) makes an array of every element and treats elements past the end of
the file as empty. A file of 100 bytes that claims 2^60 elements is read until memory is exhausted. Delete the check
when gguf checks lengths.
"""

from __future__ import annotations

import functools
import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from slimectl.architectures.config_checks import check_config
from slimectl.checkpoints.gguf_metadata import changed_keys
from slimectl.errors import CheckpointError, MissingExtraError, first_line
from slimectl.system.model_files import open_file

MAX_FIELDS = 10_000
MAX_TENSORS = 200_000
MAX_ELEMENTS = 8_000_000
"""Limit over all arrays. Tokens, scores, kinds and merges of a vocabulary of 262 144 are 1.3 million elements."""
MAX_TEXT_BYTES = 16 * 1024**2
MAX_DIMENSIONS = 8

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of a value by its type."""
_STRING, _ARRAY = 8, 9


def check_gguf(path: Path) -> None:
    """Raise ValueError for a header that is truncated or larger than any real header."""
    with open_file(path) as file:
        header = _Header(file)
        header.walk()


class _Header:
    """Parses the header, at a position in the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._order = "<"
        self._elements = 0

    def walk(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ValueError("the file does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:
            self._order = ">"  # written on a big-endian machine
        tensors, fields = self._number("Q"), self._number("Q")
        if fields > MAX_FIELDS or tensors > MAX_TENSORS:
            raise ValueError(f"{fields} fields and {tensors} tensors")
        for _ in range(fields):
            self._text()
            self._value(self._number("I"))
        for _ in range(tensors):
            self._text()
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            self._skip(8 * dimensions + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind])
        elif kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            self._array()
        else:
            raise ValueError(f"a value of kind {kind}")

    def _array(self) -> None:
        kind, length = self._number("I"), self._number("Q")
        self._elements += length
        if self._elements > MAX_ELEMENTS:
            raise ValueError(f"an array of {length} values")
        if kind in _SCALARS:
            self._skip(_SCALARS[kind] * length)
        elif kind == _STRING:
            for _ in range(length):
                self._text()
        else:
            raise ValueError(f"an array of values of kind {kind}")

    def _text(self) -> None:
        length = self._number("Q")
        if length > MAX_TEXT_BYTES:
            raise ValueError(f"a text of {length} bytes")
        self._skip(length)

    def _number(self, form: str) -> int:
        layout = struct.Struct(self._order + form)
        data = self._file.read(layout.size)
        if len(data) < layout.size:
            raise ValueError("truncated")
        return int(layout.unpack(data)[0])

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise ValueError("truncated")
        self._file.seek(count, os.SEEK_CUR)


class GGUFFile:
    """A GGUF file. Raises CheckpointError if it has something without a Hugging Face counterpart."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise MissingExtraError("gguf", extra="gguf", wanted_by=str(path)) from None
        self.path = path
        try:
            check_gguf(path)
            self._reader = GGUFReader(str(path))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{path}: cannot be read as GGUF ({first_line(error, 200)}). Download it again."
            ) from error
        parts = self._reader.fields.get("split.count")
        if parts is not None and parts.contents() > 1:
            raise CheckpointError(
                f"{path}: this is one of the {parts.contents()} files of a model. Join them with llama.cpp:"
                " llama-gguf-split --merge FIRST_FILE JOINED_FILE"
            )

    def read(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, dequantized, with its Hugging Face name. The whole model is in memory in `dtype`."""
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
            # AutoModel.from_pretrained(gguf_file=…) needs accelerate, and drops tensors that it cannot map.
            with self._read_once(), redirect_stderr(io.StringIO()):  # its progress bar
                loaded = load_gguf_checkpoint(
                    str(self.path), return_tensors=True, model_to_load=model, torch_dtype=dtype
                )
        except Exception as error:
            raise CheckpointError(f"{self.path}: dequantizing failed: {first_line(error, 200)}") from error
        tensors: dict[str, Tensor] = loaded["tensors"]
        self._check_tensors(tensors, model)
        for name in model.state_dict():
            if name in tensors:
                yield name, tensors.pop(name)

    @contextmanager
    def _read_once(self) -> Iterator[None]:
        """Make transformers reuse the open reader and one table of names.

        Otherwise it parses the whole vocabulary at every call and builds the table for each module, which is half of
        the time for a small model. Delete when transformers accepts an open reader.
        """
        import gguf

        shared = {
            "GGUFReader": lambda path: self._reader,
            "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
        }
        originals = {name: getattr(gguf, name) for name in shared}
        try:
            vars(gguf).update(shared)
            yield
        finally:
            vars(gguf).update(originals)

    def _check_tensors(self, tensors: dict[str, Tensor], model: Any) -> None:
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            for tied in model._tied_weights_keys or ():
                expected.pop(tied, None)
        missing = sorted(expected.keys() - tensors.keys())
        if missing:
            raise CheckpointError(f"{self.path}: no tensor for {missing[0]} ({len(missing)} missing)")
        if len(tensors) != len(self._reader.tensors):
            # The important case is rope_freqs: without it Llama 3.1 loads, but generates nonsense past 8k tokens.
            raise CheckpointError(
                f"{self.path}: {len(self._reader.tensors)} tensors, of which only {len(tensors)} have a Hugging Face "
                f"name. Convert from the model's original checkpoint instead."
            )
        mismatched = [name for name, shape in expected.items() if tensors[name].shape != shape]
        if mismatched:
            shape_found, shape_expected = tuple(tensors[mismatched[0]].shape), tuple(expected[mismatched[0]])
            raise CheckpointError(
                f"{self.path}: {mismatched[0]} has shape {shape_found}, but {shape_expected} is expected from its "
                f"config"
            )

    @cached_property
    def config(self) -> Any:
        """Return transformers' config from the metadata of the file. Raises CheckpointError."""
        return self._config(self._fields | self.unread)

    @cached_property
    def _fields(self) -> dict[str, Any]:
        """Return the keys of config.json that transformers reads from the file."""
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        try:
            with self._read_once():
                fields: dict[str, Any] = load_gguf_checkpoint(str(self.path))["config"]
        except Exception as error:
            raise CheckpointError(f"{self.path}: its architecture cannot be read: {first_line(error, 200)}") from error
        fields.pop("_model_name_or_path", None)
        return {key: _rounded(value) for key, value in fields.items()}

    @cached_property
    def unread(self) -> dict[str, Any]:
        """Return the keys of config.json in the metadata that transformers ignores. Raises CheckpointError."""
        from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

        architecture = self._reader.fields["general.architecture"].contents()
        prefix, model_type = f"{architecture}.", str(self._fields["model_type"])
        metadata = {
            name.removeprefix(prefix): _rounded(field.contents())
            for name, field in self._reader.fields.items()
            if name.startswith(prefix)
        }
        mapping = GGUF_CONFIG_MAPPING.get(model_type.removesuffix("_text"), {})
        try:
            changes = changed_keys(
                self._config(self._fields), metadata, {key for key, name in mapping.items() if name is not None}
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return {key: value for key, value in changes.items() if self._fields.get(key) != value}

    def _config(self, fields: dict[str, Any]) -> Any:
        from transformers import AutoConfig

        check_config(fields, str(self.path), weight_bytes=self.path.stat().st_size)
        if "rope_parameters" in fields:
            fields = {key: value for key, value in fields.items() if key != "rope_theta"}
        try:
            return AutoConfig.for_model(**fields)
        except Exception as error:
            raise CheckpointError(f"{self.path}: its architecture cannot be read: {first_line(error, 200)}") from error

    def write_companions(self, into: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config, generation config, tokenizer and chat template into the folder `into`."""
        from transformers import AutoModelForCausalLM, GenerationConfig

        config = deepcopy(self.config)
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.dtype = dtype
        config.save_pretrained(into)
        try:
            tokenizer = tokenizer_of(self.path, self._reader)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its tokenizer cannot be read: {first_line(error, 200)}") from error
        tokenizer.save_pretrained(into)
        ends = [tokenizer.eos_token_id, *self._turn_ends]
        GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=ends if len(ends) > 1 else ends[0],
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(into)

    @property
    def _turn_ends(self) -> list[int]:
        """Return the other tokens at which llama.cpp ends a response: end of a turn, end of a message to a tool."""
        fields = [self._reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        first, *others = [None if field is None else int(field.contents()) for field in fields]
        return list(dict.fromkeys(token for token in others if token is not None and token != first))


def _rounded(value: Any) -> Any:
    """Return a float in the shortest float32 digits. GGUF holds float32, so 1e-5 is read as 9.999999747378752e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


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

    Raises CheckpointError for anything but byte-level BPE with a known pre-tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    fields = {name.removeprefix("tokenizer.ggml."): field for name, field in reader.fields.items()}

    def read(name: str, default: Any = None) -> Any:
        return fields[name].contents() if name in fields else default

    if read("model") != "gpt2":
        raise CheckpointError(
            f"{path}: a tokenizer of kind {read('model')} is not supported, only byte-level BPE (gpt2). Convert from "
            f"the model's original checkpoint instead."
        )
    tokens = read("tokens")
    core = _byte_level_bpe(tokens, read("merges"), read("pre"), path)
    _add_special_tokens(core, tokens, read("token_type", []))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {role: read(f"{field}_token_id") for role, field in named.items()}
    specials = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    if "eos_token" not in specials:
        raise CheckpointError(f"{path}: has no end token. Convert from the model's original checkpoint instead.")
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
            f"{path}: the pre-tokenizer {pre!r} is not supported, only {', '.join(KNOWN)}. Convert from the model's "
            f"original "
            f"checkpoint instead."
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
