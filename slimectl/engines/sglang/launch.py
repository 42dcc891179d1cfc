"""Builds SGLang server and router processes, with flags from `[sglang.args]` (any field of SGLang's ServerArgs)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from slimectl.engines.sglang.disaggregation import bootstrap_flags, role_flags
from slimectl.engines.sglang.router import Router
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor.installed import InstalledServer, installed_version, language_config
from slimectl.engines.supervisor.node_group import interface_variables
from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram
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
    kernels=("sgl_kernel",),
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


def sglang_server(spec: ServerSpec, options: ServerOptions, *, python: str | None = None) -> ServerProcess:
    """Build the process of an SGLang server.

    If the server spans several machines, this is the process of machine `spec.node`, which gets their meeting address
    when it starts (supervisor.node_group). Raises BackendError if `python` has no SGLang, and SettingsError for
    `spec.args` that it rejects. Secrets in them are passed through the environment.
    """
    interpreter_path = SGLANG.interpreter(python)
    on_cpu, ranks = options.device == "cpu", spec.tensor_parallel
    defaults = DEFAULTS | (ON_CPU if on_cpu else {})
    own_flags, hidden = SGLANG.launch_flags(spec.args, interpreter_path, defaults=defaults, keys=options.keys)
    context = options.max_context or language_config(spec.model)["max_position_embeddings"]
    arguments = [
        f"--model-path={spec.model}", f"--tp-size={ranks}", f"--dtype={options.dtype}", f"--device={options.device}",
        f"--weight-version={options.weight_version}", "--skip-server-warmup", "--incremental-streaming-output",
        f"--context-length={context + SLACK}",
        *([f"--nnodes={spec.nodes}", f"--node-rank={spec.node}"] if spec.nodes > 1 else []),
        *role_flags(spec.role, spec.args, device=options.device),
        *own_flags,
    ]  # fmt: skip
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} | hidden  # for SLACK
    if on_cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if ranks > 1:  # else SGLang requires a NUMA node per rank (any cores do without sgl-kernel)
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * ranks)
    if spec.nodes > 1:
        environment |= interface_variables(options.host)
    program = ServerProgram(
        partial(_server_command, interpreter_path, arguments, spec.role), environment,
        ports=2 if spec.role == "prefill" else 1, leaves=LEAVES, own_tmp=True,  # SGLang leaves sockets there
    )  # fmt: skip
    return ServerProcess(spec.name, program, options)


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
    command = partial(router.command, router_interpreter(python), arguments)
    env = dict.fromkeys(("NO_PROXY", "no_proxy"), EVERY_HOST)  # it connects only to our servers
    program = ServerProgram(command, env, ready="/liveness")
    return Router("sglang-router", program, ServerOptions(log, start_timeout_s=120.0))


def _server_command(python: str, arguments: Sequence[str], role: str, host: str, port: int) -> list[str]:
    return SGLANG.command(python, [*arguments, *bootstrap_flags(role, port)], host, port)
