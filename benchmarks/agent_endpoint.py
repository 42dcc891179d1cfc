"""Cost of recording a long session: CPU time of the endpoint for each turn, beside tokenising the chat again.

    python benchmarks/agent_endpoint.py --model models/smollm2 --turns 128

Answers are scripted, 270 tokens each, and so are the messages between them (270 tokens): 69 000 tokens in all. What is
measured is everything but the model: parsing the request, finding the branch, rendering and tokenising what is new,
dividing the answer and writing the response. `tokenise again` renders and tokenises the whole chat for every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from slimectl import builders
from slimectl.agents.answer import AnswerReader
from slimectl.agents.openai_chat import chat_response, read_chat
from slimectl.agents.session import Session, SessionLimits
from slimectl.types import Completion, SamplingParams

TOKENS = 270


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Folder of a model with a chat template")
    parser.add_argument("--turns", type=int, default=128)
    arguments = parser.parse_args()
    tokenizer = builders.tokenizer(arguments.model)
    rng = random.Random(0)
    letters = [token for token in range(1000, 5000) if token not in tokenizer.all_special_ids]

    async def generate(tokens: list[int], params: SamplingParams) -> Completion:
        answer = [*rng.choices(letters, k=TOKENS - 1), tokenizer.eos_token_id]
        return Completion(answer, [-1.0] * TOKENS, tokenizer.decode(answer, skip_special_tokens=True), "stop")

    limits = SessionLimits(turns=10**6, response_tokens=10**9)
    session = Session(tokenizer, AnswerReader(tokenizer), generate, SamplingParams(), limits)
    recorded_s, again_s = measure(session, tokenizer, arguments.turns, rng, letters)
    count = len(session.tree.turns[-1].tokens())
    print(f"{arguments.turns} turns, {count} tokens")
    for title, seconds in (("recorded", recorded_s), ("tokenise again", again_s)):
        first, last = sum(seconds[:16]) / 16, sum(seconds[-16:]) / 16
        print(
            f"{title}: {sum(seconds):.2f} CPU-s; a turn {1000 * first:.1f} ms at first, {1000 * last:.1f} ms at the end"
        )


def measure(
    session: Session, tokenizer: Any, turns: int, rng: random.Random, letters: list[int]
) -> tuple[list[float], list[float]]:
    """Return the CPU-seconds of each turn, recorded and tokenised again."""
    messages: list[dict[str, Any]] = []
    recorded_s, again_s = [], []
    for _ in range(turns):
        messages.append({"role": "user", "content": tokenizer.decode(rng.choices(letters, k=TOKENS))})
        body = json.dumps({"model": "policy", "messages": messages})
        begin = time.process_time()
        reply = asyncio.run(session.answer(read_chat(json.loads(body))))
        text = json.dumps(chat_response(reply))
        recorded_s.append(time.process_time() - begin)
        begin = time.process_time()
        tokenizer.apply_chat_template(json.loads(body)["messages"], add_generation_prompt=True)
        again_s.append(time.process_time() - begin)
        messages.append({"role": "assistant", "content": json.loads(text)["choices"][0]["message"]["content"]})
    return recorded_s, again_s


if __name__ == "__main__":
    main()
