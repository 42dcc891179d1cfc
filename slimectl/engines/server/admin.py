"""Endpoints for health, server information, load, aborts, pauses and memory."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from slimectl import __version__
from slimectl.chats.requests import GenerationRequest
from slimectl.engines.server.errors import RequestError
from slimectl.engines.server.schema import read
from slimectl.engines.server.state import SERVICE, Service
from slimectl.types import SamplingParams

PAUSES = ("abort", "retract", "in_place")


async def ping(request: web.Request) -> web.Response:
    """Answer 200 while the process is alive, with or without weights."""
    return web.json_response({"status": request.app[SERVICE].state})


async def health(request: web.Request) -> web.Response:
    """Answer 200 if the engine has weights, else 503."""
    service = request.app[SERVICE]
    return web.json_response({"status": service.state}, status=200 if service.ready else 503)


async def health_generate(request: web.Request) -> web.Response:
    """Generate one token, unless the engine is paused or busy."""
    service = request.app[SERVICE]
    service.check_ready()
    engine = service.thread.engine
    if not (engine.paused or engine.running):
        generation = GenerationRequest(SamplingParams(temperature=0.0, max_tokens=1))
        rid = f"health-{id(request)}"
        with service.requests.ask([([0], generation)], [rid], rid=rid) as pending:
            await pending.finished()
    return web.json_response({"status": service.state})


async def model_info(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    return web.json_response(_model_info(service))


async def server_info(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    engine = service.thread.engine
    return web.json_response(
        _model_info(service)
        | {
            "version": __version__,
            "status": service.state,
            "tp_size": 1,
            "dp_size": 1,
            "dtype": service.served.dtype,
            "context_length": engine.max_context,
            "max_running_requests": service.served.max_running,
            "stream_interval": service.streaming.interval,
            "incremental_streaming_output": service.streaming.incremental,
            "startup_time": service.born,
            "internal_states": [_load(service)],
        }
    )


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_card(request.app[SERVICE])]})


async def model(request: web.Request) -> web.Response:
    service, name = request.app[SERVICE], request.match_info["name"]
    if name != service.served.folder.name:
        raise RequestError(f"model {name[:100]!r} is not served here. Use {service.served.folder.name!r}.", status=404)
    return web.json_response(_card(service))


async def loads(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return web.json_response({"timestamp": now, "version": __version__, "loads": [_load(service)]})


async def abort_request(request: web.Request) -> web.Response:
    """End one request or all. Each returns its tokens so far."""
    service, fields = request.app[SERVICE], await read(request)
    rid = fields.text("rid", "")
    if fields.flag("abort_all"):
        await service.thread.call(service.thread.engine.end_all)
    elif rid:
        service.requests.abort(rid)
    return web.json_response({"success": True, "message": "Success"})


async def pause_generation(request: web.Request) -> web.Response:
    """Pause until continue_generation. Sequences in flight end, or they keep or lose their keys and values."""
    service, fields = request.app[SERVICE], await read(request)
    mode = fields.choice("mode", "abort", PAUSES)
    engine = service.thread.engine

    def pause() -> None:
        engine.pause("pause", retract=mode == "retract")
        if mode == "abort":
            engine.end_all()

    await service.thread.call(pause)
    return _done("Generation paused successfully.")


async def continue_generation(request: web.Request) -> web.Response:
    return await _between_steps(request, lambda service: service.thread.engine.resume("pause"), "Generation continues.")


async def flush_cache(request: web.Request) -> web.Response:
    """Discard the prefix cache. Running sequences keep their keys and values."""
    return await _between_steps(request, lambda service: service.thread.engine.forget_prefixes(), "Cache flushed.")


async def release_memory_occupation(request: web.Request) -> web.Response:
    """Free the keys and values, and pause until resume_memory_occupation. Weights stay in memory."""

    def release(service: Service) -> None:
        engine = service.thread.engine
        engine.pause("memory", retract=True)
        engine.free()

    return await _between_steps(request, release, "Memory released.")


async def resume_memory_occupation(request: web.Request) -> web.Response:
    return await _between_steps(request, lambda service: service.thread.engine.resume("memory"), "Memory resumed.")


async def _between_steps(request: web.Request, act: Callable[[Service], None], message: str) -> web.Response:
    service = request.app[SERVICE]
    await read(request)
    await service.thread.call(partial(act, service))
    return _done(message)


def _done(message: str) -> web.Response:
    return web.json_response({"success": True, "status": "ok", "message": message})


def _model_info(service: Service) -> dict[str, Any]:
    served = service.served
    return {
        "engine": "slimectl",
        "model_path": str(served.folder),
        "served_model_name": served.folder.name,
        "tokenizer_path": str(served.folder),
        "is_generation": True,
        "weight_version": service.thread.engine.weight_version,
        "model_type": served.config.get("model_type"),
        "architectures": served.config.get("architectures"),
        "vocab_size": served.config.get("vocab_size"),
        "max_context": service.thread.engine.max_context,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "disaggregation_mode": "null",
    }


def _card(service: Service) -> dict[str, Any]:
    name = service.served.folder.name
    card = {"id": name, "object": "model", "created": int(service.born), "owned_by": "slimectl", "root": name}
    return card | {"parent": None, "max_model_len": service.thread.engine.max_context}


def _load(service: Service) -> dict[str, Any]:
    engine = service.thread.engine
    return {
        "dp_rank": 0,
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "num_total_reqs": engine.running + engine.waiting,
        "max_running_requests": service.served.max_running,
        "prefill_tokens": engine.stats.prefill_tokens,
        "decode_tokens": engine.stats.decode_tokens,
        "steps": engine.stats.steps,
        "prefix_cache_bytes": engine.prefix_cache_bytes,
    }
