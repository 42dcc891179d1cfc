"""A program whose attempts branch, for the picture of a tree: it goes on from one answer in two ways.

slimectl rollout --agent 'python docs/images/branching_agent.py' --data chats.jsonl --model smollm2 -o branches.jsonl
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def ask(messages: list[dict[str, Any]]) -> str:
    """Return the policy's answer to a chat."""
    body = json.dumps({"messages": messages, "max_tokens": 40}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def main() -> None:
    """Ask, then ask back in two ways; the answer to the second counts."""
    task = json.loads(sys.stdin.readline())
    chat = [*task["messages"], {"role": "assistant", "content": ask(task["messages"])}]
    ask([*chat, {"role": "user", "content": "Explain why."}])
    answer = ask([*chat, {"role": "user", "content": "Are you sure? Answer in one word."}])
    print(json.dumps({"reward": float(str(task["label"]).lower() in answer.lower())}))


if __name__ == "__main__":
    main()
