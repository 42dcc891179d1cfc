"""anthropic: two turns of Messages with a tool, one of them streamed."""

import json
import sys

from anthropic import Anthropic

task = json.loads(sys.stdin.readline())
client = Anthropic()
tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}]
messages = task["messages"]
first = client.messages.create(model="policy", max_tokens=12, messages=messages, tools=tools)
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Are you sure?"}]
with client.messages.stream(model="policy", max_tokens=12, messages=messages, tools=tools) as stream:
    text = "".join(stream.text_stream)
    assert stream.get_final_message().usage.output_tokens > 0
