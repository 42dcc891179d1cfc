"""`slimectl serve --record`: sessions of any client become samples when they end."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from forkserver import Process
from views import viewing
from workshop import Workshop

USER = {"role": "user", "content": "say one"}


class Served:
    """A server that records into the folder `record`, or on stdout."""

    def __init__(self, workshop: Workshop, *arguments: str, record: str = "record") -> None:
        self.folder = workshop.folder
        words = ["serve", "--model", str(workshop.model), "--port", "0", "--record", record, *arguments]
        stdout = subprocess.PIPE if record == "-" else None
        self.process: Process = workshop.start(*words, stdout=stdout, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        lines = (line.decode() for line in self.process.stderr)
        self.address = next(line for line in lines if ": serving" in line).split(": serving")[0]

    def post(self, path: str, headers: dict[str, str] | None = None, **values: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.address + path, json.dumps(values).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "record" / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def served(workshop: Workshop) -> Iterator[Served]:
    server = Served(workshop)
    yield server
    server.process.kill()
    server.process.wait()


def test_sessions_by_path_and_by_key_are_samples_when_they_end(served: Served, workshop: Workshop):
    chat = {"messages": [USER], "max_tokens": 5, "temperature": 0.5, "seed": 1}
    status, first = served.post("/s/one/v1/chat/completions", **chat)
    assert status == 200
    messages = [USER, first["choices"][0]["message"], USER]
    status, second = served.post("/s/one/v1/messages", messages=messages, max_tokens=4, temperature=0.5)
    assert status == 200
    sampled = first["usage"]["completion_tokens"] + second["usage"]["output_tokens"]  # an answer may end early
    key = {"x-api-key": "hunter2-correct-horse"}
    status, single = served.post("/v1/messages", key, messages=[USER], max_tokens=3)
    assert status == 200
    assert served.samples() == []
    assert served.post("/s/one/end", reward=0.5) == (200, {"session": "one", "samples": 1})
    assert served.post("/s/one/end")[0] == 404
    assert served.post("/s/two/v1/chat/completions", messages=[])[0] == 400
    [sample] = served.samples()
    assert (sample["reward"], sum(sample["loss_mask"]), sample["rollout_temperature"]) == (0.5, sampled, 0.5)
    assert sample["metadata"]["session"] == "one"
    report = sample["metadata"]["agent"]
    assert (report["max_tokens"], len(report["finish_reasons"])) == ([5, 4], 2)
    assert set(report["finish_reasons"]) <= {"stop", "length"}
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait() == 0
    _, other = served.samples()  # the session of the key; that of the refused request has no turn
    assert (other["index"], sum(other["loss_mask"])) == (1, single["usage"]["output_tokens"])
    assert "hunter2" not in json.dumps(other)
    # Samples of a server are samples like any other, and say whose tokens they are.
    manifest = json.loads((workshop.folder / "record" / "samples.jsonl.manifest.json").read_text())
    statuses = Counter([sample["status"], other["status"]])
    assert (manifest["stage"], manifest["counts"]) == ("serve", statuses)
    assert "hunter2" not in json.dumps(manifest)
    with viewing(workshop.folder / "record" / "samples.jsonl") as view:
        assert "say one" in "".join(view.ask("sample?file=f0&row=0")["texts"])
    workshop.slimectl("score", "record/samples.jsonl", "--rm-type", "repetition")


def test_sessions_can_be_recorded_on_stdout(workshop: Workshop):
    server = Served(workshop, record="-")
    process = server.process
    try:
        for session in ("one", "two"):
            body = {"messages": [USER], "max_tokens": 3}
            assert server.post(f"/s/{session}/v1/chat/completions", **body)[0] == 200
        assert server.post("/s/one/end", reward=1)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        samples = [json.loads(line) for line in process.stdout]
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
    assert [(sample["metadata"]["session"], sample["reward"]) for sample in samples] == [("one", 1.0), ("two", None)]
    assert all(sum(sample["loss_mask"]) == len(sample["rollout_log_probs"]) for sample in samples)
    assert not (workshop.folder / "-").exists()


def test_a_key_of_the_server_is_needed_for_every_api(workshop: Workshop):
    served = Served(workshop, "-s", "engine.api_key=hunter2-correct-horse")
    try:
        body = {"messages": [USER], "max_tokens": 3}
        for path in ("/v1/chat/completions", "/v1/messages", "/s/one/v1/responses", "/s/one/end"):
            assert served.post(path, **body)[0] == 401
        assert served.post("/v1/messages", {"x-api-key": "hunter2-correct-horse"}, **body)[0] == 200
        assert served.post("/v1/chat/completions", {"Authorization": "Bearer hunter2-correct-horse"}, **body)[0] == 200
        assert served.post("/v1/messages", {"Host": "evil.example"}, **body)[0] == 403
    finally:
        served.process.kill()
        served.process.wait()


def test_a_folder_that_cannot_be_written_is_a_line(workshop: Workshop):
    (workshop.folder / "record").write_text("")
    workshop.slimectl("serve", "--model", str(workshop.model), "--port", "0", "--record", "record", code=1)
    assert "--record record/samples.jsonl: cannot be written" in workshop.stderr
