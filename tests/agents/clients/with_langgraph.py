"""langgraph: a ReAct agent with a tool, two turns of a conversation."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

task = json.loads(sys.stdin.readline())


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="policy", max_tokens=12), [add], prompt="Be brief.")
state = agent.invoke({"messages": task["messages"]}, {"recursion_limit": 6})
agent.invoke({"messages": [*state["messages"], ("user", "Are you sure?")]}, {"recursion_limit": 6})
