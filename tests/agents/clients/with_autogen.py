"""autogen-agentchat: an assistant with a tool, two tasks in one conversation."""

import asyncio
import json
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

task = json.loads(sys.stdin.readline())


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    info = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
    client = OpenAIChatCompletionClient(
        model="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], model_info=info,
        max_tokens=12,
    )  # fmt: skip
    agent = AssistantAgent("calculator", client, tools=[add], system_message="Be brief.")
    await agent.run(task=task["messages"][-1]["content"])
    await agent.run(task="Are you sure?")


asyncio.run(main())
