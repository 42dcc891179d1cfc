"""A user's callable: found by its path, checked against what it is offered, called by parameter name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from slimectl.errors import HookError, SlimectlError


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

    Calling it passes only what its parameters ask for. What it raises comes back as HookError with its own words, its
    file and line; so does what the coroutine of an async callable raises when it is awaited.
    """

    def __init__(self, path: str, *, setting: str, offers: tuple[str, ...]) -> None:
        self.path = path
        self.setting = setting
        self.function = load_callable(path, setting=setting)
        parameters = _parameters(self.function, f"{setting}: {path}")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.wanted = tuple(p.name for p in named)
        unknown = [p.name for p in named if p.name not in offers and p.default is p.empty]
        unknown += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if unknown:
            raise HookError(f"{setting}: {path} wants {', '.join(unknown)}; on offer are {', '.join(offers)}")

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        try:
            made = self.bare(offered)
        except Exception as error:
            raise self.raised(error) from error
        return self._awaited(made) if inspect.isawaitable(made) else made

    def bare(self, offered: Mapping[str, Any]) -> Any:
        """The same call, with whatever it raises left as it is."""
        chosen = offered if self._takes_all else {name: offered[name] for name in self.wanted if name in offered}
        return self.function(**chosen)

    async def _awaited(self, made: Awaitable[Any]) -> Any:
        try:
            return await made
        except Exception as error:
            raise self.raised(error) from error

    def raised(self, error: Exception) -> SlimectlError:
        """What it raised, with the place; an error of ours, of something that it called, says enough by itself."""
        if isinstance(error, SlimectlError):
            return error
        return HookError(
            f"{self.setting}: {self.path} raised {type(error).__name__}: {error} ({self._place(error)}); mend it there"
        )

    def returned(self, made: Any, wanted: str) -> HookError:
        """The error for a result that cannot be used; `wanted` says what can."""
        shown = f"{type(made).__name__} {made!r:.60}" if isinstance(made, int | float | str | None) else _form(made)
        return HookError(f"{self.setting}: {self.path} returned {shown}; return {wanted}")

    def _place(self, error: Exception) -> str:
        """FILE:LINE: the last line of the hook's own file that was being run, else of any."""
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(self.function.__module__), "__file__", None)
        own = [frame for frame in frames if frame.filename == file]
        frame = (own or list(frames))[-1]
        return f"{Path(frame.filename).name}:{frame.lineno}"


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise HookError(
            f"{where}: its parameters cannot be read ({error}); wrap it in a function of your own"
        ) from None


def _form(made: Any) -> str:
    """A value in a few words: its type, and how many it holds."""
    return f"{type(made).__name__} of {len(made)}" if isinstance(made, list | tuple | dict) else type(made).__name__
