"""The page in a real browser, over real runs: pages open, filter, compare, follow a run, and execute no text of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from views import HOSTILE, View, hostile_samples, viewing
from workshop import Workshop, set_up

from slimectl.cli.viewer.api import ViewApi
from slimectl.cli.viewer.export import write_page
from slimectl.cli.viewer.library import Library
from slimectl.data.locks import Lock

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = sync_api.expect  # waits until the page is as expected: it draws after answers of the server
expect.set_options(timeout=10_000)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH")]

AGENT = '''
import copy

async def generate(sample, sampling_params, generate):
    """Two branches: a shared beginning, a tool's words in one, and an end of each."""
    first = await generate(sample.tokens)
    sample.append_response_tokens(first.tokens[:3], log_probs=first.log_probs[:3], text="first ")
    other = copy.deepcopy(sample)
    other.append_response_tokens([5, 6], trainable=False, text="tool ")
    for branch in (sample, other):
        second = await generate(branch.tokens)
        branch.append_response_tokens(second.tokens[:4], log_probs=second.log_probs[:4], text=second.text)
        branch.status = "completed"
    return [sample, other]
'''
NAMES = """() => [...document.querySelectorAll("button, input, select, a, [role=img]")].filter((element) =>
  !(element.textContent.trim() || element.getAttribute("aria-label") || element.labels?.length || element.title)
).map((element) => element.outerHTML)"""
"""Elements that a screen reader could not name."""
MEANS_ARE = """means => [...document.querySelectorAll("tbody tr td:nth-child(5)")].map((cell) => Number(cell.innerText))
  .every((mean, at) => mean === means[at])"""


PLACE_OF_REQUEST = """async lines => {
  const { Spans } = await import("./spans.js");
  const spans = new Spans();
  spans.add(lines);
  const at = spans.lanes.findIndex(({ name }) => name === "engine/0");
  const request = spans.lanes[at].rows[0].find((span) => span.round === 4 && !span.dataset);
  return { x: ((request.start + request.end) / 2 - spans.start) / (spans.end - spans.start), y: 34 + 24 * at + 2 };
}"""
"""Place of a request: a share of the whole time, and pixels below the top if the lanes above have one row each."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> Workshop:
    """Run `a` with an agent that branches, and run `b` with a verifier that explains its grades."""
    workshop = set_up(tmp_path_factory.mktemp("page"), model_dir("llama"))
    (workshop.folder / "agent.py").write_text(AGENT)
    agent = ("-s", "rollout.custom_generate_function_path=agent.py:generate")
    workshop.slimectl("run", "-s", "run.num_rollout=4", "-s", "run.keep_samples=train", *agent)
    assert "  slimectl view runs/a\n" in workshop.stderr
    exact = ("-s", "score.custom_rm_path=none", "-s", "score.rm_type=f1", "-s", "train.lr=5e-4")
    evaluation = ("-s", "eval.temperature=0", "-s", "eval.max_response_len=9")
    workshop.slimectl("run", "--name", "b", "-s", "run.num_rollout=2", *exact, *evaluation)
    return workshop


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until an expression holds; the page's policy forbids the eval by which wait_for_function asks again."""
    for _ in range(200):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails its test for a message on the console and for a request off the machine.

    A refused question, whose reason the page shows, is a message of the browser's own.
    """
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(10_000)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if is_trouble(message) else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: troubles.append(request.url) if is_foreign(request.url) else None)
    yield page
    context.close()
    assert not troubles


def is_trouble(message: Any) -> bool:
    return message.type in ("error", "warning") and "400 (Bad Request)" not in message.text


def is_foreign(address: str) -> bool:
    return not address.startswith(("http://127.0.0.1:", "data:", "file:", "blob:"))


@pytest.fixture(scope="module")
def view(workshop: Workshop) -> Iterator[View]:
    with viewing(workshop.folder / "runs") as view:
        yield view


def open_page(page: Any, view: View, address: str) -> None:
    page.goto("about:blank")
    page.goto(f"{view.address}#/{address}")
    page.wait_for_selector("h2")


def file_of(view: View, title: str, run: str) -> dict:
    runs = view.ask("catalogue")["runs"]
    return next(file for one in runs if one["name"] == run for file in one["files"] if file["title"] == title)


def test_curves_of_two_runs_stand_in_one_chart_and_can_be_searched(page: Any, view: View):
    open_page(page, view, "curves")
    reward = page.locator("[data-metric='rollout/raw_reward'] [role=img]")
    label = reward.get_attribute("aria-label")
    assert "a " in label
    assert "b " in label
    page.get_by_label("Search metrics").fill("grad_norm")
    page.wait_for_selector("[data-metric='train/grad_norm']")
    expect(page.locator(".chart")).to_have_count(1)
    page.get_by_label("Search metrics").fill("")
    page.get_by_label("names").select_option("roll")
    page.wait_for_selector("[data-metric='critic/score/mean']")
    page.get_by_label("over").select_option("time")
    page.get_by_label("Smoothing").fill("0.6")
    assert "(raw)" in page.locator("[data-metric='critic/score/mean'] [role=img]").get_attribute("aria-label")
    expect(page.get_by_role("row", name="train.lr 0.001 0.0005")).to_have_count(1)


def test_the_timeline_shows_lanes_and_the_parts_of_a_request_which_opens_its_group(page: Any, view: View):
    open_page(page, view, "curves")
    page.keyboard.press("m")
    canvas = page.locator("canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"Timeline of b, .*training"))
    expect(page.locator("p.legend")).to_contain_text("waiting")
    page.get_by_label("run").select_option("a")
    expect(canvas).to_have_attribute("aria-label", re.compile("Timeline of a, "))
    page.keyboard.press("ArrowLeft")  # a round before the middle of the five rounds
    until(page, "() => /from=/.test(location.hash)")
    whole = page.evaluate("() => location.hash")
    page.keyboard.press("+")
    until(page, "whole => location.hash !== whole", whole)
    page.keyboard.press("0")
    # A request is found by its place: over the engine's lane, from left to right.
    box = canvas.bounding_box()
    label = page.evaluate(PLACE_OF_REQUEST, view.ask("timeline?run=n0")["spans"])
    page.mouse.move(box["x"] + 108 + label["x"] * (box["width"] - 108), box["y"] + label["y"])
    tip = page.locator(".timeline .tip")
    expect(tip).to_contain_text("request")
    expect(tip).to_contain_text("decode")
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("article")
    assert page.evaluate("() => location.hash").startswith("#/group/")


def test_spans_of_a_lane_are_packed_into_rows_and_found_by_their_time(page: Any, view: View):
    open_page(page, view, "curves")
    found = page.evaluate("""async () => {
      const { Spans } = await import("./spans.js");
      const spans = new Spans();
      const add = (lane, name, start, end, round) => ({ lane, name, start, end, round });
      spans.add([add("engine/10", "request", 2, 4), add("trainer", "wait", 0, 3, 1), add("engine/9", "request", 1, 5),
        add("engine/9", "request", 2, 3), add("engine/9", "request", 3, 6), add("trainer", "actor_train", 3, 7, 1)]);
      const rows = spans.lanes[1].rows;
      const drawn = [];
      Spans.inWindow(rows[1], 2.5, 3.5, 0.1, (span) => drawn.push(span.start));
      const shares = spans.shares(2, 5).map(([kind, , seconds]) => [kind, seconds]);
      return { lanes: spans.lanes.map(({ name, rows }) => [name, rows.map((row) => row.map(({ start }) => start))]),
        near: Spans.at(rows[0], 5.2, 0.3)?.end, none: Spans.at(rows[0], 5.5, 0.3), rounds: spans.rounds,
        drawn, shares };
    }""")
    assert found == {
        "lanes": [["trainer", [[0, 3]]], ["engine/9", [[1], [2, 3]]], ["engine/10", [[2]]]], "drawn": [2, 3], "near": 5,
        "none": None, "rounds": [{"number": 1, "start": 0, "end": 7}], "shares": [["training", 2], ["waiting", 1]],
    }  # fmt: skip


REWARDS = {"fast-s1": [0.0, 1.0], "fast-s2": [0.5, 0.5], **{f"solo{n}": [n / 100, n / 50] for n in range(1, 9)}}
"""Rewards of two rounds of ten runs: two seeds, and eight learning rates."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    folder = tmp_path_factory.mktemp("shelf")
    for age, (name, rewards) in enumerate(REWARDS.items()):
        run = folder / name
        run.mkdir()
        seed = int(name[-1])
        lr = 1e-3 if name.startswith("fast") else seed * 1e-4
        (run / "run.toml").write_text(f"[run]\nname = '{name}'\nseed = {seed}\n[train]\nlr = {lr}\n")
        lines = [
            {"step": 2 * n, "rollout_id": n, "metrics": {"rollout/raw_reward": reward, "train/loss": 0.0}}
            for n, reward in enumerate(rewards, start=1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.utime(run / "metrics.jsonl", (1_000_000 - age, 1_000_000 - age))
    with viewing(folder) as view:
        yield view


def saved(page: Any, kind: str) -> bytes:
    with page.expect_download() as download:
        page.get_by_label(f"save rollout/raw_reward as {kind}").click()
    assert download.value.suggested_filename == f"rollout-raw_reward.{kind.lower()}"
    return Path(download.value.path()).read_bytes()


def test_the_table_of_runs_is_sorted_searched_and_leads_to_curves(page: Any, shelf: View):
    def names() -> list[str]:
        return page.locator("tbody td.run").all_inner_texts()

    page.goto(shelf.address)
    page.wait_for_selector("h2:has-text('Runs')")
    assert names() == list(REWARDS)  # the last changed first
    page.get_by_role("button", name="final reward").click()
    assert names()[0] == "solo1"
    page.get_by_role("button", name="final reward").click()
    assert names()[:3] == ["fast-s1", "fast-s2", "solo8"]
    page.get_by_label("Search runs").fill("solo reward>0.1 lr<8e-4")
    assert names() == ["solo7", "solo6"]
    assert "sort=-reward&search=solo" in page.evaluate("location.hash")
    page.get_by_label("Search runs").fill("fast")
    page.get_by_label("one row per group of seeds").check()
    cells = page.locator("tbody tr td").all_inner_texts()
    assert cells[1] == "fast (2 seeds)"
    assert "0.75 ± 0.35" in cells
    page.get_by_label("Show a setting").select_option("train.lr")
    expect(page.get_by_role("columnheader", name="train.lr")).to_have_count(1)
    page.get_by_label("select fast").check()
    page.get_by_role("link", name="Curves of these 2 runs").click()
    page.wait_for_selector(".chart")
    expect(page.locator(".legend > label")).to_have_text(["fast (2 seeds) stopped"])


def test_seeds_are_one_line_with_a_band_and_charts_are_saved(page: Any, shelf: View):
    """Means 0.25 and 0.75, standard deviations sqrt(2 * 0.25²) = 0.353553 of two seeds."""
    page.clock.install()
    open_page(page, shelf, "curves?runs=fast-s1,fast-s2,solo8&search=raw_reward")
    page.wait_for_selector(".chart canvas")
    with page.expect_response("**/catalogue*"):
        page.clock.fast_forward(20_000)  # the page asks again for the list of runs, and the choice of runs stays
    header, *rows = saved(page, "CSV").decode().splitlines()
    assert header == "step,fast (2 seeds) mean,fast (2 seeds) low,fast (2 seeds) high,solo8"
    table = [[float(cell) for cell in row.split(",")] for row in rows]
    assert table == [
        pytest.approx([2, 0.25, 0.25 - 0.353553, 0.25 + 0.353553, 0.08], abs=1e-6),
        pytest.approx([4, 0.75, 0.75 - 0.353553, 0.75 + 0.353553, 0.16], abs=1e-6),
    ]
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(saved(page, "SVG").decode()).iter()]
    assert (tags.count("polyline"), tags.count("polygon")) == (2, 1)
    assert saved(page, "PNG").startswith(b"\x89PNG\r\n")
    page.get_by_label("mean and band of seeds").uncheck()
    page.wait_for_selector(".legend:has-text('fast-s2')")
    assert saved(page, "CSV").decode().splitlines()[0] == "step,fast-s1,fast-s2,solo8"


def test_of_many_runs_some_are_drawn_and_the_address_keeps_the_choice(page: Any, shelf: View):
    open_page(page, shelf, "curves")
    page.wait_for_selector(".chart")
    expect(page.locator(".legend > label")).to_have_count(6)
    expect(page.locator(".legend summary")).to_have_text("3 more, not shown")
    assert page.locator(".chart").first.get_attribute("data-metric") == "rollout/raw_reward"
    page.locator(".legend summary").click()
    page.locator(".folded label", has_text="solo8").click()
    page.wait_for_selector(".legend > label:has-text('solo8')")
    page.get_by_label("scale").select_option("log")
    page.get_by_label("over").select_option("round")
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Search metrics").fill("reward")
    address = page.evaluate("location.hash")
    assert "solo8" in address
    assert address.endswith("axis=round&scale=log&smoothing=0.5&search=reward")
    page.goto("about:blank")
    page.goto(shelf.address + address)
    page.wait_for_selector(".legend > label:has-text('solo8')")
    expect(page.locator(".legend > label")).to_have_count(7)
    controls = [page.get_by_label(label).input_value() for label in ("over", "scale", "Smoothing", "Search metrics")]
    assert controls == ["round", "log", "0.5", "reward"]
    colours = page.locator(".legend .swatch").evaluate_all("swatches => swatches.map((one) => one.style.background)")
    assert len(set(colours)) == 9


def test_a_round_is_searched_filtered_and_sorted(page: Any, view: View):
    file = file_of(view, "round 2", "a")
    open_page(page, view, f"round/{file['id']}")
    expect(page.locator("tbody tr")).to_have_count(4)
    counts = page.locator(".histogram").nth(0).locator(".bar small").all_inner_texts()
    assert sum(map(int, counts)) <= 32
    expect(page.get_by_text("with the weights that were trained (staleness 0)")).to_have_count(1)
    page.get_by_label("Filter expression").fill("reward > 2")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=0 match")
    page.get_by_label("Filter expression").fill("open('x')")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=is not allowed in a filter")
    page.get_by_label("Filter expression").fill("")
    page.get_by_label("Search text").fill("say five")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=in 1 groups")
    page.get_by_label("Search text").fill("")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('tbody tr').length === 4")
    means = sorted(float(text) for text in page.locator("tbody tr td:nth-child(5)").all_inner_texts())
    page.get_by_label("Sort by").select_option("reward")
    until(page, MEANS_ARE, arg=means)
    page.get_by_label("Reverse the order").click()
    until(page, MEANS_ARE, arg=means[::-1])
    assert "order=down" in page.evaluate("location.hash")


def test_a_round_says_what_its_own_steps_dropped(page: Any, view: View, workshop: Workshop):
    texts = []
    for number in (1, 2):
        (metrics,) = (
            line["metrics"]
            for line in workshop.metrics("b")
            if line["rollout_id"] == number and "rollout/step" in line["metrics"]
        )
        open_page(page, view, f"round/n1.r{number}")
        page.locator(".dropped summary").click()
        shown = dict(zip(*(page.locator(f".dropped {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
        assert shown["rollout/truncated_ratio"] == f"{metrics['rollout/truncated_ratio']:.4g}"
        assert all(float(text) == pytest.approx(metrics[name], rel=1e-3) for name, text in shown.items()), shown
        texts.append(shown)
    assert texts[0] != texts[1]


def test_keys_lead_through_a_round_to_a_group_and_back(page: Any, view: View):
    file = file_of(view, "round 1", "a")
    open_page(page, view, f"round/{file['id']}")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.answer")
    assert page.evaluate("location.hash").endswith("/1")
    page.keyboard.press("ArrowRight")
    until(page, "location.hash.endsWith('/2')")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="hidden")
    page.keyboard.press("u")
    page.keyboard.press("u")
    page.wait_for_selector("table.groups")
    page.keyboard.press("c")
    page.wait_for_selector(".chart")


def test_a_group_shows_why_and_where_two_answers_differ(page: Any, view: View):
    file = file_of(view, "round 1", "b")
    open_page(page, view, f"group/{file['id']}/0")
    expect(page.locator("article.answer")).to_have_count(4)
    boxes = page.locator("article.answer input[type=checkbox]")
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.wait_for_selector(".difference del, .difference ins")
    page.get_by_role("button", name="why?").first.click()
    page.wait_for_selector(".why p")
    assert page.locator(".why p").first.inner_text()


def test_a_sample_shows_its_tokens_numbers_turns_and_branches(page: Any, view: View):
    file = file_of(view, "round 1", "a")
    open_page(page, view, f"sample/{file['id']}/1")
    record = view.ask(f"raw?file={file['id']}&row=1")
    page.wait_for_selector(".token")
    expect(page.locator(".token")).to_have_count(len(record["tokens"]))
    assert [word.strip() for word in page.locator(".author").all_inner_texts()] == [
        "prompt",
        "policy",
        "environment",
        "policy",
    ]
    last = page.locator(".token").last
    last.hover()
    shown = page.locator(".token-details").inner_text()
    assert f"engine log-prob {record['rollout_log_probs'][-1]:.4g}"[:24] in shown
    assert "advantage" in shown  # of run.keep_samples = train
    assert page.locator(".scale").inner_text().split("\n")[0].startswith("0")
    page.keyboard.press("3")
    assert page.locator("[data-mode='ratio']").get_attribute("aria-pressed") == "true"
    assert page.locator(".scale").inner_text().split()[:3] == ["0.741", "1", "1.35"]
    page.get_by_role("button", name="next").click()  # the next sample keeps its colours
    page.wait_for_selector("h2:has-text('attempt 1')")
    assert "colour=ratio" in page.evaluate("location.hash")
    page.get_by_role("button", name="previous").click()
    page.wait_for_selector("h2:has-text('attempt 0 · branch 2')")
    expect(page.locator(".tree a")).to_have_count(2)
    page.locator("details summary").click()
    page.wait_for_selector("text=rollout_log_probs")
    page.locator(".commands button").first.click()
    page.wait_for_selector("text=copied")


def test_turns_messages_and_calls_of_a_chat_stand_apart(page: Any, workshop: Workshop, tmp_path: Path):
    """A fork: its first answer, a tool call, is taught by another branch."""
    texts = ["<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n", '<tool_call>{"name": "add"}</tool_call>',
             "<|im_start|>tool\n<tool_response>3</tool_response><|im_end|>\n", "It is 3."]  # fmt: skip
    prompt, *response = [text.encode() for text in texts]
    ends = [sum(map(len, response[: at + 1])) for at in range(3)]
    turns = [[0, ends[0]], [ends[1], ends[2]]]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    record = {
        "prompt": [{"role": "user", "content": "Add."}], "tokens": [*prompt, *b"".join(response)],
        "response": b"".join(response).decode(), "response_length": ends[2],
        "loss_mask": [0] * ends[1] + [1] * len(response[2]), "rollout_log_probs": [0.0] * ends[2],
        "metadata": {"agent": {"turns": turns}, "tools": tools},
    }  # fmt: skip
    (tmp_path / "samples.jsonl").write_text(json.dumps(record) + "\n")
    manifest = {"settings": {"model": {"path": str(workshop.model)}}}
    (tmp_path / "samples.jsonl.manifest.json").write_text(json.dumps(manifest))
    with viewing(tmp_path / "samples.jsonl") as view:
        open_page(page, view, "sample/f0/0")
        assert page.locator(".author").all_inner_texts() == [
            "prompt", "policy (not trained on here)", "environment", "policy",
        ]  # fmt: skip
        headers = "".join(page.locator(".token.header").all_inner_texts())
        assert headers == "".join(f"<|im_start|>{role}↵\n" for role in ("user", "assistant", "tool"))
        expect(page.locator(".block")).to_have_count(5)
        calls = page.locator(".block.policy .tool-call[aria-label='tool call']").all_inner_texts()
        assert [text.removeprefix("tool call").strip() for text in calls] == [texts[1]]
        expect(page.locator(".block.environment .tool-call[aria-label='tool result']")).to_have_count(1)
        page.get_by_text("1 tool: add").click()
        assert page.locator(".tools .text").is_visible()
        page.get_by_role("button", name="Messages", exact=True).click()
        assert not page.locator(".token").first.is_visible()
        shown = [text.split("\n", 1) for text in page.locator(".messages .turn").all_inner_texts()]
        assert [(role, text.strip()) for role, text in shown] == [
            ("user", "Add."), ("assistant", texts[1]), ("tool", "<tool_response>3</tool_response>"),
            ("assistant", "It is 3."),
        ]  # fmt: skip
        assert page.evaluate("location.hash").endswith("?as=chat")
        open_page(page, view, "group/f0/0")
        expect(page.get_by_text("1 tool: add")).to_have_count(1)


def test_the_command_of_a_sample_replays_it(view: View, workshop: Workshop):
    """The initial model wrote round 1, the checkpoint after it round 2; the evaluation is greedy and short."""
    run = workshop.folder / "runs" / "b"
    state = json.loads((run / "step_000002" / "state.json").read_text())

    def sample_of(title: str, row: int) -> tuple[dict, list[dict]]:
        file = file_of(view, title, "b")
        return view.ask(f"raw?file={file['id']}&row={row}"), view.ask(f"sample?file={file['id']}&row={row}")["commands"]

    for title, row in (("round 1", 5), ("round 2", 9), ("small after round 2", 2)):
        record, (replay, graded) = sample_of(title, row)
        assert replay["title"] == "replay it with the same weights and seed"
        again = json.loads(workshop.slimectl(*shlex.split(replay["command"])[1:]))
        assert (again["tokens"], again["index"]) == (record["tokens"], record["index"])
        assert again["weight_versions"] == ([{"round 1": "0", "round 2": "1"}.get(title, state["weight_version"])])
        assert graded["command"].startswith(replay["command"] + " | slimectl score - -c ")
    shutil.move(run / "step_000001", run / "moved")
    try:
        _, (command, _) = sample_of("round 2", 0)
    finally:
        shutil.move(run / "moved", run / "step_000001")
    assert command["title"] == (
        "sample this prompt again (with the newest weights, because the checkpoint of version 1, which wrote it, "
        "is gone)"
    )
    file = file_of(view, "round 1", "a")
    assert "its agent runs again" in view.ask(f"sample?file={file['id']}&row=0")["commands"][0]["title"]


def test_a_prompt_is_followed_over_rounds_and_two_evaluations_are_compared(page: Any, view: View):
    file = file_of(view, "small after round 0", "a")
    open_page(page, view, f"group/{file['id']}/0")
    page.get_by_text("follow this prompt").click()
    page.wait_for_selector("text=rounds and evaluations")
    titles = page.locator("article.answer header a:first-child").all_inner_texts()
    assert {"round 1", "round 3", "small after round 0", "small after round 4"} <= set(titles)
    page.get_by_role("link", name="Compare").click()
    page.wait_for_selector("text=3 prompts in both")
    page.locator("button[aria-expanded]").first.click()
    assert page.locator(".difference").first.is_visible()


@pytest.mark.parametrize("address", ["runs", "curves", "round", "compare", "round/{}", "group/{}/0", "sample/{}/0"])
def test_pages_fit_a_telephone_and_every_control_has_a_name(page: Any, view: View, address: str):
    page.set_viewport_size({"width": 400, "height": 800})
    open_page(page, view, address.format(file_of(view, "round 1", "a")["id"]))
    page.wait_for_selector(".chart, table, .token, article")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate(NAMES) == []


def test_a_run_is_followed_while_it_writes(page: Any, workshop: Workshop, tmp_path: Path):
    run = tmp_path / "a"
    shutil.copytree(workshop.folder / "runs" / "a", run, symlinks=True)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    shutil.rmtree(run / "step_000004")
    lock = hold(run)
    with viewing(run) as view:
        open_page(page, view, "curves")
        page.wait_for_selector("text=live: a")
        before = page.locator("[data-metric='rollout/raw_reward'] [role=img]").get_attribute("aria-label")
        assert page.locator(".legend").inner_text().strip() == "a running"
        (run / "metrics.jsonl").write_text("".join(lines))
        until(
        page,
            "before => document.querySelector(\"[data-metric='rollout/raw_reward'] [role=img]\")"
            ".getAttribute('aria-label') !== before", arg=before,
        )  # fmt: skip
        page.keyboard.press("r")
        page.wait_for_selector("h2:has-text('round 3')")
        samples = run / "step_000003" / "samples.jsonl"
        record = json.loads(samples.read_text().splitlines()[0])
        with samples.open("a") as file:
            file.write(json.dumps({**record, "group_index": 99, "index": 999}) + "\n")
        page.wait_for_selector("text=33 samples")
        page.keyboard.press("c")
        page.wait_for_selector("text=live: a")
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(json.dumps(manifest | {"finished": "now"}))
        lock.release()
        page.wait_for_selector(".legend:has-text('a finished')")


BRANCHING = """
import json, os, pathlib, sys, time, urllib.request
task = json.loads(sys.stdin.readline())
while task["index"] >= 4 and not pathlib.Path("second_round").exists():
    time.sleep(0.02)

def ask(*texts):
    roles = ("assistant", "user")
    messages = task["messages"] + [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

text = ask(ask(), "go on")
ask("another past", "go on")
print(sum(letter < "M" for letter in text) / 4)
"""
"""A program whose last request has another history than the one before: its attempt has two branches."""


def test_the_branches_of_a_program_are_a_tree_while_its_run_goes_on(page: Any, workshop: Workshop):
    (workshop.folder / "branching.py").write_text(BRANCHING)
    words = ["run", "--name", "c", "--agent", shlex.join([sys.executable, "branching.py"])]
    settings = {"score.custom_rm_path": "none", "eval.interval": "none", "eval.before_train": "false",
                "rollout.max_response_len": 60, "rollout.n_samples_per_prompt": 2, "run.rollout_batch_size": 2,
                "run.num_rollout": 2, "run.dir": "programs"}  # fmt: skip
    process = workshop.start(*words, *(word for item in settings.items() for word in ("-s", "{}={}".format(*item))))
    run = workshop.folder / "programs" / "c"
    while not (run / "step_000001" / "samples.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    with viewing(run) as view:
        open_page(page, view, "curves")
        page.wait_for_selector("text=live: c")
        open_page(page, view, "sample/n0.r1/0")
        page.wait_for_selector(".token")
        expect(page.locator(".tree .tree a")).to_have_count(0)  # one fork
        expect(page.locator(".tree a")).to_have_text(["branch 1 (this one)", "branch 2"])
        page.get_by_role("link", name="branch 2", exact=True).click()
        page.wait_for_selector("b:has-text('branch 2 (this one)')")
        assert [word.strip() for word in page.locator(".author").all_inner_texts()][-2:] == ["environment", "policy"]
        page.get_by_role("link", name="group 0").click()
        page.wait_for_selector("article.answer")
        assert page.get_by_label("Prompt").inner_text().endswith("say one")  # not that of the branch with another past
        expect(page.locator("article.answer")).to_have_count(2)  # attempts
        expect(page.locator("article.answer").first.locator(".tree > li")).to_have_count(2)
        expect(page.locator("article.answer").first.get_by_text("another past", exact=True)).to_have_count(1)
        page.keyboard.press("r")
        page.wait_for_selector("h2:has-text('round 1')")
        expect(page.locator("tbody tr").first.locator(".cell")).to_have_count(2)  # one for each attempt
        (workshop.folder / "second_round").touch()
        page.wait_for_selector("option[value='n0.r2']", state="attached", timeout=60_000)
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("h2:has-text('round 2')")
        assert process.wait(300) == 0
    # The final evaluation has one attempt of two branches at each of three prompts, whose rewards are the program's:
    # there is no vote.
    evaluation = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
    assert evaluation["eval/small_samples"] == 3
    assert not any("maj" in name for name in evaluation)


def hold(run: Path) -> Lock:
    """Mark a run as running, in this process, until its lock is released."""
    from slimectl.data.run_dir import RunDir

    manifest = json.loads((run / "manifest.json").read_text())
    manifest.pop("finished", None)
    (run / "manifest.json").write_text(json.dumps(manifest))
    return RunDir(run).lock()


@pytest.mark.parametrize("how", ["server", "file"])
def test_hostile_content_is_text(page: Any, tmp_path: Path, how: str):
    samples = tmp_path / "samples.jsonl"
    hostile_samples(samples)
    with viewing(samples) as view:
        if how == "file":
            write_page(ViewApi(Library([samples]), lambda folder: None), tmp_path / "view.html")
            view = View(f"file://{tmp_path}/view.html", 0)
        open_page(page, view, "round/f0")
        page.wait_for_selector("tbody tr")
        expect(page.locator("tbody tr")).to_have_count(len(HOSTILE))
        texts = [page.inner_text("main")]
        for group in range(len(HOSTILE)):
            for address in (f"group/f0/{group}", *([f"sample/f0/{2 * group}"] if how == "server" else [])):
                open_page(page, view, address)
                page.wait_for_selector(".text")
                texts.append(page.inner_text("main"))
        assert page.evaluate("window.attacked") is None
    whole = "\n".join(texts)
    assert "<script>window.attacked = 1</script>" in whole
    assert "⟨RLO⟩" in whole
    assert "␀b␛[31mred" in whole
    assert "more characters" in whole
    assert not set(whole) & {"\x00", "\x1b", "\u202e", "\x07"}


def test_the_self_contained_page_shows_the_same(page: Any, workshop: Workshop, tmp_path: Path):
    os.chdir(workshop.folder)
    words = workshop.slimectl("view", "runs", "--html", str(tmp_path / "view.html"))
    assert words == b""
    assert "opens in any browser" in workshop.stderr
    workshop.slimectl("view", "runs", "--html", str(tmp_path / "view.html"), code=2)
    assert "--force" in workshop.stderr
    view = View(f"file://{tmp_path}/view.html", 0)
    for address, selector in [("curves", ".chart"), ("round/n0.r2", "tbody tr"), ("group/n0.r2/4", "article.answer"),
                              ("sample/n0.r2/1", ".token"), ("compare", "tbody tr")]:  # fmt: skip
        open_page(page, view, address)
        page.wait_for_selector(selector)
    open_page_without = f"{view.address}#/sample/n0.r2/999"
    page.goto(open_page_without)
    page.wait_for_selector("text=does not contain that page")
