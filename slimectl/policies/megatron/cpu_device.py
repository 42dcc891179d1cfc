"""Megatron-core on a machine without CUDA: its GPU calls are led to the CPU, and nothing outside megatron.core changes.

megatron-core has no switch for the device: it writes `device="cuda"`, asks `torch.cuda.current_device()`, calls
`tensor.cuda()` and compares `tensor.type()` with "torch.cuda.FloatTensor". Here the functions of its loaded modules
are given the same bytecode with other names: "cuda" becomes "cpu", and `torch` becomes a view of torch whose `cpu` also
answers what megatron-core asks of `torch.cuda`. Delete this module when megatron-core takes its device from torch's
current accelerator; delete a patch when the comment at it says so.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from slimectl.errors import BackendError

TESTED = ("0.16.1",)
"""Versions of megatron-core whose every GPU call is known."""

_TYPES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
_WORDS = {"cuda": "cpu", **_TYPES}
_done: set[str] = set()


def needed() -> bool:
    """Whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def install(version: str) -> None:
    """Patch every loaded module of megatron.core; again after more of it was imported. Raises BackendError."""
    if version not in TESTED:
        raise BackendError(
            f"megatron-core {version} was not tested without a GPU; run: pip install 'megatron-core=={TESTED[-1]}'"
        )
    view = _torch_on_cpu()
    for name in [name for name in sys.modules if name.startswith("megatron.core") and name not in _done]:
        module = sys.modules[name]
        _done.add(name)
        if isinstance(module, ModuleType):
            _redirect(module, view)
    _patch_random()
    _patch_token_dispatcher()
    _patch_uneven_parts()


def _redirect(module: ModuleType, view: ModuleType) -> None:
    if vars(module).get("torch") is torch:
        module.torch = view  # type: ignore[attr-defined]
    for function in _functions(module):
        function.__code__ = _renamed(function.__code__)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Every function that the module defines, in classes and under decorators too."""
    spaces: list[Mapping[str, Any]] = [vars(module)]
    spaces += [vars(kind) for kind in vars(module).values() if inspect.isclass(kind) and _of(kind, module)]
    for value in [value for space in spaces for value in space.values()]:
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = inspect.unwrap(getattr(part, "__func__", part))
            if isinstance(function, FunctionType) and _of(function, module):
                yield function


def _of(thing: Any, module: ModuleType) -> bool:
    return getattr(thing, "__module__", None) == module.__name__


def _renamed(code: CodeType) -> CodeType:
    """The same code that speaks of the CPU; functions defined inside included."""
    return code.replace(
        co_names=tuple(_WORDS.get(name, name) for name in code.co_names),
        co_consts=tuple(_constant(value) for value in code.co_consts),
    )


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _renamed(value)
    if isinstance(value, tuple):
        return tuple(_constant(part) for part in value)
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _torch_on_cpu() -> ModuleType:
    """torch, except that `cpu` has the calls of `torch.cuda` that megatron-core makes."""
    view = types.ModuleType("torch")
    vars(view).update(vars(torch))
    view.__getattr__ = lambda name: getattr(torch, name)  # type: ignore[method-assign]
    cpu = types.ModuleType("torch.cpu")
    vars(cpu).update(vars(torch.cpu))
    cpu.current_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    cpu.Stream = _Stream  # type: ignore[attr-defined]
    cpu.default_stream = torch.cpu.current_stream  # type: ignore[attr-defined]
    cpu.manual_seed = torch.manual_seed  # type: ignore[attr-defined]
    cpu.get_rng_state = torch.get_rng_state  # type: ignore[attr-defined]
    cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    cpu.OutOfMemoryError = torch.OutOfMemoryError  # type: ignore[attr-defined]
    view.cpu = cpu  # type: ignore[attr-defined]
    return view


class _Stream(torch.cpu.Stream):
    """A stream whose events can be waited for; torch's own returns none (2.13)."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


def _patch_random() -> None:
    """Random state of the only generator there is.

    megatron-core (0.16.1) keeps states of CUDA generators and warns if the CPU's generator moves meanwhile; here
    they are the same. Goes with the rest of this module.
    """
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random.CudaRNGStatesTracker.fork = _fork


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """CudaRNGStatesTracker.fork: draw from the state `name` inside, from the caller's again outside."""
    outer = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)


def _patch_token_dispatcher() -> None:
    """Split sizes of all-to-all as a host sequence.

    megatron-core (0.16.1) makes them one only when it moves them off a GPU; `all_to_all_single` refuses tensors.
    Delete when `maybe_move_tensor_to_cpu` honours `as_numpy` for host tensors.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_uneven_parts() -> None:
    """Gather and reduce-scatter of parts that differ in length, by padding them to the longest.

    gloo (torch 2.13) refuses such lists, nccl takes them; experts that are cut (expert tensor parallelism) exchange
    them. Delete when gloo's all_gather and reduce_scatter take lists of unequal tensors.
    """
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    if getattr(gather, "_slimectl", False):
        return

    def gathered(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        parts = gather(_lengthened(part, longest), group).split(longest)
        return torch.cat([each[:size] for each, size in zip(parts, output_split_sizes, strict=True)])

    def scattered(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, None, use_global_buffer)
        longest = max(input_split_sizes)
        parts = [_lengthened(part, longest) for part in whole.split(input_split_sizes)]
        return reduce_scatter(torch.cat(parts), group)[: input_split_sizes[group.rank()]]

    gathered._slimectl = True  # type: ignore[attr-defined]
    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gathered, scattered


def _lengthened(part: torch.Tensor, rows: int) -> torch.Tensor:
    """The tensor with rows of zeros below."""
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])
