"""strands-agents: an agent with a tool, which streams, two turns of a conversation."""

import json
import os
import sys
from contextlib import suppress

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

task = json.loads(sys.stdin.readline())


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


address = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
model = OpenAIModel(client_args=address, model_id="policy", params={"max_tokens": 12})
agent = Agent(model=model, tools=[add], system_prompt="Be brief.", callback_handler=None)
for question in (task["messages"][-1]["content"], "Are you sure?"):
    with suppress(MaxTokensReachedException):  # a small model goes on and on
        agent(question)
