"""`slimectl report`: what a run's folder tells, as Markdown and HTML, whatever its samples contain."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner
from views import HOSTILE

from slimectl.cli.app import app
from slimectl.cli.report import page
from slimectl.cli.run_report import MAX_TEXT, code, fence, plain, table
from slimectl.cli.terminal import visible
from slimectl.data.locks import Lock
from slimectl.data.ownership import LOCK

GFM = MarkdownIt("commonmark", {"html": True}).enable("table")
"""As GitHub reads Markdown: HTML in it is HTML."""

SETTINGS = """
[model]
path = "base"
[rollout]
data = ["train.jsonl"]
[score]
rm_type = "exact"
[train]
lr = 1e-3
[engine]
api_key = "__SECRET__"
[run]
name = "{name}"
seed = {seed}
num_rollout = 4
[eval]
data = {{ held_out = "test.jsonl" }}
"""


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sample(index: int, reward: float | None, response: str = "four", **fields: Any) -> dict[str, Any]:
    return {"group_index": index, "index": index, "prompt": "2+2=", "response": response, "response_length": 1,
            "tokens": [1, 2], "label": "4", "reward": reward, "status": "completed", **fields}  # fmt: skip


def make_run(folder: Path, *, seed: int = 1, finished: bool = True) -> Path:
    """Two rounds of 3 s with rewards 0.25 and 0.75, and an evaluation of 0.5 before and 0.7 after them."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(SETTINGS.format(name=folder.name, seed=seed))
    manifest = {"slimectl": "0.2.0", "stage": "run", "command": "run", "settings_sha256": "5" * 64,
                "inputs": {"/data/train|1.jsonl": "d" * 64},
                "environment": {"python": "3.11.7", "memory_gib": 23.5, "gpus": ["H200", "H200"],
                                "packages": {"torch": "2.13.0"}}}  # fmt: skip
    manifest |= {"finished": "2026-01-01T00:00:00Z"} if finished else {}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rewards = {1: 0.25, 2: 0.75}
    lines = [{"step": step, "rollout_id": step, "metrics": {"rollout/step": step, "rollout/raw_reward": value}}
             for step, value in rewards.items()]  # fmt: skip
    for number, value, error in ((0, 0.5, 0.05), (2, 0.7, 0.04)):
        metrics = {"eval/held_out_accuracy": value, "eval/held_out_accuracy_stderr": error, "eval/held_out-pass@4": 0.9}
        lines.append({"step": number, "rollout_id": number, "metrics": metrics})
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "perf.jsonl", [{"step": step, "metrics": {"perf/total_time": 3.0}} for step in rewards])
    why = {"from": "response", "why": "is not the label", "extracted": "3"}
    write_lines(folder / "eval" / "held_out-000002.jsonl", [
        sample(0, 0.0, "three", metadata={"explanation": why}),
        sample(1, 1.0), sample(2, None), sample(3, 0.5, "4 or 5"),
    ])  # fmt: skip
    return folder


def report(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0].strip()


def test_a_report_tells_the_result_and_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = report(make_run(Path("runs/a")))
    assert text.startswith("# Report on `a`\n")
    assert section(text, "Result") == (
        "`a` trained `base` with `grpo` on `train.jsonl`: 2 rounds of 4 in 6 s. "
        "The mean reward rose from 0.25 to 0.75, the accuracy of `held_out` rose from 0.5 to 0.7."
    )
    assert "| `train.lr` | `0.001` | `1e-06` |" in section(text, "Settings")
    assert "| `rollout/raw_reward` | 0.25 | ▁█ | 0.75 | 0.25 to 0.75 |" in section(text, "Curves")
    row = "| `held_out` | accuracy | 0.5 ± 0.05 (round 0) | 0.7 ± 0.04 (round 2) | +0.2 | 0.7 ± 0.04 (round 2) |"
    assert row in section(text, "Evaluations")
    assert "| `held_out` | pass@4 | 0.9 (round 0) | 0.9 (round 2) | +0 | 0.9 (round 0) |" in section(
        text, "Evaluations"
    )
    samples = section(text, "Samples")
    assert samples.startswith("From held\\_out after round 2, 3 samples with a mean reward of 0.5.")
    ranks = re.findall(r"\*\*(\w+)\*\* (\d): reward `(.*?)`", samples)
    assert ranks == [("best", "1", "1.0"), ("best", "3", "0.5"), ("worst", "0", "0.0")]
    assert "Why: `response: '3' is not the label`" in samples
    for row in ("| `python` | `3.11.7` |", "| `torch` | `2.13.0` |", "| `GPUs` | `H200, H200` |",
                f"| data `/data/train\\|1.jsonl` | `SHA-256 {'d' * 64}` |"):  # fmt: skip
        assert row in section(text, "Versions, hardware and data")
    again = section(text, "Run it again")
    assert again.startswith("```sh\nslimectl run --name again \\\n  -s 'model.path=\"base\"' \\\n")
    assert "SECRET" not in again
    assert again.endswith("Set these secrets first: `engine.api_key`.")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("wrapped", ["{}", "````\n{}\n```` |`|\n# title", "![x](javascript:alert(1))[a](//b){}"])
