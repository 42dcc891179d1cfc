"""Agent with two branches in each attempt, for the picture of a tree: it continues one response in two ways.

slimectl rollout --agent 'python docs/images/branching_agent.py' --data words.jsonl -n 3 -o branches.jsonl \\
    --model pictures/grpo-5e-4-s1/latest/policy

A line of words.jsonl is {"prompt": "lich>", "label": "hcil"}.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any


def continued(text: str) -> str:
    """Return a text with what the policy writes after it."""
    body = json.dumps({"prompt": text, "max_tokens": 10}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return text + str(answer["choices"][0]["text"])


def main() -> None:
    """Ask for the first word, then for another word in each of two branches. The first response is graded."""
    task = json.loads(sys.stdin.readline())
    first = continued(task["prompt"])
    continued(f"{first} ping>")
    continued(f"{first} maam>")
    print(json.dumps({"reward": float(first == task["prompt"] + task["label"])}))


if __name__ == "__main__":
    main()
