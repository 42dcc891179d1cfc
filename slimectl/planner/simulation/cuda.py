"""CUDA devices in a process without a GPU, for fake tensors only: devices, streams, attention, meshes.

torch (2.13) lets fake tensors of a CUDA device through autograd only in builds with CUDA: elsewhere autograd asks for a
stream, which does not exist. Here fake tensors show C++ the meta device, as the tensors that they wrap, and
Python their own. Everything is patched for the life of the process, which does nothing else. Delete each patch
when a release of torch makes it unnecessary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.bias import CausalBias
from torch.utils._pytree import tree_leaves

KINDS = ("cpu", "cuda", "meta")
FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")
"""Functions of torch that megatron-core (0.16.1) calls with the number of a GPU."""


class Stream:
    """A stream on which nothing runs."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> Event:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Generator:
    """A generator whose state never changes: nothing that is random decides a shape."""

    state = torch.zeros(16, dtype=torch.uint8)

    def get_state(self, *_: Any, **__: Any) -> Tensor:
        return self.state

    def set_state(self, *_: Any, **__: Any) -> None: ...


class CudaMode(FakeTensorMode):
    """Fake tensors of which some are on CUDA devices."""

    builds_on_meta = True
    """Whether meta really means the meta device, as while a model is built on it."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not self.builds_on_meta and getattr(kwargs.get("device"), "type", None) == "meta":
            kwargs = {**kwargs, "device": self._device_of(args, kwargs)}
        return super().dispatch(func, types, args, kwargs)

    def _device_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
        """Return the device that C++ means by meta: the device of the operands, or a GPU without operands."""
        devices = {leaf.fake_device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)}
        return next(iter(devices), torch.device("cuda", torch.cuda.current_device()))


def install(*, gpu: int, gpus: int) -> None:
    """Make GPU `gpu` of `gpus` the current device of this process, for fake tensors."""
    import torch._dynamo  # it compares signatures of functions that are patched here

    _patch_cuda(gpu, gpus)
    _patch_fake_tensors()
    _patch_groups()
    F.scaled_dot_product_attention = _attention(F.scaled_dot_product_attention)
    F.rms_norm = _norm(F.rms_norm)
    # Use one thread, because device drivers would start autograd's device threads.
    torch.autograd.set_multithreading_enabled(False)


def _patch_cuda(gpu: int, gpus: int) -> None:
    cuda: Any = torch.cuda
    current = [gpu]
    stream = Stream()
    answers = {
        "is_available": True, "is_initialized": True, "device_count": gpus, "get_device_capability": (9, 0),
        "current_stream": stream, "default_stream": stream, "get_device_name": "simulated",
        **dict.fromkeys(("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "_lazy_init")),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.current_device = lambda: current[0]
    cuda.set_device = lambda device: current.__setitem__(0, torch.device("cuda", device).index)
    cuda.Stream, cuda.Event = Stream, Event
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.default_generators = [Generator()] * gpus
    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = Generator().get_state, Generator().set_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None


def _patch_fake_tensors() -> None:
    from torch.distributed.tensor import DTensor

    make = torch.Tensor._make_subclass

    def make_subclass(cls: type, data: Tensor, requires_grad: bool = False, **kwargs: Any) -> Any:
        if cls is FakeTensor:
            kwargs["dispatch_device"] = False
        return make(cls, data, requires_grad, **kwargs)

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[method-assign, assignment]
    fake: Any = FakeTensor
    fake.type = _type
    fake.to, fake.cpu, fake.cuda = _to, lambda self, *_, **__: _to(self, "cpu"), _to_current
    sharded: Any = DTensor
    sharded.device = property(lambda self: self._local_tensor.device)
    torch.utils.swap_tensors = _swap
    for name in FACTORIES:
        setattr(torch, name, _with_device(getattr(torch, name)))
    fake.new_empty = _with_device(Tensor.new_empty)
    for kind in KINDS:
        for tensors in (fake, sharded):
            setattr(tensors, f"is_{kind}", property(partial(_is_on, kind=kind)))


def _is_on(tensor: Any, *, kind: str) -> bool:
    device: torch.device = tensor.device
    return device.type == kind


def _swap(first: Tensor, second: Tensor, *, swap: Callable[..., None] = torch.utils.swap_tensors) -> None:
    """Give a parameter that Module.to moves its new tensor. Keep weak references to it and its attributes.

    torch uses swap_tensors for fake parameters, which fails with weak references and loses attributes.
    """
    if not isinstance(first, FakeTensor):
        swap(first, second)
    elif first.untyped_storage() is not second.untyped_storage():
        attributes = dict(second.__dict__)
        torch._C._swap_tensor_impl(first, second)
        first.__dict__.update(attributes)


def _with_device(create: Any) -> Any:
    """Let a function take the number of a GPU for its device, which torch looks up in its own list of GPUs."""

    def created(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return create(*args, device=device, **kwargs)

    return created


def _to(self: FakeTensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Tensor.to, whose own comparison of devices in C++ sees meta."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    stays = device in (None, self.fake_device) and dtype in (None, self.dtype)
    if stays and not copy and memory_format in (None, torch.preserve_format):
        return self
    moved: Tensor = torch.ops.aten._to_copy(
        self, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
    )
    return moved


def _type(self: FakeTensor, dtype: Any = None, **options: Any) -> Any:
    """Tensor.type, whose name has the device in it."""
    if dtype is not None:
        return Tensor.type(self, dtype, **options)
    with real_tensors():
        kind = torch.empty(0, dtype=self.dtype).type().removeprefix("torch.")
    return f"torch.cuda.{kind}" if self.is_cuda else f"torch.{kind}"


def _to_current(self: FakeTensor, *_: Any, **__: Any) -> Tensor:
    return _to(self, "cuda")


def _attention(attend: Any) -> Any:
    """Let attention on a CUDA device use the kernel that a GPU uses for half precision: flash, without scores.

    In C++, the choice depends on the device that torch was built for.
    """

    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if isinstance(attn_mask, CausalBias):
            is_causal, attn_mask = True, None
        half = query.dtype in (torch.bfloat16, torch.float16)
        output: Tensor
        if query.is_cuda and half and attn_mask is None and query.shape[-1] <= 256:
            output = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return output
        output = attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return output

    return scaled_dot_product_attention


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel of a GPU: it saves its input, the weight and a float32 number for each row."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, states.new_empty((*states.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        states, weight, _ = ctx.saved_tensors
        return torch.empty_like(states), torch.empty_like(weight)


def _norm(normalize: Any) -> Any:
    """Make RMSNorm on a CUDA device one kernel. Without CUDA, torch has only the operations that it replaces."""

    def rms_norm(states: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        fused = states.is_cuda and weight is not None and weight.dtype == states.dtype
        output: Tensor = (
            _FusedNorm.apply(states, weight)  # type: ignore[no-untyped-call]
            if fused
            else normalize(states, shape, weight, eps)
        )
        return output

    return rms_norm


def _patch_groups() -> None:
    """Make all process groups fake. Build device meshes of real tensors, as their constructor reads ranks from one."""
    build, new_group = dist.init_device_mesh, dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def init_device_mesh(*args: Any, **kwargs: Any) -> Any:
        with real_tensors():
            return build(*args, **kwargs)

    dist.init_device_mesh, dist.new_group = init_device_mesh, fake_group


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Leave the mode of fake tensors."""
    with fake_tensor.unset_fake_temporarily():
        yield
