"""Applies megatron_on_cpu.py and sglang_on_cpu.py to Megatron-core and SGLang when a process imports them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

SHIMS = {"megatron.core": "megatron_on_cpu", "sglang": "sglang_on_cpu"}
"""The module with the shims of each package. It is imported before the package, and patches its modules one by one."""


class _Finder:
    """Finds the modules of these packages as Python does, with a loader that patches them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        shims = next((SHIMS[package] for package in SHIMS if f"{name}.".startswith(f"{package}.")), None)
        spec = PathFinder.find_spec(name, path, target) if shims else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
            spec.loader.shims = shims
        return spec


class _Loader(SourceFileLoader):
    shims: str

    def exec_module(self, module: ModuleType) -> None:
        shims = importlib.import_module(self.shims)
        super().exec_module(module)
        shims.patch(module)


sys.meta_path.insert(0, _Finder())