def test_a_sample_of_any_content_is_only_text(text: str, wrapped: str):
    text = wrapped.replace("{}", text)
    shown = visible(text, MAX_TEXT)
    (block,) = GFM.parse(fence(text))
    assert (block.type, block.content) == ("fence", f"{shown}\n")
    tokens = GFM.parse(table(["a", "b"], [[code(text), plain(text)]]))
    cells = [token for token in tokens if token.type == "inline"][2:]
    assert [child.type for child in cells[0].children or []] == ["code_inline"]
    assert {child.type for child in cells[1].children or []} <= {"text", "text_special"}
    line = visible(text, 200).replace("\n", "␊").replace("\t", " ")
    assert (cells[0].children or [])[0].content.strip() == line.strip()
    assert GFM.renderer.render([cells[1]], GFM.options, {}).count("<") == 0
    html = page("\n\n".join([code(text), plain(text), fence(text)]), text, {})
    body = html.split("<title>")[1]
    assert set(re.findall(r"<(\w+)", body.split("</style>")[1])) <= {"p", "code", "pre", "body"}
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", html)


def test_a_hostile_run_gives_a_page_that_runs_nothing(tmp_path: Path):
    folder = make_run(tmp_path / "a<b>`c`|d")
    hostile = [
        sample(number, float(number), text, label=text, prompt=[{"role": text[:50], "content": text}])
        for number, text in enumerate(HOSTILE.values())
    ]
    write_lines(folder / "eval" / "held_out-000002.jsonl", hostile)
    (folder / "log.txt").write_text(
        "[2026-01-01 00:00:00] WARNING run.py:2 - <script>x</script> Bearer abcdefghijklmnopqrstu\n"
    )
    out = tmp_path / "report.html"
    report(folder, "-o", out)
    html = out.read_text()
    assert "default-src 'none'" in html
    assert not re.search(r"<script|<img (?!alt=\"curves\" src=\"data:image/svg)|javascript:[^&]*\"", html)
    assert "abcdefghijklmnopqrstu" not in html
    assert html.count('src="data:image/svg+xml;base64,') == 2
    tokens = GFM.parse(report(folder))
    inline = [child.type for token in tokens for child in token.children or []]
    assert not {"html_block", "html_inline", "link_open", "image"} & {*inline, *(token.type for token in tokens)}


def test_markdown_has_its_curves_beside_it_and_is_the_same_every_time(tmp_path: Path):
    folder, out = make_run(tmp_path / "a"), tmp_path / "my report.md"
    report(folder, "-o", out)
    first, picture = out.read_bytes(), out.with_suffix(".svg").read_bytes()
    assert b"![curves](my%20report.svg)" in first
    assert picture.startswith(b"<?xml")
    refused = CliRunner().invoke(app, ["report", str(folder), "-o", str(out)])
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "already exists. Add --force to replace it" in refused.stderr
    report(folder, "-o", out, "--force")
    assert (out.read_bytes(), out.with_suffix(".svg").read_bytes()) == (first, picture)


def test_without_matplotlib_one_line_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report(folder, "-o", tmp_path / "a.md")
    curves = section((tmp_path / "a.md").read_text(), "Curves")
    assert curves.startswith("No pictures: drawing curves needs matplotlib, which is not installed. Run: pip install")
    assert "| ▁█ |" in curves
    assert not (tmp_path / "a.svg").exists()


