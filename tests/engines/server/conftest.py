"""A server in a thread of this process, and questions to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoConfig, AutoTokenizer

from slimectl.architectures.config import read_config
from slimectl.checkpoints.base_model import base_model
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.server.access import Guard, own_names
from slimectl.engines.server.app import running
from slimectl.engines.server.state import ServerConfig, Service
from slimectl.engines.weight_sync.delta_format import DeltaFile
from slimectl.system.listening import bound

ADMIN_KEY = "admin-key-of-the-tests"


@dataclass(slots=True)
class Server:
    url: str
    service: Service

    @property
    def engine(self) -> EmbeddedEngine:
        return self.service.thread.engine

    def ask(self, path: str, body: Any = None, *, method: str | None = None) -> tuple[int, Any]:
        """Status and JSON of one request."""

        async def asked(session: aiohttp.ClientSession) -> tuple[int, Any]:
            return await ask(session, path, body, method=method)

        return self.run(asked)

    def good(self, path: str, body: Any = None) -> Any:
        status, answer = self.ask(path, body)
        assert status == 200, answer
        return answer

    def run(self, scene: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, Any]]) -> Any:
        """What the scene returns, given a session whose paths are the server's."""

        async def played() -> Any:
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
            async with aiohttp.ClientSession(self.url, connector=connector, headers=headers) as session:
                return await scene(session)

        return asyncio.run(asyncio.wait_for(played(), 120))


async def ask(session: aiohttp.ClientSession, path: str, body: Any = None, *, method: str | None = None) -> Any:
    """Status, and the JSON that the server answered."""
    method = method or ("GET" if body is None else "POST")
    async with session.request(method, path, json=body) as response:
        return response.status, json.loads(await response.text())


async def events(session: aiohttp.ClientSession, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON values of a stream, which must end with [DONE]."""
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        last = None
        async for line in response.content:
            if line.strip():
                assert line.startswith(b"data: ")
                last = line[6:].strip()
                if last != b"[DONE]":
                    yield json.loads(last)
        assert last == b"[DONE]"


@contextlib.contextmanager
def served(
    folder: Path,
    *,
    load: bool = True,
    api_key: str | None = None,
    allowed_hosts: tuple[str, ...] = (),
    pause_timeout_s: float = 60.0,
    extension: Any = None,
    middlewares: tuple[Any, ...] = (),
    **options: Any,
) -> Iterator[Server]:
    """A server of the model in a folder, until the block is left."""
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(config, tokenizer, EngineOptions(**options))
    if load:
        engine.load_weights(HFCheckpoint().read(folder), version="0")
    names, loopback_only = own_names("127.0.0.1", allowed_hosts)
    guard = Guard(ADMIN_KEY, api_key=api_key, names=names, loopback_only=loopback_only)
    facts = ServerConfig(
        folder, read_config(folder), tokenizer, "float32", 64, HFCheckpoint().read, base_model, read_delta=DeltaFile,
        middlewares=middlewares, guard=guard, pause_timeout_s=pause_timeout_s,
    )  # fmt: skip
    listening = bound("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    loop, up, over, found = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), []

    async def lived() -> None:
        async with running(engine, facts, listening, extension=extension) as service:
            found.append(service)
            up.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(lived(),))
    thread.start()
    assert up.wait(300)
    try:
        yield Server(url, found[0])
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()
        assert found[0].clean
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(model_dir: Callable[[str], Path]) -> Iterator[Server]:
    with served(model_dir("llama")) as made:
        yield made


@pytest.fixture(scope="session")
def in_process(model_dir: Callable[[str], Path]) -> EmbeddedEngine:
    """The same weights without a server."""
    folder = model_dir("llama")
    engine = EmbeddedEngine(AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    engine.load_weights(HFCheckpoint().read(folder), version="0")
    return engine


@pytest.fixture(name="serving", scope="session")
def serving_fixture() -> Callable[..., Any]:
    return served


@pytest.fixture(name="ask")
def ask_fixture() -> Callable[..., Any]:
    return ask


@pytest.fixture(name="events")
def events_fixture() -> Callable[..., Any]:
    return events
