"""GGUF files as Hugging Face checkpoints: weights dequantized, config, tokenizer and chat template from the file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.checkpoints.gguf_header import check_gguf
from slimectl.checkpoints.gguf_tokenizer import tokenizer_of
from slimectl.errors import CheckpointError, MissingExtraError
from slimectl.weights.config_checks import check_config


class GGUFFile:
    """A GGUF file. Raises CheckpointError if a part of it has no Hugging Face counterpart."""

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
                f"{path}: cannot be read as GGUF ({_first_line(error)}); download it again"
            ) from error

    def read(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Stream every tensor, dequantized, with its Hugging Face name. The model is in memory as `dtype`."""
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(self.config, trust_remote_code=False)
            # Not AutoModel.from_pretrained(gguf_file=…): that needs accelerate, and drops tensors that it cannot map.
            with redirect_stderr(io.StringIO()):  # its progress bar
                loaded = load_gguf_checkpoint(
                    str(self.path), return_tensors=True, model_to_load=model, torch_dtype=dtype
                )
        except Exception as error:
            raise CheckpointError(f"{self.path}: dequantizing failed: {_first_line(error)}") from error
        tensors: dict[str, Tensor] = loaded["tensors"]
        self._check_tensors(tensors, model)
        for name in model.state_dict():
            if name in tensors:
                yield name, tensors.pop(name)

    def _check_tensors(self, tensors: dict[str, Tensor], model: Any) -> None:
        expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            for tied in model._tied_weights_keys or ():
                expected.pop(tied, None)
        missing = sorted(expected.keys() - tensors.keys())
        if missing:
            raise CheckpointError(f"{self.path}: no tensor for {missing[0]} ({len(missing)} missing)")
        if len(tensors) != len(self._reader.tensors):
            # Above all rope_freqs: without it a Llama 3.1 loads, and generates nonsense past 8 k tokens.
            raise CheckpointError(
                f"{self.path}: {len(self._reader.tensors)} tensors, of which only {len(tensors)} have a Hugging Face "
                f"name; convert from the model's original checkpoint instead"
            )
        mismatched = [name for name, shape in expected.items() if tensors[name].shape != shape]
        if mismatched:
            shape_found, shape_expected = tuple(tensors[mismatched[0]].shape), tuple(expected[mismatched[0]])
            raise CheckpointError(
                f"{self.path}: {mismatched[0]} has shape {shape_found}, its config says {shape_expected}"
            )

    @cached_property
    def config(self) -> Any:
        """Config of transformers from the metadata of the file. Raises CheckpointError."""
        from transformers import AutoConfig
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        try:
            fields = load_gguf_checkpoint(str(self.path))["config"]
            # GGUF holds float32: 1e-5 is written there as 9.999999747378752e-06.
            fields = {key: float(f"{v:.7g}") if isinstance(v, float) else v for key, v in fields.items()}
            fields.pop("_model_name_or_path", None)
            check_config(fields, str(self.path), weight_bytes=self.path.stat().st_size)
            return AutoConfig.for_model(**fields)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: its architecture cannot be read: {_first_line(error)}") from error

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
            raise CheckpointError(f"{self.path}: its tokenizer cannot be read: {_first_line(error)}") from error
        tokenizer.save_pretrained(into)
        ends = {"bos_token_id": config.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(into)


def _first_line(error: Exception) -> str:
    return f"{(str(error).strip().splitlines() or [type(error).__name__])[0]:.200}"
