"""Real servers for tests: which Python has SGLang, and clients of servers as the commands make them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.api_keys import Keys
from slimectl.engines.embedded.detokenizer import Detokenizer
from slimectl.engines.http.client import HttpEngine
from slimectl.engines.server.launch import serve_server
from slimectl.engines.sglang.api import SglangApi
from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.supervisor.server_process import ServerProcess

CONTEXT = 256
KEYS = Keys(admin_api_key="admin-key-of-the-tests")
"""Opens the servers that are started here."""


may_use_sglang = False
"""Whether the test that runs is marked `sglang`."""


def sglang_python() -> str:
    """The Python with SGLang; skips the test where nobody has installed one."""
    assert may_use_sglang, "mark this test `sglang` in tests/markers.py"
    python = os.environ.get("SLIMECTL_SGLANG_PYTHON")
    if not python:
        pytest.skip("needs SGLang: install slimectl/engines/sglang/requirements-cpu.txt, name its Python in "
                    "SLIMECTL_SGLANG_PYTHON")  # fmt: skip
    return python


def sglang(folder: Path, logs: Path, **options: Any) -> ServerProcess:
    options = {"python": sglang_python(), "max_context": CONTEXT, "log": logs / "sglang.log", "keys": KEYS} | options
    return sglang_server(folder, **options)


def serve(folder: Path, logs: Path, **options: Any) -> ServerProcess:
    return serve_server(folder, **({"max_context": CONTEXT, "log": logs / "serve.log", "keys": KEYS} | options))


def client(urls: Sequence[str], folder: Path, **options: Any) -> HttpEngine:
    """An engine that takes weights, for servers of the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return HttpEngine(
        urls,
        api=SglangApi(),
        vocabulary=AutoConfig.from_pretrained(folder).vocab_size,
        max_context=CONTEXT,
        decode=Detokenizer(tokenizer).decode,
        receiver=partial(SglangWorkers, keys=KEYS),
        forms=HFCheckpoint().open(folder).forms,
        **{"keys": KEYS, **options},
    )
