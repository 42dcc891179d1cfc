"""Builds the servers that sample, their client, and the engine of a stage outside a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slimectl.architectures import cards
from slimectl.architectures.config import read_config
from slimectl.chats.model_tokens import end_tokens
from slimectl.chats.tokenizer import corrected_config
from slimectl.data.routed_experts import NO_EXPERTS
from slimectl.engines.limits import check_ids
from slimectl.errors import SettingsError
from slimectl.runtime.builders.engines import EngineBackend, engine, engine_backend, engine_reads, keys
from slimectl.runtime.builders.executors import executor as executor_of
from slimectl.runtime.builders.executors import executor_backend
from slimectl.runtime.builders.models import device, served_model, tokenizer
from slimectl.runtime.builders.weight_sync import (
    LOCAL,
    adapter_obstacle,
    check_transport,
    keyed,
    needs_shared_memory,
    pushed_precision,
    urls,
)
from slimectl.settings import Settings
from slimectl.settings.engine import EngineSettings
from slimectl.system.event_loop import run_coroutine
from slimectl.system.stdio import logger, quantity

if TYPE_CHECKING:
    from slimectl.engines.http.api import ServerApi
    from slimectl.engines.http.client import HttpEngine
    from slimectl.engines.sglang.topology import ServerSpec
    from slimectl.engines.supervisor.control import EngineControl
    from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
    from slimectl.engines.supervisor.server_process import ServerProcess
    from slimectl.engines.weight_sync.base import WeightSyncBase
    from slimectl.protocols import Engine, Executor


def engine_gpus(engine: EngineSettings, gpus: int = 1) -> float:
    """Return the GPUs of an engine process, which has `gpus` on its machine. Returns 0 on a CPU."""
    return gpus if device(engine.device) == "cuda" else 0.0


def check_engine(settings: Settings) -> None:
    """Check that servers can be started here and receive weights in their own precision, before anything is built.

    Raises BackendError, SettingsError or CheckpointError. On a Ray cluster, the machines that start servers check them.
    """
    if settings.engine.load:
        pushed_precision(settings, served_model(settings.engine, Path()))  # raises
    if settings.train.lora_rank is not None and settings.uses_servers:
        adapter_obstacle(settings)  # raises
    if settings.uses_servers:
        check_transport(settings)
    if settings.engine.url:
        return
    backend = engine_backend(settings)
    if settings.uses_servers and type(backend).server is EngineBackend.server:
        backend.server(settings, backend.specs(settings, Path("model"))[0], log=Path("log"), waiting=True)  # raises
    backend.check(settings)
    if settings.uses_servers and settings.train.use_rollout_routing_replay:
        backend.reporting_api(layers=1, choices=1)  # raises
    if settings.cluster.executor == "local" and settings.uses_servers and _router_policy(settings) is not None:
        from slimectl.engines.sglang.launch import router_interpreter

        router_interpreter(settings.sglang.python)


def check_middlewares(engine: EngineSettings, *, servers: bool) -> None:
    """Load engine.middleware_paths. Raises HookError, or SettingsError if no engine of the settings is a server."""
    if not engine.middleware_paths:
        return
    if not servers:
        raise SettingsError(
            "engine.middleware_paths: a single embedded engine receives no HTTP requests. Set "
            "engine.num_engines = 2 for servers, or rollout.custom_generate_function_path to see each request."
        )
    from slimectl.engines.server.middleware import middlewares

    middlewares(engine.middleware_paths)


def check_stop_tokens(settings: Settings, config: Mapping[str, Any]) -> None:
    """Raise SettingsError for a stop token of [rollout] or [eval] outside the model's vocabulary."""
    sections = {"rollout": settings.rollout.stop_token_ids}
    sections |= {f"eval.data.{name}": data.stop_token_ids or [] for name, data in settings.eval.datasets.items()}
    for section, tokens in sections.items():
        check_ids(f"{section}.stop_token_ids", tokens, vocabulary=cards.language_model(dict(config))["vocab_size"])


