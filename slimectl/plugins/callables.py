"""Loads a user's callable from its path, checks its parameters and calls it by parameter name."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimectl.errors import HookError
from slimectl.migrate.stand_ins import install_stand_ins
from slimectl.plugins.containment import (
    MODULE_PREFIX,
    contained,
    converted,
    in_one_line,
    is_users,
    register_module,
    user_error,
)
from slimectl.system.event_loop import awaited

LISTED = 12
"""Maximum number of functions that an error lists."""


def load_callable(path: str, *, setting: str) -> Callable[..., Any]:
    """Import the object at `package.module:name`, `package.module.name` or `path/to/file.py:name`. Raises HookError."""
    module_path, colon, name = path.rpartition(":")
    if not colon:
        module_path, _, name = path.rpartition(".")
    if not module_path or not name:
        raise HookError(
            f"{setting}: {path} does not include a function. Write it as package.module:name or path/to/file.py:name."
        )
    module = _import(module_path, setting)
    value = getattr(module, name, None)
    if value is None:
        raise HookError(
            f"{setting}: {path}: {module_path} has no such name: {name}. "
            f"It has {', '.join(_functions(module)[:LISTED]) or 'no functions'}."
        )
    if not callable(value):
        raise HookError(f"{setting}: {path}: {name} is {_describe(value)}. Give a function.")
    return value  # type: ignore[no-any-return]


def _functions(module: Any) -> list[str]:
    """Return the names of the functions and classes that a module defines itself."""
    values = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    return [name for name, value in values.items() if getattr(value, "__module__", "") == module.__name__]


def complete_path(path: str, *, setting: str, names: Sequence[Sequence[str]]) -> str:
    """Return `path` with the name of the function, which is optional for a file or module.

    `names` are customary names of the function. The names of the first sequence are tried first. Raises HookError if
    the module has none of them, or several of one sequence.
    """
    if ":" in path or not names:
        return path
    if not path.endswith(".py"):
        parent, _, name = path.rpartition(".")
        if parent and callable(getattr(_import(parent, setting), name, None)):
            return path
        if not _is_module(path):
            return path
    module = _import(path, setting)
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    defined = _functions(module)
    for candidates in (defined, functions):
        for group in names:
            matches = [name for name in group if name in candidates]
            if len(matches) > 1:
                raise HookError(f"{setting}: {path} has {' and '.join(matches)}. Choose one, as in {path}:{matches[0]}")
            if matches:
                return f"{path}:{matches[0]}"
    customary = ", ".join(name for group in names for name in group)
    raise HookError(
        f"{setting}: {path} has no function with a customary name ({customary}). Give the function, as in "
        f"{path}:NAME. It has {', '.join(defined) or 'no functions'}"
    )


def _import(module_path: str, setting: str) -> Any:
    """Import a file or a module. Raises HookError."""
    if module_path.endswith(".py") and not Path(module_path).exists():
        raise HookError(f"{setting}: {module_path}: no such file")
    _make_importable(os.getcwd())
    try:
        with contained(f"{setting}: {module_path}"):
            register_module(module_path)
            file = module_path.endswith(".py")
            return _load_file(Path(module_path)) if file else importlib.import_module(module_path)
    except BaseException as error:
        if not is_users(error):
            raise
        place = _innermost_frame(error)
        hint = ""
        if module_path.endswith(".py") and "relative import" in str(error):
            hint = f". Name it as a module, as in {module_path.removesuffix('.py').replace('/', '.')}"
        raise HookError(f"{setting}: importing {module_path} failed: {in_one_line(error)}{place}{hint}") from error


def _innermost_frame(error: BaseException) -> str:
    """Return ` (FILE:LINE)` of the user's code in which an import failed, or an empty string if it failed before."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith("<") and frame.filename != __file__]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


def _is_module(path: str) -> bool:
    """Return whether a module has this name. Its parent is imported already."""
    _make_importable(os.getcwd())
    try:
        return importlib.util.find_spec(path) is not None
    except (ImportError, ValueError):
        return False


def _make_importable(folder: str) -> None:
    """Make modules of a folder importable. The folder comes last, so that its files do not hide installed packages.

    Modules of slime are slimectl's stand-ins.
    """
    install_stand_ins()
    if folder not in sys.path:
        sys.path.append(folder)


