"""OpenEnv servers, used over WebSocket sessions. Their actions and observations have declared fields."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from slimectl.agents.environments.port import Action, Environment, Messages, Observation, Task
from slimectl.system.event_loop import run_coroutine

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
BESIDE = ("done", "reward", "metadata")
"""Fields of every observation that the policy does not read."""
LARGEST = 1 << 27
"""Maximum number of bytes in a message."""


class OpenEnv(Environment):
    """An OpenEnv server at an address. Its tasks are seeds, and the sum of its rewards is the reward.

    If an action has one field, it is the whole answer. If it has several, it is a JSON object in the answer. Servers of
    tools (whose action has `tool_name` and `arguments`) receive the tool calls. Arguments of the adapter: `instruction`
    (text before the first observation), `action` (name of the field that the answer fills), `observation` (name of the
    field to show). All other arguments go to the server's reset.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:

        arguments = dict(arguments)
        self._url = target.rstrip("/").replace("ws://", "http://").replace("wss://", "https://")
        self._instruction = str(arguments.pop("instruction", ""))
        self._shown_field = arguments.pop("observation", None)
        field = arguments.pop("action", None)
        self._arguments = arguments
        schema = run_coroutine(self._schema())
        self._fields = {name: part for name, part in schema.get("properties", {}).items() if name != "metadata"}
        self._has_tools = {"tool_name", "arguments"} <= set(self._fields)
        required = [name for name in schema.get("required", ()) if name in self._fields]
        names = required if len(required) == 1 else list(self._fields)
        self._field = field or (names[0] if len(names) == 1 else None)
        if self._field is not None and self._field not in self._fields:
            raise ValueError(f"action: no field {self._field!r} in the actions, only {', '.join(self._fields)}")

    async def _schema(self) -> dict[str, Any]:
        """Return the JSON schema of the server's actions."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/schema") as response:
            response.raise_for_status()
            schema: dict[str, Any] = (await response.json())["action"]
            return schema

    async def reset(self, task: Task) -> Observation:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=LARGEST)
        result = await self._ask("reset", {"seed": task.seed, **self._arguments})
        tools: Messages = []
        if self._has_tools:
            listed = await self._ask("step", {"type": "list_tools"})
            tools = [_tool(tool) for tool in listed["observation"].get("tools", ())]
        text = "\n\n".join(filter(None, (self._instruction, self._text(result["observation"]))))
        return Observation([{"role": "user", "content": text}], tools=tools)

    async def step(self, action: Action) -> Observation:
        if self._has_tools:
            return await self._call_tools(action)
        values = self._action(action.text)
        if values is None:
            form = f"an object of {', '.join(self._fields)}" if self._field is None else "a number"
            return self._refusal(f"answer with {form}")
        answer = await self._exchange("step", values)
        if answer["type"] == "error":
            if answer["data"].get("code") != "VALIDATION_ERROR":
                raise RuntimeError(answer["data"].get("message"))
            return self._refusal(str(answer["data"].get("message"))[:500])
        result = answer["data"]
        message = {"role": "user", "content": self._text(result["observation"])}
        return Observation([message], {0: float(result.get("reward") or 0.0)}, is_done=bool(result.get("done")))

    async def close(self) -> Observation:
        await self._socket.send_json({"type": "close"})
        await self._socket.close()
        await self._session.close()
        return Observation(is_done=True)

    async def _call_tools(self, action: Action) -> Observation:
        """Run the tool calls of an answer. An answer without calls ends the episode."""
        messages: Messages = []
        reward, is_done, is_error = 0.0, not action.tool_calls, False
        for call in action.tool_calls:
            try:
                values = json.loads(call["arguments"])
            except ValueError:
                values = None
            if not isinstance(values, dict):
                content, is_error = "error: the arguments are no JSON object", True
            else:
                step = {"type": "call_tool", "tool_name": call["name"], "arguments": values}
                result = await self._ask("step", step)
                observation = result["observation"]
                is_error |= bool(observation.get("error"))
                content = self._text(observation)
                reward += float(result.get("reward") or 0.0)
                is_done |= bool(result.get("done"))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return Observation(messages, {0: reward}, is_done=is_done, is_error=is_error)

    async def _exchange(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        answer: dict[str, Any] = await self._socket.receive_json()
        return answer

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        answer = await self._exchange(kind, data)
        if answer["type"] == "error":
            raise RuntimeError(answer["data"].get("message"))
        result: dict[str, Any] = answer["data"]
        return result

    def _action(self, text: str) -> dict[str, Any] | None:
        """Return the fields of an answer, or None if it does not have them."""
        if self._field is None:
            try:
                value = json.loads(text[text.index("{") : text.rindex("}") + 1])
            except ValueError:
                return None
            return value if isinstance(value, dict) else None
        kind = self._fields[self._field].get("type")
        if kind not in ("integer", "number"):
            return {self._field: text}
        numbers = NUMBER.findall(text)
        if not numbers:
            return None
        return {self._field: float(numbers[-1]) if kind == "number" else int(float(numbers[-1]))}

    def _refusal(self, reason: str) -> Observation:
        message = {"role": "user", "content": f"This is no valid action: {reason}"}
        return Observation([message], {0: 0.0}, is_error=True)

    def _text(self, observation: dict[str, Any]) -> str:
        """Return the text of an observation: the field to show, the only field, or all fields as JSON."""
        fields = {name: value for name, value in observation.items() if name not in BESIDE and value is not None}
        if self._shown_field is not None:
            value = observation.get(self._shown_field, "")
        else:
            value = next(iter(fields.values())) if len(fields) == 1 else fields
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a server's tool in the form that chat templates expect."""
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}
