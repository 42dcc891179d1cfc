"""One server of each kind for all suites of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import serving


@pytest.fixture(scope="session")
def model_dir(model_dir: Callable[[str], Path]) -> Callable[..., Path]:
    """As elsewhere, but the small model has heads of 32: vLLM computes no smaller ones on a CPU."""
    return lambda family="llama_wide": model_dir(family)


@pytest.fixture(scope="session")
def served(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`slimectl serve` of the small model, waiting for weights."""
    server = serving.serve(model_dir(), tmp_path_factory.mktemp("logs"))
    yield server.start()
    server.stop()


@pytest.fixture(scope="session")
def sglang(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real SGLang with the small model."""
    server = serving.sglang(model_dir(), tmp_path_factory.mktemp("logs"))
    yield server.start()
    server.stop()


@pytest.fixture(scope="session")
def vllm(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real vLLM with the small model."""
    server = serving.vllm(model_dir(), tmp_path_factory.mktemp("logs"))
    url = server.start()
    serving.vllm_urls.add(url)
    yield url
    server.stop()
