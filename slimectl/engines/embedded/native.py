"""Kernels in C for a CPU: compiled once by the machine's own compiler, kept in the cache folder, called by ctypes.

N rows · I inputs · O outputs · E hidden size · H query heads · K key-value heads · D head dimension · T tokens.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 120
DTYPES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
PANEL = 16
"""Outputs of a panel of packed weights, as in kernels.c."""

logger = logging.getLogger("slimectl")

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
_SIGNATURES = {
    "rms_norm": [*[_POINTER] * 3, *[_LONG] * 2, _FLOAT],
    "norm_heads": [*[_POINTER] * 2, *[_LONG] * 4, _FLOAT],
    "rotate": [*[_POINTER] * 3, *[_LONG] * 4],
    "silu_product": [*[_POINTER] * 2, *[_LONG] * 2],
    "attend": [*[_POINTER] * 5, _FLOAT, *[_LONG] * 7],
    "pack": [*[_POINTER] * 2, *[_LONG] * 3],
    "product": [*[_POINTER] * 5, *[_LONG] * 5],
}


class Kernels:
    """The kernels for one dtype; all tensors are contiguous and on the CPU.

    `multiplies` says that products of packed weights are faster than oneDNN's, as they are with AVX2: 1.2 to 1.5 times
    at 1 to 32 rows of float32, as fast at 512; oneDNN has none of bfloat16 there. With AVX-512 oneDNN's are better.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.multiplies = torch.backends.cpu.get_cpu_capability() == "AVX2"
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, None

    def rms_norm(self, rows_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Return rows / rms(rows) * weight."""
        rows, width = rows_NE.shape
        out_NE = torch.empty_like(rows_NE)
        self._library.rms_norm(rows_NE.data_ptr(), weight_E.data_ptr(), out_NE.data_ptr(), rows, width, eps)
        return out_NE

    def norm_heads(self, qkv_NHD: Tensor, weight_HD: Tensor, eps: float) -> None:
        """Normalize in place the first heads of every row, as many as the weight has."""
        rows, heads, head_dim = qkv_NHD.shape
        self._library.norm_heads(
            qkv_NHD.data_ptr(), weight_HD.data_ptr(), rows, weight_HD.shape[0], heads, head_dim, eps
        )

    def rotate(self, qkv_NHD: Tensor, rotated: int, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
        """Rotate in place the first `rotated` heads of every row; the first half of the sines carries the minus."""
        rows, heads, head_dim = qkv_NHD.shape
        self._library.rotate(qkv_NHD.data_ptr(), cos_N1D.data_ptr(), sin_N1D.data_ptr(), rows, rotated, heads, head_dim)

    def silu_product(self, rows_NI: Tensor) -> Tensor:
        """Return silu(first half of each row) * second half."""
        rows, width = rows_NI.shape
        out = rows_NI.new_empty(rows, width // 2)
        self._library.silu_product(rows_NI.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def attend(self, qkv_NHD: Tensor, cache_2SKTD: Tensor, positions_N: Tensor, scratch: Tensor) -> Tensor:
        """Write each row's keys and values into its slot, and return attention over the slot's tokens [N, H * D]."""
        rows, all_heads, head_dim = qkv_NHD.shape
        _, slots, kv_heads, tokens, _ = cache_2SKTD.shape
        heads = all_heads - 2 * kv_heads
        out = qkv_NHD.new_empty(rows, heads * head_dim)
        self._library.attend(
            qkv_NHD.data_ptr(),
            cache_2SKTD.data_ptr(),
            positions_N.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            head_dim**-0.5,
            rows,
            heads,
            kv_heads,
            head_dim,
            tokens,
            slots * kv_heads * tokens * head_dim,
            torch.get_num_threads(),
        )
        return out

    def attention_scratch(self, cache_2SKTD: Tensor, heads: int) -> Tensor:
        """Allocate the memory that `attend` computes in."""
        kv_heads, tokens, head_dim = cache_2SKTD.shape[2:]
        return torch.empty(torch.get_num_threads() * (heads // kv_heads) * (head_dim + tokens))

    def pack(self, weight_OI: Tensor, panels: Tensor | None, *, gated: bool) -> Tensor:
        """Return a weight as `product` reads it, in the memory of earlier `panels` of it if there are any."""
        outputs, inputs = weight_OI.shape
        if panels is None:
            panels = weight_OI.new_empty(-(-outputs // PANEL) * PANEL * inputs)
        self._library.pack(weight_OI.data_ptr(), panels.data_ptr(), outputs, inputs, gated)
        return panels

    def product(
        self,
        rows_NI: Tensor,
        panels: Tensor,
        outputs: int,
        *,
        bias: Tensor | None = None,
        residual_NO: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Return rows · weightᵀ + bias + residual; gated: silu(first half) * second half of rows · weightᵀ + bias."""
        rows, inputs = rows_NI.shape
        out = panels.new_empty(rows, outputs // 2 if gated else outputs)
        rows_NI = rows_NI.to(torch.float32, memory_format=torch.contiguous_format)
        self._library.product(
            rows_NI.data_ptr(),
            panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if residual_NO is None else residual_NO.data_ptr(),
            out.data_ptr(),
            rows,
            inputs,
            outputs,
            gated,
            torch.get_num_threads(),
        )
        return out


@functools.cache
def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for a dtype; None without a compiler, and where they were never tried."""
    if dtype not in DTYPES or not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        return Kernels(ctypes.CDLL(str(_compiled(DTYPES[dtype]))))
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        logger.info("the embedded engine computes without its own kernels, which need a C compiler: %s", error)
        return None


def _compiled(flags: tuple[str, ...]) -> Path:
    """Return the compiled kernels, which are compiled if the cache folder does not have them for this processor.

    Raises OSError or SubprocessError where that fails, RuntimeError for a user without a home.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"none of {', '.join(COMPILERS)} is installed")
    parts = [SOURCE.read_text(), *FLAGS, *flags, os.path.realpath(compiler), _processor(), torch.__version__]
    name = f"kernels-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slimectl" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} belongs to another user, or others may write to it")
    if (folder / name).is_file():
        return folder / name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Renamed into place when it is whole: other processes may compile the same at the same time.
        target = Path(scratch) / name
        command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(target)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
        target.replace(folder / name)
    return folder / name


def _processor() -> str:
    """Return model and instructions of the processor, for which code is compiled."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
