"""Objects that live in actors: a proxy calls their methods, a stream carries what their generators make."""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ray import cloudpickle

from slimectl.errors import DiedError
from slimectl.executors.driving import GRACE_S
from slimectl.executors.hosting import close_hosted
from slimectl.executors.outputs import with_tail
from slimectl.executors.rank import portable
from slimectl.executors.ray.deaths import cause, tail_at
from slimectl.executors.ray.library import ray
from slimectl.executors.ray.surroundings import Surroundings, Whereabouts

THREADS = 32
"""Calls and streams of one object at the same time."""


class HostActor:
    """Holds one object. Answers are ("done", value), ("item", value) or ("error", exception)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: Any = None
        self._slots: dict[str, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
        self._stopped: set[str] = set()

    def enter(self, surroundings: Surroundings, log: Path | None) -> Whereabouts:
        surroundings.enter(log)
        return Whereabouts.here()

    def build(self, built: bytes) -> tuple[str, Any]:
        def made() -> None:
            self._hosted = cloudpickle.loads(built)()

        return self._answer(made)

    def call(self, method: str, arguments: list[Any], options: dict[str, Any]) -> tuple[str, Any]:
        return self._answer(lambda: self._called(method, arguments, options))

    def items(self, key: str, method: str, arguments: list[Any], options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """What the method yields, an item a slot; this thread is the generator's own from first to last."""
        slots, made = self._slots[key], None
        try:
            made = iter(self._called(method, arguments, options))
            while True:
                # The slot is taken before producing: Ray's own backpressure lets one more item be made.
                slots.acquire()
                if key in self._stopped:
                    return
                try:
                    item = next(made)
                except StopIteration:
                    return
                yield "item", item
        except Exception as error:
            yield "error", portable(error, self._name)
        finally:
            if inspect.isgenerator(made):
                made.close()
            del self._slots[key]
            self._stopped.discard(key)

    @ray.method(concurrency_group="control")
    def allow(self, key: str, slots: int) -> None:
        self._slots[key].release(slots)

    @ray.method(concurrency_group="control")
    def stop(self, key: str) -> None:
        if key in self._slots:
            self._stopped.add(key)
            self._slots[key].release()

    def close(self) -> tuple[str, Any]:
        return self._answer(lambda: close_hosted(self._hosted))

    def _called(self, method: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        named = {name: _opened(value) for name, value in options.items()}
        return getattr(self._hosted, method)(*map(_opened, arguments), **named)

    def _answer(self, call: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "done", call()
        except Exception as error:
            return "error", portable(error, self._name)


class Host:
    """The driving end of a HostActor; picklable, so that other actors may call it too."""

    def __init__(self, actor: Any, name: str, where: Whereabouts, log: Path | None) -> None:
        self.actor, self.name, self.where, self.log = actor, name, where, log

    def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the object's method, wait, return or raise what it does; iterators among `arguments` are carried."""
        return self.answered(self.actor.call.remote(method, *_packed(arguments, options)))

    def answered(self, answer: Any, timeout: float | None = None) -> Any:
        """The value of an answer that is under way. Raises DiedError if the actor is gone."""
        try:
            kind, value = ray.get(answer, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
            raise self._death(error) from None
        if kind == "error":
            raise value
        return value

    def _death(self, error: BaseException) -> DiedError:
        see = f"see {self.log}" if self.log else "see its messages above"
        told = DiedError(f"{self.name} died (on {self.where}: {cause(error, self.where)}); {see}")
        return with_tail(told, tail_at(self.log, self.where))

    def stream(
        self, method: str, arguments: tuple[Any, ...], options: dict[str, Any], *, ahead: int, key: str
    ) -> Iterator[Any]:
        """What the object's method yields, at most `ahead` items made before they are asked for.

        Closing ends the generator after the item in hand, for which it waits a while; Ctrl-C waits for nothing.
        """
        patience = GRACE_S
        control = self.actor
        streaming = control.items.options(num_returns="streaming")
        coming = streaming.remote(key, method, *_packed(arguments, options))
        try:
            if ahead:
                control.allow.remote(key, ahead)
            while True:
                control.allow.remote(key, 1)
                try:
                    answer = next(coming)
                except StopIteration:
                    return
                yield self.answered(answer)
        except KeyboardInterrupt:
            patience = 0.0
            raise
        finally:
            control.stop.remote(key)
            ray.wait([coming.completed()], timeout=patience)


class Proxy:
    """Stands for an object in an actor: a method blocks and returns, or raises, what the object's does."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return ProxyMethod(self._host, name)


class ProxyMethod:
    """`proxy.name`, which can be pickled, called, and streamed by the executor."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.host.call(self.name, arguments, options)


def hosted_call(make: Callable[[], Any]) -> tuple[ProxyMethod, tuple[Any, ...], dict[str, Any]] | None:
    """The method and arguments of a call to a hosted object, given as the method or a partial of it; else None."""
    if isinstance(make, ProxyMethod):
        return make, (), {}
    if isinstance(make, partial) and isinstance(make.func, ProxyMethod):
        return make.func, make.args, make.keywords
    return None


class Carried:
    """An iterator on its way into an actor: its items lie in Ray's store, and come out one at a time."""

    def __init__(self, references: list[Any]) -> None:
        self.references = references

    def __iter__(self) -> Iterator[Any]:
        return (ray.get(reference) for reference in self.references)


def _packed(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [_carried(value) for value in arguments], {name: _carried(value) for name, value in options.items()}


def _carried(value: Any) -> Any:
    return Carried([ray.put(item) for item in value]) if isinstance(value, Iterator) else value


def _opened(value: Any) -> Any:
    return iter(value) if isinstance(value, Carried) else value
