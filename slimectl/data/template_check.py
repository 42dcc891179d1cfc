"""Resource check of chat templates. A template ships with a model, so its author may be untrusted.

transformers renders templates in jinja's sandbox, which denies access to files and to Python's internals, but does not
stop endless loops or texts that fill the memory. A template that does either for a simple question is rejected here.
One that does so only for certain chats is not detected.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slimectl.errors import CheckpointError

PROBE = [{"role": "user", "content": "What is 1 + 1?"}]
MAX_CPU_S = 5.0
"""Maximum time for one short chat. Templates need milliseconds."""
MAX_MEMORY_BYTES = 1024**3


class _LimitError(Exception):
    """A template exceeded its time limit."""


def check_template(tokenizer: Any, folder: Path) -> None:
    """Raise CheckpointError for a chat template that does not terminate, or takes too much memory."""
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        with _limited_memory(), _limited_cpu_time():
            tokenizer.apply_chat_template(PROBE, add_generation_prompt=True, tokenize=False)
    except (_LimitError, MemoryError, RecursionError) as error:
        reason = "takes too much memory" if isinstance(error, MemoryError) else "does not end"
        raise CheckpointError(
            f"{folder}: the chat template {reason}. Replace it with the template of the model's original checkpoint."
        ) from None
    except Exception:
        # Other errors of a template are reported when a chat is rendered, which many models never need.
        return


@contextmanager
def _limited_cpu_time() -> Iterator[None]:
    """Limit the CPU time of a template. Signals reach only the main thread, so other threads have no such limit."""
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
    """Limit the growth of the process to MAX_MEMORY_BYTES, if the system reports its size."""
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
