"""smolagents: an agent that calls tools, within two steps."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

task = json.loads(sys.stdin.readline())


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=12
)
ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0).run(task["messages"][-1]["content"])
