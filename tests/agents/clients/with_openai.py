"""openai: two turns of a chat with a tool, one of them streamed."""

import json
import sys

from openai import OpenAI

task = json.loads(sys.stdin.readline())
client = OpenAI()
tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
tools = [{"type": "function", "function": tool}]
messages = task["messages"]
first = client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=12)
messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Are you sure?"}]
stream = client.chat.completions.create(model="policy", messages=messages, tools=tools, max_tokens=12, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
response = client.responses.create(model="policy", input="Say hello.", max_output_tokens=12)
assert text or response.output_text
