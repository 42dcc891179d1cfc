"""A chat template tried out before it is used: it comes with a model, so a stranger may have written it.

transformers renders templates in jinja's sandbox, which keeps them from files and from Python's internals, but not from
running forever or building a text that fills the memory. A template that does either for a plain question is refused
here; one that does so only for certain chats is not found.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from slimectl.errors import CheckpointError

PROBE = [{"role": "user", "content": "What is 1 + 1?"}]
MAX_LINES = 500_000
"""Lines of the compiled template that one short chat may take; templates with tools take a few hundred."""
MAX_CPU_S = 5.0
MAX_MEMORY_BYTES = 1024**3


class _LimitError(Exception):
    """A template went on for too long."""


def check_template(tokenizer: Any, folder: Path) -> None:
    """Raises CheckpointError for a chat template that does not end, or takes more memory than any chat."""
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        with _limited_memory(), _limited_cpu_time(), _limited_lines():
            tokenizer.apply_chat_template(PROBE, add_generation_prompt=True, tokenize=False)
    except (_LimitError, MemoryError, RecursionError) as error:
        reason = "takes too much memory" if isinstance(error, MemoryError) else "does not end"
        raise CheckpointError(
            f"{folder}: the chat template {reason}; replace it by that of the model's original checkpoint"
        ) from None
    except Exception:
        # What a template refuses is said where a chat is rendered; many models are never asked to chat.
        return


@contextmanager
def _limited_lines() -> Iterator[None]:
    """Count the lines that templates execute, which compile to Python."""
    before, count = sys.gettrace(), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != "<template>":
            return None
        count += event == "line"
        if count > MAX_LINES:
            raise _LimitError
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _limited_cpu_time() -> Iterator[None]:
    """Interrupt what no line of a template shows: a filter, a function or a power that takes for ever.

    Signals reach the main thread only; elsewhere there is no such limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Let the process grow by MAX_MEMORY_BYTES at most, where the system can say how large it is."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY_BYTES
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
