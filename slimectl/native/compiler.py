"""Compiles C sources once, by the machine's own compiler, into the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
TIMEOUT_S = 120
POINTER, LONG, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float

logger = logging.getLogger("slimectl")


def load_library(
    source: Path, signatures: Mapping[str, Sequence[Any]], *, flags: Sequence[str] = (), without: str
) -> ctypes.CDLL | None:
    """Return the library of a C file with the parameters of its functions; None where it cannot be compiled.

    The file may include headers of its folder. It was tried on Linux on x86-64 only. `without` begins the log's line
    about a missing compiler: who computes slower.
    """
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        library = ctypes.CDLL(str(compiled(source, tuple(flags))))
        for name, types in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(types), None
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        logger.info("%s, which need a C compiler: %s", without, error)
        return None
    return library


def compiled(source: Path, flags: tuple[str, ...] = ()) -> Path:
    """Return a compiled file, which is compiled if the cache folder does not have it for this processor.

    Raises OSError or SubprocessError where that fails, RuntimeError for a user without a home.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"none of {', '.join(COMPILERS)} is installed")
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = [*texts, *FLAGS, *flags, os.path.realpath(compiler), _processor(), torch.__version__]
    name = f"{source.stem}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:20]}.so"
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
        command = [compiler, *FLAGS, *flags, str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
        target.replace(folder / name)
    return folder / name


def _processor() -> str:
    """Return model and instructions of the processor, for which code is compiled."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
