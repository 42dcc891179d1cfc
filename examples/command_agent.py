"""An agent that is a program: it may use a calculator, and asks the policy over the chat API that OpenAI made known.

    slimectl rollout --agent 'python examples/command_agent.py' --data sums.jsonl --model models/tiny -n 4

It is started once for each sample, with the row of the data on its stdin. Any client of that API would do as well.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from typing import Any

ROUNDS = 3


def ask(messages: list[dict[str, Any]]) -> str:
    """Return the policy's answer to a chat."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 64}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def main() -> None:
    """Talk until the policy gives an answer; the last line of stdout is the reward."""
    task = json.loads(sys.stdin.readline())
    messages = [*task["messages"]]
    text = ""
    for _ in range(ROUNDS):
        text = ask(messages)
        call = re.search(r"<calc>(\d+)([+*-])(\d+)</calc>", text)
        if call is None:
            break
        a, operator, b = int(call[1]), call[2], int(call[3])
        result = a + b if operator == "+" else a * b if operator == "*" else a - b
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(result)}]
    print(json.dumps({"reward": float(str(task["label"]) in text.split())}))


if __name__ == "__main__":
    main()
