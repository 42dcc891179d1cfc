"""Contains side effects of user functions on the calling process: exits, exceptions, working directory, streams."""

from __future__ import annotations

import contextlib
import dis
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

from slimectl.errors import HookError, SlimectlError
from slimectl.system import stdio

LONGEST = 400
"""Maximum number of characters of an exception's message that an error shows."""
EXIT_CODE = HookError.exit_code
MODULE_PREFIX = "slimectl_hook_"
"""Prefix of the names of modules that are loaded from a user's file."""
exit_at_once = os._exit
"""The original os._exit, for a signal handler that interrupts user code. Calls of user code are refused."""

_running: ContextVar[str] = ContextVar("running", default="")
_user_modules: set[str] = set()


class _Exit(BaseException):
    """Raised instead of an exit. It is a BaseException, so that the user's `except Exception` does not catch it."""


@contextlib.contextmanager
def contained(name: str) -> Iterator[None]:
    """Run user code in the block without letting it exit this process, change its folder or close its streams.

    `name` identifies the code in errors, such as `score.custom_rm_path: own.py:reward`. Its exceptions pass unchanged.
    """
    _prevent_exits()
    _report_threads()
    process, folder = os.getpid(), _working_directory()
    token = _running.set(name)
    try:
        yield
    finally:
        if os.getpid() != process:  # a child that the user's code forked. Two processes must not write to one file.
            _leave_child(name)
        _running.reset(token)
        if folder is not None and _working_directory() != folder:
            with contextlib.suppress(OSError):
                os.chdir(folder)
        stdio.mend()


def is_users(error: BaseException, *, suspended: bool = False) -> bool:
    """Return whether user code raised this error. False for a Ctrl-C, or a cancellation by slimectl.

    `suspended`: the error came out of a coroutine.
    """
    import asyncio  # a fifth of what a command costs that only prints help

    if isinstance(error, Exception):
        return True
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task() if suspended else None
        return task is None or not task.cancelling()
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, GeneratorExit) and suspended):
        return _is_raised_by_statement(error.__traceback__)
    return True


def in_one_line(error: BaseException) -> str:
    """Return type and message of an exception in one short line, even if its `__str__` raises."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "(its message cannot be read)"
    message = message if len(message) <= LONGEST else f"{message[:LONGEST]}…"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def user_error(name: str, error: BaseException, place: str = "") -> SlimectlError:
    """Return the error for an exception of user code. A SlimectlError from a function that it called is unchanged."""
    if isinstance(error, SlimectlError):
        return error
    action = f"called {error}" if isinstance(error, _Exit) else f"raised {in_one_line(error)}"
    return HookError(f"{name} {action}{f' ({place})' if place else ''}. Fix it there.")


@contextlib.contextmanager
def converted(name: str, place: Callable[[BaseException], str] = lambda error: "") -> Iterator[None]:
    """Run user code as `contained` does and raise its exceptions as HookError of one line."""
    with contextlib.ExitStack() as ending:
        ending.enter_context(contained(name))
        try:
            yield
        except BaseException as error:
            if not is_users(error):
                raise
            raise user_error(name, error, place(error)) from error


def _is_raised_by_statement(trace: TracebackType | None) -> bool:
    """Return whether a `raise` statement of user code raised it. A signal interrupts any other instruction."""
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
    except OSError:  # the folder was deleted
        return None


# --- signals ----------------------------------------------------------------------------------------------------------


ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals of a scheduler and of a closed terminal. They end a command in the same way as Ctrl-C."""


def handle_here(number: int, handler: Callable[[int, Any], None]) -> None:
    """Handle a signal in this process, and keep the default handling in children that user code forks.

    A pool in a user's function ends its processes by SIGTERM. They would survive if they inherited a handler.
    """
    owner = os.getpid()

    def handle(received: int, frame: Any) -> None:
        if os.getpid() == owner:
            handler(received, frame)
            return
        signal.signal(received, signal.SIG_DFL)
        os.kill(os.getpid(), received)

    signal.signal(number, handle)


# --- exits that run no clean-up ---------------------------------------------------------------------------------------


def _prevent_exits() -> None:
    """Replace os._exit and os.exec…, once, by functions that refuse calls of user code, which would leave no error.

    Calls by slimectl, by libraries and in child processes still work.
    """
    for name in ("_exit", "execv", "execve"):
        function = getattr(os, name)
        if not hasattr(function, "prevented"):
            setattr(os, name, _make_preventer(name, function))


def _make_preventer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    owner = os.getpid()

    def prevented(*arguments: Any) -> Any:
        if os.getpid() != owner:
            return function(*arguments)
        if _running.get():
            code = arguments[0] if name == "_exit" and arguments else "…"
            raise _Exit(f"os.{name}({code})")
        frame = sys._getframe(1)
        if _is_users_module(frame.f_globals.get("__name__", "")):  # in a thread that user code started
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            stdio.logger.error(f"slimectl: a thread of a user's function called os.{name} ({place}). Fix it there.")
            exit_at_once(EXIT_CODE)
        return function(*arguments)

    prevented.prevented = function  # type: ignore[attr-defined]
    return prevented


# --- threads that user code starts ------------------------------------------------------------------------------------


def _report_threads() -> None:
    """Report an exception that ends a thread of user code in one line, like an exception of the function itself."""
    original = threading.excepthook
    if hasattr(original, "reports_user_code"):
        return

    def report(arguments: threading.ExceptHookArgs) -> None:
        error, frames = arguments.exc_value, traceback.walk_tb(arguments.exc_traceback)
        lines = [
            f"{frame.f_code.co_filename}:{line}"
            for frame, line in frames
            if _is_users_module(frame.f_globals.get("__name__", ""))
        ]
        if error is None or isinstance(error, SystemExit) or not lines:
            original(arguments)
            return
        stdio.logger.error(
            f"slimectl: a thread of a user's function raised {in_one_line(error)} ({lines[-1]}). Fix it there."
        )

    report.reports_user_code = True  # type: ignore[attr-defined]
    threading.excepthook = report


def register_module(name: str) -> None:
    """Register a module that is about to be imported as user code."""
    _user_modules.add(name)


def _is_users_module(name: str) -> bool:
    return name in _user_modules or name.startswith(MODULE_PREFIX)


def _leave_child(name: str) -> None:
    stdio.logger.error(
        f"slimectl: {name} forked this process, and the child returned. End the child with os._exit, or use subprocess."
    )
    exit_at_once(EXIT_CODE)
