"""Recording APIs in a server of the embedded engine: streams that leave while the engine samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from transformers import AutoTokenizer

from slimectl.agents.recorder import SessionRecorder
from slimectl.protocols import OnTokens
from slimectl.types import Completion, Sample, SamplingParams


class PausingRecorder:
    """A recorder whose engine pauses after the first token of a stream, until /continue_generation."""

    def __init__(self, recorder: SessionRecorder) -> None:
        self.recorder = recorder
        self.pause: Callable[[str], None]

    def routes(self, generate: Callable[..., Any], score: Any) -> Iterator[Any]:
        def pausing(report: OnTokens, start: int, tokens: list[int]) -> None:
            if start == 0:
                self.pause("pause")
            report(start, tokens)

        async def generate_and_pause(
            tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
        ) -> Completion:
            report = None if on_tokens is None else partial(pausing, on_tokens)
            completion: Completion = await generate(tokens, params, on_tokens=report)
            return completion

        return self.recorder.routes(generate_and_pause, score)

    def close(self) -> None:
        self.recorder.close()


def test_a_recorded_stream_leaves_while_the_engine_samples_and_ends_with_its_client(
    model_dir: Callable[[str], Path], serving: Callable[..., Any]
) -> None:
    folder, samples = model_dir("llama"), list[Sample]()
    params = SamplingParams(max_tokens=256)
    recorder = PausingRecorder(
        SessionRecorder(AutoTokenizer.from_pretrained(folder), params, 256, write=samples.append)
    )
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "once"}], "max_tokens": 24}
    body |= {"seed": 3, "stop": ["no such text"]}
    with serving(folder, extension=recorder) as server:
        recorder.pause = server.engine.pause
        whole = server.good(f"/s/one{path}", body)["choices"][0]["message"]["content"]

        async def stream(client: ClientSession) -> str:
            text = ""
            async with client.post(f"/s/one{path}", json=body | {"stream": True}) as response:
                async for line in response.content:
                    if server.engine.paused:  # the first chunk is here, and the engine waits for its client
                        assert server.engine.running == 1
                        (await client.post("/continue_generation", json={})).release()
                    if line.startswith(b"data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            async with client.post(f"/s/two{path}", json=body | {"stream": True}) as response:
                await response.content.readline()
                response.close()
            while server.engine.running:
                (await client.post("/continue_generation", json={})).release()
                await asyncio.sleep(0.001)
            return text

        assert server.run(stream) == whole
        assert server.good("/s/one/end", {}) == {"session": "one", "samples": 2}
    assert samples[0].tokens == samples[1].tokens
    assert len(samples) == 2  # the session of the client that left has no turn
