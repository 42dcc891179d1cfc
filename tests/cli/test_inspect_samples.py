"""`slimectl inspect` of samples: filtered, sorted, one prompt over rounds, followed, compared, coloured by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from views import HOSTILE, hostile_samples

from slimectl.cli import follow
from slimectl.cli.app import app
from slimectl.data.manifest import Manifest, manifest_path
from slimectl.data.resumable import ResumableOutput
from slimectl.data.run_dir import RunDir
from slimectl.types import Sample


def inspect(*words: str | Path, code: int = 0, environment: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(app, ["inspect", *map(str, words)], env=environment)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def shown(*words: str | Path) -> list[int]:
    """The numbers of the samples that are printed."""
    return [
        int(line.split("sample ")[1].split()[0]) for line in inspect(*words).stdout.splitlines() if line[:3] == "---"
    ]


def sample(index: int, **fields: object) -> dict:
    record = {"group_index": index // 2, "index": index, "prompt": f"prompt {index // 2}", "tokens": [60, 65, 66],
              "response": f"answer {index}", "response_length": 2, "reward": None, "status": "completed"}  # fmt: skip
    return record | fields


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


REWARDS = [0.5, 0.0, 1.0, None, 0.25, 1.0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    records = [sample(at, reward=reward, metadata={"level": at % 3}) for at, reward in enumerate(REWARDS)]
    return write(tmp_path / "samples.jsonl", records)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two rounds of two prompts, whose second answers change, and what was trained on in the second."""
    folder = tmp_path / "runs" / "a"
    for number in (1, 2):
        records = [
            sample(10 * number + at, group_index=2 * number + at // 2, prompt=f"prompt {at // 2}", label="b",
                   reward=float(number == 2 and at == 1), response=f"the {'good' if at == number - 1 else 'bad'} one",
                   rollout_log_probs=[-0.5, -4.0], weight_versions=[str(number)])
            for at in range(4)
        ]  # fmt: skip
        write(folder / f"step_{number:06d}" / "samples.jsonl", records)
    trained = [
        record | {"ratios": [1.0, 1.5], "clipped": [False, True], "advantages": [0.75, 0.75]} for record in records
    ]
    write(folder / "step_000002" / "train_data.jsonl", trained)
    (folder / "run.toml").write_text("[eval]\nsuccess_threshold = 0.5\n")
    return folder


def test_an_answer_of_several_weight_versions_has_the_span_of_each(tmp_path: Path, model_dir: Callable[..., Path]):
    spans = [["6", 0, 1], ["7", 1, 3]]
    records = [
        sample(0, tokens=[60, 65, 66, 67], response_length=3, loss_mask=[1, 1, 1], rollout_log_probs=[-1.0] * 3,
               weight_versions=["6", "7"], metadata={"weight_version_spans": spans}),
        sample(1, tokens=[60, 65, 66], weight_versions=["6", "7"]),
    ]  # fmt: skip
    path = write(tmp_path / "samples.jsonl", records)
    words = [path, "--color-by", "version", "--model", model_dir()]
    assert [line for line in inspect(*words).stdout.splitlines() if line.startswith("<")] == ["<A{6}BC{7}", "<AB{6-7}"]
    coloured = inspect(*words, environment={"FORCE_COLOR": "1"}).stdout
    assert "\x1b[30;46mA\x1b[0m\x1b[30;43mBC\x1b[0m (version 6, 7)" in coloured


def test_a_reward_that_is_an_object_counts_as_its_score_and_shows_its_components(tmp_path: Path):
    rewards = [{"right": 1.0, "short": 0.5, "score": 1.5}, {"right": 0.0, "short": None, "score": 0.0}]
    path = write(tmp_path / "samples.jsonl", [sample(2 * at, reward=reward) for at, reward in enumerate(rewards)])
    header, first, *_ = inspect(path).stdout.splitlines()
    assert header == f"{path}: 2 samples of 2 prompts, mean reward 0.75, right 0.5"  # short has one prompt only
    assert 'reward {"right": 1.0, "short": 0.5, "score": 1.5}' in first
    assert inspect(path, "--where", "reward >= 0").stdout.splitlines()[0].endswith("mean reward 0.75, right 0.5")
    assert shown(path, "--where", "reward > 1.2") == [0]
    answer = json.loads(inspect(path, "--json").stdout)
    assert (answer["mean_reward"], answer["mean_components"]) == (0.75, {"right": 0.5})


