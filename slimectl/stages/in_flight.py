"""Groups in flight, which are submitted at any time and returned when they finish."""

from __future__ import annotations

import asyncio
from typing import Any

from slimectl.stages.generation import GroupGenerator
from slimectl.system.event_loop import run_on
from slimectl.types import Sample

Group = list[Sample]


class InFlightGroups:
    """The groups in flight in one engine, oldest first. They make progress only while one is awaited."""

    def __init__(self, attempts: GroupGenerator) -> None:
        self.attempts = attempts
        self._tasks: dict[asyncio.Task[Group], int] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_quiet_about_interrupts)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def oldest_index(self) -> int:
        """Index of the oldest group's prompt."""
        return next(iter(self._tasks.values()))

    def start(self, group: Group) -> None:
        """Generate the unfinished samples of a group."""
        self._tasks[self._loop.create_task(self.attempts.complete(group))] = group[0].group_index

    def wait_oldest(self) -> Group:
        """Wait for the oldest group and return it."""
        task = next(iter(self._tasks))
        del self._tasks[task]
        return run_on(self._loop, task)

    def wait_any(self) -> Group:
        """Wait for the first group to finish and return it. If several have finished, return the oldest."""
        run_on(self._loop, asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED))
        task = next(task for task in self._tasks if task.done())
        del self._tasks[task]
        return task.result()

    def interrupt(self) -> list[Group]:
        """Interrupt all groups and return them, so that they can be resumed later."""
        self.attempts.interrupting = True
        try:
            tasks, self._tasks = list(self._tasks), {}
            if tasks:
                run_on(self._loop, self.attempts.engine.abort())
            return [run_on(self._loop, task) for task in tasks]
        finally:
            self.attempts.interrupting = False

    def close(self) -> None:
        """Cancel all groups in flight, so that neither the engine nor the event loop keeps them."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # asyncio prints errors that are not retrieved. The first has already been raised
        unfinished = [task for task in self._tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            run_on(self._loop, self.attempts.engine.abort())
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            if not task.cancelling():  # an attempt whose group ended by a KeyboardInterrupt
                task.cancel()
        if tasks:
            run_on(self._loop, asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()


def _quiet_about_interrupts(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Do not print a KeyboardInterrupt as the error of the task that it hit, because the caller gets it too."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)
