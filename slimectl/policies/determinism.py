"""Deterministic kernels: the same rows on the same GPUs and libraries give the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from slimectl.errors import SettingsError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Variables that cuBLAS, FlashAttention, NCCL and TransformerEngine read once a process."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Computes(Protocol):
    """A trainer, and the context in which its kernels run."""

    kernels: Callable[[], AbstractContextManager[None]]


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch run deterministic kernels only, and restore its choices at the end.

    An operation without such a kernel raises RuntimeError. Of scaled dot-product attention cuDNN's is turned off, and
    the others take their deterministic backward pass.
    """
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    before = cudnn.deterministic, cudnn.benchmark, cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which costs time, and would hide nothing here
    _choose(deterministic=True, benchmark=False, cudnn_attention=False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        _choose(deterministic=before[0], benchmark=before[1], cudnn_attention=before[2])


def _choose(*, deterministic: bool, benchmark: bool, cudnn_attention: bool) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)


def in_kernels(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Run a method of a trainer in its `kernels`."""

    @wraps(method)
    def call(trainer: Computes, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with trainer.kernels():
            return method(trainer, *args, **kwargs)

    return call


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json with the number of experts."""


def check_model(config: Mapping[str, Any], *, device: str, backend: str) -> None:
    """Raise SettingsError for a model of which a GPU has no deterministic kernels. `config` is its config.json."""
    if device != "cuda":
        return
    if "linear_attention" in (config.get("layer_types") or ()):
        raise SettingsError(
            "train.deterministic: linear attention sums with torch.cumsum, which has no deterministic kernel on a GPU."
            ' Set train.deterministic = false, or train.device = "cpu".'
        )
    if backend == "fsdp" and any(config.get(key) for key in EXPERTS):
        raise SettingsError(
            "train.deterministic: transformers counts the tokens of experts with torch.histc, which has no"
            ' deterministic kernel on a GPU. Set train.backend = "megatron", or train.deterministic = false.'
        )


def prepare_gpu(*, used: bool) -> None:
    """Set the variables of a process for its GPU; those that are set already stay.

    Raises SettingsError if the process has `used` the GPU, and cuBLAS may have read its variable.
    """
    if used and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise SettingsError(
            "train.deterministic: this process has used the GPU before, and cuBLAS has chosen its workspace. Set"
            " CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment and start again."
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def gpu_is_used() -> bool:
    """Return whether this process has allocated memory on a GPU."""
    return torch.cuda.is_initialized() and torch.cuda.memory_stats().get("allocation.all.allocated", 0) > 0
