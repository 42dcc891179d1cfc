"""Environments of the package verifiers. Its own rollout runs, and gets its answers through our client."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Observation, Task
from slimectl.errors import BackendError

CONTEXT_FULL = "This model's maximum context length is used up."
"""The message by which the library recognises that a chat is too long. It then scores the chat so far."""


class Verifiers(Environment):
    """An environment of `verifiers.load_environment(ID, **arguments)`, with the rewards of its rubric.

    An episode is the library's own rollout of one row. Its client hands each chat to the policy, so that turns, tools,
    stop conditions and scoring are the library's.
    """

    tasks = "rows"

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        import verifiers

        _check_version(version("verifiers"))
        self._env = verifiers.load_environment(target, **arguments)
        if self._env.requires_group_rollouts:
            raise ValueError("the rubric compares rollouts of a group, but episodes are scored one by one")
        self._rows: dict[str, Any] = {"train": self._env.get_dataset()}
        if self._env.eval_dataset is not None or self._env.eval_dataset_source is not None:
            self._rows["eval"] = self._env.get_eval_dataset()

    def count(self, split: str) -> int:
        return len(self._rows.get(split, ()))

    async def reset(self, task: Task) -> Observation:
        from verifiers.clients import OpenAIChatCompletionsClient

        self._requests: asyncio.Queue[_Request] = asyncio.Queue()
        self._request: _Request | None = None
        client = OpenAIChatCompletionsClient(_openai_client(self._requests))
        row = dict(self._rows[task.split][task.index or 0])
        self._rollout = asyncio.ensure_future(self._env.run_rollout(row, client, "policy", {}))
        return await self._next()

    async def step(self, action: Action) -> Observation:
        assert self._request is not None
        self._request.answer.set_result(_completion(action))
        return await self._next()

    async def close(self) -> Observation:
        if self._request is not None and not self._request.answer.done():
            self._request.answer.set_exception(_Refused(CONTEXT_FULL))
        while not self._rollout.done():
            final = await self._next()
            if not final.is_done and self._request is not None:
                self._request.answer.set_exception(_Refused(CONTEXT_FULL))
        return self._ending()

    async def _next(self) -> Observation:
        """Return the next chat that needs an answer, or the end of the rollout."""
        waiting = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({waiting, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self._request = None
            return self._ending()
        self._request = waiting.result()
        body = self._request.body
        return Observation(body["messages"], {0: 0.0}, tools=body.get("tools") or [], replaces_chat=True)

    def _ending(self) -> Observation:
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(f"the rollout ended with {output['error']}")
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if value is not None}
        info = {"metrics": metrics, "stop_condition": output.get("stop_condition")}
        return Observation(rewards={0: float(output["reward"])}, is_done=True, info=info)


def _check_version(installed: str) -> None:
    """Raise BackendError for an unsupported version: 0.4 has other environments, and 0.2 has no clients."""
    parts = [int(part) for part in re.findall(r"\d+", installed)[:2]]
    if parts != [0, 3]:
        other = " Its environments (verifiers.v1) start a program for every task." if parts > [0, 3] else ""
        raise BackendError(
            f"rollout.env: verifiers {installed} in {sys.executable}: slimectl runs environments of verifiers 0.3."
            f"{other} Run: pip install 'verifiers>=0.3.1,<0.4', or set rollout.env_python to a Python that has it."
        )


class _Request:
    """A chat that waits for its answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()


class _Refused(Exception):
    """The policy has no room for an answer."""


def _openai_client(requests: asyncio.Queue[_Request]) -> Any:
    """Return OpenAI's client with a transport that puts requests into a queue."""
    import httpx
    import openai

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            pending = _Request(json.loads(await request.aread()))
            await requests.put(pending)
            try:
                return httpx.Response(200, json=await pending.answer, request=request)
            except _Refused as refusal:
                error = {"message": str(refusal), "code": "context_length_exceeded", "type": "invalid_request_error"}
                return httpx.Response(400, json={"error": error}, request=request)

    http_client = httpx.AsyncClient(transport=Transport())
    return openai.AsyncOpenAI(api_key="none", base_url="http://policy/v1", http_client=http_client, max_retries=0)


def _completion(action: Action) -> dict[str, Any]:
    """Return an answer as the body of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": action.text}
    if action.tool_calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in action.tool_calls
        ]
    finish = "tool_calls" if action.tool_calls else "length" if action.is_cut else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    head = {"id": "chatcmpl-policy", "object": "chat.completion", "created": 0, "model": "policy"}
    return {**head, "choices": [choice], "usage": usage}
