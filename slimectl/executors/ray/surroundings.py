"""Environment forwarded from the driver to actors, and actor location."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slimectl.executors.outputs import redirect
from slimectl.executors.ray.library import ray

FAMILIES = ("SLIMECTL_", "HF_", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH", "TOKENIZERS_", "PYTORCH_")
"""Prefixes of environment variables that change how slimectl, or its libraries, compute and communicate."""


@dataclass(frozen=True)
class Surroundings:
    """Import paths, working directory and environment of the driver, so that actors find a reward in its folder too.

    On other machines the same paths must hold the same files, as with any checkpoint that they read.
    """

    paths: tuple[str, ...]
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def here() -> Surroundings:
        """Return those of this process."""
        installed = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})
        paths = tuple(os.path.abspath(path) for path in sys.path if not os.path.abspath(path).startswith(installed))
        variables = {name: value for name, value in os.environ.items() if name.startswith(FAMILIES)}
        return Surroundings(paths, os.getcwd(), variables)

    def enter(self, log: Path | None) -> None:
        """Apply them to this process; its output goes to `log`, or to stderr."""
        redirect(log)
        sys.path[:0] = [path for path in self.paths if path not in sys.path]
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        if "OMP_NUM_THREADS" not in self.variables:
            # Ray sets it to the CPUs of an actor, ours ask for none: torch is to use what it would use without Ray.
            os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(self.variables)


@dataclass(frozen=True)
class Whereabouts:
    """Machine, GPUs and process of an actor: Ray's id of the node, and the address that others reach it by."""

    node: str
    address: str
    gpus: tuple[str, ...]
    pid: int

    @staticmethod
    def here() -> Whereabouts:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Whereabouts(
            ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), tuple(gpus), os.getpid()
        )

    def __str__(self) -> str:
        return f"{self.address}, GPU {','.join(self.gpus)}" if self.gpus else self.address
