"""Rewards of a server: what is posted, what is tried again, and what stops the work."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from aiohttp import web
from graders import grading, says

from slimectl.errors import BackendError, HookError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.rewards import verifier, weighted
from slimectl.settings import Settings
from slimectl.stages.score import Grader, score
from slimectl.system import client as http
from slimectl.system.client import HttpClient
from slimectl.types import Sample, Status

SAMPLE = Sample(index=3, prompt="1+1=", response="2", label="2")


def graded(url: str, samples: list[Sample], **given: object) -> list[object]:
    settings = Settings.model_validate({"score": {"rm_type": "remote_rm", "rm_url": url, **given}})
    return [one.reward for one in score(samples, Grader(settings), settings.score, executor=LocalExecutor())]


@pytest.mark.parametrize("answer", [0.5, -3, True, {"score": 1.0, "why": "good"}, {}])
def test_the_answer_is_the_reward_as_it_is(answer):
    with grading(lambda body: web.json_response(answer)) as server:
        assert verifier("remote_rm", url=f"{server.url}/rm")(SAMPLE) == answer
    assert server.bodies == [{"path": "/rm", "body": {"prompt": "1+1=", "response": "2", "label": "2"}}]


def test_half_a_surrogate_pair_and_a_chat_arrive_as_they_are():
    chat = [{"role": "user", "content": "é"}]
    with grading(lambda body: web.json_response(float(len(body["response"])))) as server:
        assert verifier("remote_rm", url=server.url)(Sample(prompt=chat, response="\ud800\x00é", label=None)) == 3.0
    assert server.bodies[0]["body"] == {"prompt": chat, "response": "\ud800\x00é", "label": None}


def test_many_are_asked_at_once_and_answered_in_order():
    async def slowly(body):
        await asyncio.sleep(0.02 * (int(body["response"]) % 3))
        return web.json_response(float(body["response"]))

    samples = [Sample(index=i, response=str(i)) for i in range(100)]
    with grading(slowly) as server:
        assert graded(server.url, samples, concurrency=25) == [float(i) for i in range(100)]
    assert 10 < server.most <= 25
    assert [thread for thread in threading.enumerate() if thread.name == "http-client"] == []


@pytest.mark.parametrize("rm_type", ["remote_rm", "judge"])
def test_failed_attempts_are_asked_about_by_nobody(rm_type):
    samples = [
        Sample(index=i, response=f"no. {i}", status=Status.FAILED if i % 2 else Status.COMPLETED) for i in range(4)
    ]
    with grading(lambda body: web.json_response(1.0) if rm_type == "remote_rm" else says("Score: 10")) as server:
        assert graded(server.url, samples, rm_type=rm_type) == [1.0, 0.0, 1.0, 0.0]
    asked = json.dumps(server.bodies)
    assert [f"no. {i}" in asked for i in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [({"rm_options": {"batch_size": 4}}, [4, 4, 2]), ({"group_rm": True}, [2, 2, 2, 2, 2]), ({}, [1] * 10)],
)
def test_lists_go_out_and_come_back(given, sizes):
    def answer(body):
        bodies = body if isinstance(body, list) else [body]
        rewards = [float(one["response"]) for one in bodies]
        return web.json_response(rewards if isinstance(body, list) else rewards[0])

    samples = [Sample(index=i, group_index=i // 2, response=str(i)) for i in range(10)]
    with grading(answer) as server:
        assert graded(server.url, samples, concurrency=1, **given) == [float(i) for i in range(10)]
    assert [len(one["body"]) if isinstance(one["body"], list) else 1 for one in server.bodies] == sizes


def test_it_is_a_part_of_a_sum():
    with grading(lambda body: web.json_response({"help": 0.5})) as server:
        parts = [{"type": "exact"}, {"type": "remote_rm", "url": server.url, "key": "help", "weight": 2.0}]
        assert weighted(parts)(SAMPLE) == {"score": 2.0, "exact": 1.0, "remote_rm": 0.5}
        settings = Settings.model_validate({"score": {"rm": parts}})
        (scored,) = score([SAMPLE], Grader(settings), settings.score, executor=LocalExecutor())
        assert scored.reward == {"score": 2.0, "exact": 1.0, "remote_rm": 0.5}


@pytest.mark.parametrize("number", [10**400, float("nan"), "1", None])
def test_a_part_that_is_no_number_stops_the_sum(number):
    with grading(lambda body: web.json_response({"help": number})) as server:
        sum_ = weighted([{"type": "remote_rm", "url": server.url, "key": "help"}])
        with pytest.raises(HookError, match=r"score\.rm: remote_rm: no number under 'help' in \{'help': "):
            sum_(SAMPLE)


def test_a_fault_that_passes_is_tried_again_with_a_pause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.02)
    answers = [web.Response(status=503, text="busy"), web.Response(status=429, headers={"Retry-After": "0"}),
               web.json_response(1.0)]  # fmt: skip
    with grading(lambda body: answers.pop(0)) as server:
        assert verifier("remote_rm", url=server.url)(SAMPLE) == 1.0
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("answer", "asked", "message"),
    [
        (web.Response(status=503, text="too  busy\n"), 2, r"answered 503: too busy \(2 tries, 0 s\)"),
        (web.json_response({"error": {"message": "no model"}}, status=400), 1, r"answered 400: no model \(1 try"),
        (web.Response(status=302, headers={"Location": "/"}), 1, "answered 302: no reason given"),
        (web.Response(text="<html>"), 1, "the response is not JSON: <html>"),
        (web.Response(text="[" * 100_000), 1, "the response is not JSON"),
        (web.Response(text="NaN"), 1, "answered 'nan' for sample 3. Expected a number or an object."),
        (web.Response(text="1" * 400), 1, r"answered '1{60}' for sample 3. Expected a number"),
        (web.Response(text="null"), 1, "answered 'None' for sample 3"),
        (web.Response(text="[1.0]"), 1, r"answered '\[1\.0\]' for sample 3"),
        (web.Response(body=b"1" * 20_000_000), 1, "the response is larger than 16 MiB"),
    ],
)
def test_what_is_no_reward_stops_the_work(monkeypatch: pytest.MonkeyPatch, answer, asked, message):
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.02)

    def fresh(body):
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    with grading(fresh) as server, pytest.raises(BackendError, match=message):
        graded(server.url, [SAMPLE], rm_options={"max_retries": 1})
    assert len(server.bodies) == asked


def test_a_list_of_the_wrong_length_names_the_samples():
    with (
        grading(lambda body: web.json_response([1.0])) as server,
        pytest.raises(BackendError, match=r"answered 1 rewards for 2 samples \(5 to 6\)"),
    ):
        graded(server.url, [Sample(index=5), Sample(index=6)], group_rm=True)


def test_a_server_that_hangs_and_one_that_is_not_there_cost_their_time_and_no_more():
    async def hang(body):
        await asyncio.sleep(10_000)  # longer than a test may take

    with (
        grading(hang) as server,
        pytest.raises(BackendError, match=r"no answer. No time is left to try again \(1 try, \d+ s\)"),
    ):
        verifier("remote_rm", url=server.url, timeout_s=0.3)(SAMPLE)
    with pytest.raises(BackendError, match=r"no answer: .*\(2 tries"):
        verifier("remote_rm", url=server.url, max_retries=1)(SAMPLE)


def test_what_is_under_way_ends_with_the_work():
    async def hang(body):
        await asyncio.sleep(10_000)  # longer than a test may take

    with grading(hang) as server:
        settings = Settings.model_validate({"score": {"rm_type": "remote_rm", "rm_url": server.url, "concurrency": 8}})

        def source():
            yield from (Sample(index=i) for i in range(4))
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(score(source(), Grader(settings), settings.score, executor=LocalExecutor()))
    assert [thread for thread in threading.enumerate() if thread.name == "http-client"] == []


def test_turns_keep_the_rate():
    with HttpClient() as http:

        async def all_of_them() -> None:
            await asyncio.gather(*(http.turn("u", 50.0) for _ in range(11)))

        started = time.perf_counter()
        http.submit(all_of_them()).result()
        assert time.perf_counter() - started > 0.19  # ten intervals of 0.02 s


def test_from_a_thread_that_runs_an_event_loop():
    async def inside() -> object:
        return verifier("remote_rm", url=server.url)(SAMPLE)

    with grading(lambda body: web.json_response(2.0)) as server:
        assert asyncio.run(inside()) == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"rm_options\.url: missing, and remote_rm needs it"),
        ({"url": "localhost:8000"}, r"'localhost:8000' is not an address\. Write http://HOST:PORT/PATH"),
        ({"url": "http://x", "max_retries": -1}, "below 0"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(options, message):
    with pytest.raises(SettingsError, match=message):
        verifier("remote_rm", **options)
