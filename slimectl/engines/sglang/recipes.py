"""The servers that slimectl starts: SGLang's own, `slimectl serve`, and sglang-router in front of several."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slimectl.engines.keys import Keys
from slimectl.engines.sglang.args import INSIDE, flags, interpreter, router_interpreter
from slimectl.engines.sglang.asking import NO_KEYS
from slimectl.engines.sglang.servers import ServerProcess
from slimectl.redaction import is_secret_name

UNPUSHED = "unpushed"
"""Weight version of a server that waits for its first push: no answer under this name is ever used."""

HIDDEN_FLAGS, HIDDEN_KEYS = "SLIMECTL_FLAGS", "SLIMECTL_KEYS"
"""Environment variables by which inside/launch.py gets what no command line may show: flags of SGLang as a JSON list,
and the API key and the admin key."""

SERVE_KEYS = ("SLIMECTL_ENGINE_API_KEY", "SLIMECTL_ENGINE_ADMIN_API_KEY")
"""The settings engine.api_key and engine.admin_api_key in the environment of `slimectl serve`."""

SLACK = 8
"""Tokens that SGLang 0.5.21 keeps of a context for itself; the client sees to the real bound."""

STREAM_INTERVAL = 16
"""Tokens between two words of a stream: one by one they cost a CPU a fifth of its speed, and nobody reads along."""

ON_CPU = {
    "attention_backend": "--attention-backend=torch_native",
    "sampling_backend": "--sampling-backend=pytorch",
    "grammar_backend": "--grammar-backend=none",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "sleep_on_idle": "--sleep-on-idle",  # an idle server would burn a core
    "max_total_tokens": "--max-total-tokens=20000",  # the cache's share of memory is reckoned from a GPU's
    "enable_deterministic_inference": "--enable-deterministic-inference",  # else sampling_seed has no effect
}
"""Flags by the field that they set: where `args` has it, theirs is taken."""


def sglang_server(
    model: Path,
    *,
    log: Path,
    python: str | None = None,
    tensor_parallel: int = 1,
    args: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    max_context: int | None = None,
    weight_version: str = UNPUSHED,
    role: str | None = None,
    bootstrap_port: int | None = None,
    name: str = "sglang",
    env: Mapping[str, str] | None = None,
    host: str | None = "127.0.0.1",
    start_timeout_s: float = 600.0,
    keys: Keys = NO_KEYS,
) -> ServerProcess:
    """A real SGLang server of the model in a folder.

    `weight_version` names the weights in that folder; leave it where others will be pushed before anything is sampled.
    `role` is prefill or decode (disaggregation). Raises BackendError if `python` has no SGLang, SettingsError for
    `args` that it does not take. Keys, and whatever else of `args` is a secret, reach it through its environment.
    """
    chosen = interpreter(python)
    given = dict(args or {})
    written = [
        f"--model-path={model}", f"--tp-size={tensor_parallel}", f"--dtype={dtype}", f"--device={device}",
        f"--weight-version={weight_version}", "--skip-server-warmup", "--incremental-streaming-output",
        f"--context-length={(max_context or _context(model)) + SLACK}",
        *([] if "stream_interval" in given else [f"--stream-interval={STREAM_INTERVAL}"]),
        *([f"--disaggregation-mode={role}"] if role else []),
        *([f"--disaggregation-bootstrap-port={bootstrap_port}"] if bootstrap_port else []),
        *([flag for field, flag in ON_CPU.items() if field not in given] if device == "cpu" else []),
        *flags({field: value for field, value in given.items() if not is_secret_name(field)}, chosen),
    ]  # fmt: skip
    surroundings = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for SLACK
    hidden = flags({field: value for field, value in given.items() if is_secret_name(field)}, chosen)
    surroundings |= {HIDDEN_FLAGS: json.dumps(hidden), HIDDEN_KEYS: json.dumps([keys.api_key, keys.admin_api_key])}
    if device == "cpu":
        surroundings |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if tensor_parallel > 1:  # SGLang asks for a NUMA node a rank, unless it is told cores; without sgl-kernel, any
            surroundings["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * tensor_parallel)
    return ServerProcess(
        partial(_inside, chosen, "launch.py", written),
        name=name, log=log, env=surroundings | dict(env or {}), host=host, start_timeout_s=start_timeout_s,
        own_tmp=True,  # SGLang puts sockets there and never removes them
    )  # fmt: skip


def serve_server(
    model: Path,
    *,
    log: Path,
    dtype: str = "float32",
    device: str = "cpu",
    max_running: int = 64,
    max_context: int | None = None,
    wait_for_weights: bool = False,
    name: str = "serve",
    env: Mapping[str, str] | None = None,
    host: str | None = "127.0.0.1",
    start_timeout_s: float = 600.0,
    pause_timeout_s: float = 600.0,
    keys: Keys = NO_KEYS,
) -> ServerProcess:
    """`slimectl serve` of the model in a folder; with `wait_for_weights` it reads none and answers nothing before a
    push. It gets `keys` through its environment, and without an admin key leaves its own where this user finds it.
    """
    settings = {"engine.dtype": dtype, "engine.device": device, "engine.max_running_requests": max_running}
    if max_context:
        settings["rollout.max_context_len"] = max_context
    arguments = ["--model", str(model), *(["--wait-for-weights"] if wait_for_weights else [])]
    arguments += ["--pause-timeout", f"{pause_timeout_s:g}"]
    secrets = {SERVE_KEYS[0]: keys.api_key, SERVE_KEYS[1]: keys.admin_api_key}
    arguments += [word for key, value in settings.items() for word in ("-s", f"{key}={value}")]
    return ServerProcess(
        partial(_serve, arguments),
        name=name, log=log, env={name: key for name, key in secrets.items() if key} | dict(env or {}), host=host,
        start_timeout_s=start_timeout_s, ready="/ping" if wait_for_weights else "/health",
    )  # fmt: skip


def router_server(
    policy: str,
    *,
    log: Path,
    python: str | None = None,
    disaggregated: bool = False,
    health: str = "/ping",
    host: str | None = "127.0.0.1",
    request_timeout_s: float = 14400.0,
    start_timeout_s: float = 120.0,
) -> ServerProcess:
    """sglang-router without workers yet; `policy` is cache_aware, round_robin, random or power_of_two.

    `disaggregated`: some workers prefill, the others decode. `health` is what it asks of workers: /ping answers also
    while they wait for weights or are paused to take some. Raises BackendError if `python` has no sglang-router.
    """
    written = [
        f"--policy={policy}", f"--health-check-endpoint={health}",
        f"--request-timeout-secs={int(request_timeout_s)}", "--log-level=warn",
        # The client tries again itself, elsewhere and for longer; and what breaks a circuit here is a push's pause.
        "--disable-retries", "--disable-circuit-breaker",
        *(["--pd-disaggregation"] if disaggregated else []),
    ]  # fmt: skip
    return ServerProcess(
        partial(_inside, router_interpreter(python), "route.py", written),
        name="sglang-router", log=log, host=host, start_timeout_s=start_timeout_s, ready="/liveness",
    )  # fmt: skip


def _context(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["max_position_embeddings"])


def _inside(python: str, script: str, written: Sequence[str], host: str, port: int) -> list[str]:
    # -E: our own PYTHONPATH is not meant for another Python.
    return [python, "-E", str(INSIDE / script), *written, f"--host={host}", f"--port={port}"]


def _serve(written: Sequence[str], host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "slimectl", "serve", *written, "--host", host, "--port", str(port)]
    return [*command, "--with-parent"]
