"""Cost of the endpoint for agents: CPU time of everything but the model, in a session of many turns.

    python benchmarks/agent_endpoint.py --model models/smollm2 --turns 128            # answers are scripted
    python benchmarks/agent_endpoint.py --model models/smollm2 --turns 128 --sample   # answers are sampled

Scripted answers have 270 tokens each, and so have the messages between them: 69 000 tokens in all. Measured are parsing
the request's JSON, and beside it reading its messages, finding the branch, rendering and tokenising what is new,
dividing the answer and writing the response. `tokenise again` renders and tokenises the whole chat for every turn.

With --sample the embedded engine samples every answer, and a client in another process asks over HTTP, without streams
and with them. The engine's share is the CPU time of its steps; the endpoint's is all that is left of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from slimectl import load_settings
from slimectl.agents.answer import AnswerReader
from slimectl.agents.endpoint import SessionServer
from slimectl.agents.openai_chat import chat_response, read_chat
from slimectl.agents.session import Session, SessionLimits
from slimectl.protocols import OnTokens
from slimectl.runtime import builders
from slimectl.types import Completion, SamplingParams

TOKENS = 270
WORDS = "the river carried a small boat past seven old houses while two children counted stones on the far bank"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Folder of a model with a chat template")
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--sample", action="store_true", help="Sample the answers with the embedded engine")
    parser.add_argument("--answer-tokens", type=int, default=16, help="Tokens of a sampled answer")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        talk(arguments.client, arguments.turns, arguments.answer_tokens, stream=arguments.stream)
    elif arguments.sample:
        asyncio.run(sampled(arguments.model, arguments.turns, arguments.answer_tokens))
    else:
        scripted(arguments.model, arguments.turns)


def scripted(model: Path, turns: int) -> None:
    tokenizer = builders.tokenizer(model)
    rng = random.Random(0)
    letters = [token for token in range(1000, 5000) if token not in tokenizer.all_special_ids]

    async def generate(tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None) -> Completion:
        answer = [*rng.choices(letters, k=TOKENS - 1), tokenizer.eos_token_id]
        return Completion(answer, [-1.0] * TOKENS, tokenizer.decode(answer, skip_special_tokens=True), "stop")

    limits = SessionLimits(turns=10**6, response_tokens=10**9)
    session = Session(tokenizer, AnswerReader(tokenizer), generate, SamplingParams(), limits)
    parts_s = asyncio.run(measure(session, tokenizer, turns, rng, letters))
    count = len(session.tree.turns[-1].tokens())
    print(f"{turns} turns, {count} tokens")
    for title, seconds in zip(("JSON", "recorded", "tokenise again"), parts_s, strict=True):
        first, last = sum(seconds[:16]) / 16, sum(seconds[-16:]) / 16
        print(
            f"{title}: {sum(seconds):.2f} CPU-s; a turn {1000 * first:.1f} ms at first, {1000 * last:.1f} ms at the end"
        )


async def measure(
    session: Session, tokenizer: Any, turns: int, rng: random.Random, letters: list[int]
) -> tuple[list[float], list[float], list[float]]:
    """Return the CPU-seconds of each turn: parsing the request's JSON, the rest recorded, and tokenising again."""
    messages: list[dict[str, Any]] = []
    json_s, recorded_s, again_s = [], [], []
    for _ in range(turns):
        messages.append({"role": "user", "content": tokenizer.decode(rng.choices(letters, k=TOKENS))})
        body = json.dumps({"model": "policy", "messages": messages})
        begin = time.process_time()
        values = json.loads(body)
        json_s.append(time.process_time() - begin)
        begin = time.process_time()
        reply = await session.answer(read_chat(values))
        text = json.dumps(chat_response(reply))
        recorded_s.append(time.process_time() - begin)
        begin = time.process_time()
        tokenizer.apply_chat_template(json.loads(body)["messages"], add_generation_prompt=True)
        again_s.append(time.process_time() - begin)
        messages.append({"role": "assistant", "content": json.loads(text)["choices"][0]["message"]["content"]})
    return json_s, recorded_s, again_s


async def sampled(model: Path, turns: int, answer_tokens: int) -> None:
    """Serve sessions of the embedded engine to a client, and print the CPU time of the engine and of the endpoint."""
    settings = load_settings(None, {"model.path": str(model)})
    tokenizer = builders.tokenizer(model)
    engine = builders.engine(settings, model, tokenizer)
    spent = StepTime(engine)
    server = SessionServer()
    await server.start()
    params = SamplingParams(max_tokens=10**6, seed=1, ignore_eos=True)
    for stream in (False, True):
        limits = SessionLimits(turns=10**6, response_tokens=10**9, context=engine.max_context)

        async def generate(
            tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
        ) -> Completion:
            return await engine.generate(tokens, params=params, on_tokens=on_tokens)

        session = Session(tokenizer, AnswerReader(tokenizer), generate, params, limits)
        begin, spent.seconds = time.process_time(), 0.0
        async with server.open(session) as address:
            words = [__file__, "--client", address, "--turns", str(turns), "--answer-tokens", str(answer_tokens)]
            client = await asyncio.create_subprocess_exec(sys.executable, *words, *(["--stream"] if stream else []))
            if await client.wait():
                raise SystemExit("the client failed")
        endpoint_s = time.process_time() - begin - spent.seconds
        way = "streamed" if stream else "whole"
        print(
            f"{way}: {len(session.tree.turns)} turns, {len(session.tree.turns[-1].tokens())} tokens; engine "
            f"{spent.seconds:.2f} CPU-s, endpoint {endpoint_s:.2f} CPU-s: {100 * endpoint_s / spent.seconds:.2f} %",
            flush=True,
        )
        engine.forget_prefixes()
    await server.stop()


class StepTime:
    """CPU-seconds of the steps of an engine."""

    def __init__(self, engine: Any) -> None:
        self.seconds = 0.0
        self._step = engine._step
        engine._step = self._measured_step

    def _measured_step(self) -> Any:
        begin = time.process_time()
        finished = self._step()
        self.seconds += time.process_time() - begin
        return finished


def talk(address: str, turns: int, answer_tokens: int, *, stream: bool) -> None:
    """Hold a conversation of so many turns, each with one message more."""
    messages: list[dict[str, Any]] = []
    rng = random.Random(0)
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS.split(), k=20))})
        body = {"model": "policy", "messages": messages, "max_tokens": answer_tokens, "stream": stream}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as response:
            messages.append({"role": "assistant", "content": content_of(response.read().decode(), stream=stream)})


def content_of(text: str, *, stream: bool) -> str:
    if not stream:
        content: str = json.loads(text)["choices"][0]["message"]["content"]
        return content
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


if __name__ == "__main__":
    main()
