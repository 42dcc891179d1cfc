"""Routed experts of a sample: the experts that an engine chose for every token that it read, as stored in records.

I tokens read · L layers of the model, dense ones included · k experts per token.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slimectl.data.checks import a_mapping, shown
from slimectl.errors import HookError

if TYPE_CHECKING:
    import numpy as np

    from slimectl.types import TrainingSample

Routing = dict[str, Any]
"""{"shape": [I, L, k], "dtype": "uint8" or "uint16", "data": base64 of the experts in this order, little-endian}."""


def no_experts(setting: str) -> str:
    """Return the message for a setting that replays the routing of a model without experts."""
    return f"{setting}: this model has no experts to route to. Set it to false."


NO_EXPERTS = no_experts("train.use_rollout_routing_replay")

ITEM_BYTES = {"uint8": 1, "uint16": 2}
MOST_EXPERTS_OF_UINT8 = 256


def encoded(experts: Any) -> Routing:
    """Return the record of an array [I, L, k] of any integer type, with one byte per expert if that is enough.

    >>> import numpy
    >>> encoded(numpy.array([[[0, 3]], [[2, 1]]]))
    {'shape': [2, 1, 2], 'dtype': 'uint8', 'data': 'AAMCAQ=='}

    Raises ValueError for another number of dimensions, or for an invalid expert number.
    """
    import numpy as np

    experts_ILk = np.asarray(experts)
    if experts_ILk.ndim != 3:
        raise ValueError(f"expected [tokens, layers, experts of a token], got {list(experts_ILk.shape)}")
    if experts_ILk.dtype.kind not in "iu":
        raise ValueError(f"expected whole numbers, got {experts_ILk.dtype}")
    highest = int(experts_ILk.max(initial=0))
    if experts_ILk.min(initial=0) < 0 or highest >= 2**16:
        raise ValueError(f"{int(experts_ILk.min(initial=0)) or highest} is not an expert")
    dtype = "uint8" if highest < MOST_EXPERTS_OF_UINT8 else "uint16"
    data = experts_ILk.astype(f"<u{ITEM_BYTES[dtype]}").tobytes()
    return {"shape": list(experts_ILk.shape), "dtype": dtype, "data": base64.b64encode(data).decode()}


def set_routing(experts: Any) -> Routing | None:
    """Return the record of experts that a function set: a record, an array, or nested lists. Raises HookError."""
    if experts is None or isinstance(experts, dict):
        return experts
    try:
        return encoded(experts)
    except (TypeError, ValueError) as error:
        raise HookError(f"sample.rollout_routed_experts, as the function set it: {error}") from None


def decoded(routing: Routing) -> np.ndarray:
    """Return the experts [I, L, k] of a record that `a_routing` accepts."""
    import numpy as np

    data = base64.b64decode(routing["data"])
    return np.frombuffer(data, dtype=f"<u{ITEM_BYTES[routing['dtype']]}").reshape(routing["shape"])


def routing_marks(rows: Sequence[TrainingSample]) -> list[np.ndarray]:
    """Return a number for each input token of the rows, uint64 [I]: equal for equal experts, 0 without experts.

    Two different choices get the same number with a probability below 2^-48: sums of random multiples modulo 2^64
    (Carter and Wegman 1979, doi:10.1016/0022-0000(79)90044-8).
    """
    import numpy as np

    marks = [np.zeros(row.input_length, dtype=np.uint64) for row in rows]
    factors_C = np.zeros(0, dtype=np.uint64)
    for marks_I, row in zip(marks, rows, strict=True):
        if row.routed_experts is None:
            continue
        experts_IC = decoded(row.routed_experts).reshape(routed_tokens(row.routed_experts), -1)
        if len(factors_C) != experts_IC.shape[1]:
            factors_C = np.random.default_rng(0).integers(2**64, size=experts_IC.shape[1], dtype=np.uint64)
        experts_IC = experts_IC[: row.input_length]
        marks_I[: len(experts_IC)] = (experts_IC.astype(np.uint64) + np.uint64(1)) @ factors_C
    return marks


def a_routing(value: Any) -> Routing:
    """Return a valid record of routed experts, from a record or nested lists. Raises ValueError with the reason."""
    if isinstance(value, list):
        return encoded(value)
    routing = a_mapping(value)
    if set(routing) != {"shape", "dtype", "data"}:
        raise ValueError(f"expected the keys shape, dtype and data, got {', '.join(sorted(routing)) or 'none'}")
    shape, dtype, data = routing["shape"], routing["dtype"], routing["data"]
    sizes = shape if type(shape) is list and len(shape) == 3 else [0]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(f"shape: expected [tokens, layers, experts of a token], got {shown(shape)}")
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise ValueError(f"dtype: expected uint8 or uint16, got {shown(dtype)}")
    try:
        size = len(base64.b64decode(data, validate=True))
    except (TypeError, ValueError):
        raise ValueError(f"data: expected base64, got {shown(data)}") from None
    if size != (expected := math.prod(shape) * ITEM_BYTES[dtype]):
        raise ValueError(f"data: {size} bytes, expected {expected} for {list(shape)} of {dtype}")
    return routing


def routed_tokens(routing: Routing | None) -> int:
    """Return the number of tokens with experts."""
    return 0 if routing is None else int(routing["shape"][0])


def extended(routing: Routing | None, later: Routing, *, tokens: int) -> Routing | None:
    """Return `routing`, extended up to `tokens` by the further tokens of `later`. Both begin at the same token.

    A token keeps the experts of the request that read it first, because its log-probabilities were computed with them.
    If the shapes differ, the records come from different models, and the later one is returned.
    """
    import numpy as np

    tokens = min(tokens, routed_tokens(later))
    if routing is not None and routing["shape"][1:] != later["shape"][1:]:
        routing = None
    start = routed_tokens(routing)
    if tokens <= start:
        return routing
    if routing is None:
        return later if tokens == routed_tokens(later) else encoded(decoded(later)[:tokens])
    return encoded(np.concatenate((decoded(routing), decoded(later)[start:tokens])))
