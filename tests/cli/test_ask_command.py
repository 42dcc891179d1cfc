"""`slimectl ask` and `slimectl chat`: answers as they are written, pipes, turns, and Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.runtime.model_functions import ChatModel
from slimectl.settings import Settings

GREEDY = ("--temperature", "0", "-s", "rollout.ignore_eos=true")
QUESTION = [{"role": "user", "content": "2+3=?"}]


@pytest.fixture(scope="module")
def model(model_dir: Callable[[str], Path]) -> ChatModel:
    return ChatModel(Settings.model_validate({"model": {"path": str(model_dir("llama"))}}))


def test_an_answer_comes_in_pieces_that_add_up_to_what_the_engine_writes(model: ChatModel):
    pieces: list[str] = []
    params = model.params(max_tokens=40, temperature=0.8, seed=5)
    completion = model.answer(QUESTION, params, show=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == completion.text
    assert completion.tokens == asyncio.run(model.engine.generate(model.tokens(QUESTION), params=params)).tokens


def test_ctrl_c_stops_an_answer_which_keeps_its_text_and_the_next_one_is_whole(model: ChatModel):
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    params = model.params(max_tokens=200, temperature=0.8, seed=5)
    completion = model.answer(QUESTION, params, show=interrupt, stoppable=True)
    assert completion.finish_reason == "abort"
    assert completion.text == "".join(pieces)
    assert 2 <= len(completion.tokens) < 200
    with pytest.raises(KeyboardInterrupt):
        model.answer(QUESTION, params, show=lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert model.answer(QUESTION, model.params(max_tokens=8), show=lambda _: None).finish_reason in ("length", "stop")


@pytest.mark.slow
def test_a_question_on_a_pipe_follows_the_words_and_the_answer_alone_is_on_stdout(workshop: Workshop):
    options = ["--model", str(workshop.model), *GREEDY, "--max-tokens", "12"]
    whole = workshop.slimectl("ask", "Add:", *options, stdin=b"2+3=?\n")
    assert whole.endswith(b"\n")
    assert workshop.stderr == "stopped after 12 tokens. Raise --max-tokens to allow more\n"
    assert workshop.slimectl("ask", *options, stdin=b"Add:\n\n2+3=?") == whole
    assert workshop.slimectl("ask", "Add:", *options, "--system", "Be brief.", stdin=b"2+3=?\n") != whole
    assert workshop.slimectl("ask", *options, stdin=b" \n", code=3) == b""
    assert "no question given. Pass it as an argument" in workshop.stderr


def test_a_run_is_asked_as_it_was_trained(workshop: Workshop):
    run = workshop.folder / "runs" / "a"
    shutil.copytree(workshop.model, run / "step_000001" / "policy")
    (run / "latest").symlink_to("step_000001")
    (run / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    settings = '[rollout]\ndata = ["prompts.jsonl"]\nignore_eos = true\nmax_response_len = 6\n[run]\nname = "a"\n'
    (run / "run.toml").write_text(settings)
    as_trained = workshop.slimectl("ask", "2+3=", "--model", "runs/a", "--temperature", "0")
    used = "rollout.apply_chat_template=false, rollout.max_response_len=6, rollout.ignore_eos=true"
    assert workshop.stderr.splitlines()[0] == f"using {used} from runs/a/run.toml"
    raw = ("ask", "2+3=", "--raw", "--model", str(workshop.model), *GREEDY, "--max-tokens", "6")
    assert workshop.slimectl(*raw) == as_trained
    templated = ("ask", "2+3=", "--model", "runs/a", *GREEDY, "-s", "rollout.apply_chat_template=true")
    assert workshop.slimectl(*templated) != as_trained
    assert workshop.stderr.startswith("using rollout.max_response_len=6 from runs/a/run.toml\n")
    workshop.slimectl("chat", "--model", "runs/a", code=2)
    assert "runs/a: was trained without its chat template. Use `slimectl ask`" in workshop.stderr
    workshop.slimectl("ask", "2+3=", "--model", "runs/a", "--system", "Be brief.", code=2)
    assert "--system: needs the chat template" in workshop.stderr


def test_on_a_terminal_ctrl_c_at_the_prompt_and_ctrl_d_leave_no_traceback(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    terminal, end = pty.openpty()
    monkeypatch.setenv("TERM", "dumb")  # no escape codes around the prompt
    options = ["--model", str(workshop.model), *GREEDY, "--max-tokens", "4"]
    process = workshop.start("chat", *options, stdin=end, stdout=end, stderr=subprocess.PIPE)
    os.close(end)
    try:
        read_until(terminal, b"> ")
        os.write(terminal, b"hello\n")
        read_until(terminal, b"\n> ")
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        # CPython's readline forgets a signal between its prompt and its select() until a line comes: an empty one.
        os.write(terminal, b"\n")
        read_until(process.stderr.fileno(), b"\nType /exit or press Ctrl-D to quit\n")
        for _ in range(300):  # a key that comes while readline switches the terminal is lost too
            os.write(terminal, b"\x04")
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.wait(1) == 0
        assert process.stderr.read().strip() == b""
    finally:
        process.kill()
        os.close(terminal)


def read_until(descriptor: int, mark: bytes) -> bytes:
    text = b""
    while not text.endswith(mark):
        assert select.select([descriptor], [], [], 60)[0], text
        text += os.read(descriptor, 1024).replace(b"\r\n", b"\n")
    return text


def test_a_chat_keeps_its_turns_until_it_is_reset(workshop: Workshop):
    typed = b"hello\nhello\n/what\n/reset\nhello\n\n/exit\nnever read\n"
    out = workshop.slimectl("chat", "--model", str(workshop.model), *GREEDY, "--max-tokens", "8", stdin=typed)
    settings = Settings.model_validate({"model": {"path": str(workshop.model)}, "rollout": {"ignore_eos": True}})
    hello = {"role": "user", "content": "hello"}
    with ChatModel(settings) as model:
        params = model.params(max_tokens=8, temperature=0.0)
        one = model.answer([hello], params, show=lambda _: None).text
        turns = [hello, {"role": "assistant", "content": one}, hello]
        two = model.answer(turns, params, show=lambda _: None).text
    assert one != two
    assert out.decode() == "".join(text.removesuffix("\n") + "\n" for text in (one, two, one))
    said = workshop.stderr.splitlines()
    assert said.count("stopped after 8 tokens") == 3
    assert sum("/retry regenerates the response" in line for line in said) == 2  # at the beginning, and for /what
    assert "the conversation starts over" in said
