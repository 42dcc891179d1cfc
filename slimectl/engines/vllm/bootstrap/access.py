"""ASGI middleware that requires keys for all requests to a vLLM server, including its development endpoints.

`--api-key` of vLLM 0.32.0 protects only /v1 and /inference. /collective_rpc, which calls any method of a worker, /pause
and weight updates are open to everyone. Delete when vLLM has an admin key.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import hidden_keys

ASKING = ("/inference/v1/generate", "/v1/", "/tokenize", "/detokenize")
"""Paths with these prefixes accept the API key and the admin key. All others require the admin key."""
OPEN = ("/health", "/ping", "/version", "/metrics")
"""Paths that need no key, because they only show that the server is up."""

Scope = dict[str, Any]


class KeyGuard:
    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._api_key, self._admin_key = hidden_keys.keys()

    async def __call__(self, scope: Scope, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        body = b'{"error": {"message": "this request needs a key", "code": 401}}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _may_pass(self, scope: Scope) -> bool:
        """As in SGLang, the API key opens everything unless there is an admin key. Then it opens only generation."""
        path = scope["path"]
        if path in OPEN or (path.startswith(ASKING) and not self._api_key):
            return True
        keys = [self._admin_key or self._api_key]
        if path.startswith(ASKING):
            keys.append(self._api_key)
        if not any(keys):
            return True
        sent = dict(scope["headers"]).get(b"authorization", b"")
        return any(hmac.compare_digest(sent, f"Bearer {key}".encode()) for key in keys if key)
