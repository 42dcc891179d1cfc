"""Tools of an MCP server, given by a command or an address. They become the tools of the chat template."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from slimectl.agents.environments.port import Action, Environment, Messages, Observation, Task
from slimectl.system.event_loop import run_coroutine


class Mcp(Environment):
    """The tools of a server: a command that uses stdin and stdout, or an address (SSE if it ends in /sse, else
    streamable HTTP).

    The tasks are rows of the user's data. An answer without calls ends the episode, and a verifier grades it. Each
    episode has its own session, and its own process for a command. Arguments: `env` and `cwd` of the command,
    `headers` for an address, and `tools` (names of the tools that the policy gets, all by default). The values of `env`
    and `headers` may be env:NAME, to read an environment variable.
    """

    tasks = "data"
    gives_reward = False

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        import mcp

        names = {"env", "cwd", "headers", "tools"}
        if unknown := set(arguments) - names:
            raise ValueError(f"env_args: {', '.join(sorted(unknown))} not among {', '.join(sorted(names))}")
        self._target, self._arguments = target, arguments
        self._error_class: Any = getattr(mcp, "MCPError", None) or mcp.McpError  # the latter until mcp 2
        run_coroutine(self._check())

    async def _check(self) -> None:
        """Connect once, so that a server that does not answer is reported before the first episode."""
        await self.reset(Task())
        await self.close()

    async def reset(self, task: Task) -> Observation:
        self._stack = AsyncExitStack()
        self._session = await self._connect()
        names = self._arguments.get("tools")
        listed = (await self._session.list_tools()).tools
        if missing := set(names or ()) - {tool.name for tool in listed}:
            raise ValueError(f"the server has no tool {', '.join(sorted(missing))}")
        tools = [_declared(tool) for tool in listed if names is None or tool.name in names]
        return Observation(task.messages, tools=tools)

    async def step(self, action: Action) -> Observation:
        if not action.tool_calls:
            return Observation(is_done=True)
        messages: Messages = []
        is_error = False
        for call in action.tool_calls:
            content, failed = await self._result(call)
            is_error |= failed
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return Observation(messages, is_error=is_error)

    async def close(self) -> Observation:
        await self._stack.aclose()
        return Observation(is_done=True)

    async def _connect(self) -> Any:
        """Return an initialised session with the server."""
        from mcp import ClientSession, StdioServerParameters, stdio_client

        if self._target.startswith(("http://", "https://")):
            streams = await self._stack.enter_async_context(self._http_streams())
        else:
            command, *arguments = shlex.split(self._target)
            environment = {**os.environ, **_values(self._arguments.get("env", {}))}
            server = StdioServerParameters(
                command=command, args=arguments, env=environment, cwd=self._arguments.get("cwd")
            )
            streams = await self._stack.enter_async_context(stdio_client(server))
        session = await self._stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await session.initialize()
        return session

    def _http_streams(self) -> Any:
        headers = _values(self._arguments.get("headers", {}))
        if self._target.rstrip("/").endswith("/sse"):
            from mcp.client.sse import sse_client

            return sse_client(self._target, headers=headers)
        from mcp.client import streamable_http

        library = getattr(streamable_http, "httpx2", None) or streamable_http.httpx  # the latter until mcp 2
        client = library.AsyncClient(headers=headers) if headers else None
        return streamable_http.streamable_http_client(self._target, http_client=client)

    async def _result(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text of a tool's result, and whether it is an error."""
        try:
            values = json.loads(call["arguments"] or "{}")
        except ValueError as error:
            return f"error: the arguments are no JSON: {error}", True
        if not isinstance(values, dict):
            return "error: the arguments are no JSON object", True
        try:
            result = await self._session.call_tool(call["name"], values)
        except self._error_class as error:  # an unknown tool or wrong arguments, which the policy may correct
            return f"error: {error}", True
        texts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        return "\n".join(texts), bool(_either(result, "is_error", "isError"))


def _values(texts: Mapping[str, str]) -> dict[str, str]:
    """Replace values env:NAME by environment variables, so that no settings file contains a secret."""
    named = {key: text.removeprefix("env:") for key, text in texts.items() if text.startswith("env:")}
    if missing := {name for name in named.values() if name not in os.environ}:
        raise ValueError(f"env_args: environment variable not set: {', '.join(sorted(missing))}")
    return {key: os.environ[named[key]] if key in named else text for key, text in texts.items()}


def _declared(tool: Any) -> dict[str, Any]:
    """Return a tool in the form that chat templates expect."""
    schema = _either(tool, "input_schema", "inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
    return {"type": "function", "function": function}


def _either(value: Any, name: str, earlier: str) -> Any:
    """Return an attribute that is in snake case from mcp 2 on."""
    return getattr(value, name, None) if hasattr(value, name) else getattr(value, earlier, None)
