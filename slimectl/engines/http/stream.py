"""Streams one answer from one server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from slimectl.engines.http.api import Refused, ServerApi
from slimectl.engines.http.request import Paused, PendingRequest, Unavailable
from slimectl.errors import BackendError, SettingsError
from slimectl.transport.http import PASSING, error_message, parsed

MENDED_BY_ASKING_OTHERWISE = {400, 413, 422}


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    request: PendingRequest,
    *,
    api: ServerApi,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Stream an answer into `request`.

    Raises Unavailable or aiohttp's errors if a retry may succeed, SettingsError or BackendError if none will.
    """
    async with session.post(url + api.generate_path, json=api.generate_body(request), headers=headers) as reply:
        if reply.status != 200:
            _refuse(url, reply.status, parsed(await reply.text()), api)
        async for event in _events(reply.content):
            try:
                api.add_event(event, request)
            except Refused as refused:
                _refuse(url, refused.status, refused.body, api)
            if request.finish is not None:
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


def _refuse(url: str, status: int, body: Any, api: ServerApi) -> None:
    if api.is_paused(status, body):
        raise Paused(error_message(body))
    if status in PASSING:
        raise Unavailable(f"{status} {error_message(body)}")
    if status in MENDED_BY_ASKING_OTHERWISE:
        raise SettingsError(f"engine at {url} refuses the request: {error_message(body)}")
    hint = "; give its key by engine.api_key" if status == 401 else ""
    raise BackendError(f"engine at {url} answers {status}: {error_message(body)}{hint}")
