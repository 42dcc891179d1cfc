"""Deterministic kernels: the same rows on the same GPUs and libraries give the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from slimectl.errors import SettingsError

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
"""Variables that cuBLAS, FlashAttention, NCCL and TransformerEngine read once per process."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let torch run only deterministic kernels, and restore its settings at the end.

    An operation without a deterministic kernel raises RuntimeError. cuDNN's scaled dot-product attention is turned off,
    and the other implementations use their deterministic backward pass.
    """
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    memory: Any = torch.utils.deterministic  # its attribute is untyped
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    before = cudnn.deterministic, cudnn.benchmark, cuda.cudnn_sdp_enabled()
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it costs time, and no kernel here reads such memory
    _choose(deterministic=True, benchmark=False, cudnn_attention=False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills
        _choose(deterministic=before[0], benchmark=before[1], cudnn_attention=before[2])


def _choose(*, deterministic: bool, benchmark: bool, cudnn_attention: bool) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, benchmark
    torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)


def in_kernels(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Run a method of a trainer with deterministic kernels, if its options ask for them."""

    @wraps(method)
    def call(trainer: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with deterministic_kernels() if trainer.options.deterministic else nullcontext():
            return method(trainer, *args, **kwargs)

    return call


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json with the number of experts."""


def check_model(config: Mapping[str, Any], *, device: str, backend: str) -> None:
    """Raise SettingsError if the model of `config` (config.json) needs GPU kernels that are not deterministic."""
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
    """Set the GPU variables of this process. Variables that are already set are kept.

    Raises SettingsError if the process has `used` the GPU, because cuBLAS may have read its variable.
    """
    if used and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise SettingsError(
            "train.deterministic: this process has already used the GPU, so cuBLAS has chosen its workspace. Set"
            " CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment and start again."
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def gpu_is_used() -> bool:
    """Return whether this process has allocated memory on a GPU."""
    return torch.cuda.is_initialized() and bool(torch.cuda.memory_stats().get("allocation.all.allocated"))
