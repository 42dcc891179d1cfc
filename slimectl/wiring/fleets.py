"""Settings to servers that sample, what asks them, and an engine for a stage that stands alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from slimectl.settings import Settings
from slimectl.wiring.engines import engine
from slimectl.wiring.models import device, version_of
from slimectl.wiring.places import executor as executor_of

if TYPE_CHECKING:
    from slimectl.engines.fleet import Fleet
    from slimectl.engines.sglang.client import SglangEngine
    from slimectl.engines.sglang.servers import ServerProcess
    from slimectl.ports import Engine, Executor


def engine_gpus(settings: Settings) -> float:
    """GPUs that one engine asks for."""
    return float(settings.cluster.rollout_num_gpus_per_engine) if device(settings.engine.device) == "cuda" else 0.0


def check_engine(settings: Settings) -> None:
    """Before anything is made: can such servers be started here?

    Raises BackendError or SettingsError. On a Ray cluster the machines that start them say so.
    """
    if settings.engine.url or not settings.uses_servers or settings.cluster.executor != "local":
        return
    from slimectl.engines.sglang.args import flags, interpreter, router_interpreter

    if settings.engine.kind == "sglang":
        flags(settings.sglang.args, interpreter(settings.sglang.python))
    if _router_policy(settings) is not None:
        router_interpreter(settings.sglang.python)


def fleet(settings: Settings, model: Path, *, executor: Executor, folder: Path, waiting: bool = True) -> Fleet | None:
    """The servers that the settings ask for, up; None where an engine needs none, or runs elsewhere already.

    With `waiting` they answer nothing before a first push; otherwise they have the weights in `model`. What they say
    goes to engine-0.log, … in `folder`/logs.
    """
    if settings.engine.url or not settings.uses_servers:
        return None
    from slimectl.engines.fleet import Fleet

    given, logs = settings.engine, folder / "logs"
    gpus = engine_gpus(settings)

    def make(i: int) -> Any:
        recipe = partial(_server, settings, model, log=logs / f"engine-{i}.log", waiting=waiting)
        return executor.host(recipe, name=f"engine-{i}", gpus=gpus)

    made = Fleet(
        make,
        settings.num_engines,
        router=_router(settings, logs),
        interval_s=given.health_check_interval,
        timeout_s=given.health_check_timeout,
        first_wait_s=given.health_check_first_wait,
        max_restarts=given.max_restarts,
        watch=given.use_fault_tolerance,
    )
    made.start()
    return made


def _server(settings: Settings, model: Path, *, log: Path, waiting: bool) -> ServerProcess:
    """One server, not yet started; made where it will run."""
    from slimectl.engines.sglang.recipes import UNPUSHED, serve_server, sglang_server

    given = settings.engine
    shared: dict[str, Any] = {
        "log": log.absolute(),
        "dtype": given.dtype,
        "device": device(given.device),
        "max_context": settings.rollout.max_context_len,
        "start_timeout_s": given.start_timeout_s,
        "host": None if settings.cluster.executor == "ray" and settings.cluster.ray_address else "127.0.0.1",
    }
    if given.kind == "embedded":
        return serve_server(
            model.absolute(), max_running=given.max_running_requests, wait_for_weights=waiting, **shared
        )  # fmt: skip
    return sglang_server(
        model.absolute(),
        python=settings.sglang.python,
        tensor_parallel=settings.cluster.rollout_num_gpus_per_engine,
        # Only then does SGLang give back memory while the trainer has its turn.
        args=({"enable_memory_saver": True} if settings.cluster.colocate else {}) | settings.sglang.args,
        weight_version=UNPUSHED if waiting else version_of(model),
        **shared,
    )


def _router_policy(settings: Settings) -> str | None:
    """sglang-router's policy; None where requests are spread by the client."""
    chosen = settings.engine.router
    if chosen == "auto":
        chosen = "cache_aware" if settings.engine.kind == "sglang" and settings.num_engines > 1 else "none"
    return None if chosen == "none" else chosen


def _router(settings: Settings, logs: Path) -> Any:
    policy = _router_policy(settings)
    if policy is None:
        return None
    from slimectl.engines.sglang.recipes import router_server
    from slimectl.engines.sglang.router import Router

    timeout_s = settings.engine.request_timeout_s
    return Router(
        router_server(
            policy, log=logs / "router.log", python=settings.sglang.python, request_timeout_s=timeout_s
        )
    )  # fmt: skip


def client(
    settings: Settings,
    model: Path,
    text: Any,
    addresses: Sequence[str],
    workers: Sequence[str],
    *,
    troubled: Callable[[str], None] | None = None,
) -> SglangEngine:
    """What asks the servers at `addresses`. Raises BackendError if those of engine.url serve another model."""
    from slimectl.engines.embedded.detokenizer import Detokenizer
    from slimectl.engines.sglang.client import SglangEngine
    from slimectl.weights.complete import read_config

    given, config = settings.engine, read_config(model)
    config = config.get("text_config", config)
    made = SglangEngine(
        addresses,
        workers=workers,
        vocabulary=config["vocab_size"],
        max_context=settings.rollout.max_context_len or config["max_position_embeddings"],
        decode=Detokenizer(text).decode,
        concurrency=given.server_concurrency,
        affinity=given.session_affinity,
        request_timeout_s=given.request_timeout_s,
        connect_timeout_s=given.connect_timeout_s,
        troubled=troubled,
    )
    if given.url:
        made.check_model({"model_type": config.get("model_type"), "vocab_size": config["vocab_size"]})
    return made


@contextmanager
def engines(settings: Settings, model: Path, text: Any) -> Iterator[Engine]:
    """An engine with the model's own weights, for a stage that stands alone; its servers end with the block."""
    if not settings.uses_servers:
        yield engine(settings, model, text)
        return
    with ExitStack() as closing:
        executor = executor_of(settings, trains=False)
        closing.callback(executor.close)
        folder = Path(closing.enter_context(TemporaryDirectory(prefix="slimectl-engines-")))
        started = fleet(settings, model, executor=executor, folder=folder, waiting=False)
        if started is None:
            asking = client(settings, model, text, settings.engine.url, settings.engine.url)
        else:
            closing.callback(started.close)
            print(f"{len(started.urls)} engines are up", file=sys.stderr, flush=True)
            asking = client(settings, model, text, started.addresses, started.urls, troubled=started.look)
            started.announce, started.failed = asking.set_urls, asking.fail
        closing.callback(lambda: asyncio.run(asking.close()))
        yield asking
