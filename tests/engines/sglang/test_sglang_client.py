"""The client, against `slimectl serve` and against small real servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import serving
from aiohttp import web

from slimectl.engines.http import dispatch
from slimectl.engines.http.client import HttpEngine, ServedModel
from slimectl.engines.http.dispatch import ClientOptions
from slimectl.engines.sglang.api import SglangApi
from slimectl.engines.supervisor.server_process import free_port
from slimectl.errors import BackendError, SettingsError
from slimectl.types import Completion, SamplingParams

PROMPT = list(b"once upon a time")
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=3)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def url(model_dir: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = serving.serve(model_dir(), tmp_path_factory.mktemp("logs"), weight_version="0")
    yield server.start()
    server.stop()


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """A server whose every POST is answered so."""
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def event(tokens: list[int], *, total: int, finish: Any = None, version: str = "7", **more: Any) -> bytes:
    meta = {
        "finish_reason": finish, "completion_tokens": total, "weight_version": version,
        "output_token_logprobs": [[-0.5 * token, token, None] for token in tokens], **more,
    }  # fmt: skip
    return b"data: " + json.dumps({"text": "", "output_ids": tokens, "meta_info": meta}).encode() + b"\n\n"


def streaming(*events: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for each in events:
            # In pieces: what arrives is cut anywhere.
            await response.write(each[:20])
            await response.write(each[20:])
        return response

    return answer


def refusing(status: int, body: Any) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


def bare(*urls: str, api: SglangApi = SglangApi(), **options: Any) -> HttpEngine:
    return HttpEngine(list(urls), api=api, model=ServedModel(259, 256), options=ClientOptions(**options))


def asked_of(answer: Answer, params: SamplingParams = SHORT, **options: Any) -> Completion:
    async def asked() -> Completion:
        async with listening(answer) as address:
            engine = bare(address, **options)
            try:
                return await engine.generate(PROMPT, params=params)
            finally:
                await engine.close()

    return asyncio.run(asked())


LENGTH = {"type": "length", "length": 4}


@pytest.mark.parametrize(
    "events",
    [
        [event([1], total=1), event([2, 3], total=3), event([4], total=4, finish=LENGTH)],
        [event([1], total=1), event([1, 2, 3], total=3), event([1, 2, 3, 4], total=4, finish=LENGTH)],
        [event([1, 2, 3, 4], total=4, finish=LENGTH)],
    ],
    ids=["new tokens", "all tokens", "at once"],
)
def test_streams_of_what_is_new_and_of_all_there_is_say_the_same(events: list[bytes]):
    answer = asked_of(streaming(*events))
    assert (answer.tokens, answer.log_probs, answer.finish_reason) == ([1, 2, 3, 4], [-0.5, -1.0, -1.5, -2.0], "length")
    assert answer.weight_versions == ["7"]


def test_tokens_are_reported_while_the_server_samples():
    reports: list[tuple[int, list[int]]] = []
    reported = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event([1, 2], total=2))
        await reported.wait()  # the rest is sampled only when the beginning has been reported
        await response.write(event([3], total=3) + event([4], total=4, finish=LENGTH))
        return response

    async def asked() -> Completion:
        loop = asyncio.get_running_loop()

        def report(start: int, tokens: list[int]) -> None:
            reports.append((start, tokens))
            loop.call_soon_threadsafe(reported.set)

        async with listening(answer) as address, asyncio.timeout(60):
            engine = bare(address)
            try:
                return await engine.generate(PROMPT, params=SHORT, on_tokens=report)
            finally:
                await engine.close()

    assert asyncio.run(asked()).tokens == [1, 2, 3, 4]
    assert reports == [(0, [1, 2]), (2, [3]), (3, [4])]


def test_every_version_is_named_once_in_order():
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 4}]
    told = asked_of(streaming(event([1, 2, 3, 4], total=4, finish=LENGTH, version="2", weight_versions=spans)))
    seen = asked_of(
        streaming(
            event([1], total=1, version="1"), event([2], total=2, version="1"), event([3, 4], total=4, finish=LENGTH)
        )
    )
    assert told.weight_versions == ["1", "2"]
    assert told.version_spans() == [["1", 0, 2], ["2", 2, 4]]
    assert seen.weight_versions == ["1", "7"]
    assert seen.version_spans() == [["1", 0, 2], ["7", 2, 4]]


def test_what_else_a_server_tells_is_kept():
    answer = asked_of(streaming(event([1], total=1, finish=LENGTH, spec_verify_ct=2, cached_tokens=5, e2e=0.1)))
    assert (answer.extras, answer.cached_tokens) == ({"spec_verify_ct": 2}, 5)


def test_a_server_without_the_option_to_report_experts_is_named():
    silent = streaming(event([1], total=1), event([2], total=2, finish=LENGTH))
    with pytest.raises(SettingsError, match=r"routed_experts: none\. Start SGLang with --enable-return-routed-experts"):
        asked_of(silent, api=SglangApi(routed_experts=(2, 2)))


def test_a_stop_token_ends_the_answer_even_where_the_server_goes_on():
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(3,), min_tokens=3)
    events = [event([3, 1, 3], total=3), event([5, 3, 7], total=6), event([8], total=7, finish=LENGTH)]
    answer = asked_of(streaming(*events), params)
    assert (answer.tokens, len(answer.log_probs), answer.finish_reason) == ([3, 1, 3], 3, "stop")


def test_answers_of_weights_that_were_never_pushed_are_not_used():
    stale = streaming(event([1, 2, 3, 4], total=4, finish=LENGTH, version="unpushed"))
    with pytest.raises(BackendError, match=r"is not answering \(\d+ tries, \d+ s\): the server has no weights yet"):
        asked_of(stale, connect_timeout_s=0.5)


def test_an_answer_that_breaks_off_is_asked_for_again_from_its_beginning():
    whole = streaming(event([1, 2, 3, 4], total=4, finish=LENGTH))
    torn = streaming(event([9], total=1), event([9], total=2))
    names: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        names.append((await request.json())["rid"])
        return await (torn if len(names) < 3 else whole)(request)

    assert asked_of(answer).tokens == [1, 2, 3, 4]
    assert len(set(names)) == len(names) == 3


def test_refusals_have_the_words_of_the_server_and_are_not_repeated():
    tries: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        tries.append(1)
        return await refusing(400, {"error": {"message": "top_p must be in (0, 1], got 2.0."}})(request)

    with pytest.raises(SettingsError, match=r"engine at http://\S+ rejects the request: top_p must be in \(0, 1\]"):
        asked_of(answer)
    assert len(tries) == 1
    inside = {"type": "abort", "message": "Grammar is broken", "status_code": 400}
    with pytest.raises(SettingsError, match="rejects the request: Grammar is broken"):
        asked_of(streaming(event([], total=0, finish=inside)))
    with pytest.raises(BackendError, match=r"responds with status 404: .*Not Found"):
        asked_of(refusing(404, "Not Found"))


def test_a_busy_server_is_asked_again():
    tries: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        tries.append(1)
        whole = streaming(event([1, 2, 3, 4], total=4, finish=LENGTH))
        return await (refusing(503, {"detail": "queue is full"}) if len(tries) < 3 else whole)(request)

    assert asked_of(answer).tokens == [1, 2, 3, 4]
    assert len(tries) == 3


def test_an_answer_that_takes_too_long_is_given_up():
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("nobody waits that long")

    with pytest.raises(BackendError, match=r"did not complete the request within 1 s \(engine\.request_timeout_s\)"):
        asked_of(answer, request_timeout_s=0.6)


@pytest.mark.slow
def test_an_address_where_nobody_answers_is_named_with_what_was_tried():
    nowhere = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    engine = bare(nowhere, connect_timeout_s=0.5)
    words = rf"engine at {nowhere} is not answering \(\d+ tries, \d+ s\): .*\. Start one with `slimectl serve`"
    with pytest.raises(BackendError, match=words):
        asyncio.run(engine.generate(PROMPT, params=SHORT))
    with pytest.raises(BackendError, match=rf"engine at {nowhere} is not answering\. Start one with `slimectl serve`"):
        engine.check_model({})
    asyncio.run(engine.close())


@pytest.mark.slow
def test_another_model_behind_the_address_is_noticed(url: str):
    engine = bare(url)
    engine.check_model({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "unknown_to_it": 3})
    words = rf"engine at {url} serves another model: its model_type is llama, but model\.path has qwen3"
    with pytest.raises(BackendError, match=words):
        engine.check_model({"model_type": "qwen3"})


def test_requests_go_where_servers_are_announced_and_wait_until_then(url: str):
    engine = bare()
    threading.Timer(0.5, engine.set_urls, [[url]]).start()
    begun = time.monotonic()
    assert len(asyncio.run(engine.generate(PROMPT, params=SHORT)).tokens) == 4
    assert time.monotonic() - begun >= 0.5
    asyncio.run(engine.close())


def test_a_server_that_is_withdrawn_is_not_waited_for(url: str):
    async def scene() -> Completion:
        async def silent(_: web.Request) -> web.StreamResponse:
            await asyncio.sleep(30)
            raise AssertionError("nobody waits that long")

        async with listening(silent) as lost:
            engine = bare(lost)
            under_way = asyncio.create_task(engine.generate(PROMPT, params=SHORT))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(engine.set_urls, [url])
            try:
                return await asyncio.wait_for(under_way, 10)
            finally:
                await engine.close()

    assert len(asyncio.run(scene()).tokens) == 4


def test_a_request_finishes_on_a_server_that_is_leaving(url: str):
    async def scene() -> tuple[Completion, dict[str, int]]:
        engine = bare(url)
        params = SamplingParams(max_tokens=150, ignore_eos=True, seed=1)
        under_way = asyncio.create_task(engine.generate(PROMPT, params=params))
        while not engine.in_flight():
            await asyncio.sleep(0.001)
        counted = engine.in_flight()
        await asyncio.to_thread(engine.set_urls, [], [], [url])  # no other server could take it
        try:
            return await asyncio.wait_for(under_way, 30), counted
        finally:
            await engine.close()

    completion, counted = asyncio.run(scene())
    assert len(completion.tokens) == 150
    assert counted == {url: 1}


@pytest.mark.parametrize("moves", [True, False])
def test_a_response_that_a_server_ends_as_it_stops_is_generated_by_another(url: str, moves: bool):
    async def scene() -> Completion:
        async def stopping(request: web.Request) -> web.StreamResponse:
            await asyncio.to_thread(engine.set_urls, [url], [url], [where])
            return await streaming(event([1], total=1), event([], total=1, finish={"type": "abort"}))(request)

        async with listening(stopping) as where:
            engine = bare(where, moves_aborted=moves)
            try:
                return await asyncio.wait_for(engine.generate(PROMPT, params=SHORT), 30)
            finally:
                await engine.close()

    completion = asyncio.run(scene())
    assert (len(completion.tokens), completion.finish_reason) == ((4, "length") if moves else (1, "abort"))


def test_the_time_that_a_lost_server_had_a_request_is_no_silence(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "CONNECT_S", 0.1)

    async def scene() -> Completion:
        async def lost(_: web.Request) -> web.StreamResponse:
            await asyncio.sleep(0.6)
            await asyncio.to_thread(engine.set_urls, [url])
            raise AssertionError("the request has moved")

        async with listening(lost) as where:
            engine = bare(where, connect_timeout_s=0.5)
            try:
                return await asyncio.wait_for(engine.generate(PROMPT, params=SHORT), 30)
            finally:
                await engine.close()

    assert len(asyncio.run(scene()).tokens) == 4


def test_whoever_waits_for_servers_hears_that_there_will_be_none():
    engine = bare()
    threading.Timer(0.2, engine.fail, [BackendError("all restarts are used")]).start()
    with pytest.raises(BackendError, match="all restarts are used"):
        asyncio.run(engine.generate(PROMPT, params=SHORT))
    asyncio.run(engine.close())


def test_abort_returns_who_waits_for_a_server_at_once():
    engine = bare()

    async def scene() -> Completion:
        waiting = asyncio.create_task(engine.generate(PROMPT, params=SHORT))
        await asyncio.sleep(0.1)
        await engine.abort()
        return await waiting

    answer = asyncio.run(scene())
    assert (answer.tokens, answer.finish_reason) == ([], "abort")
    asyncio.run(engine.close())


def test_siblings_stay_together_and_groups_spread():
    """Eight groups of four over two servers: four groups each, none torn apart."""
    asked: dict[int, dict[str, int]] = {0: {}, 1: {}}

    def counting(server: int) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            key = str((await request.json())["input_ids"])
            asked[server][key] = asked[server].get(key, 0) + 1
            await asyncio.sleep(0.2)
            return await streaming(event([1, 2, 3, 4], total=4, finish=LENGTH))(request)

        return answer

    async def scene() -> None:
        async with listening(counting(0)) as one, listening(counting(1)) as two:
            engine = bare(one, two)
            prompts = [[65 + group, *PROMPT] for group in range(8) for _ in range(4)]
            await asyncio.gather(*(engine.generate(prompt, params=SHORT) for prompt in prompts))
            await engine.close()

    asyncio.run(scene())
    assert [sorted(counts.values()) for counts in asked.values()] == [[4] * 4, [4] * 4]


def test_no_server_gets_more_requests_at_a_time_than_it_may():
    now, most = 0, 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return await streaming(event([1, 2, 3, 4], total=4, finish=LENGTH))(request)

    async def scene() -> int:
        async with listening(answer) as address:
            engine = bare(address, concurrency=3)
            answers = await asyncio.gather(*(engine.generate([i, *PROMPT], params=SHORT) for i in range(20)))
            await engine.close()
            return len(answers)

    assert asyncio.run(scene()) == 20
    assert most == 3


def test_connections_outlive_event_loops_and_a_closed_engine_opens_again(url: str):
    engine = bare(url)
    threads = threading.active_count()
    first = [asyncio.run(engine.generate(PROMPT, params=SHORT)).tokens for _ in range(3)]
    asyncio.run(engine.close())
    assert threading.active_count() == threads
    assert asyncio.run(engine.generate(PROMPT, params=SHORT)).tokens == first[0] == first[2]
    asyncio.run(engine.close())
