"""The server of a view answers its own page alone, shows no other file, and says every mistake in one line."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import forkserver
import pytest
from views import TOKEN, View, hostile_samples, page_answers, viewing
from vision_models import image_file

from slimectl.cli.viewer.api import ViewApi
from slimectl.cli.viewer.export import write_page
from slimectl.cli.viewer.library import Library
from slimectl.errors import SettingsError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two rounds, an evaluation, and links that lead out of it."""
    root = tmp_path_factory.mktemp("view")
    run = root / "runs" / "a"
    for number in (1, 2):
        (run / f"step_{number:06d}").mkdir(parents=True)
        hostile_samples(run / f"step_{number:06d}" / "samples.jsonl")
    (run / "eval").mkdir()
    hostile_samples(run / "eval" / "small-000002.jsonl")
    (root / "secret.jsonl").write_text('{"response": "the secret"}\n')
    (run / "step_000003").mkdir()
    (run / "step_000003" / "samples.jsonl").symlink_to(root / "secret.jsonl")
    (run / "eval" / "stolen-000003.jsonl").symlink_to(root / "secret.jsonl")
    (run / "run.toml").write_text("[train]\nlr = 1e-3\n[score]\ncustom_rm_path = 'reward.py:reward'\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "rollout_id": 0, "metrics": {"rollout/raw_reward": 0.5}}\n{"st')
    return root


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[View]:
    with viewing(folder / "runs") as view:
        yield view


@pytest.mark.parametrize("name", ["", "main.js", "style.css", "uplot.js", "uplot-license.txt"])
def test_the_page_comes_with_rules_that_forbid_everything_foreign(view: View, name: str):
    with urllib.request.urlopen(view.address + name) as response:
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Referrer-Policy"] == "no-referrer"
        text = response.read().decode()
    assert name == "uplot.js" or "://" not in text  # uPlot's comments name pages that it learnt from


def test_it_serves_and_decodes_without_the_libraries_that_run_models(folder: Path, model_dir: Callable[[str], Path]):
    code = (
        "import pathlib, sys; from slimectl.runtime import builders; from slimectl.system.listening import bound; "
        "from slimectl.cli.viewer import server; from slimectl.cli.viewer.api import ViewApi; "
        "from slimectl.cli.viewer.library import Library; from slimectl.cli.viewer.token_view import Decoders; "
        "ViewApi(Library([pathlib.Path(sys.argv[1])]), builders.token_decoder).answer('catalogue', {}); "
        "bound('127.0.0.1', 0).close(); "
        "print(Decoders(builders.token_decoder).decoder(pathlib.Path(sys.argv[2]))([256 + 1, *'né'.encode()])); "
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    # Their import takes CPU seconds, which a run on the same machine would lack.
    words = [sys.executable, "-c", code, str(folder / "runs"), str(model_dir("llama"))]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert output == "<|im_start|>né\n[]\n"


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Host": "127.0.0.1.evil.example"}, {"Host": ""},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}],
)  # fmt: skip
def test_another_site_is_refused(view: View, headers: dict[str, str]):
    status, text = view.get("api/catalogue", headers)
    assert status in (400, 403)
    assert "runs" not in text.replace("slimectl view", "")


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper()])
@pytest.mark.parametrize("page", ["", "main.js", "api/catalogue", "api/raw?file=n0.r1&row=0"])
def test_nothing_is_answered_without_the_token(view: View, token: str, page: str):
    elsewhere = View(view.address.replace(TOKEN, token), view.port)
    status, text = elsewhere.get(page)
    assert status == 403
    assert "token" in text


