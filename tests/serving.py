"""Real servers for tests: which Python has SGLang or vLLM, and clients of servers as the commands make them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zygote
from transformers import AutoConfig, AutoTokenizer

from slimectl.engines.api_keys import ServerKeys
from slimectl.engines.embedded.detokenizer import Detokenizer
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.http.api import ServerApi
from slimectl.engines.http.client import HttpEngine, ServedModel
from slimectl.engines.http.dispatch import ClientOptions
from slimectl.engines.http.request import NO_WEIGHTS
from slimectl.engines.http.weight_client import HttpWorkers
from slimectl.engines.server.launch import serve_server
from slimectl.engines.sglang.api import SglangApi
from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.stop_tokens import StopTokens, special_tokens
from slimectl.engines.supervisor.server_process import ServerOptions, ServerProcess
from slimectl.engines.vllm.api import VllmApi
from slimectl.engines.vllm.launch import vllm_server
from slimectl.engines.vllm.weight_client import VllmWorkers
from slimectl.protocols import NamedTensors
from slimectl.types import Completion, SamplingParams

CONTEXT = 256
KEYS = ServerKeys(admin_api_key="admin-key-of-the-tests")
"""Opens the servers that are started here."""


INSTALLED = {"sglang": "SGLang", "vllm": "vLLM"}
"""Servers that are installed in a Python of their own, by the marker of the tests that need them."""

SERVERS = [
    pytest.param("served", marks=pytest.mark.slow),
    pytest.param("sglang", marks=[pytest.mark.slow, pytest.mark.sglang]),
    pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm]),
]
"""The fixtures of servers as parameters."""

permitted: set[str] = set()
"""Those that the running test is marked with."""

vllm_urls: set[str] = set()
"""Addresses of vLLM servers, which speak another API than the others."""


def python_of(kind: str) -> str:
    """The Python with such a server; skips the test where nobody has installed one."""
    assert kind in permitted, f"mark this test `{kind}` "
    variable = f"SLIMECTL_{kind.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"needs {INSTALLED[kind]}: install tests/support/cpu/requirements-{kind}.txt, name its Python "
                    f"in {variable}")  # fmt: skip
    return python


def sglang(
    folder: Path, logs: Path, *, spec: ServerSpec | None = None, preloaded: bool = False, python: str | None = None
) -> ServerProcess:
    """A server; with `preloaded` it is forked from a process that has imported SGLang, 10 s of CPU."""
    spec = spec or ServerSpec("sglang", folder)
    env = {zygote.PRELOADED: "1"} if preloaded else {}
    return sglang_server(spec, options(spec, logs, env=env), python=python or python_of("sglang"))


def vllm(folder: Path, logs: Path) -> ServerProcess:
    spec = ServerSpec("vllm", folder)
    return vllm_server(spec, options(spec, logs), python=python_of("vllm"), keep_weights=True)


def serve(folder: Path, logs: Path, *, name: str = "serve", weight_version: str = NO_WEIGHTS) -> ServerProcess:
    """A server that waits for weights, or has those in the folder under a version."""
    spec = ServerSpec(name, folder)
    return serve_server(spec, options(spec, logs, weight_version=weight_version))


def options(spec: ServerSpec, logs: Path, **more: Any) -> ServerOptions:
    return ServerOptions(logs / f"{spec.name}.log", max_context=CONTEXT, keys=KEYS, **more)


def api(urls: Sequence[str]) -> ServerApi:
    return VllmApi() if vllm_urls.intersection(urls) else SglangApi()


def workers(urls: Sequence[str], **options: Any) -> HttpWorkers:
    kind = VllmWorkers if vllm_urls.intersection(urls) else SglangWorkers
    return kind(urls, **{"keys": KEYS, **options})


class PushedEngine(HttpEngine):
    """Servers with the interface of an engine in this process: a push of whole weights is one call."""

    def load_weights(self, tensors: NamedTensors, *, version: str) -> None:
        receivers = workers(self._workers)
        receivers.begin(mode="in_place")
        try:
            receivers.load_tensors(list(tensors), version=version)
        finally:
            receivers.end()


def client(urls: Sequence[str], folder: Path, **options: Any) -> PushedEngine:
    """An engine that takes weights, for servers of the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    stops = StopTokens(special_tokens(tokenizer, vocabulary=vocabulary))
    return PushedEngine(
        urls,
        api=api(urls),
        model=ServedModel(vocabulary, CONTEXT, decode=Detokenizer(tokenizer).response_text, stops=stops),
        options=ClientOptions(**{"keys": KEYS, **options}),
    )


PROMPTS = [[*b"once upon a time", 65 + i] for i in range(4)]


async def ask(engine: HttpEngine, max_tokens: int = 12) -> list[Completion]:
    """The answers to all prompts at once, each with its seed."""
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed) for seed in range(len(PROMPTS))]
    calls = (engine.generate(prompt, params=each) for prompt, each in zip(PROMPTS, params, strict=True))
    return await asyncio.gather(*calls)


def assert_log_probs_of_model(answers: Sequence[Completion], make_engine: Callable[..., EmbeddedEngine]) -> None:
    """Answers have the log-probabilities that the model gives them in one process."""
    rows = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    scores = make_engine().scores(rows, [len(prompt) - 1 for prompt in PROMPTS])
    for answer, score in zip(answers, scores, strict=True):
        assert len(answer.tokens) == 12
        assert answer.log_probs == pytest.approx(list(score.log_probs), abs=1e-4)
