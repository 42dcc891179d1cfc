"""A user's callable: found by its path, checked against what it is offered, called by parameter name."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from slimectl.errors import HookError
from slimectl.hooks.containment import (
    MODULE_PREFIX,
    contained,
    converted,
    in_one_line,
    is_users,
    register_module,
    user_error,
)


def load_callable(path: str, *, setting: str) -> Callable[..., Any]:
    """The object at `package.module:name`, `package.module.name` or `path/to/file.py:name`. Raises HookError."""
    module_path, colon, name = path.rpartition(":")
    if not colon:
        module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise HookError(f"{setting}: {path}: write it as package.module:name or path/to/file.py:name")
    if module_path.endswith(".py") and not Path(module_path).exists():
        raise HookError(f"{setting}: {module_path}: no such file")
    try:
        with contained(f"{setting}: {module_path}"):
            file = module_path.endswith(".py")
            register_module(module_path)
            module = _load_file(Path(module_path)) if file else importlib.import_module(module_path)
            value = getattr(module, name, None)
    except BaseException as error:
        if not is_users(error):
            raise
        raise HookError(f"{setting}: importing {module_path} failed: {in_one_line(error)}") from error
    if not callable(value):
        what = "is not callable" if value is not None else "has no such name"
        raise HookError(f"{setting}: {path}: {module_path} {what}: {name}")
    return value  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    # The name is that of the resolved file: a hook loaded twice is one module, and worker processes can pickle by it.
    name = MODULE_PREFIX + "".join(c if c.isalnum() else "_" for c in str(path.resolve().with_suffix("")))
    if name not in sys.modules:
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
        with converted(self.name, self._place):
            result = self.bare(offered)
        return self._awaited(result) if inspect.isawaitable(result) else result

    @property
    def name(self) -> str:
        """The setting and the path, as errors name the callable."""
        return f"{self.setting}: {self.path}"

    def bare(self, offered: Mapping[str, Any]) -> Any:
        """The same call, with whatever it raises left as it is."""
        chosen = offered if self._takes_all else {name: offered[name] for name in self.wanted if name in offered}
        return self.function(**chosen)

    def attempt(self, offered: Mapping[str, Any]) -> Any:
        """The same call, with its exceptions left as they are; what is no Exception is raised as HookError."""
        try:
            with contained(self.name):
                result = self.bare(offered)
        except BaseException as error:
            self._refuse_exit(error, suspended=False)
            raise
        return self._attempted(result) if inspect.isawaitable(result) else result

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that the callable returned, called under the same rules."""

        def call(*values: Any, **named: Any) -> Any:
            with converted(self.name, self._place):
                return function(*values, **named)

        return call

    async def _awaited(self, awaitable: Awaitable[Any]) -> Any:
        try:
            with contained(self.name):
                return await awaitable
        except BaseException as error:
            if not is_users(error, suspended=True):
                raise
            raise user_error(self.name, error, self._place(error)) from error

    async def _attempted(self, awaitable: Awaitable[Any]) -> Any:
        try:
            with contained(self.name):
                return await awaitable
        except BaseException as error:
            self._refuse_exit(error, suspended=True)
            raise

    def _refuse_exit(self, error: BaseException, *, suspended: bool) -> None:
        """Raise the error for an exception of the user's that would end more than the attempt."""
        if isinstance(error, Exception) or not is_users(error, suspended=suspended):
            return
        if isinstance(error, asyncio.CancelledError):  # of a task or a connection of its own
            raise RuntimeError(in_one_line(error)) from error
        raise user_error(self.name, error, self._place(error)) from error

    def returned(self, made: Any, wanted: str) -> HookError:
        """The error for a result that cannot be used; `wanted` says what can."""
        shown = f"{type(made).__name__} {_shown(made)}" if isinstance(made, int | float | str | None) else _form(made)
        return HookError(f"{self.setting}: {self.path} returned {shown}; return {wanted}")

    def _place(self, error: BaseException) -> str:
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


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # a whole number of more digits than Python writes
        return "of very many digits"
