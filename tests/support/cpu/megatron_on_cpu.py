"""Runs Megatron-core on a machine without CUDA by redirecting its GPU calls to the CPU. Other modules are unchanged.

megatron-core has no switch for the device. It writes `device="cuda"`, calls `torch.cuda.current_device()` and
`tensor.cuda()`, and compares `tensor.type()` with "torch.cuda.FloatTensor". Here the functions of its modules get the
same bytecode with other names: "cuda" becomes "cpu", and `torch` becomes a view of torch whose `cpu` also has
the functions of `torch.cuda` that megatron-core calls. Delete this module when megatron-core takes its device from
torch's current accelerator. Each patch's docstring states when to delete the patch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from slimectl.errors import BackendError
from slimectl.policies.onednn_linear import is_faster, linear

TESTED = ("0.16.1", "0.19.2")
"""Versions of megatron-core whose GPU calls are all covered."""

_TYPES = {f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
_REPLACEMENTS = {"cuda": "cpu", **_TYPES}


def patch(module: ModuleType) -> None:
    """Patch a module of megatron.core that was just imported. Raises BackendError for an untested version."""
    if torch.cuda.is_available():
        return
    if (installed := version("megatron-core")) not in TESTED:
        raise BackendError(
            f"megatron-core {installed} was not tested without a GPU. Run: pip install 'megatron-core=={TESTED[0]}'"
        )
    _redirect(module, _torch_on_cpu())
    if module.__name__ in _PATCHES:
        _PATCHES[module.__name__](module)


def _redirect(module: ModuleType, view: ModuleType) -> None:
    if vars(module).get("torch") is torch:
        module.torch = view  # type: ignore[attr-defined]
    for function in _functions(module):
        function.__code__ = _replace_cuda_names(function.__code__)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield every function that the module defines, including methods and decorated functions."""
    spaces: list[Mapping[str, Any]] = [vars(module)]
    spaces += [vars(kind) for kind in vars(module).values() if inspect.isclass(kind) and _is_defined_in(kind, module)]
    for value in [value for space in spaces for value in space.values()]:
        parts: tuple[Any, ...] = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = inspect.unwrap(getattr(part, "__func__", part))
            if isinstance(function, FunctionType) and _is_defined_in(function, module):
                yield function


def _is_defined_in(value: Any, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _replace_cuda_names(code: CodeType) -> CodeType:
    """Replace CUDA names with CPU names in a code object, including nested functions."""
    return code.replace(
        co_names=tuple(_REPLACEMENTS.get(name, name) for name in code.co_names),
        co_consts=tuple(_constant(value) for value in code.co_consts),
    )


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _replace_cuda_names(value)
    if isinstance(value, tuple):
        return tuple(_constant(part) for part in value)
    return _REPLACEMENTS.get(value, value) if isinstance(value, str) else value


@functools.cache
def _torch_on_cpu() -> ModuleType:
    """Build a view of torch whose `cpu` has the functions of `torch.cuda` that megatron-core calls."""
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
    """A stream that returns events. torch's own (2.13) returns None."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


def _patch_random(random: Any) -> None:
    """Redirect random states to the CPU generator, the only one.

    megatron-core (0.16.1) keeps states of CUDA generators and warns if the CPU's generator advances in the meantime. On
    a CPU they are the same generator. Delete with the rest of this module.
    """
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random.CudaRNGStatesTracker.fork = _fork


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Replace CudaRNGStatesTracker.fork: draw from the state `name` within the block, then restore the caller's."""
    outer = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)


