"""The conversions that transformers applies to the tensors of a checkpoint, in both directions, for single tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn


class NameConversions:
    """Conversions of a model for the names of one checkpoint.

    transformers' functions are imported where they are called, because importing them takes seconds.
    """

    def __init__(self, hf: Any, stored: Collection[str]) -> None:
        """`stored`: names in the checkpoint, which decide on prefixes that only some checkpoints of a model have."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter

        self._hf = hf
        self._state = {name: tensor.detach().to("meta") for name, tensor in module_tensors(hf).items()}
        transforms = get_model_conversion_mapping(hf)
        self._renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        # transformers reverts the conversions in this attribute when it saves the model.
        hf._weight_conversions = [
            transform
            for transform in get_model_conversion_mapping(hf, add_legacy=False)
            if not isinstance(transform, PrefixChange)
            or any(transform.rename_source_key(name)[1] is not None for name in stored)
        ]
        inverted = [transform.reverse_transform() for transform in hf._weight_conversions[::-1]]
        self._inverted_renamings = [each for each in inverted if not isinstance(each, WeightConverter)]
        self._inverted_converters = [each for each in inverted if isinstance(each, WeightConverter)]

    def canonical(self, name: str) -> str:
        """Return a name after all renamings, without the base model's prefix, which a checkpoint may lack."""
        return _rename(name, self._renamings, [])[0].removeprefix(f"{self._hf.base_model_prefix}.")

    def module_name(self, name: str) -> str:
        """Return the module's name of a checkpoint's tensor that is only renamed."""
        return _rename(name, self._renamings, [], self._hf.base_model_prefix, self._state)[0]

    def published_name(self, name: str) -> str:
        """Return the published name of a parameter that is only renamed."""
        return _rename(name, self._inverted_renamings, [])[0]

    def inverted_converter(self, name: str) -> tuple[str, Any | None]:
        """Return what converts a parameter when it is saved, or None, and a key that its whole group shares."""
        key, pattern = _rename(name, [], self._inverted_converters)
        if pattern is None:
            return name, None
        return key, next(each for each in self._inverted_converters if pattern in each.source_patterns)

    def to_published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the published tensors of one group of parameters."""
        from transformers.core_model_loading import revert_weight_conversion

        published: dict[str, Tensor] = revert_weight_conversion(self._hf, dict(tensors))
        return published

    def to_module(self, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of one group from all of its published tensors."""
        from transformers.core_model_loading import dot_natural_key

        converters = {pattern: each for each in self._converters for pattern in each.source_patterns}
        conversion: Any = None
        first = ""
        for name in sorted(published, key=dot_natural_key):
            arguments = self._renamings, self._converters, self._hf.base_model_prefix, self._state
            renamed, pattern = _rename(name, *arguments)
            if conversion is None:
                conversion, first = deepcopy(converters[pattern or ""]), renamed
            conversion.add_tensor(renamed, name, pattern, published[name])
        parameters = conversion.convert(first, model=self._hf, config=self._hf.config)
        return {name: part[0] if isinstance(part, list) else part for name, part in parameters.items()}


def _rename(name: str, *arguments: Any) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    renamed: tuple[str, str | None] = rename_source_key(name, *arguments)
    return renamed


def persistent_buffers(hf: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints contain, such as a router's biases, by name."""
    stored = hf.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in hf.named_buffers() if name in stored}


def module_tensors(hf: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by all of their names, in the order of the module."""
    return dict(hf.named_parameters(remove_duplicate=False)) | persistent_buffers(hf)
