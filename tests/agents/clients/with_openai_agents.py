"""openai-agents: a run of an agent with a tool, over the Responses API, and one over chats."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api

task = json.loads(sys.stdin.readline())


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    limits = ModelSettings(max_tokens=300)  # an answer that is cut is an error to this framework
    agent = Agent(name="calculator", instructions="Be brief.", model="policy", tools=[add], model_settings=limits)
    first = await Runner.run(agent, task["messages"][-1]["content"], max_turns=2)
    items = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
    await Runner.run(agent, items, max_turns=2)
    set_default_openai_api("chat_completions")
    await Runner.run(agent, "Say hello.", max_turns=2)


asyncio.run(main())
