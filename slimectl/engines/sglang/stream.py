"""Streams one generation request from one server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from slimectl.engines.sglang.request import Flight, Paused, Unavailable
from slimectl.engines.sglang.wire import parsed, words_of
from slimectl.errors import BackendError, SettingsError

PAUSED = "engine_paused"
"""Type of the error of `slimectl serve` for a request that has waited long for a paused engine."""
RETRIED = {429, 500, 502, 503, 504}
MENDED_BY_ASKING_OTHERWISE = {400, 413, 422}


async def ask(
    session: aiohttp.ClientSession, url: str, flight: Flight, *, headers: Mapping[str, str] | None = None
) -> None:
    """Stream an answer into `flight`.

    Raises Unavailable or aiohttp's errors if a retry may succeed, SettingsError or BackendError if none will.
    """
    async with session.post(f"{url}/generate", json=flight.body, headers=headers) as reply:
        if reply.status != 200:
            _refuse(url, reply.status, parsed(await reply.text()))
        async for event in _events(reply.content):
            _check_event(url, event)
            flight.take(event)
            if flight.finish is not None:
                return
    raise Unavailable("it broke off in the middle of an answer")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of every server-sent event, across packet boundaries."""
    buffer = b""
    async for packet in stream.iter_any():
        *lines, buffer = (buffer + packet).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)


def _check_event(url: str, event: Mapping[str, Any]) -> None:
    """Raise for refusals within the stream: an error event, or an "abort" that has a status."""
    if "error" in event:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        _refuse(url, int(code or 400), event)
    reason = event["meta_info"].get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        _refuse(url, int(reason["status_code"]), reason)


def _refuse(url: str, status: int, body: Any) -> None:
    error = body.get("error") if isinstance(body, dict) else None
    if status == 503 and isinstance(error, dict) and error.get("type") == PAUSED:
        raise Paused(words_of(body))
    if status in RETRIED:
        raise Unavailable(f"{status} {words_of(body)}")
    if status in MENDED_BY_ASKING_OTHERWISE:
        raise SettingsError(f"engine at {url} refuses the request: {words_of(body)}")
    hint = "; give its key by engine.api_key" if status == 401 else ""
    raise BackendError(f"engine at {url} answers {status}: {words_of(body)}{hint}")