def test_a_filter_and_a_sort_choose_what_is_printed(file: Path):
    assert shown(file, "--where", "reward > 0.3") == [0, 2, 5]
    assert shown(file, "--sort", "-reward", "--rows", "9") == [2, 5, 0, 4, 1, 3]  # the one without a reward is last
    assert shown(file, "--sort", "reward", "--rows", "2") == [1, 4]
    assert shown(file, "--sort", "-metadata.level", "--where", "metadata.level > 0") == [2, 5, 1]
    assert shown(file, "--sort", "response", "--where", "'5' in response or '4' in response") == [4, 5]
    header = inspect(file, "--where", "reward > 0.3").stdout.splitlines()[0]
    assert header == f"{file}: 3 of 6 samples match reward > 0.3: 3 prompts, mean reward 0.8333"
    answer = json.loads(inspect(file, "--where", "reward > 0.3", "--sort", "-index", "--rows", "1", "--json").stdout)
    assert (answer["matches"], answer["samples"], [row["index"] for row in answer["rows"]]) == (3, 6, [5])


def test_samples_of_a_run_are_those_of_all_its_files_the_newest_first(run: Path):
    assert shown(run, "--where", "reward == 1 or index == 10") == [21, 10]
    assert shown(run / "step_000001", "--sort", "-index", "--rows", "1") == [13]
    assert shown(run / "step_000002" / "train_data.jsonl", "--where", "ratios != null", "--rows", "1") == [20]
    assert "round 2, sample 21 (completed, reward 1.0, label 'b')" in inspect(run, "--where", "reward == 1").stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--where", "len(x)"], "filter: 'len(x)' is not allowed in a filter"),
        (["--sort", "nothing"], "--sort nothing: no sample has this field. Fields of a sample: group_index"),
        (["--color-by", "mood"], "--color-by: 'mood' is unknown. Choose one of logprob"),
        (["--prompt", "prompt"], "3 prompts contain 'prompt'. Give the number of one:"),
        (["--prompt", "poem"], "no prompt contains 'poem'"),
        (["--diff"], "--diff: needs two paths"),
        (["--prompt", "1", "--follow"], "--prompt and --follow cannot be combined"),
        (["--prompt", "1", "--sort", "index"], "--prompt and --sort cannot be combined"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(file: Path, words: list[str], reason: str):
    assert reason in inspect(file, *words, code=2).stderr


def test_lines_that_are_no_samples_are_counted_and_the_others_shown(file: Path):
    with file.open("a") as lines:
        lines.write('{"half\n' + json.dumps(sample(6)) + "\n")
    result = inspect(file, "--where", "index > 4")
    assert "2 of 7 samples match" in result.stdout
    assert result.stderr.startswith(f"{file}: 1 line skipped, e.g. {file}: byte ")


def test_one_prompt_is_shown_over_rounds_by_its_number_or_a_part_of_it(run: Path):
    by_number, by_text = (inspect(run, "--prompt", wanted, "--rows", "1").stdout for wanted in ("4", "PROMPT 0"))
    assert by_number == by_text
    assert by_text.splitlines() == [
        "prompt 0",
        "label 'b', 4 responses in 2 files, mean reward 0 ▁█ 0.5",
        "--- round 1: reward 0 0, mean 0, length 2",
        "     0  the good one",
        "--- round 2: reward 0 1, mean 0.5, length 2",
        "     0  the bad one",
    ]
    answer = json.loads(inspect(run, "--prompt", "4", "--json").stdout)
    assert [line["file"]["round"] for line in answer["appearances"]] == [1, 2]


def test_two_rounds_are_compared_by_the_change_of_the_reward_with_the_words_that_differ(run: Path):
    rounds = [run / "step_000001", run / "step_000002"]
    lines = inspect("--diff", *rounds).stdout.splitlines()
    assert lines[2] == "2 prompts in both, mean reward 0 -> 0.25 (+0.25), 1 became right, 0 wrong"
    assert lines[3].startswith("--- 0 -> 0.5 (+0.5)  label 'b'")
    assert lines[4:6] == ["- the [-good-] one", "+ the {+bad+} one"]
    assert lines[6].startswith("--- 0 -> 0 (+0)")
    same = inspect("--diff", run, run, "--rows", "1").stdout.splitlines()  # the newest round of both
    assert same[:2] == [str(run / "step_000002" / "samples.jsonl")] * 2
    assert json.loads(inspect("--diff", *rounds, "--json").stdout)["became_right"] == 1

    def prompts(*words: str) -> list[str]:
        return [line["prompt"] for line in json.loads(inspect("--diff", *rounds, *words, "--json").stdout)["prompts"]]

    assert prompts("--sort", "after") == ["prompt 1", "prompt 0"]
    assert prompts("--sort", "-group_index") == ["prompt 1", "prompt 0"]
    assert prompts("--sort", "group_index") == ["prompt 0", "prompt 1"]
    assert prompts("--where", "reward > 0.5") == ["prompt 0"]  # an answer of the second round
    assert prompts("--where", "reward > 2") == []
    right = inspect("--diff", *rounds, "--where", "reward > 0.5").stdout
    assert "1 prompt in both that match reward > 0.5, mean" in right
    unknown = inspect("--diff", *rounds, "--sort", "colour", code=2)
    assert "--sort colour: no sample has this field" in unknown.stderr


def test_a_sample_says_why_it_has_its_reward(run: Path, file: Path, tmp_path: Path):
    (run / "run.toml").write_text('[score]\nrm_type = "exact"\n')
    words = [run / "step_000002", "--where", "index == 21", "--explain"]
    why = "why: response: 'the good one' is not the label 'b'"
    assert inspect(*words).stdout.splitlines()[-1] == why
    assert (
        "not part of a run, so its verifier is unknown. Use slimectl score" in inspect(file, "--explain", code=2).stderr
    )
    assert "--diff and --explain cannot be combined" in inspect("--diff", file, file, "--explain", code=2).stderr
    explanation = {"extracted": None, "from": "\x1b[31mbox", "why": "empty", "span": None}
    parts = [sample(0, metadata={"explanation": value}) for value in (explanation, {"from": 3}, "text")]
    lines = inspect(write(tmp_path / "graded.jsonl", parts), "--sort", "index").stdout.splitlines()
    assert [line for line in lines if line.startswith("why")] == ["why: ␛[31mbox: empty"]


def test_a_reward_that_is_an_object_is_filtered_by_its_number_and_by_its_parts(tmp_path: Path):
    rewards = [{"acc": 0.0, "form": 1.0}, {"acc": 1.0, "form": 0.0}, {"acc": 0.0, "form": 0.0}]
    records = [sample(at, reward=reward, metadata={"level": at}) for at, reward in enumerate(rewards)]
    path = write(tmp_path / "samples.jsonl", records)
    assert shown(path, "--where", "reward < 0.5") == [0, 2]
    assert shown(path, "--where", "reward < 0.5 and metadata.level > 0") == [2]
    assert shown(path, "--where", "reward < 0.5 and reward.form > 0.5") == [0]


def test_runs_are_compared_by_the_newest_evaluation_that_both_have(run: Path, tmp_path: Path):
    other = tmp_path / "runs" / "b"
    for folder, reward, numbers in ((run, 0.0, (0, 2, 4)), (other, 1.0, (0, 2))):
        for number in numbers:
            write(folder / "eval" / f"small-{number:06d}.jsonl", [sample(0, reward=reward)])
    (other / "run.toml").touch()
    (other / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    lines = inspect("--diff", run, other).stdout.splitlines()
    assert [Path(line).name for line in lines[:2]] == ["small-000002.jsonl"] * 2
    assert "mean reward 0 -> 1 (+1), 1 became right, 0 wrong" in lines[2]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("logprob", "<A{-0.5}B{-4}"),
        ("advantage", "<AB{0.75}"),
        ("ratio", "<A{1}B{1.5!}"),
        ("mask", "<[[AB]]"),
        ("version", "<AB{2}"),
        (
            "trainer_minus_engine",
            '(no trainer_minus_engine: this sample was not trained on, or run.keep_samples of the run is not "train")',
        ),
    ],
)
def test_tokens_have_their_numbers_behind_them_without_colours(
    run: Path, model_dir: Callable[..., Path], name: str, plain: str
):
    words = [run / "step_000002", "--color-by", name, "--rows", "1", "--model", model_dir()]
    lines = inspect(*words, environment={"NO_COLOR": "1", "FORCE_COLOR": "1"}).stdout.splitlines()
    assert plain in lines
    assert "\x1b" not in "".join(lines)


