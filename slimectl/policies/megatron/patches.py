"""Patches for Megatron-core without TransformerEngine and other kernel libraries, including on GPUs.

This package replaces other defective parts instead of patching them: latent attention (mla.py), experts (moe.py) and
saved optimizer state.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slimectl.errors import BackendError, MissingExtraError


def install() -> None:
    """Patch the loaded modules. Calling it again does nothing."""
    _patch_router_gate()
    _patch_delta_net()
    _patch_gradient_norm()


def _patch_router_gate() -> None:
    """Define a name that the router's matrix product uses but only an import of TransformerEngine defines.

    megatron-core (0.16.1): NameError on `te_general_gemm` in RouterGatingLinearFunction. Delete when moe_utils
    defines it without TransformerEngine.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_delta_net() -> None:
    """Allow building gated delta nets without flash-linear-attention.

    megatron-core (0.16.1, 0.19.2) refuses to build the module. We use its parameters, but not its computation
    (delta_net.py). Delete when it only refuses to run.
    """
    from megatron.core.ssm import gated_delta_net

    if not hasattr(gated_delta_net, "gdn"):
        gated_delta_net.HAVE_FLA = True
    elif not gated_delta_net.HAVE_FLA:  # 0.19 is a package, and also refuses a rule that is None
        gated_delta_net.common.HAVE_FLA = True
        gated_delta_net.gdn.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule


def _patch_gradient_norm() -> None:
    """Compute the norm of gradients, and clip them, without waiting for the GPU at every parameter.

    megatron-core (0.16.1) without TransformerEngine and apex reads the norm of each gradient on the host, and scales
    each with a copy. Delete when its local implementations are torch's _foreach functions.
    """
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def _l2_norm(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Return the norm [1] of all tensors of the lists."""
    norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors])
    return torch.stack(norms).float().norm()[None], None


def _scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Scale the tensors of the first list into the second list's, which are the same tensors when clipping."""
    sources, targets = map(list, lists)
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


OLDEST, NEWER = (0, 16), (0, 20)
"""Supported versions of megatron-core: from the first of these, and below the second."""

_PARTS = (
    "models.gpt.gpt_layer_specs", "models.gpt.gpt_model", "transformer.multi_latent_attention",
    "transformer.moe.moe_layer", "transformer.moe.experts", "ssm.gated_delta_net",
    "distributed", "distributed.finalize_model_grads",
    "optimizer", "optimizer_param_scheduler", "pipeline_parallel", "pipeline_parallel.p2p_communication",
    "dist_checkpointing", "dist_checkpointing.strategies.fully_parallel", "dist_checkpointing.strategies.torch",
)  # fmt: skip
"""Modules imported before patching: all of megatron.core that this package calls, with their dependencies."""

_QUIET = (
    r"Transformer Engine and Apex are not installed", r"Apex is not installed",
    r"The following imports from `dynamic_context.py`", r"\s*The 'megatron.core.transformer.custom_layers",
    r"`torch.jit.script_method` is deprecated", r"`torch.jit.script` is deprecated",
)  # fmt: skip
"""Import warnings about missing optional libraries, which are missing on purpose."""
_QUIET_LATER = (
    r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
    r"When using sequence parallelism it is recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS",
    r"`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
)
"""Run-time warnings that concern its developers, or only GPUs older than Blackwell."""


def prepare() -> None:
    """Import megatron.core and patch it.

    Raises MissingExtraError if megatron-core or psutil is missing, BackendError for an unsupported version.
    """
    _check_version()
    with warnings.catch_warnings(), _hidden("wandb"):
        for message in _QUIET:
            warnings.filterwarnings("ignore", message=message)
        for part in _PARTS:
            importlib.import_module(f"megatron.core.{part}")
    for message in _QUIET_LATER:
        warnings.filterwarnings("ignore", message=message)
    install()


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Hide an installed library from imports inside, unless it is loaded already.

    megatron-core (0.16.1) imports W&B for an inference context that this package does not use, 0.6 s of CPU per rank.
    """
    hides = name not in sys.modules
    if hides:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules[name]


def _check_version() -> None:
    for module, package in (("megatron", "megatron-core"), ("psutil", "psutil")):
        # Without psutil saving a checkpoint hangs (megatron-core 0.16.1).
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(package, extra="megatron", wanted_by='train.backend = "megatron"')
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError("megatron-core", extra="megatron", wanted_by='train.backend = "megatron"') from error
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= numbers < NEWER:
        raise BackendError(f"megatron-core {version} is not supported. Run: pip install 'megatron-core>=0.16.1,<0.20'")
