"""Compiles C sources once with the system compiler, and stores the libraries in the cache folder."""

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
    """Compile a C file and return the library with its function signatures, or None if it cannot be compiled.

    The file may include headers from its folder. Only Linux on x86-64 is supported. `without` is the start of the log
    message about a missing compiler, and describes the consequence.
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
    """Return the library of a C file, compiling it unless the cache folder has it for this CPU.

    Raises OSError or SubprocessError if that fails, and RuntimeError if the user has no home directory.
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
        raise PermissionError(f"{folder} belongs to another user or is writable by others")
    if (folder / name).is_file():
        return folder / name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Renamed into place when complete, because other processes may compile the same file at the same time.
        target = Path(scratch) / name
        command = [compiler, *FLAGS, *flags, str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
        target.replace(folder / name)
    return folder / name


def _processor() -> str:
    """Return the model and instruction sets of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
