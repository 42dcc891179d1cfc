"""A run that is given secrets: they work, and its folder and its processes show none."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from rewards.graders import grading
from workshop import Workshop

pytestmark = pytest.mark.slow

WORD = "hunter2-of-a-run"
RUN = ("run", "-c", "slimectl.toml", "-s", "score.custom_rm_path=none", "-s", "score.rm_type=remote_rm")
RUN += ("-s", "score.explain=true", "-s", "run.num_rollout=1", "-s", "eval.data={}", "-s", "eval.interval=none")
RUN += ("-s", "engine.num_engines=2", "-s", 'track.with=["jsonl"]')


def command_lines() -> str:
    """Of all processes that this test may see."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)


def test_a_run_shows_no_secret_and_says_which_one_a_resume_lacks(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def answer(body: object) -> web.Response:
        seen.append(command_lines())
        return web.json_response(len(seen) / 100)

    with grading(answer) as server:
        url = server.url.replace("http://", f"http://user:{WORD}@")
        monkeypatch.setenv("SLIMECTL_SCORE_RM_URL", f"{url}/score?token={WORD}")
        monkeypatch.setenv("SLIMECTL_ENGINE_API_KEY", f"{WORD}-of-engines")
        workshop.slimectl(*RUN)
        assert server.headers["Authorization"].startswith("Basic ")
    assert seen
    assert "slimectl serve" in seen[-1]
    assert not any(WORD in lines for lines in seen)
    assert WORD not in workshop.stderr
    run = workshop.folder / "runs" / "a"
    for file in [path for path in run.rglob("*") if path.is_file()]:
        assert WORD.encode() not in file.read_bytes(), file
    assert "http://__SECRET__@127.0.0.1" in (run / "run.toml").read_text()
    assert "http://__SECRET__@127.0.0.1" in (run / "step_000001" / "samples.jsonl").read_text()
    monkeypatch.delenv("SLIMECTL_SCORE_RM_URL")
    monkeypatch.setenv("HOME", "/")
    elsewhere = Workshop(Path("/"), workshop.model)
    elsewhere.slimectl("run", "--resume", str(run), code=2)
    assert elsewhere.stderr.splitlines(keepends=True)[-1] == (
        "slimectl: score.rm_url: secrets are never written to files. Supply it again with "
        "-s score.rm_url=env:VARIABLE or "
        "SLIMECTL_SCORE_RM_URL in the environment\n"
    )