def _patch_token_dispatcher(token_dispatcher: Any) -> None:
    """Convert split sizes of all-to-all to a host sequence.

    megatron-core (0.16.1) converts them only when it moves them off a GPU, but `all_to_all_single` rejects tensors.
    Delete when `maybe_move_tensor_to_cpu` honors `as_numpy` for host tensors.
    """

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_uneven_parts(mappings: Any) -> None:
    """Gather and reduce-scatter parts of different lengths by padding them to the longest.

    gloo (torch 2.13) rejects such lists, nccl accepts them. Sharded experts (expert tensor parallelism) exchange
    them. Delete when gloo's all_gather and reduce_scatter accept lists of unequal tensors.
    """
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gathered(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        parts = gather(_pad_rows(part, longest), group).split(longest)
        return torch.cat([padded[:size] for padded, size in zip(parts, output_split_sizes, strict=True)])

    def scattered(full: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(full, group, None, use_global_buffer)
        longest = max(input_split_sizes)
        parts = [_pad_rows(part, longest) for part in full.split(input_split_sizes)]
        return reduce_scatter(torch.cat(parts), group)[: input_split_sizes[group.rank()]]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gathered, scattered


def _patch_lone_ranks(buffers: Any) -> None:
    """Skip the exchange of gradients and weights in a group of one rank, whose part is already the whole.

    gloo (torch 2.13) copies it several times, while nccl skips the exchange. Delete when gloo skips it too.
    """
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, _unless_alone(getattr(buffers, name)))


def _unless_alone(exchange: Any) -> Any:
    def call(output: torch.Tensor, source: torch.Tensor, *, group: Any, **options: Any) -> Any:
        if group.size() == 1 and output.data_ptr() == source.data_ptr() and output.shape == source.shape:
            return None
        return exchange(output, source, group=group, **options)

    return call


def _patch_linear_layers(layers: Any) -> None:
    """Compute float32 linear layers with oneDNN where that is faster.

    With tensor parallelism they are mcore's layers, which exchange inputs and gradients. Delete with onednn_linear.py.
    """
    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        setattr(layers, name, _by_onednn(getattr(layers, name)))


def _by_onednn(multiply: Any) -> Any:
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    @functools.wraps(multiply)  # also copies the attribute `warned`, which it sets on itself by name
    def call(input: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None, **options: Any) -> Any:
        is_alone = get_tensor_model_parallel_group_if_none(options.get("tp_group")).size() == 1
        defers = options["gradient_accumulation_fusion"] or options.get("grad_output_buffer") is not None
        if is_alone and not defers and is_faster(input.device, input.dtype):
            # If the weight is frozen, mcore computes no gradient for the bias either.
            return linear(input, weight, bias.detach() if bias is not None and not weight.requires_grad else bias)
        return multiply(input, weight, bias=bias, **options)

    return call


def _pad_rows(part: torch.Tensor, rows: int) -> torch.Tensor:
    """Append rows of zeros up to `rows` rows."""
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def _share_groups(parallel_state: Any) -> None:
    """Let megatron-core create only one process group for all of its groups with the same ranks.

    megatron-core (0.16.1) creates 20, most of them of one rank or of the same ranks. Every gloo group (torch 2.13)
    keeps three threads, one of which wakes 100 times a second. Delete when gloo's groups share their threads.
    """
    create, initialize = parallel_state.create_group, parallel_state.initialize_model_parallel

    @functools.wraps(initialize)
    def initialize_shared(*args: Any, **options: Any) -> None:
        groups: dict[tuple[int, ...], Any] = {}

        def create_once(ranks: Sequence[int], **options: Any) -> Any:
            if tuple(ranks) not in groups:
                groups[tuple(ranks)] = create(ranks, **options)
            return groups[tuple(ranks)]

        parallel_state.create_group = create_once
        try:
            initialize(*args, **options)
        finally:
            parallel_state.create_group = create

    parallel_state.initialize_model_parallel = initialize_shared


_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.distributed.param_and_grad_buffer": _patch_lone_ranks,
    "megatron.core.parallel_state": _share_groups,
    "megatron.core.tensor_parallel.layers": _patch_linear_layers,
    "megatron.core.tensor_parallel.mappings": _patch_uneven_parts,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.transformer.moe.token_dispatcher": _patch_token_dispatcher,
}
"""What else a module needs."""
