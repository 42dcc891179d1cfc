"""Builds the `slimectl serve` process for servers that slimectl starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from slimectl.engines.http.request import NO_WEIGHTS
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram

SERVE_KEYS = ("SLIMECTL_ENGINE_API_KEY", "SLIMECTL_ENGINE_ADMIN_API_KEY")
"""Environment variables of the settings engine.api_key and engine.admin_api_key."""


def serve_server(
    spec: ServerSpec,
    options: ServerOptions,
    *,
    settings: Mapping[str, Any] | None = None,
    pause_timeout_s: float = 600.0,
) -> ServerProcess:
    """Build the process of `slimectl serve`, with further `settings`.

    Without an admin key, the server generates one and stores it for this user.
    """
    all_settings = {"engine.dtype": options.dtype, "engine.device": options.device, **(settings or {})}
    if options.max_context:
        all_settings["rollout.max_context_len"] = options.max_context
    waits = options.weight_version == NO_WEIGHTS
    arguments = ["--model", str(spec.model), *(["--wait-for-weights"] if waits else [])]
    arguments += ["--pause-timeout", f"{pause_timeout_s:g}"]
    arguments += [argument for key, value in all_settings.items() for argument in ("-s", f"{key}={value}")]
    secrets = {SERVE_KEYS[0]: options.keys.api_key, SERVE_KEYS[1]: options.keys.admin_api_key}
    env = {name: key for name, key in secrets.items() if key}
    ready = "/ping" if waits else "/health"
    return ServerProcess(spec.name, ServerProgram(partial(_serve_command, arguments), env, ready=ready), options)


def _serve_command(arguments: Sequence[str], host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "slimectl", "serve", *arguments, "--host", host, "--port", str(port)]
    return [*command, "--with-parent"]