def test_tokens_are_coloured_by_the_strength_that_the_page_shows(run: Path, model_dir: Callable[..., Path]):
    words = [run / "step_000002", "--rows", "1", "--model", model_dir(), "--color-by"]
    colours = {"FORCE_COLOR": "1", "NO_COLOR": None, "TERM": "xterm"}
    ratio = inspect(*words, "ratio", environment=colours).stdout  # log 1.5 / 0.3 is above 1: the strongest, underlined
    assert "\x1b[2m<\x1b[0mA\x1b[38;5;16;48;5;208;4mB\x1b[0m\n" in ratio
    advantage = inspect(*words, "advantage", environment=colours).stdout  # 0.75 / 2 rounds to the second of four levels
    assert "\x1b[38;5;16;48;5;222mAB\x1b[0m\n" in advantage


def test_hostile_texts_are_harmless(tmp_path: Path):
    path = tmp_path / "samples.jsonl"
    hostile_samples(path)
    views = [
        [path, "--rows", "20"], [path, "--where", "reward > 0", "--rows", "20"], [path, "--prompt", "3"],
        [path, "--prompt", "half"],
        ["--diff", path, path, "--rows", "20"], [path, "--sort", "response", "--color-by", "version", "--rows", "20"],
        [path, "--rows", "20", "--json"],
    ]  # fmt: skip
    for words in views:
        text = inspect(*words, environment={"NO_COLOR": "1"}).stdout
        assert not {letter for letter in text if ord(letter) < 32} - {"\n", "\t"}, words
        assert not {"\x7f", "\x9b", "\u202e", "\u2066", "\ufeff", "\ud800"} & {*text}, words
        assert len(text) < 200_000 or "--json" in words
    records = json.loads(text)["rows"]
    assert [record["response"] for record in records[::2]] == [f"{name}: {text}" for name, text in HOSTILE.items()]


