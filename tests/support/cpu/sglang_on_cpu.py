"""Shims for SGLang 0.5.21 on a machine without a GPU. Each docstring explains why and when to delete the shim.

Importing this module, before SGLang, applies those that need no module of SGLang.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import types
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []
"""Keeps operator definitions alive, because torch removes them with their library."""


def prepare() -> None:
    """Prepare this process, whose workers are forked, for SGLang."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # SGLang 0.5.21 compiles small functions. This needs a C++ compiler at run time and does not help on a CPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    gc.disable()  # until the server starts: collections would scan the objects of all modules again and again
    _torchvision_schemas()
    _triton()
    _sgl_kernel()
    _synchronize()
    _fork_workers()


def patch(module: types.ModuleType) -> None:
    """Patch a module of SGLang that was just imported."""
    if module.__name__ in _PATCHES and not torch.cuda.is_available():
        _PATCHES[module.__name__](module)


def _torchvision_schemas() -> None:
    """Define torchvision's operators.

    PyPI's torchvision 0.28.0 is built for CUDA. With a CPU torch its operators do not load, and `import torchvision`,
    which SGLang needs for images, fails without them. Delete when PyPI's wheel loads on a CPU.
    """
    if not importlib.metadata.version("torchvision").endswith("+cpu"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


def _triton() -> None:
    """Replace triton, which SGLang imports everywhere to decorate kernels that a CPU never calls.

    Delete to install the real package, which takes 700 MB.
    """
    if importlib.util.find_spec("triton") is None:
        importlib.import_module("torch.utils._triton").has_triton_package()  # cached, so that torch knows there is none
        for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.libdevice"):
            _Inert.install(name)
        language: Any = sys.modules["triton.language"]
        language.constexpr = lambda value: value  # modules wrap constants on import


def _sgl_kernel() -> None:
    """Replace sgl-kernel, which has no CPU wheel.

    torch_native attention calls one of its functions. Calling any other raises. Delete when there is a CPU wheel.
    """
    if importlib.util.find_spec("sgl_kernel") is None:
        module = _Inert.install("sgl_kernel")
        module.assign_req_to_token_pool_cpu = _assign_req_to_token_pool


def _assign_req_to_token_pool(
    rows_N: torch.Tensor,
    pool_RL: torch.Tensor,
    start_N: torch.Tensor,
    end_N: torch.Tensor,
    slots: torch.Tensor,
    _length: int,
) -> None:
    """Write each request's new cache slots to its row of the pool. `slots` is concatenated over requests."""
    offset = 0
    for row, start, end in zip(rows_N.tolist(), start_N.tolist(), end_N.tolist(), strict=True):
        pool_RL[row, start:end] = slots[offset : offset + end - start]
        offset += end - start


def _deterministic_sampling(choices: Any) -> None:
    """Enable seeded sampling.

    SGLang uses `sampling_seed` only with --enable-deterministic-inference. That mode does not allow torch_native
    attention, replaces matrix products by triton kernels, and hashes seeds in sgl-kernel. On a CPU, torch's own
    products are used and the hash is implemented here. Delete when SGLang's deterministic mode starts on a CPU.
    """
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", _murmur_hash32, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _keep_matrix_products(invariant: Any) -> None:
    invariant.enable_batch_invariant_mode = lambda *_, **__: None


def _sample_with_min_p(sampler: Any) -> None:
    filtered = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = functools.partial(_seeded_min_p, filtered)


def _seeded_min_p(
    draw: Any,
    probs_NV: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps_N: Any,
    need_min_p: bool,
    seed: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Apply min-p before a seeded draw, because SGLang asserts that the two are not combined, and dies.

    The result is the same, because top-k and top-p depend only on larger probabilities. The seeded draw accepts
    unnormalized probabilities.
    """
    if need_min_p and seed is not None:
        floor_N1 = probs_NV.max(dim=-1, keepdim=True).values * min_ps_N.view(-1, 1)
        probs_NV, need_min_p = probs_NV.masked_fill(probs_NV < floor_N1, 0.0), False
    return draw(probs_NV, top_ks, top_ps, min_ps_N, need_min_p, seed, *args, **options)


def _murmur_hash32(seed_N: torch.Tensor, position_N: torch.Tensor, column_V: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 (32 bits, seed 0) of seed low, seed high, position and column: [N, V] uint32."""
    seed_N = seed_N.view(torch.int64)
    blocks = (seed_N & 0xFFFFFFFF, (seed_N >> 32) & 0xFFFFFFFF, position_N.to(torch.int64) & 0xFFFFFFFF)
    hashed = torch.zeros_like(seed_N)
    for word in blocks:
        hashed = _mix(hashed, word)
    hashed_NV = _mix(hashed[:, None], column_V.to(torch.int64)[None, :]) ^ 16
    hashed_NV = (hashed_NV ^ (hashed_NV >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    hashed_NV = (hashed_NV ^ (hashed_NV >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return (hashed_NV ^ (hashed_NV >> 16)).to(torch.uint32)


def _mix(hashed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Run one round. Products of 32-bit numbers may overflow int64, but only the correct low 32 bits are used."""
    word = _rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
    return _rotate(hashed ^ word, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return (word << bits | word >> (32 - bits)) & 0xFFFFFFFF


def _penalty_order(orchestrator: Any) -> None:
    """Apply additive penalties before the repetition penalty, which is multiplicative.

    SGLang does so with its overlap schedule. Without it, and thus on a CPU, it takes them in the order of a set, which
    differs between processes. Delete when BatchedPenalizerOrchestrator.apply sorts penalties.
    """
    create = orchestrator.BatchedPenalizerOrchestrator.__init__

    def create_sorted(self: Any, vocab_size: int, batch: Any, penalizers: Any) -> None:
        create(self, vocab_size, batch, sorted(penalizers, key=lambda penalizer: penalizer.is_multiplicative))

    orchestrator.BatchedPenalizerOrchestrator.__init__ = create_sorted


def _host_register(common: Any) -> None:
    """Disable cudaHostRegister, with which SGLang pins a host buffer for routed experts without checking for a GPU.

    Delete when sglang/srt/mem_cache/pool_host/common.py checks.
    """
    common._cuda_host_register = lambda *_: None


def _synchronize() -> None:
    """Disable torch.cuda.synchronize, which weight checksums call without checking for a GPU.

    Delete when sglang/srt/utils/weight_checker.py checks.
    """
    torch.cuda.synchronize = lambda *_: None


def _fork_workers() -> None:
    """Fork the worker processes, which SGLang spawns because a process that uses CUDA cannot be forked.

    Each spawned process would import torch and SGLang again, which takes 6 seconds of CPU time. Delete when SGLang
    forks on a CPU.

    A worker inherits about 600 000 objects of imported modules. They are frozen, because SGLang on a CPU collects
    garbage at every cache flush, and thus at every weight push. Scanning all objects would take 0.4 s.
    """
    os.register_at_fork(before=gc.freeze)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None


def _observe_adapters(_: Any) -> None:
    """Import the adapter loader of slimectl, which wraps methods of this module, in the server's script.

    Forked workers inherit it. It then also knows of the updates before the first adapter.
    """
    if importlib.util.find_spec("adapter_loader") is not None:
        importlib.import_module("adapter_loader")


def _collect_garbage(_: Any) -> None:
    """Scan only new objects from here on, where the server starts."""
    gc.freeze()
    gc.enable()


_PATCHES = {
    "sglang.launch_server": _collect_garbage,
    "sglang.srt.arg_groups.choices": _deterministic_sampling,
    "sglang.srt.batch_invariant_ops": _keep_matrix_products,
    "sglang.srt.layers.sampler": _sample_with_min_p,
    "sglang.srt.mem_cache.pool_host.common": _host_register,
    "sglang.srt.model_executor.model_runner_components.weight_updater": _observe_adapters,
    "sglang.srt.sampling.penaltylib.orchestrator": _penalty_order,
}
"""What each module of SGLang needs."""


class _Inert(types.ModuleType):
    """A stub module. All names can be imported and used as decorators, but not called for a result."""

    @classmethod
    def install(cls, name: str) -> Any:
        module: Any = cls(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__version__ = "0.0.0"
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
        return module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Name:
    """A name in a stub module: a decorator with or without arguments, or a type in annotations. Raises if called."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._path}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and isinstance(args[0], types.FunctionType):
            return args[0]
        if not args and options:
            return self
        if args and all(isinstance(arg, list | dict) for arg in args):
            return self  # @triton.autotune([...], key=[...])
        raise NotImplementedError(f"{self._path} is not available on a CPU")

    def __getitem__(self, _: Any) -> Any:
        return self


if not torch.cuda.is_available():
    prepare()
