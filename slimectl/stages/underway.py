"""Groups being sampled at once: begun at will, taken when they have finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from slimectl.stages.attempt import Attempts
from slimectl.types import Prompt, Sample

Group = list[Sample]
Result = TypeVar("Result")


class Underway:
    """The groups under way in one engine, oldest first. They proceed only while one is waited for."""

    def __init__(self, attempts: Attempts) -> None:
        self.attempts = attempts
        self._tasks: dict[asyncio.Task[Group], int] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_quiet_about_interrupts)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def oldest_index(self) -> int:
        """Which prompt occurrence the oldest is."""
        return next(iter(self._tasks.values()))

    def begin(self, prompt: Prompt) -> None:
        self._go(self.attempts.group(prompt), prompt.index)

    def go_on(self, group: Group) -> None:
        """Finish a group that was broken off."""
        self._go(self.attempts.rest(group), group[0].group_index)

    def _go(self, work: Coroutine[Any, Any, Group], index: int) -> None:
        self._tasks[self._loop.create_task(work)] = index

    def oldest(self) -> Group:
        """The oldest group, once it has finished."""
        task = next(iter(self._tasks))
        del self._tasks[task]
        return run_to_end(self._loop, task)

    def first(self) -> Group:
        """The group that finishes first, the oldest of several."""
        run_to_end(self._loop, asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED))
        task = next(task for task in self._tasks if task.done())
        del self._tasks[task]
        return task.result()

    def break_off(self) -> list[Group]:
        """All groups as they are now, to be gone on with later."""
        self.attempts.breaking_off = True
        try:
            tasks, self._tasks = list(self._tasks), {}
            if tasks:
                self._loop.run_until_complete(self.attempts.engine.abort())
            return [run_to_end(self._loop, task) for task in tasks]
        finally:
            self.attempts.breaking_off = False

    def close(self) -> None:
        """End what is still under way, so that neither the engine nor the loop holds on to it."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # looked at: asyncio prints those that nobody saw; the first has been raised already
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(self.attempts.engine.abort())
        ending = asyncio.all_tasks(self._loop)
        if ending:
            self._loop.run_until_complete(asyncio.gather(*ending, return_exceptions=True))
        self._loop.close()


def run_to_end(loop: asyncio.AbstractEventLoop, work: Awaitable[Result]) -> Result:
    """Drive the loop until the work is done, also past a sys.exit in some other task, with which asyncio leaves it."""
    task = asyncio.ensure_future(work, loop=loop)
    while True:
        try:
            return loop.run_until_complete(task)
        except SystemExit:
            if task.done():
                raise


def _quiet_about_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An interrupt ends whichever task it hits, and is raised to the caller too: no need to print it as that task's."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)
