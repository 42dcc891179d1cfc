"""What a user's function does to the process that calls it: its exits, its exceptions, its working directory."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

from slimectl import stdio
from slimectl.errors import HookError, SlimectlError

LONGEST = 400
"""Characters of an exception's words that an error shows."""
EXIT_CODE = HookError.exit_code
MODULE_PREFIX = "slimectl_hook_"
"""How the modules begin that are loaded from a user's file."""

_running: ContextVar[str] = ContextVar("running", default="")
_user_modules: set[str] = set()


class _Exit(BaseException):
    """Raised in place of an exit; no `except Exception` of the user's takes it for something else."""


@contextlib.contextmanager
def contained(name: str) -> Iterator[None]:
    """Run user code in the block: nothing of it ends this process, moves it elsewhere or takes its streams away.

    `name` is what errors call the code, such as `score.custom_rm_path: own.py:reward`. What it raises is left as it is.
    """
    _prevent_exits()
    process, folder = os.getpid(), _working_directory()
    token = _running.set(name)
    try:
        yield
    finally:
        if os.getpid() != process:  # a child that the user's code forked: two processes must not write one file
            _leave_child(name)
        _running.reset(token)
        if folder is not None and _working_directory() != folder:
            with contextlib.suppress(OSError):
                os.chdir(folder)
        stdio.mend()


def is_users(error: BaseException, *, suspended: bool = False) -> bool:
    """Return whether user code raised this, and no Ctrl-C or cancellation of ours; `suspended` says of a coroutine."""
    if isinstance(error, Exception):
        return True
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task() if suspended else None
        return task is None or not task.cancelling()
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, GeneratorExit) and suspended):
        return _is_raised_by_statement(error.__traceback__)
    return True


def in_one_line(error: BaseException) -> str:
    """Return type and words of an exception, short, without a line break; also of one that cannot say itself."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = "(its words cannot be read)"
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]}…"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def user_error(name: str, error: BaseException, place: str = "") -> SlimectlError:
    """Return the error for what user code raised; one of ours, of something that it called, says enough by itself."""
    if isinstance(error, SlimectlError):
        return error
    act = f"called {error}" if isinstance(error, _Exit) else f"raised {in_one_line(error)}"
    return HookError(f"{name} {act}{f' ({place})' if place else ''}; mend it there")


@contextlib.contextmanager
def converted(name: str, place: Callable[[BaseException], str] = lambda error: "") -> Iterator[None]:
    """As `contained`, with whatever the code raises as a HookError of one line."""
    with contextlib.ExitStack() as ending:
        ending.enter_context(contained(name))
        try:
            yield
        except BaseException as error:
            if not is_users(error):
                raise
            raise user_error(name, error, place(error)) from error


def _is_raised_by_statement(trace: TracebackType | None) -> bool:
    """Return whether a `raise` of the user's is where it began: a signal interrupts any other instruction."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if code.co_code[trace.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return False
    file = Path(code.co_filename)
    return not any(file.is_relative_to(folder) for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1]))


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # deleted under us
        return None


# --- exits that run no clean-up ---------------------------------------------------------------------------------------


def _prevent_exits() -> None:
    """Replace os._exit and os.exec…, once: nothing can be said after one of them, so it is refused when it is called.

    Those of our own and of libraries, and in child processes, do what they did.
    """
    for name in ("_exit", "execv", "execve"):
        function = getattr(os, name)
        if not hasattr(function, "prevented"):
            setattr(os, name, _preventing(name, function))


def _preventing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    owner = os.getpid()

    def prevented(*arguments: Any) -> Any:
        if os.getpid() != owner:
            return function(*arguments)
        if _running.get():
            shown = arguments[0] if name == "_exit" and arguments else "…"
            raise _Exit(f"os.{name}({shown})")
        frame = sys._getframe(1)
        if _is_users_module(frame.f_globals.get("__name__", "")):  # in a thread of its own
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            stdio.say(f"slimectl: a thread of a user's function called os.{name} ({place}); mend it there")
            return original_exit(EXIT_CODE)
        return function(*arguments)

    original_exit = getattr(os._exit, "prevented", os._exit)
    prevented.prevented = function  # type: ignore[attr-defined]
    return prevented


def register_module(name: str) -> None:
    """Note that a module, which is about to be imported, holds user code."""
    _user_modules.add(name)


def _is_users_module(name: str) -> bool:
    return name in _user_modules or name.startswith(MODULE_PREFIX)


def _leave_child(name: str) -> None:
    stdio.say(f"slimectl: {name} forked this process, and its child came back; end it with os._exit, or use subprocess")
    getattr(os._exit, "prevented", os._exit)(EXIT_CODE)
