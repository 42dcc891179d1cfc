"""A causal language model of transformers in two halves, for its log-probabilities: scales, caps and biases included.

C states of a chunk · H hidden width · B rows · L tokens · V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slimectl.errors import CheckpointError

MOVES = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "slice", "select", "expand", "squeeze", "unsqueeze",
    "alias", "detach", "_to_copy",
}  # fmt: skip
"""Operations that change no value, except by its precision."""


OWN_MASKS = ("doge",)
"""Model types whose layers pass masks that depend on their values. Other attention than eager then loses the causal
mask (transformers 5.12)."""


def check_causal(hf: nn.Module, location: str) -> None:
    """Raise CheckpointError for an encoder such as BERT, whose tokens attend to later ones."""
    if any(getattr(module, "is_decoder", True) is False for module in hf.modules()):
        raise CheckpointError(
            f"{location}: this model is an encoder (is_decoder is false), so it cannot generate text. Give a model that"
            " continues text."
        )


READ_LATER_TOKENS = ("NemotronHMamba2Mixer", "Zamba2MambaMixer")
"""State-space mixers whose torch code in transformers (5.12.1) adds the states of later chunks."""


def compute_rows_as_one_chunk(hf: nn.Module) -> None:
    """Make mixers of READ_LATER_TOKENS compute whole rows as one chunk, unless they use the kernels of mamba-ssm."""
    for module in hf.modules():
        if type(module).__name__ in READ_LATER_TOKENS:
            module.forward = _in_one_chunk(module, module.forward)


def _in_one_chunk(mixer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    size = mixer.chunk_size
    has_kernels = getattr(sys.modules[type(mixer).__module__], "is_fast_path_available", False)

    @functools.wraps(forward)
    def call(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.device.type == "cpu" or not has_kernels:
            mixer.chunk_size = max(size, hidden_states.shape[1])
        return forward(hidden_states, *args, **kwargs)

    return call


class CausalModel:
    """A causal language model of transformers in two halves: its base model, and its head on chosen states.

    Both run the model's own forward, so nothing of it is described again.
    """

    def __init__(self, hf: Any) -> None:
        """Build it while the parameters are on the meta device, where a trial of the head costs nothing."""
        self.hf = hf
        parameters = inspect.signature(hf.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._options = {"use_cache": False} if takes_any or "use_cache" in parameters else {}
        self.is_plain = _is_one_product(self)
        """Whether logits are the product of states and output embeddings, and nothing else."""

    def states(self, **inputs: Any) -> Tensor:
        """Return the last hidden states [B, L, H] of the base model. Raises CheckpointError if the model has none."""
        found: list[Tensor] = []

        def run(base: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> _BaseOutput:
            output = base(*arguments, **options)
            found.append(output[0])
            return _BaseOutput(output[0][:1, :1], output)  # the head computes only one state, which is not used

        with self._base(run):
            self.hf(**inputs, **self._options)
        if len(found) != 1:
            raise CheckpointError(
                f"{type(self.hf).__name__} does not compute its logits from the output of one base model."
                " Use a model of another architecture."
            )
        return found[0]

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """Return the model's logits [C, V] of hidden states."""

        def give(base: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> _BaseOutput:
            return _BaseOutput(hidden_CH[None])

        with self._base(give):
            blank_1C = torch.zeros(1, len(hidden_CH), dtype=torch.long, device=hidden_CH.device)
            logits_CV: Tensor = self.hf(input_ids=blank_1C, **self._options).logits[0]
        return logits_CV

    @contextmanager
    def _base(self, call: _Call) -> Iterator[None]:
        """Replace calls of the base model by `call`."""
        from transformers import PreTrainedModel

        modules, name = self.hf._modules, self.hf.base_model_prefix
        if name not in modules:  # some classes have another name for it than they declare
            name = next((name for name, part in modules.items() if isinstance(part, PreTrainedModel)), "")
        base = modules.get(name)
        if base is None:
            yield
            return
        modules[name] = _StandIn(base, call)
        try:
            yield
        finally:
            modules[name] = base


_Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], "_BaseOutput"]


class _StandIn:
    """Stands in for a base model, or for its decoder where the model calls only that."""

    def __init__(self, base: nn.Module, call: _Call) -> None:
        self._parts = base, call

    def __call__(self, *arguments: Any, **options: Any) -> _BaseOutput:
        base, call = self._parts
        return call(base, arguments, options)

    def __getattr__(self, name: str) -> Any:
        base, call = self._parts
        part = getattr(base, name)
        return _StandIn(part, call) if name == "decoder" else part


class _BaseOutput:
    """Output of a base model with other hidden states. What `rest` does not have is None."""

    def __init__(self, hidden_1CH: Tensor, rest: Any = None) -> None:
        self.last_hidden_state, self._rest = hidden_1CH, rest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rest, name, None)

    def __getitem__(self, index: int | slice) -> Any:
        parts = (self.last_hidden_state, *(() if self._rest is None else self._rest[1:]))
        return parts[index]


class _Operations(TorchDispatchMode):
    """Lists the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def _is_one_product(model: CausalModel) -> bool:
    embeddings = model.hf.get_output_embeddings()
    if embeddings is None or not isinstance(getattr(embeddings, "weight", None), Tensor):
        return False
    hidden_1H = torch.zeros(1, embeddings.weight.shape[-1], device="meta")
    operations = _Operations()
    try:
        with torch.no_grad(), operations:
            model.logits(hidden_1H)
    except Exception:  # a model whose head needs more than states. Its first real call has the error.
        return False
    values = [name for name in operations.names if name not in MOVES]
    return [name for name in values if name not in ("zeros", "empty", "zero_", "fill_")] == ["mm"]