@pytest.mark.parametrize(
    "path",
    ["../slimectl/errors.py", "..%2ferrors.py", "%2e%2e/errors.py", "page", "index.html.py", "main.py", "..",
     "/etc/passwd", "api/../../x", "main.js%00.css"],
)  # fmt: skip
def test_no_other_file_is_served(view: View, path: str):
    status, text = view.get(path)
    assert status in (400, 403, 404), text
    assert "error" in json.loads(text)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("api/nothing", "unknown question"),
        ("api/groups", "file: is missing"),
        ("api/groups?file=n0.r3", "is not in this view"),
        ("api/groups?file=/etc/passwd", "is not in this view"),
        ("api/metrics?run=../..", "is not in this view"),
        ("api/group?file=n0.r1&group=x", "is not a whole number"),
        ("api/sample?file=n0.r1&row=99999", "no sample 99999. The file has 14"),
        ("api/sample?file=n0.r1&row=-1", "out of range"),
        ("api/sample?file=n0.r1&row=" + "9" * 5000, "not a whole number"),
        ("api/groups?file=n0.r1&where=open(1)", "is not allowed in a filter"),
        ("api/compare?before=n0.r1&after=n0.r2&threshold=x", "is not a number"),
        ("api/explain?file=n0.r1&row=0", "which a view does not run"),
    ],
)
def test_a_mistake_is_one_line(view: View, question: str, reason: str):
    status, text = view.get(question)
    assert status == 400
    message = json.loads(text)["error"]
    assert reason in message
    assert "\n" not in message


def test_links_are_not_followed_and_an_unfinished_line_waits(view: View):
    catalogue = view.ask("catalogue")
    assert [file["id"] for file in catalogue["runs"][0]["files"]] == ["n0.r1", "n0.r2", "n0.e2.small"]
    answer = view.ask("metrics?run=n0")
    assert [line["step"] for line in answer["metrics"]] == [1]
    rest = view.ask(f"metrics?run=n0&metrics={answer['offsets']['metrics']}")
    assert rest["metrics"] == []


def test_a_round_counts_what_its_own_steps_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three rounds of two steps, an evaluation before and after each, read in parts of 1 kB."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "run.toml").touch()
    lines = [{"step": 0, "rollout_id": 0, "metrics": {"eval/x-truncated_ratio": 0.9, "eval/step": 0.0}}]
    for number in (1, 2, 3):
        (run / f"step_{number:06d}").mkdir()
        hostile_samples(run / f"step_{number:06d}" / "samples.jsonl")
        drops = {f"rollout/dynamic_filter/drop_{number}": float(number), "rollout/no_signal": 0.0, "x" * 600: 1.0}
        lines += [
            {"step": 2 * number - 1, "rollout_id": number, "metrics": drops},
            {"step": 2 * number, "rollout_id": number, "metrics": {"rollout/truncated_ratio": number / 8}},
            {"step": 2 * number, "rollout_id": number, "metrics": {"eval/x-truncated_ratio": 0.8}},
        ]
    metrics = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(metrics.rsplit("\n", 3)[0] + '\n{"rollout_id": 3')
    samples = (run / "step_000001" / "samples.jsonl").read_text().splitlines(keepends=True)
    (run / "step_000001" / "train_data.jsonl").write_text("".join(samples[:3] + samples[4:]))
    monkeypatch.setattr("slimectl.cli.viewer.library.MAX_METRICS_BYTES", 1000)
    with viewing(run) as view:
        assert view.ask("dropped?file=n0.r1")["untrained"] == [3]
        for number in (1, 2):
            answer = view.ask(f"dropped?file=n0.r{number}")
            again = view.ask(f"dropped?file=n0.r{number}&offset={answer['offset']}")
            assert answer == again
            assert answer["steps"] == 2
            assert answer["counts"] == {
                f"rollout/dynamic_filter/drop_{number}": [number, None], "rollout/truncated_ratio": [None, number / 8],
            }  # fmt: skip
            assert metrics[answer["offset"] :].startswith(json.dumps(lines[3 * number - 2]))
        growing = view.ask("dropped?file=n0.r3")
        (run / "metrics.jsonl").write_text(metrics)
        complete = view.ask(f"dropped?file=n0.r3&offset={growing['offset']}")
        assert (growing["steps"], complete["steps"], complete["untrained"]) == (1, 2, None)
        assert complete["counts"]["rollout/truncated_ratio"] == [None, 0.375]