def test_new_samples_of_a_file_are_printed_until_ctrl_c(file: Path, monkeypatch: pytest.MonkeyPatch):
    later = [[sample(6, reward=1.0), sample(7, reward=0.0)], [sample(8, reward=1.0)]]

    def sleep(seconds: float) -> None:
        if not later:
            raise KeyboardInterrupt
        with file.open("a") as lines:
            lines.write("".join(json.dumps(record) + "\n" for record in later.pop(0)) + '{"ha')
        if later:
            file.write_text(file.read_text().removesuffix('{"ha'))

    monkeypatch.setattr(follow.time, "sleep", sleep)
    result = inspect(file, "--follow", "--where", "reward > 0.3", "--rows", "1", code=130)
    assert [line.split()[2] for line in result.stdout.splitlines() if line[:3] == "---"] == ["5", "6", "8"]
    assert result.stderr == "slimectl: interrupted\n"


def test_a_file_that_is_replaced_is_read_from_its_start(file: Path, monkeypatch: pytest.MonkeyPatch):
    versions = [[sample(40)], []]

    def sleep(seconds: float) -> None:
        if not (records := versions.pop(0)):
            raise KeyboardInterrupt
        write(file.with_name("new"), records).replace(file)

    monkeypatch.setattr(follow.time, "sleep", sleep)
    result = inspect(file, "--follow", "--rows", "0", "--json", code=130)
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [40]


def test_a_run_is_followed_to_its_end(run: Path, monkeypatch: pytest.MonkeyPatch):
    lock = RunDir(run).lock()

    def sleep(seconds: float) -> None:
        write(run / "step_000003" / "samples.jsonl", [sample(30)])
        lock.release()

    monkeypatch.setattr(follow.time, "sleep", sleep)
    result = inspect(run, "--follow", "--rows", "2")
    headings = [line for line in result.stdout.splitlines() if line[:3] == "---"]
    assert [line.split(" (")[0] for line in headings] == [
        "--- round 2, sample 22", "--- round 2, sample 23", "--- round 3, sample 30",
    ]  # fmt: skip
    keeping = f"{run}: has samples of its evaluations only. Set run.keep_samples = true to keep samples of rounds\n"
    assert result.stderr == f"{keeping}{run}: stopped\n"  # its settings say nothing of keep_samples


def test_an_output_is_followed_while_its_stage_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "out.jsonl"
    with ResumableOutput(str(out), Manifest("score", {}, {})) as partial:
        partial.write(Sample(index=0, prompt="p", response="first"))

        def sleep(seconds: float) -> None:
            partial.write(Sample(index=1, prompt="p", response="second"))
            partial.commit()

        monkeypatch.setattr(follow.time, "sleep", sleep)
        assert manifest_path(partial.path).exists()
        result = inspect(out, "--follow")
    assert [line for line in result.stdout.splitlines() if line[:3] == ">>>"] == [">>> first", ">>> second"]
    assert result.stderr == f"{out}: is complete\n"


def test_images_of_a_sample_are_named_and_with_colours_pictured(tmp_path: Path):
    from PIL import Image

    half = Image.new("RGB", (32, 32), (255, 0, 0))
    half.paste((0, 0, 255), (0, 16, 32, 32))
    half.save(tmp_path / "half.png")
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    outside = tmp_path.with_name("outside.png")
    half.save(outside)
    inputs = {"images": ["half.png", "gone.png", str(outside)]}
    file = write(tmp_path / "samples.jsonl", [sample(0, prompt=chat, multimodal_inputs=inputs)])
    plain = inspect(file, "--sort", "index", environment={"NO_COLOR": "1"}).stdout
    assert f"image 1: {tmp_path / 'half.png'}\nimage 2: {tmp_path / 'gone.png'}\nimage 3: {outside}\n" in plain
    coloured = inspect(file, "--sort", "index", environment={"FORCE_COLOR": "1"}).stdout
    lines = [line for line in coloured.splitlines() if "▀" in line]
    assert [line.count("▀") for line in lines] == [24] * 12
    assert lines[0].startswith("\x1b[38;2;255;0;0;48;2;255;0;0m▀")
    assert lines[-1].startswith("\x1b[38;2;0;0;255;48;2;0;0;255m▀")
    assert "gone.png: the image cannot be read" in coloured
    assert "outside.png: is outside the folders of these samples" in coloured
