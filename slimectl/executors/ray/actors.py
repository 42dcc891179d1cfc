"""Objects in actors: a proxy calls their methods, and a stream transfers the items of their generators."""

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
from slimectl.executors.child_processes import attach_log_tail
from slimectl.executors.local import close_hosted
from slimectl.executors.rank_group import GRACE_S
from slimectl.executors.rank_process import picklable_error
from slimectl.executors.ray.cluster import ActorLocation, DriverEnvironment, ray
from slimectl.executors.ray.failures import death_reason, tail_at
from slimectl.plugins.garbage import frozen_objects
from slimectl.system.liveness import expose, own_stacks

THREADS = 32
"""Maximum number of concurrent calls and streams of one object."""


class ObjectActor:
    """Holds one object. Answers are ("done", value), ("item", value) or ("error", exception)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: Any = None
        self._slots: dict[str, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
        self._stopped: set[str] = set()

    def enter(self, environment: DriverEnvironment, log: Path | None) -> ActorLocation:
        environment.enter(log)
        expose(self._name, describe=own_stacks)
        return ActorLocation.here()

    def build(self, pickled: bytes) -> tuple[str, Any]:
        def construct() -> None:
            with frozen_objects():  # the build imports some thousand modules
                self._hosted = cloudpickle.loads(pickled)()

        return self._answer(construct)

    def call(self, method: str, arguments: list[Any], options: dict[str, Any]) -> tuple[str, Any]:
        return self._answer(lambda: self._call(method, arguments, options))

    def items(self, key: str, method: str, arguments: list[Any], options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the method's items, one per slot. One thread runs the generator from start to end."""
        slots, iterator = self._slots[key], None
        try:
            iterator = iter(self._call(method, arguments, options))
            while True:
                # Take the slot before producing, because Ray's own backpressure lets one more item be produced.
                slots.acquire()
                if key in self._stopped:
                    return
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                yield "item", item
        except Exception as error:
            yield "error", picklable_error(error, self._name)
        finally:
            if inspect.isgenerator(iterator):
                iterator.close()
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

    def _call(self, method: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        keywords = {name: _unpack(value) for name, value in options.items()}
        return getattr(self._hosted, method)(*map(_unpack, arguments), **keywords)

    def _answer(self, call: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "done", call()
        except Exception as error:
            return "error", picklable_error(error, self._name)


class Host:
    """Driver side of an ObjectActor. It is picklable, so other actors can call it too."""

    def __init__(self, actor: Any, name: str, location: ActorLocation, log: Path | None) -> None:
        self.actor, self.name, self.location, self.log = actor, name, location, log

    def call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call the object's method and wait. Return its result or raise its exception.

        Iterators among the arguments are transferred item by item.
        """
        return self.answered(self.actor.call.remote(method, *_pack_arguments(arguments, options)))

    def answered(self, answer: Any, timeout: float | None = None) -> Any:
        """Return the value of a pending answer. Raises DiedError if the actor is gone."""
        try:
            kind, value = ray.get(answer, timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError) as error:
            raise self._death_error(error) from None
        if kind == "error":
            raise value
        return value

    def _death_error(self, error: BaseException) -> DiedError:
        place = self.log or "its messages above"
        died = DiedError(f"{self.name} died (on {self.location}: {death_reason(error, self.location)}). See {place}.")
        return attach_log_tail(died, tail_at(self.log, self.location))

    def stream(
        self, method: str, arguments: tuple[Any, ...], options: dict[str, Any], *, ahead: int, key: str
    ) -> Iterator[Any]:
        """Yield the items of the object's method, at most `ahead` of them produced before they are requested.

        Closing ends the generator after the current item and waits up to GRACE_S for that. Ctrl-C does not wait.
        """
        timeout_s = GRACE_S
        control = self.actor
        streaming = control.items.options(num_returns="streaming")
        answers = streaming.remote(key, method, *_pack_arguments(arguments, options))
        try:
            if ahead:
                control.allow.remote(key, ahead)
            while True:
                control.allow.remote(key, 1)
                try:
                    answer = next(answers)
                except StopIteration:
                    return
                yield self.answered(answer)
        except KeyboardInterrupt:
            timeout_s = 0.0
            raise
        finally:
            if ray.is_initialized():  # else a stream that is collected at exit would start a new cluster
                control.stop.remote(key)
                ray.wait([answers.completed()], timeout=timeout_s)


class Proxy:
    """Proxy of an object in an actor. A method call blocks, then returns or raises what the object's method does."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return ProxyMethod(self._host, name)


class ProxyMethod:
    """Method `proxy.name`, which can be pickled, called, and streamed by the executor."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name = host, name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.host.call(self.name, arguments, options)


def hosted_call(make: Callable[[], Any]) -> tuple[ProxyMethod, tuple[Any, ...], dict[str, Any]] | None:
    """Return the method and arguments if `make` is a hosted object's method or a partial of one, else None."""
    if isinstance(make, ProxyMethod):
        return make, (), {}
    if isinstance(make, partial) and isinstance(make.func, ProxyMethod):
        return make.func, make.args, make.keywords
    return None


class RemoteIterator:
    """Iterator argument of an actor call. Its items are in Ray's object store and are fetched one at a time."""

    def __init__(self, references: list[Any]) -> None:
        self.references = references

    def __iter__(self) -> Iterator[Any]:
        return (ray.get(reference) for reference in self.references)


def _pack_arguments(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [_pack(value) for value in arguments], {name: _pack(value) for name, value in options.items()}


def _pack(value: Any) -> Any:
    return RemoteIterator([ray.put(item) for item in value]) if isinstance(value, Iterator) else value


def _unpack(value: Any) -> Any:
    return iter(value) if isinstance(value, RemoteIterator) else value
