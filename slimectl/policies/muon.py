"""Muon: momentum whose matrices are orthogonalized, for hidden matrices. AdamW updates all other parameters.

E experts · M rows · N columns of a matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slimectl.architectures.lora import is_adapter
from slimectl.policies.moments import MOMENTS, moments_of
from slimectl.policies.optimizer import ChunkedAdamW, OptimizerOptions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial a x + b x^3 + c x^5, which moves singular values towards 1."""
EPSILON = 1e-7
ADAMW_RMS = 0.2
"""Typical root mean square of AdamW's updates, divided by the learning rate."""
ELEMENTS_AT_ONCE = 2**26
"""Maximum elements of a stack of experts that are orthogonalized together, unless one matrix has more."""

OTHERS = re.compile(r"(^|\.)(embed\w*|\w*_embed|\w*embeddings?|wte|wpe|lm_head|score|gate|router|shared_expert_gate)\.")
"""Matrices that AdamW updates: embeddings, heads and routers. A router is `gate`, not `gate_proj`."""
EXPERTS = re.compile(r"(^|\.)experts\.\w+$")

Orthogonalize = Callable[[Tensor], Tensor]


def hidden_matrices(hf: Any) -> set[str]:
    """Return the names of the parameters that Muon updates: matrices [M, N] of layers, and of experts [E, M, N].

    Embeddings, heads, routers, norms, biases and convolutions are left to AdamW, as in Jordan et al. 2024 (see Muon).
    """
    tables = {id(module.weight) for module in hf.modules() if isinstance(module, nn.Embedding)}
    head = hf.get_output_embeddings()
    tables |= set() if head is None else {id(head.weight)}
    return {
        name
        for name, parameter in hf.named_parameters()
        if id(parameter) not in tables
        and not OTHERS.search(name)
        and (
            (parameter.dim() == 2 and (name.endswith(".weight") or is_adapter(name)))
            or (parameter.dim() == 3 and EXPERTS.search(name) is not None)
        )
    }


def orthogonalized(matrices: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Return about U V^T for each matrix U S V^T of [M, N] or [E, M, N]. A zero matrix stays zero.

    Newton-Schulz iteration of degree 5 in `dtype`, after which singular values are between about 0.7 and 1.2. Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = COEFFICIENTS
    X_EMN = matrices.to(dtype).view(-1, *matrices.shape[-2:])
    is_tall = X_EMN.shape[1] > X_EMN.shape[2]
    if is_tall:
        X_EMN = X_EMN.mT
    X_EMN = X_EMN / torch.linalg.matrix_norm(X_EMN, keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram_EMM = X_EMN @ X_EMN.mT
        update_EMM = torch.baddbmm(gram_EMM, gram_EMM, gram_EMM, beta=b, alpha=c)
        X_EMN = torch.baddbmm(X_EMN, update_EMM, X_EMN, beta=a)
    return (X_EMN.mT if is_tall else X_EMN).reshape(matrices.shape)


def direction(matrices: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Return Muon's update of [M, N] or [E, M, N] for a learning rate of 1, with the typical size of AdamW's.

    Liu et al. 2025, arXiv:2502.16982, eq. 4: the orthogonalized matrix times 0.2 sqrt(max(M, N)).
    """
    stack = matrices if matrices.dim() == 3 else matrices[None]
    parts = stack.split(max(1, ELEMENTS_AT_ONCE // stack[0].numel()))
    results = torch.cat([orthogonalized(part, steps=steps, dtype=dtype) for part in parts])
    return results.view_as(matrices).float() * (ADAMW_RMS * math.sqrt(max(matrices.shape[-2:])))


class WholeMatrices(Protocol):
    """Gives Muon whole matrices where ranks hold parts of them."""

    at_once: int
    """Number of parameters that `apply` should get at once."""

    def apply(self, masters: Sequence[Tensor], updates: Sequence[Tensor], function: Orthogonalize) -> list[Tensor]:
        """Call `function` on every whole update, and return this rank's parts of the results."""
        ...

    def has_tokens(self, master: Tensor, gradient: Tensor) -> Tensor:
        """Return for each expert of a stack [E, M, N] of this rank whether any part of its gradient is not zero."""
        ...


class LocalMatrices:
    """WholeMatrices of one process."""

    at_once = 1

    def apply(self, masters: Sequence[Tensor], updates: Sequence[Tensor], function: Orthogonalize) -> list[Tensor]:
        return [function(update) for update in updates]

    def has_tokens(self, master: Tensor, gradient: Tensor) -> Tensor:
        return gradient.flatten(1).any(dim=1)


class Muon(ChunkedAdamW):
    """Muon on the parameters of groups with `matrices`, and AdamW on the others.

    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, with the scale and the decoupled weight decay of Liu
    et al. 2025, arXiv:2502.16982 (Moonlight), so that learning rate and weight decay are AdamW's. The momentum is the
    moment `exp_avg`. A matrix of an expert without gradient stays, because its update would have full size however
    small its momentum is.
    """

    def __init__(
        self,
        params: Iterable[Any],
        options: OptimizerOptions,
        *,
        exchange: WholeMatrices,
        dtype: torch.dtype,
        **more: Any,
    ) -> None:
        super().__init__(params, state_dtype=options.state_dtype, **more)
        self.options, self.exchange, self.dtype = options, exchange, dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            masters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not group["matrices"]:
                for master in masters:
                    self._update(master, master.grad, group)
                continue
            for i in range(0, len(masters), self.exchange.at_once):
                self._update_matrices(masters[i : i + self.exchange.at_once], group)

    def _update_matrices(self, masters: Sequence[Tensor], group: dict[str, Any]) -> None:
        updates, lr = [self._momentum(master) for master in masters], float(group["lr"])
        for master, update in zip(masters, self.exchange.apply(masters, updates, self._direction), strict=True):
            master.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)

    def _direction(self, matrices: Tensor) -> Tensor:
        return direction(matrices, steps=self.options.muon_num_ns_steps, dtype=self.dtype)

    def _momentum(self, master: Tensor) -> Tensor:
        """Add the gradient to the momentum, and return this rank's part of the matrix to orthogonalize."""
        assert master.grad is not None
        name, beta = MOMENTS[0], self.options.muon_momentum
        state, moments, gradient = self._advanced(master, [name]), moments_of(self, master), master.grad.float()
        momentum = moments.read(state, name).view_as(master).lerp(gradient, 1 - beta)
        noise = self._noise(master, moments, 0, master.numel(), int(state["step"]))
        moments.write(state, name, 0, momentum.view(-1), None if noise is None else noise & 0xFFFF)
        update = gradient.lerp(momentum, beta) if self.options.muon_use_nesterov else momentum
        if master.dim() == 3:
            update = update * self.exchange.has_tokens(master, gradient)[:, None, None]
        return update


def moment_names(parameter: str, matrices: Collection[str]) -> tuple[str, ...]:
    """Return the moments of a parameter. `matrices` are the names of Muon's parameters."""
    return MOMENTS[:1] if parameter in matrices else MOMENTS