def server_pool(
    settings: Settings, model: Path, *, executor: Executor, folder: Path, waiting: bool = True
) -> ServerPool | None:
    """Start the servers of the settings, or watch the running ones of engine.url. Returns None if none are needed.

    With `waiting`, they answer no request before the first push. Otherwise they start with the weights in `model`.
    Their output goes to engine-0.log, … in `folder`/logs.
    """
    from slimectl.engines.supervisor.health import RunningServer
    from slimectl.engines.supervisor.server_pool import ServerPool

    if not settings.uses_servers:
        return None
    if running := urls(settings.engine):
        pool = ServerPool(lambda i: RunningServer(running[i]), len(running), watch=_watch(settings.engine))
    else:
        pool = new_pool(settings, model, executor=executor, folder=folder, waiting=waiting)
    pool.start()
    return pool


def new_pool(settings: Settings, model: Path, *, executor: Executor, folder: Path, waiting: bool) -> ServerPool:
    """Create the pool of `server_pool` without starting it."""
    from slimectl.engines.supervisor.server_pool import ServerPool

    logs, api_key = folder / "logs", keys(settings).api_key
    specs = _trained_specs(settings, served_model(settings.engine, model))

    def spec_of(i: int) -> ServerSpec:
        """Return the specification of a server. One that joins later is like the first."""
        return specs[i] if i < len(specs) else replace(specs[0], name=f"{_group(specs[0])}-{i}")

    def release(i: int) -> None:
        for part in spec_of(i).parts():
            executor.end_host(part.name)

    pool = ServerPool(
        lambda i: _hosted(settings, spec_of(i), executor=executor, logs=logs, waiting=waiting),
        len(specs),
        router=_router(settings, logs),
        kinds=[spec.router_kind() | ({"api_key": api_key} if api_key else {}) for spec in specs],
        watch=_watch(settings.engine),
    )
    pool.release = release
    pool.rank_beside = lambda i: executor.rank_beside(spec_of(i).name)
    return pool


def _trained_specs(settings: Settings, model: Path) -> list[ServerSpec]:
    """Return the specification of every server that gets the policy's weights."""
    return [spec for spec in engine_backend(settings).specs(settings, model) if spec.gets_weights]


def _group(spec: ServerSpec) -> str:
    return spec.name.rpartition("-")[0]


def _watch(engine: EngineSettings) -> WatchOptions:
    from slimectl.engines.supervisor.server_pool import WatchOptions

    return WatchOptions(
        watches=engine.use_fault_tolerance,
        interval_s=engine.health_check_interval,
        timeout_s=engine.health_check_timeout,
        first_wait_s=engine.health_check_first_wait,
        max_restarts=engine.max_restarts,
    )


def engine_control(
    settings: Settings, model: Path, folder: Path, pool: ServerPool, transport: WeightSyncBase
) -> EngineControl:
    """Build what carries out the requests of `slimectl engines` for the run in `folder`."""
    from slimectl.engines.supervisor.control import EngineControl

    return EngineControl(folder, pool, check=partial(_check_addition, settings, model, transport))


def _check_addition(settings: Settings, model: Path, transport: WeightSyncBase, url: str | None) -> None:
    """Check that an engine can join the run: a new one, or the running one at `url`. Raises one error line if not."""
    if url is not None:
        if not settings.engine.url:
            raise SettingsError("this run starts its engines. Leave out --url, or start a run with engine.url")
        if "@" in url or not url.startswith(("http://", "https://")):
            raise SettingsError(f"--url {url}: give http://HOST:PORT. Keys belong in engine.api_key")
        if needs_shared_memory(transport) and urlsplit(url).hostname not in LOCAL:
            raise SettingsError(
                f"--url {url}: weights reach the engines through shared memory (sync.transport = tensor), which "
                "servers on other machines cannot read. Start the run with sync.transport = distributed, disk or delta"
            )
        client(settings, model, tokenizer(model), [url], [url])  # raises
    elif settings.engine.url:
        raise SettingsError("this run uses servers that are already running (engine.url). Add one with --url")
    elif settings.cluster.colocate:
        raise SettingsError("cluster.colocate: engines share the GPUs of the trainer, so none is free for another one")
    elif len({_group(spec) for spec in _trained_specs(settings, model)}) > 1:
        raise SettingsError("engines of several groups (prefill and decode, or sglang.server_groups) cannot be added")


