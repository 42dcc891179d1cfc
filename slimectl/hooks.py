"""User callables by path, called by parameter name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slimectl.errors import HookError
from slimectl.settings import Settings


class Args:
    """The resolved settings readable as flat attributes, by the names that people know.

    >>> Args(Settings()).rollout_temperature, Args(Settings()).lr
    (1.0, 1e-06)

    `args.section` is the section itself; `args.section_key` and, where only one section has it, `args.key` its value.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        settings = self._settings
        if name in type(settings).model_fields:
            return getattr(settings, name)
        sections = {section: getattr(settings, section) for section in type(settings).model_fields}
        for section, values in sections.items():
            key = name.removeprefix(f"{section}_")
            if key != name and key in type(values).model_fields:
                return getattr(values, key)
        # The warm-up repeats names of [train]; a bare name means the main loop's.
        main = [values for section, values in sections.items() if section != "warmup"]
        having = [values for values in main if name in type(values).model_fields]
        if len(having) == 1:
            return getattr(having[0], name)
        what = "stands in several sections" if having else "is no setting"
        raise AttributeError(f"args.{name}: {name} {what}; use args.SECTION.KEY")


def load_callable(path: str, *, setting: str) -> Callable[..., Any]:
    """The object at `package.module:name`, `package.module.name` or `path/to/file.py:name`. Raises HookError."""
    module_path, colon, name = path.rpartition(":")
    if not colon:
        module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise HookError(f"{setting}: {path}: write it as package.module:name or path/to/file.py:name")
    try:
        module = _load_file(Path(module_path)) if module_path.endswith(".py") else importlib.import_module(module_path)
    except FileNotFoundError:
        raise HookError(f"{setting}: {module_path}: no such file") from None
    except Exception as error:
        raise HookError(f"{setting}: importing {module_path} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "is not callable" if found is not None else "has no such name"
        raise HookError(f"{setting}: {path}: {module_path} {what}: {name}")
    return found  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    # The name is that of the resolved file: a hook loaded twice is one module, and worker processes can pickle by it.
    name = "slimectl_hook_" + "".join(c if c.isalnum() else "_" for c in str(path.resolve().with_suffix("")))
    if name not in sys.modules:
        if not path.exists():
            raise FileNotFoundError(path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class Hook:
    """A user's callable with the names that it is offered; checked once, before any model is loaded.

    Calling it passes only what its parameters ask for. What it raises comes back as HookError with its own words, and
    the coroutine of an async callable is returned as it is.
    """

    def __init__(self, path: str, *, setting: str, offers: tuple[str, ...]) -> None:
        self.path = path
        self.setting = setting
        self.function = load_callable(path, setting=setting)
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._wanted = [p.name for p in named]
        unknown = [p.name for p in named if p.name not in offers and p.default is p.empty]
        unknown += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if unknown:
            raise HookError(f"{setting}: {path} wants {', '.join(unknown)}; on offer are {', '.join(offers)}")

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        try:
            return self.bare(offered)
        except Exception as error:
            raise HookError(f"{self.setting}: {self.path} raised {type(error).__name__}: {error}") from error

    def bare(self, offered: Mapping[str, Any]) -> Any:
        """The same call, with whatever it raises left as it is."""
        chosen = offered if self._takes_all else {name: offered[name] for name in self._wanted if name in offered}
        return self.function(**chosen)
