"""What every client makes of a server's answer: its message, whether to try again, and when."""

from __future__ import annotations

import asyncio
import threading

import pytest

from slimectl.system.client import Background
from slimectl.system.http import LONGEST_MESSAGE, backoff_s, error_message, parsed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long", "code": 400}}, "too long"),  # OpenAI's form
        ({"object": "error", "message": "no room"}, "no room"),  # SGLang's
        ({"detail": "Not Found"}, "Not Found"),  # FastAPI's
        ({"success": False, "message": "two\n  lines"}, "two lines"),
        ("plain words\n", "plain words"),
        ("", "no reason given"),
        ({}, "{}"),
        ("x" * 1000, "x" * LONGEST_MESSAGE),
    ],
)
def test_the_message_of_an_error_is_one_line_whatever_form_it_has(body: object, message: str):
    assert error_message(body) == message


def test_an_answer_that_is_no_json_is_its_text():
    assert parsed('{"a": 1}') == {"a": 1}
    assert parsed("<html>") == "<html>"
    assert parsed("[" * 100_000) == "[" * 100_000


def test_pauses_double_up_to_a_bound_and_differ_between_clients():
    pauses = [[backoff_s(tries, first_s=0.5, longest_s=3.0) for _ in range(50)] for tries in range(1, 6)]
    for longest, drawn in zip([0.5, 1.0, 2.0, 3.0, 3.0], pauses, strict=True):
        assert longest / 2 <= min(drawn) < max(drawn) <= longest


def test_what_is_closed_last_is_closed_after_all_others_were_cancelled():
    order: list[str] = []
    started = threading.Event()
    background = Background("a loop of the tests")

    async def wait() -> None:
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            order.append("cancelled")

    async def close() -> None:
        order.append("closed")

    waiting = background.submit(wait())
    assert started.wait(300)
    background.stop(close)
    assert order == ["cancelled", "closed"]
    assert waiting.cancelled()
    assert not background.runs
    background.stop(close)
    assert order == ["cancelled", "closed"]


def test_a_task_that_exits_leaves_the_loop_to_the_others():
    background = Background("a loop of the tests")

    async def leave() -> None:
        raise SystemExit(3)

    async def stay() -> int:
        return 7

    with pytest.raises(SystemExit):
        background.submit(leave()).result(10)
    assert background.submit(stay()).result(10) == 7
    background.stop()
