"""Reads GGUF files: dequantizes the weights, and converts config and tokenizer."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from slimectl.architectures.config_checks import check_config
from slimectl.checkpoints.gguf_header import check_gguf
from slimectl.checkpoints.gguf_metadata import changed_keys
from slimectl.checkpoints.gguf_tokenizer import tokenizer_of, turn_ends
from slimectl.errors import CheckpointError, first_line, requiring

VOCABULARY = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


class GGUFFile:
    """A GGUF file. Raises CheckpointError if it has something without a Hugging Face counterpart."""

    def __init__(self, path: Path) -> None:
        with requiring("gguf", extra="gguf", wanted_by=str(path)):
            from gguf import GGUFReader
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
        """Make transformers reuse the open reader without its vocabulary, and one table of names.

        Otherwise it parses the whole vocabulary at every call and builds the table for each module, which is half of
        the time for a small model. Delete when transformers accepts an open reader.
        """
        import gguf

        fields = {name: field for name, field in self._reader.fields.items() if name not in VOCABULARY}
        size = f"{self._architecture}.vocab_size"
        if size not in fields and (tokens := self._reader.fields.get(VOCABULARY[0])):
            count = numpy.array([len(tokens.data)], numpy.uint32)
            fields[size] = gguf.ReaderField(0, size, [count], [0], [gguf.GGUFValueType.UINT32])
        reader = SimpleNamespace(fields=fields, tensors=self._reader.tensors)
        shared = {
            "GGUFReader": lambda path: reader,
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
    def _architecture(self) -> str:
        return str(self._reader.fields["general.architecture"].contents())

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

        prefix, model_type = f"{self._architecture}.", str(self._fields["model_type"])
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
        from transformers import GenerationConfig

        self.write_config(into, dtype)
        try:
            tokenizer = tokenizer_of(self.path, self._reader)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path}: its tokenizer cannot be read: {first_line(error, 200)}") from error
        tokenizer.save_pretrained(into)
        ends = [tokenizer.eos_token_id, *turn_ends(tokenizer, self._reader)]
        GenerationConfig(
            bos_token_id=self.config.bos_token_id,
            eos_token_id=ends if len(ends) > 1 else ends[0],
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(into)

    def write_config(self, into: Path, dtype: torch.dtype) -> None:
        """Write config.json of weights in `dtype` into the folder `into`."""
        from transformers import AutoModelForCausalLM

        config = deepcopy(self.config)
        config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
        config.dtype = dtype
        config.save_pretrained(into)


def _rounded(value: Any) -> Any:
    """Return a float in the shortest float32 digits. GGUF holds float32, so 1e-5 is read as 9.999999747378752e-06."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