def auxiliary_servers(
    settings: Settings, model: Path, *, executor: Executor, folder: Path
) -> tuple[list[ServerPool], Settings]:
    """Start the servers of other models (a judge, a teacher), which keep their weights.

    Returns them, and settings for hooks in which each of sglang.server_groups has the list `url` of its addresses.
    """
    from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions

    started: list[ServerPool] = []
    groups = [dict(group) for group in settings.sglang.server_groups]
    companion_specs = {
        spec.name: spec for spec in engine_backend(settings).specs(settings, model) if not spec.gets_weights
    }
    for group in groups:
        specs = [
            spec for name, spec in companion_specs.items() if name.rpartition("-")[0] == group.get("name", "engine")
        ]
        if not specs:
            continue

        def make(i: int, specs: list[ServerSpec] = specs) -> Any:
            return _hosted(settings, specs[i], executor=executor, logs=folder / "logs", waiting=False)

        started.append(ServerPool(make, len(specs), watch=WatchOptions(max_restarts=settings.engine.max_restarts)))
        try:
            started[-1].start()
        except BaseException:
            for pool in started:
                pool.close()
            raise
        group["url"] = started[-1].urls
    sglang = settings.sglang.model_copy(update={"server_groups": groups})
    return started, settings.model_copy(update={"sglang": sglang})


