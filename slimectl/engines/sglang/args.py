"""The SGLang that is installed: its version, and `[sglang.args]`, any field of its ServerArgs, as flags."""

from __future__ import annotations

import sys
from pathlib import Path

from slimectl.engines.supervisor.installed import InstalledServer, installed_version
from slimectl.errors import BackendError

BOOTSTRAP = Path(__file__).parent / "bootstrap"

SGLANG = InstalledServer(
    section="sglang",
    packages=("sglang",),
    # They pin the torch and transformers that slimectl works with.
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
        "weight_version": "the weights that are pushed",
        "disaggregation_mode": "sglang.prefill_num_servers or sglang.server_groups",
    },
    help_command="python -m sglang.launch_server --help",
    on_gpu="sglang>=0.5.18,<0.5.22",
)

interpreter, flags = SGLANG.interpreter, SGLANG.flags


def router_interpreter(python: str | None) -> str:
    """Return the Python that runs sglang-router: `python`, else this one. Raises BackendError if it has none."""
    path = python or sys.executable
    if installed_version(path, "sglang-router", setting="sglang.python") is None:
        raise BackendError(
            f"engine.router: {path} has no sglang-router; run: {path} -m pip install sglang-router==0.3.2, "
            f"or set engine.router = none"
        )
    return path
