"""pydantic-ai: an agent with a tool, two runs of one conversation."""

import json
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

task = json.loads(sys.stdin.readline())
provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(OpenAIChatModel("policy", provider=provider), instructions="Be brief.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


limits = ModelSettings(max_tokens=12)
first = agent.run_sync(task["messages"][-1]["content"], model_settings=limits)
agent.run_sync("Are you sure?", message_history=first.all_messages(), model_settings=limits)
