"""Builds the `slimectl serve` process for servers that slimectl starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from slimectl.engines.api_keys import NO_KEYS, ServerKeys
from slimectl.engines.supervisor.server_process import ServerProcess

SERVE_KEYS = ("SLIMECTL_ENGINE_API_KEY", "SLIMECTL_ENGINE_ADMIN_API_KEY")
"""Environment variables of the settings engine.api_key and engine.admin_api_key."""


def serve_server(
    model: Path,
    *,
    log: Path,
    dtype: str = "float32",
    device: str = "cpu",
    max_running: int = 64,
    prefix_cache_gib: float = 1.0,
    max_context: int | None = None,
    wait_for_weights: bool = False,
    name: str = "serve",
    env: Mapping[str, str] | None = None,
    host: str | None = "127.0.0.1",
    start_timeout_s: float = 600.0,
    pause_timeout_s: float = 600.0,
    keys: ServerKeys = NO_KEYS,
    middleware_paths: Sequence[str] = (),
) -> ServerProcess:
    """Build the process of `slimectl serve` for the model in a folder.

    With `wait_for_weights`, the server reads no weights and handles no requests before a push. `keys` are passed
    through the environment. Without an admin key, the server generates one and stores it for this user.
    """
    settings: dict[str, object] = {
        "engine.dtype": dtype,
        "engine.device": device,
        "engine.max_running_requests": max_running,
        "engine.prefix_cache_gib": prefix_cache_gib,
    }
    if middleware_paths:
        settings["engine.middleware_paths"] = json.dumps(list(middleware_paths))
    if max_context:
        settings["rollout.max_context_len"] = max_context
    arguments = ["--model", str(model), *(["--wait-for-weights"] if wait_for_weights else [])]
    arguments += ["--pause-timeout", f"{pause_timeout_s:g}"]
    secrets = {SERVE_KEYS[0]: keys.api_key, SERVE_KEYS[1]: keys.admin_api_key}
    arguments += [argument for key, value in settings.items() for argument in ("-s", f"{key}={value}")]
    return ServerProcess(
        partial(_serve_command, arguments),
        name=name, log=log, env={name: key for name, key in secrets.items() if key} | dict(env or {}), host=host,
        start_timeout_s=start_timeout_s, ready="/ping" if wait_for_weights else "/health",
    )  # fmt: skip


def _serve_command(arguments: Sequence[str], host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "slimectl", "serve", *arguments, "--host", host, "--port", str(port)]
    return [*command, "--with-parent"]