def test_a_file_that_a_resume_made_shorter_is_read_again(view: View):
    answer = view.ask("metrics?run=n0&metrics=99999")
    assert (answer["offsets"]["metrics"], answer["more"]) == (0, True)


def test_settings_that_differ_are_named(folder: Path, tmp_path: Path):
    other = tmp_path / "b"
    other.mkdir()
    (other / "run.toml").write_text("[train]\nlr = 2e-3\n")
    (other / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    table = Library([folder / "runs" / "a", other]).settings_table()
    assert table["rows"] == [
        {"name": "score.custom_rm_path", "values": ["reward.py:reward", None]},
        {"name": "train.lr", "values": [1e-3, 2e-3]},
    ]


@pytest.mark.parametrize(
    ("name", "reason"), [("missing", "no such file"), ("empty", "not a run, and contains no runs")]
)
def test_a_path_that_shows_nothing_is_refused(tmp_path: Path, name: str, reason: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=reason):
        Library([tmp_path / name])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 129)])
def test_the_command_prints_an_address_and_ends_by_a_signal(folder: Path, number: signal.Signals, code: int):
    pipe = subprocess.PIPE
    process = forkserver.start(
        ["view", "runs", "--no-browser"], cwd=folder, env=dict(os.environ), stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    address = process.stdout.readline().decode().strip()
    assert View(address, 0).ask("catalogue")["runs"][0]["name"] == "a"
    process.send_signal(number)
    _, words = process.communicate(timeout=300)
    assert process.returncode == code
    assert b"Traceback" not in words


def test_a_model_can_be_named_whose_tokens_they_are(
    tmp_path: Path, model_dir: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
):
    samples, page = tmp_path / "samples.jsonl", tmp_path / "view.html"
    samples.write_text(json.dumps({"prompt": "", "tokens": [*b"hello"], "response": "", "response_length": 0}) + "\n")
    words = ["view", str(samples), "--html", str(page), "--force", "--model"]
    environment = dict(os.environ)
    assert forkserver.start([*words, str(tmp_path)], cwd=tmp_path, env=environment).wait() == 2
    assert "has no tokenizer_config.json" in capfd.readouterr().err
    assert forkserver.start([*words, str(model_dir("llama"))], cwd=tmp_path, env=environment).wait() == 0
    answers = page_answers(page)
    assert answers["sample?file=f0&row=0"]["texts"] == [*"hello"]


def test_the_images_of_a_sample_are_small_pictures_or_one_line(tmp_path: Path):
    image_file(tmp_path / "a.png", width=900, height=300)
    (tmp_path / "secret.txt").write_text("the secret")
    images = ["a.png", "secret.txt", {"bytes": base64.b64encode((tmp_path / "a.png").read_bytes()).decode()}]
    record = {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}]}
    lines = [record | {"index": 0, "multimodal_inputs": {"images": images}}, record | {"index": 1}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with viewing(tmp_path / "samples.jsonl") as view:
        file = view.ask("catalogue")["files"][0]["id"]
        first, second, third = view.ask(f"images?file={file}&row=0")
        assert view.ask(f"images?file={file}&row=1") == []
        assert view.ask(f"groups?file={file}")["groups"][0]["prompt"] == "<image>Why?"
    assert (first["name"], third["name"]) == (str(tmp_path / "a.png"), "in the record")
    assert first["address"] == third["address"]
    data = base64.b64decode(first["address"].removeprefix("data:image/png;base64,"))
    assert struct.unpack(">II", data[16:24]) == (256, 85)
    assert second["error"].endswith("secret.txt: is not a PNG, JPEG, WEBP, GIF, BMP image. Convert it.")


def test_images_come_from_files_of_the_samples_their_run_and_its_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A samples file in a folder of its own, and a run whose data lie elsewhere, name everything around them."""
    secret, data = tmp_path / "private" / "secret.png", tmp_path / "data"
    run, named = tmp_path / "runs" / "a", tmp_path / "some" / "named" / "folder" / "samples.jsonl"
    for folder in (secret.parent, data, run / "step_000001", named.parent):
        folder.mkdir(parents=True)
    image_file(secret, width=30, height=20)
    image_file(data / "prompt.png", width=30, height=20)
    (data / "prompts.jsonl").write_text("{}\n")
    (run / "run.toml").write_text(f"[rollout]\ndata = ['{data}/prompts.jsonl@[0:1]', 'no/such/file']\n")
    refused: dict[str, str] = {
        str(secret): "is outside", "../../../private/secret.png": "is outside",
        "link.png": "is outside", "folder/secret.png": "is outside",
        "/dev/zero": "is outside", "zero": "is outside", "fifo": "not a regular file", ".": "not a regular file",
        "a\0b": "cannot be read", "half \ud800": "cannot be read", "loop": "cannot be read", "gone.png": "No such file",
        "large": "larger than 0 MiB", str(data / "prompt.png"): "is outside",
    }  # fmt: skip
    for samples in (run / "step_000001" / "samples.jsonl", named):
        folder = samples.parent
        (folder / "link.png").symlink_to(secret)
        (folder / "folder").symlink_to(secret.parent)
        (folder / "zero").symlink_to("/dev/zero")
        (folder / "loop").symlink_to("loop")
        os.mkfifo(folder / "fifo")
        image_file(folder / "own.png", width=30, height=20)
        (folder / "large").write_bytes(b"\x89PNG" + b" " * 9000)
        samples.write_text(json.dumps({"multimodal_inputs": {"images": [*refused, "own.png"]}}) + "\n")
    monkeypatch.setattr("slimectl.data.images.MAX_BYTES", 9000)
    for path in (run, named):
        with viewing(path) as view:
            *answers, last = view.ask(f"images?file={'n0.r1' if path == run else 'f0'}&row=0")
        reasons = [reason in answer.get("error", "") for reason, answer in zip(refused.values(), answers, strict=True)]
        assert reasons == [True] * (len(refused) - 1) + [path == named], answers
        assert "address" in last
        assert ("address" in answers[-1]) == (path == run)  # the data of its run
        assert not any("\n" in answer.get("error", "") for answer in answers)


def test_a_self_contained_page_that_is_full_has_the_newest_with_their_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of nine rounds with an evaluation after each, with sixteen groups of a sample, a part fits."""
    image_file(tmp_path / "a.png", width=20, height=10)
    encoded = {"bytes": base64.b64encode((tmp_path / "a.png").read_bytes()).decode()}
    run = tmp_path / "a"
    (run / "eval").mkdir(parents=True)
    (run / "run.toml").touch()
    for number in range(1, 10):
        (run / f"step_{number:06d}").mkdir()
        lines = [{"group_index": group, "index": group, "prompt": f"{number} {group}", "response": "x" * 5000}
                 for group in range(16)]  # fmt: skip
        lines[0]["multimodal_inputs"] = {"images": [encoded]}
        for file in (run / f"step_{number:06d}" / "samples.jsonl", run / "eval" / f"small-{number:06d}.jsonl"):
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("slimectl.cli.viewer.export.MAX_BYTES", 1_200_000)
    summary = write_page(ViewApi(Library([run]), lambda folder: None), tmp_path / "view.html")
    answers = page_answers(tmp_path / "view.html")
    assert re.search(r"without \d+ pages beyond", summary)
    assert (tmp_path / "view.html").stat().st_size < 1_000_000
    overviews = {f"groups?file=n0.r{n}" for n in range(1, 10)} | {f"groups?file=n0.e{n}.small" for n in range(1, 10)}
    assert overviews <= answers.keys()
    for file in ("n0.e9.small", "n0.r9", "n0.e8.small"):
        assert {f"group?file={file}&group=7", f"sample?file={file}&row=7", f"raw?file={file}&row=7"} <= answers.keys()
        assert answers[f"images?file={file}&row=0"][0]["address"].startswith("data:image/png;base64,")
        number = next(line["hash"] for line in answers[f"groups?file={file}"]["groups"] if line["group"] == 7)
        assert f"prompt?hash={number}&run=n0" in answers
    assert "group?file=n0.r1&group=7" not in answers
