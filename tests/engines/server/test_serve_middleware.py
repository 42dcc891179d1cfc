"""Middlewares of the user's own: what they see, change and refuse, and what is no middleware."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from workshop import Workshop

from slimectl.engines.server.middleware import middlewares
from slimectl.errors import HookError

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
OWN = """
calls = []

async def outer(request, handler):
    calls.append(f"outer {request.path}")
    response = await handler(request)
    calls.append(f"outer {response.status}")
    return response

async def shorter(request, handler):
    if request.can_read_body:
        body = await request.json()
        calls.append(f"shorter {body['sampling_params']['max_new_tokens']}")
        body["sampling_params"]["max_new_tokens"] = 2
        return await handler(request, body=body)
    return await handler(request)

async def silent(request, handler):
    return None

def blocking(request, handler):
    return handler(request)

async def starlette(request, call_next):
    return await call_next(request)

class AsgiMiddleware:
    def __init__(self, app, router):
        self.app = app
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., list[str]]:
    (tmp_path / "own.py").write_text(OWN)
    return lambda *names: [f"{tmp_path}/own.py:{name}" for name in names]


def request(tokens: int) -> dict[str, Any]:
    return {"input_ids": list(b"once"), "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}


def test_the_first_is_outermost_and_a_body_may_be_replaced(serving: Any, model_dir: Any, own: Any):
    made = middlewares(own("outer", "shorter"))
    with serving(model_dir("llama"), middlewares=made) as server:
        answer = server.good("/generate", request(6))
        assert answer["meta_info"]["completion_tokens"] == 2  # not the 6 of the request
        status, refused = server.ask("/generate", {"input_ids": [9**9], "sampling_params": {"max_new_tokens": 1}})
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")  # an error keeps its status
    (cell,) = [cell for cell in made[0].__closure__ if callable(cell.cell_contents)]
    calls = cell.cell_contents.__globals__["calls"]
    assert calls[:3] == ["outer /generate", "shorter 6", "outer 200"]


def test_a_key_is_checked_before_a_middleware_runs(serving: Any, model_dir: Any, own: Any, ask: Any):
    async def without_key(session: aiohttp.ClientSession) -> Any:
        async with aiohttp.ClientSession(session._base_url) as stranger:
            return await ask(stranger, "/generate", request(1))

    made = middlewares(own("silent"))
    with serving(model_dir("llama"), middlewares=made, api_key="open") as server:
        assert server.run(without_key)[0] == 401
        status, answer = server.ask("/generate", request(1))
        assert status == 500
        assert "own.py:silent returned NoneType, not a response" in answer["error"]["message"]


@pytest.mark.parametrize("name", ["blocking", "starlette", "AsgiMiddleware"])
def test_what_is_no_middleware_of_aiohttp_is_refused_before_a_server_starts(own: Any, name: str):
    with pytest.raises(HookError, match=rf"own.py:{name}: is not an aiohttp middleware. Define it as `async def NAME"):
        middlewares(own(name))


def test_the_example_of_the_page_runs(serving: Any, model_dir: Any, tmp_path: Path):
    (example,) = re.findall(r"```python own.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "page.py").write_text(example)
    with serving(model_dir("llama"), middlewares=middlewares([f"{tmp_path}/page.py:at_most_64_tokens"])) as server:
        assert server.good("/generate", request(2))["meta_info"]["id"] == "from-own"
        status, answer = server.ask("/generate", request(65))
        assert (status, answer["error"]["message"]) == (403, "max_new_tokens: at most 64 here")


def test_a_run_passes_them_to_its_servers_or_refuses_them(workshop: Workshop):
    (workshop.folder / "own.py").write_text(
        "async def seen(request, handler):\n"
        "    with open('seen.txt', 'a') as file:\n"
        "        file.write(request.path + '\\n')\n"
        "    return await handler(request)\n"
    )
    paths = ["-s", 'engine.middleware_paths=["own.py:seen"]']
    common = ["--data", "prompts.jsonl@[0:1]", "--model", str(workshop.model), "-n", "2", *paths]
    samples = workshop.slimectl("rollout", *common, "-s", "engine.num_engines=2")
    assert len([json.loads(line) for line in samples.splitlines()]) == 2
    assert (workshop.folder / "seen.txt").read_text().splitlines().count("/generate") == 2
    workshop.slimectl("rollout", *common, code=2)
    assert "engine.middleware_paths: a single embedded engine receives no HTTP requests" in workshop.stderr
    workshop.slimectl("rollout", *common, "-s", "engine.backend=sglang", code=2)
    assert "engine.middleware_paths has no effect without servers of `slimectl serve`" in workshop.stderr