def _load_file(path: Path) -> Any:
    _make_importable(str(path.resolve().parent))  # for the modules next to it
    # Named after the resolved file, so a hook loaded twice is one module, and workers can unpickle its objects.
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
    """A user's callable and the argument names available to it. It is checked once, before any model is loaded.

    A call passes only the arguments that match its parameters. Its exceptions are raised as HookError with their
    message, file and line, and so are exceptions that the coroutine of an async callable raises when it is awaited.
    """

    def __init__(
        self,
        path: str,
        *,
        setting: str,
        offers: tuple[str, ...],
        other_names: Mapping[str, str] = MappingProxyType({}),
        takes_data: bool = False,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """`other_names` maps further argument names to the names in `offers`.

        With `takes_data` a call also offers the columns of its data, whose names are not known yet. A given `function`
        is used instead of loading the path.
        """
        self.path = path
        self.setting = setting
        self._other_names = other_names
        self.function = load_callable(path, setting=setting) if function is None else function
        parameters = _parameters(self.function, f"{setting}: {path}")
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self._positional = tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.wanted = tuple(p.name for p in named)
        self.required = tuple(p.name for p in named if p.default is p.empty)
        unknown = [name for name in self.required if other_names.get(name, name) not in offers and not takes_data]
        if unknown:
            raise HookError(
                f"{setting}: {path} asks for {', '.join(unknown)}. Functions of this setting can ask for "
                f"{', '.join(offers)}."
            )

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function and return its result. An async function runs to completion in a separate thread."""
        result = self.begin(arguments)
        if not inspect.isawaitable(result):
            return result
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(copy_context().run, asyncio.run, awaited(result)).result()

    def begin(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function. The result of an async function must be awaited."""
        with converted(self.name, self.error_location):
            result = self.bare(arguments)
        return self._await_converted(result) if inspect.isawaitable(result) else result

    @property
    def name(self) -> str:
        """The setting and the path, as errors show them."""
        return f"{self.setting}: {self.path}"

    def bare(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function and let its exceptions pass unchanged."""
        names = {name: name if name in arguments else self._other_names.get(name, name) for name in self.wanted}
        accepted = {name: arguments[ours] for name, ours in names.items() if ours in arguments}
        keywords = dict(arguments) | accepted if self._takes_all else accepted
        positional = [keywords.pop(name) for name in takewhile(keywords.__contains__, self._positional)]
        return self.function(*positional, **keywords)

    def attempt(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function. Subclasses of Exception pass unchanged, others (SystemExit) are raised as HookError."""
        try:
            with contained(self.name):
                result = self.bare(arguments)
        except BaseException as error:
            self._refuse_exit(error, suspended=False)
            raise
        return self._await_attempt(result) if inspect.isawaitable(result) else result

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that the callable returned, so that its errors are converted too."""

        def call(*values: Any, **keywords: Any) -> Any:
            with converted(self.name, self.error_location):
                return function(*values, **keywords)

        return call

    async def _await_converted(self, awaitable: Awaitable[Any]) -> Any:
        try:
            with contained(self.name):
                return await awaitable
        except BaseException as error:
            if not is_users(error, suspended=True):
                raise
            raise user_error(self.name, error, self.error_location(error)) from error

    async def _await_attempt(self, awaitable: Awaitable[Any]) -> Any:
        try:
            with contained(self.name):
                return await awaitable
        except BaseException as error:
            self._refuse_exit(error, suspended=True)
            raise

    def _refuse_exit(self, error: BaseException, *, suspended: bool) -> None:
        """Raise HookError for a user exception that would end more than the attempt, such as SystemExit."""
        if isinstance(error, Exception) or not is_users(error, suspended=suspended):
            return
        if isinstance(error, asyncio.CancelledError):  # raised by a task or connection that the user's code created
            raise RuntimeError(in_one_line(error)) from error
        raise user_error(self.name, error, self.error_location(error)) from error

    def returned(self, result: Any, expected: str) -> HookError:
        """Return the error for an invalid result. `expected` describes a valid one."""
        return HookError(f"{self.setting}: {self.path} returned {_describe(result)}. Return {expected}.")

    def error_location(self, error: BaseException) -> str:
        """Return FILE:LINE of the callable's own code that an error comes from."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return error_location(error, self.function.__module__) or f"{Path(frame.filename).name}:{frame.lineno}"


def error_location(error: BaseException, module: str) -> str:
    """Return FILE:LINE of the innermost frame in a module's file, or an empty string if there is none.

    Frames of an error of another process are in `remote_frames` (executors.rank_process.picklable_error).
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    lines = [line for name, line in [*frames, *getattr(error, "remote_frames", ())] if name == file]
    return f"{Path(str(file)).name}:{lines[-1]}" if lines else ""


def parameter_names(function: Callable[..., Any], *, location: str) -> set[str]:
    """Return the names of a callable's parameters. Raises HookError, which begins with `location`, if it hides them."""
    return {p.name for p in _parameters(function, location)}


def _parameters(function: Callable[..., Any], location: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise HookError(
            f"{location}: its parameters cannot be read ({error}). Wrap it in a function of your own"
        ) from None


def _describe(value: Any) -> str:
    """Describe a value by its type, with its text if it is short and plain, and with the length of a container."""
    if value is None:
        return "None"
    if isinstance(value, int | float | str):
        return f"{type(value).__name__} {_short_repr(value)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple | dict) else type(value).__name__


def _short_repr(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an integer with more digits than Python prints
        return "of very many digits"
