"""Builds SGLang server and router processes, with flags from `[sglang.args]` (any field of SGLang's ServerArgs)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slimectl.engines.api_keys import NO_KEYS, ServerKeys
from slimectl.engines.http.request import NO_WEIGHTS
from slimectl.engines.sglang.disaggregation import bootstrap_flags, role_flags
from slimectl.engines.sglang.router import Router
from slimectl.engines.supervisor.installed import InstalledServer, installed_version, language_config
from slimectl.engines.supervisor.node_group import interface_variables
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError

BOOTSTRAP = Path(__file__).parent / "bootstrap"
ADAPTER_LOADER = "adapter_loader.load"
"""The function in `BOOTSTRAP` that SGLang calls with adapter messages."""

SGLANG = InstalledServer(
    section="sglang",
    packages=("sglang",),
    # These versions pin versions of torch and transformers that slimectl supports.
    oldest=(0, 5, 18),
    newest=(0, 5, 21),
    script=BOOTSTRAP / "launch_server.py",
    owned={
        "model_path": "model.path",
        "host": "engine.num_engines",
        "port": "engine.num_engines",
        "tp_size": "cluster.rollout_num_gpus_per_engine",
        "dtype": "engine.dtype",
        "device": "engine.device",
        "context_length": "rollout.max_context_len",
        "weight_version": "the pushed weights",
        **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "cluster.num_gpus_per_node"),
        "disaggregation_mode": "sglang.prefill_num_servers or sglang.server_groups",
    },
    help_command="python -m sglang.launch_server --help",
    on_gpu="sglang>=0.5.18,<0.5.22",
)


def router_interpreter(python: str | None) -> str:
    """Return the Python that runs sglang-router: `python`, else this one. Raises BackendError if that is missing."""
    path = python or sys.executable
    if installed_version(path, "sglang-router", setting="sglang.python") is None:
        raise BackendError(
            f"engine.router: {path} has no sglang-router. Run: {path} -m pip install sglang-router==0.3.2, "
            f"or set engine.router = none"
        )
    return path


EVERY_HOST = "*,0.0.0.0/0,::/0"
"""Value of NO_PROXY that matches every host. sglang-router (reqwest 0.12) needs networks for addresses, * for names."""
LEAVES = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_")
"""Prefixes of shared memory that SGLang 0.5.21 leaves behind: the first always, the second only if it is killed."""

SLACK = 8
"""Number of context tokens that SGLang 0.5.21 reserves. The client enforces the real limit."""

DEFAULTS = {
    "custom_weight_loader": f"--custom-weight-loader={ADAPTER_LOADER}",
    # Chunks of one token would cost a fifth of the speed on a CPU, and no user reads them live.
    "stream_interval": "--stream-interval=16",
}
ON_CPU = {
    "attention_backend": "--attention-backend=torch_native",
    "sampling_backend": "--sampling-backend=pytorch",
    "grammar_backend": "--grammar-backend=none",
    "disable_overlap_schedule": "--disable-overlap-schedule",
    "sleep_on_idle": "--sleep-on-idle",  # an idle server would burn a core
    "max_total_tokens": "--max-total-tokens=20000",  # the default is computed from GPU memory
    "enable_deterministic_inference": "--enable-deterministic-inference",  # else sampling_seed has no effect
}
"""Flags by the field that they set. A field in `args` replaces its flag."""


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
    weight_version: str = NO_WEIGHTS,
    role: str | None = None,
    nodes: int = 1,
    node: int = 0,
    name: str = "sglang",
    env: Mapping[str, str] | None = None,
    host: str | None = "127.0.0.1",
    start_timeout_s: float = 600.0,
    keys: ServerKeys = NO_KEYS,
) -> ServerProcess:
    """Build the process of an SGLang server for the model in a folder.

    `weight_version` is the version of the weights in that folder. Keep its default if other weights are pushed before
    sampling starts. `role` is prefill or decode (disaggregation). If the server spans several machines, this is the
    process of machine `node`, which gets their meeting address when it starts (supervisor.node_group). Raises
    BackendError if `python` has no SGLang, and SettingsError for `args` that it rejects. Keys and other secrets in
    `args` are passed through the environment.
    """
    interpreter_path = SGLANG.interpreter(python)
    defaults = DEFAULTS | (ON_CPU if device == "cpu" else {})
    own_flags, hidden = SGLANG.launch_flags(args or {}, interpreter_path, defaults=defaults, keys=keys)
    context = max_context or language_config(model)["max_position_embeddings"]
    arguments = [
        f"--model-path={model}", f"--tp-size={tensor_parallel}", f"--dtype={dtype}", f"--device={device}",
        f"--weight-version={weight_version}", "--skip-server-warmup", "--incremental-streaming-output",
        f"--context-length={context + SLACK}",
        *([f"--nnodes={nodes}", f"--node-rank={node}"] if nodes > 1 else []),
        *role_flags(role, args or {}, device=device),
        *own_flags,
    ]  # fmt: skip
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} | hidden  # for SLACK
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if tensor_parallel > 1:  # else SGLang requires a NUMA node per rank (any cores do without sgl-kernel)
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * tensor_parallel)
    if nodes > 1:
        environment |= interface_variables(host)
    return ServerProcess(
        partial(_server_command, interpreter_path, arguments, role), ports=2 if role == "prefill" else 1,
        name=name, log=log, env=environment | dict(env or {}), host=host, start_timeout_s=start_timeout_s,
        leaves=LEAVES, own_tmp=True,  # SGLang leaves sockets there
    )  # fmt: skip


def router_server(
    policy: str,
    *,
    log: Path,
    python: str | None = None,
    disaggregated: bool = False,
    request_timeout_s: float = 14400.0,
) -> Router:
    """Build the process of sglang-router, without workers.

    `policy` is cache_aware, round_robin, random or power_of_two. With `disaggregated`, some workers prefill and the
    others decode. Raises BackendError if `python` has no sglang-router.
    """
    arguments = [
        f"--policy={policy}",
        "--health-check-endpoint=/ping",  # workers answer it even while they wait for weights or load them
        f"--request-timeout-secs={int(request_timeout_s)}", "--log-level=warn",
        # The client itself retries for longer and on other servers. The pause of a push would open the circuit breaker.
        "--disable-retries", "--disable-circuit-breaker",
        *(["--pd-disaggregation"] if disaggregated else []),
    ]  # fmt: skip
    router = replace(SGLANG, script=BOOTSTRAP / "launch_router.py")
    return Router(
        partial(router.command, router_interpreter(python), arguments),
        name="sglang-router", log=log, start_timeout_s=120.0, ready="/liveness",
        env=dict.fromkeys(("NO_PROXY", "no_proxy"), EVERY_HOST),  # it connects only to our servers
    )  # fmt: skip


def _server_command(python: str, arguments: Sequence[str], role: str | None, host: str, port: int) -> list[str]:
    return SGLANG.command(python, [*arguments, *bootstrap_flags(role, port)], host, port)