def test_running_stopped_and_empty_runs_say_so(tmp_path: Path):
    running, stopped = make_run(tmp_path / "running", finished=False), make_run(tmp_path / "stopped", finished=False)
    with Lock(running / LOCK, "is active", way_out="").acquire():
        assert "`running` is training `base`" in report(running)
    assert "`stopped` stopped after training `base`" in report(stopped)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.toml").write_text("")
    (empty / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    text = report(empty)
    assert "`empty` stopped before it trained a model with `grpo`: 0 rounds." in text
    assert section(text, "Curves") == "No metrics yet."
    assert "## Samples" not in text
    (stopped / "metrics.jsonl").write_text(
        '{"step": 1, "rollout_id": 1, "metrics": {"rollout/raw_reward": NaN}}\nhalf a li'
    )
    (stopped / "run.toml").write_text("[train]\nlr = 'high'\n")
    (stopped / "eval" / "held_out-000002.jsonl").write_text("not a sample\n")
    assert section(report(stopped), "Curves") == "No metrics yet."


def test_of_samples_with_equal_rewards_none_is_the_best(tmp_path: Path):
    folder = make_run(tmp_path / "a")
    write_lines(folder / "eval" / "held_out-000002.jsonl", [sample(number, 0.0) for number in range(4)])
    assert re.findall(r"\*\*(\w+)\*\* (\d)", section(report(folder), "Samples")) == [("sample", "0"), ("sample", "1")]


def test_preferences_show_their_loss_and_not_their_fixed_rewards(tmp_path: Path):
    folder = make_run(tmp_path / "dpo")
    lines = [{"step": step, "rollout_id": step, "metrics": {"train/loss": 0.7 / step, "train/pair_accuracy": 0.5,
              "rollout/raw_reward": 0.5}} for step in (1, 2)]  # fmt: skip
    write_lines(folder / "metrics.jsonl", lines)
    curves = section(report(folder), "Curves")
    assert re.findall(r"^\| `(.*?)` \|", curves, re.MULTILINE) == ["train/loss", "train/pair_accuracy"]


def test_several_runs_are_compared(tmp_path: Path):
    text = report(*[make_run(tmp_path / name, seed=seed) for name, seed in (("a-1", 1), ("a-2", 2))])
    assert text.startswith("# Report on 2 runs: `a-1`, `a-2`\n")
    assert section(text, "Settings").endswith("| `run.seed` | `1` | `2` |")
    assert "| `rollout/raw_reward` | 0.25 | ▁█ | 0.75 |" in section(text, "Curves")  # one line: the mean over seeds
    assert section(text, "Evaluations").count("| accuracy | 0.5 ± 0.05 (round 0)") == 2
    samples = section(text, "Samples")
    assert re.findall(r"### `(.*?)`|\*\*(\w+)\*\*", samples)[:3] == [("a-1", ""), ("", "best"), ("", "worst")]
    assert section(text, "Run it again").count("slimectl run --name again") == 2


def test_a_supervised_run_has_a_loss(tmp_path: Path):
    folder = make_run(tmp_path / "sft")
    (folder / "run.toml").write_text(
        '[algorithm]\nname = "sft"\n[model]\npath = "base"\n[rollout]\ndata = ["my data.jsonl"]\n'
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"command": "train"}))
    lines = [{"step": step, "rollout_id": step, "metrics": {"train/loss": 4.0 / step, "train/sft_loss": 4.0 / step}}
             for step in (1, 2)]  # fmt: skip
    lines += [{"step": step, "rollout_id": step, "metrics": {"eval/held_out/loss": 3.0 - step}} for step in (0, 2)]
    write_lines(folder / "metrics.jsonl", lines)
    text = report(folder)
    assert "The loss fell from 4 to 2, the loss of `held_out` fell from 3 to 1." in text
    assert "| `held_out` | loss | 3 (round 0) | 1 (round 2) | -2 | 1 (round 2) |" in text
    assert "slimectl train 'my data.jsonl' --name again \\\n" in section(text, "Run it again")


def test_a_wrong_path_is_one_line(tmp_path: Path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text("{}\n")
    for arguments, problem in (
        ([tmp_path / "none"], "none: no such file or folder"),
        ([tmp_path], "not a run, and contains no runs"),
        ([samples], "samples.jsonl: not a run. Give a run's folder: slimectl report runs/NAME"),
        ([make_run(tmp_path / "x" / "a" / "b"), "-o", tmp_path / "a.pdf"], "give a file that ends in .md or .html"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert problem in result.stderr
