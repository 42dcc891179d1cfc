"""litellm: one conversation over OpenAI's API and one over Anthropic's."""

import json
import os
import sys

import litellm

task = json.loads(sys.stdin.readline())
messages = task["messages"]
limits = {"max_tokens": 12}
first = litellm.completion("openai/policy", messages=messages, api_base=os.environ["OPENAI_BASE_URL"], **limits)
messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Sure?"}]
litellm.completion("openai/policy", messages=messages, api_base=os.environ["OPENAI_BASE_URL"], **limits)
litellm.completion("anthropic/policy", messages=messages, api_base=os.environ["ANTHROPIC_BASE_URL"], **limits)
