"""Log-probabilities by a transformers model's own head: scales, soft caps and biases of its logits included.

C states of a chunk · U states · Q pairs of a state and a token that it predicts · V vocabulary · H hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slimectl.errors import CheckpointError
from slimectl.policies import lm_head
from slimectl.policies.pack_plan import Predictions
from slimectl.policies.recompute import recomputed

MOVES = {
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "slice", "select", "expand", "squeeze", "unsqueeze",
    "alias", "detach", "_to_copy",
}  # fmt: skip
"""Operations that change no value, except by its precision."""


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
                f"{type(self.hf).__name__} does not compute its logits from the output of one base model, which fsdp"
                " does not train. Train a model of another architecture."
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
        modules, name = self.hf._modules, self.hf.base_model_prefix
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


def own_log_probs(
    model: CausalModel, hidden_UH: Tensor, predictions: Predictions, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [R] and entropies [R] as `predicted_log_probs` does, in chunks of states.

    Chunks after the first KEPT_LOGITS logits are recomputed in backward.
    """
    if not len(predictions.targets_Q):
        # Still a function of the head's parameters, so that backward reaches every rank's collectives.
        blank = model.logits(hidden_UH.new_zeros(1, hidden_UH.shape[1])).sum() * 0.0
        empty_Q = hidden_UH.sum(1).float() + blank.float()
        return empty_Q, empty_Q if entropy else None

    def of_chunk(hidden_CH: Tensor, row_Q: Tensor, targets_Q: Tensor) -> tuple[Tensor, Tensor | None]:
        log_p_CV = torch.log_softmax(scaled(model.logits(hidden_CH), temperature), dim=1)
        entropy_C = -(log_p_CV.exp() * log_p_CV).sum(1) if entropy else None
        return log_p_CV[row_Q, targets_Q], entropy_C

    vocabulary = int(model.hf.get_output_embeddings().weight.shape[0])
    chunk = max(1, lm_head.CHUNK_LOGITS // vocabulary)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for C, pairs, row_Q in lm_head.chunks(len(hidden_UH), chunk, predictions.state_Q, hidden_UH.device):
        is_kept = (C.start + chunk) * vocabulary <= lm_head.KEPT_LOGITS
        compute = of_chunk if is_kept else recomputed(of_chunk)
        logprobs_Q, entropy_C = compute(hidden_UH[C], row_Q, predictions.targets_Q[pairs])
        logprobs.append(logprobs_Q)
        entropies += [] if entropy_C is None else [entropy_C]
    entropy_R = predictions.of_states(torch.cat(entropies)) if entropy else None
    return predictions.of_pairs(torch.cat(logprobs)), entropy_R


def scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature, at least in float32."""
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
