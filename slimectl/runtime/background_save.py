"""A checkpoint that a thread writes while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from slimectl.protocols import BackgroundSaver

POLL_S = 0.1
"""Seconds between questions whether the tensors are written."""


class BackgroundSave:
    """Runs `write(copied)` in a thread, which calls `copied` once training may change the state.

    The checkpoint's folder appears under its name at the end of `write`, so a killed process leaves no part of it.
    """

    def __init__(self, number: int, write: Callable[[Callable[[], None]], None]) -> None:
        """`number` is the round of the checkpoint. Returns when the state is copied. Raises the error of `write`."""
        self.number = number
        self._result: Future[None] = Future()
        copied = threading.Event()

        def run() -> None:
            try:
                write(copied.set)
                self._result.set_result(None)
            except BaseException as error:
                self._result.set_exception(error)
            finally:
                copied.set()

        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        copied.wait()
        self.check()

    def check(self) -> None:
        """Raise the error of `write`, if it has failed."""
        if self._result.done():
            self._result.result()

    def wait(self) -> None:
        """Wait for the end, and raise its error."""
        self._result.result()


def start_models(models: Sequence[BackgroundSaver], folders: Sequence[Path]) -> Callable[[], None]:
    """Start to save models into new folders. Return a function that waits until all are written."""
    for model, folder in zip(models, folders, strict=True):
        folder.mkdir()
        model.save_in_background(folder)

    def wait() -> None:
        pause = threading.Event()
        for model in models:
            while not model.is_saved():
                pause.wait(POLL_S)

    return wait