def _hosted(settings: Settings, spec: ServerSpec, *, executor: Executor, logs: Path, waiting: bool) -> Any:
    """Return a server that the executor hosts, as one process or one on each of its machines."""
    from slimectl.engines.supervisor.node_group import NodeGroup

    processes = [
        executor.host(
            partial(_server, settings, part, log=logs / f"{part.name}.log", waiting=waiting),
            name=part.name,
            gpus=engine_gpus(settings.engine, spec.gpus // spec.nodes),
        )
        for part in spec.parts()
    ]
    return processes[0] if spec.nodes == 1 else NodeGroup(processes, engine_backend(settings).meeting_flags)


def _server(settings: Settings, spec: ServerSpec, *, log: Path, waiting: bool) -> ServerProcess:
    """Build one server without starting it. Called on the machine where it will run."""
    from slimectl.checkpoints.hf import copy_companions

    backend, spec = engine_backend(settings), replace(spec, model=spec.model.absolute())
    option = backend.tokenizer_option
    if option and option not in spec.args and (config := corrected_config(spec.model)) is not None:
        folder = log.with_suffix(".tokenizer")
        folder.mkdir(parents=True, exist_ok=True)
        copy_companions(spec.model, folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        spec = replace(spec, args={**spec.args, option: str(folder.absolute())})
    return backend.server(settings, spec, log=log, waiting=waiting)


def _router_policy(settings: Settings) -> str | None:
    """Return sglang-router's policy, or None if the client balances requests itself."""
    policy: str = settings.engine.router
    if policy == "auto":
        backend = engine_backend(settings)
        forwards = not settings.train.use_rollout_routing_replay  # sglang-router 0.3.2 drops that field of a request
        routes = forwards and len(_trained_specs(settings, Path("model"))) > 1
        policy = backend.default_router if routes else "none"
    return None if policy == "none" else policy


def _router(settings: Settings, logs: Path) -> Any:
    policy = _router_policy(settings)
    if policy is None:
        return None
    from slimectl.engines.sglang.launch import router_server

    return router_server(
        policy,
        log=logs / "router.log",
        python=settings.sglang.python,
        disaggregated=any(spec.role != "regular" for spec in engine_backend(settings).specs(settings, Path("model"))),
        request_timeout_s=settings.engine.request_timeout_s,
    )


def client(
    settings: Settings, model: Path, tokenizer: Any, addresses: Sequence[str], workers: Sequence[str]
) -> HttpEngine:
    """Build the client of the servers at `addresses`. Raises BackendError if engine.url serves another model."""
    from slimectl.engines.embedded.detokenizer import Detokenizer
    from slimectl.engines.http.client import HttpEngine, ServedModel
    from slimectl.engines.http.dispatch import ClientOptions
    from slimectl.engines.stop_tokens import StopTokens, special_tokens

    options, config = settings.engine, read_config(model)
    config = config.get("text_config", config)
    vocabulary, specials = config["vocab_size"], special_tokens(tokenizer, vocabulary=config["vocab_size"])
    served = ServedModel(
        vocabulary,
        settings.rollout.max_context_len or config["max_position_embeddings"],
        decode=Detokenizer(tokenizer).response_text,
        stops=StopTokens(specials, end_tokens(model, tokenizer)),
    )
    client_options = ClientOptions(
        concurrency=options.server_concurrency,
        affinity=options.session_affinity,
        request_timeout_s=options.request_timeout_s,
        connect_timeout_s=options.connect_timeout_s,
        keys=keys(settings),
        moves_aborted=settings.sync.pause_mode != "abort",
        shared=bool(options.url),
    )
    api = _api(settings, config)
    http_engine = HttpEngine(addresses, api=api, model=served, workers=workers, options=client_options)
    if options.url:
        http_engine.check_model({"model_type": config.get("model_type"), "vocab_size": config["vocab_size"]})
    return http_engine


def _api(settings: Settings, config: Mapping[str, Any]) -> ServerApi:
    """Return the dialect of the servers, with routed experts if the trainer replays them."""
    backend = engine_backend(settings)
    if not settings.train.use_rollout_routing_replay:
        return backend.api()
    choices = config.get("num_experts_per_tok")
    if not choices:
        raise SettingsError(NO_EXPERTS)
    return backend.reporting_api(layers=config["num_hidden_layers"], choices=choices)


@contextmanager
def start_engines(settings: Settings, model: Path, tokenizer: Any) -> Iterator[Engine]:
    """Yield an engine with the model's own weights for a stage outside a run. Its servers stop with the block."""
    check_stop_tokens(settings, read_config(model))
    check_middlewares(settings.engine, servers=settings.stage_uses_servers)
    with ExitStack() as closing:
        if not engine_reads(settings, model):
            model = _converted(settings, model, closing.enter_context(TemporaryDirectory(prefix="slimectl-model-")))
        if not settings.stage_uses_servers:
            yield engine(settings, model, tokenizer)
            return
        settings = keyed(settings)
        executor = executor_of(settings, trains=False)
        closing.callback(executor.close)
        folder = Path(closing.enter_context(TemporaryDirectory(prefix="slimectl-engines-")))
        if settings.engine.url:
            http_engine = client(settings, model, tokenizer, urls(settings.engine), urls(settings.engine))
        else:
            started = new_pool(settings, model, executor=executor, folder=folder, waiting=False)
            closing.callback(started.close)
            started.start()
            count = len(started.urls)
            logger.info(f"{quantity(count, 'engine')} ready")
            http_engine = client(settings, model, tokenizer, started.addresses, started.urls)
            http_engine.troubled = started.look
            started.announce, started.failed = http_engine.set_urls, http_engine.fail
        closing.callback(lambda: run_coroutine(http_engine.close()))
        yield http_engine


def _converted(settings: Settings, model: Path, folder: str) -> Path:
    """Convert a torch_dist model into a temporary folder. Raises SettingsError if engines run on other machines."""
    from slimectl.checkpoints.conversion import convert_checkpoint

    command, name = f"slimectl convert {shlex.quote(str(model))} DIR --to hf", settings.engine.backend
    if executor_backend(settings).spans_machines(settings):
        raise SettingsError(f"{model}: {name} cannot read torch_dist. Convert it: {command}")
    logger.info(f"converting {model}, because {name} cannot read torch_dist. To convert it only once: {command}")
    convert_checkpoint(model, Path(folder) / "model")
    return Path(folder) / "model"
