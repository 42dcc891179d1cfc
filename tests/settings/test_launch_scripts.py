"""Launch scripts of other stacks become settings; nothing of them is executed.

Write the expected settings anew after an intended change, and read the difference:
python tests/settings/test_launch_scripts.py
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.conversion import Dialect, Row, canonical
from slimectl.migrate.launch_scripts.reading import DIALECTS, Reading, read
from slimectl.migrate.launch_scripts.writing import flag_name, inline, settings_file
from slimectl.settings.keys import setting_names
from slimectl.settings.layers import from_file
from slimectl.settings.loading import resolve

SCRIPTS = Path(__file__).parent / "launch_scripts"
FLAGS = (Path(__file__).parent / "slime_flags.txt").read_text(encoding="utf-8").split()
"""slime's flags, as its documents name them."""

TRAIN = (
    "python3 train.py --hf-checkpoint /m --prompt-data /d.jsonl --rollout-batch-size 4 --rm-type math "
    "--rollout-max-response-len 64"
)
"""The beginning of a training command, to which a test adds its flags."""


def reading(tmp_path: Path, text: str, name: str = "run.sh", **options: Any) -> Reading:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return read(file, **{"environ": {}, **options})


def settings_of(tmp_path: Path, text: str, name: str = "run.sh", **options: Any) -> dict[str, Any]:
    """Dotted settings of the file that is written, which the loader of settings has accepted."""
    result = reading(tmp_path, text, name, **options)
    written = tmp_path / "written.toml"
    written.write_text(settings_file(result.conversion, tmp_path / name, result.notes), encoding="utf-8")
    resolve([from_file(written)])
    sections = tomllib.loads(written.read_text(encoding="utf-8"))
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


@pytest.mark.parametrize(
    "file", sorted(path for path in SCRIPTS.glob("*/run.*")), ids=lambda path: f"{path.parent.name}{path.suffix}"
)
def test_a_launch_file_with_every_construct_becomes_the_expected_settings_in_full(file: Path):
    result = read(file, environ={"HOME": "/home/user"})
    assert settings_file(result.conversion, file, result.notes) == file.with_name("expected.toml").read_text("utf-8")
    assert result.conversion.problems == []
    resolve([from_file(file.with_name("expected.toml"))])


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_key_of_a_table_is_a_setting_and_every_flag_has_one_row(name: str):
    rows = [row for group in DIALECTS[name].groups.values() for row in group]
    known = {*setting_names(), "custom.max_turns"}
    assert [row.names for row in rows if row.key and ".".join(row.key.split(".")[:2]) not in known] == []
    assert [row.names for row in rows if not row.key and not row.text] == []
    flags = [flag for row in rows for flag in row.names.split()]
    assert sorted(flag for flag in set(flags) if flags.count(flag) > 1) == []


def test_every_flag_of_slime_has_a_row():
    assert [flag for flag in FLAGS if canonical(flag) not in DIALECTS["slime"].rows] == []


VALUES = {
    "loss-type": "policy_loss", "advantage-estimator": "gspo", "kl-loss-type": "k2", "train-backend": "megatron",
    "update-weight-mode": "full", "update-weight-transport": "disk", "update-weight-delta-encoding": "xor",
    "update-weight-delta-checksum": "blake3", "lr-decay-style": "cosine", "eval-prompt-data": "aime /aime.jsonl",
    "apply-chat-template-kwargs": "'{\"a\": 1}'", "rollout-top-p": "0.9", "eval-top-p": "0.9", "gamma": "0.9",
    "lambd": "0.9", "eps-clip": "0.3", "eps-clip-high": "0.4", "eps-clip-c": "3", "rollout-stop": "END STOP",
    "wandb-mode": "offline", "sglang-router-ip": "10.0.0.1", "rollout-external-engine-addrs": "10.0.0.1:30000",
}  # fmt: skip
"""Values for flags that take no plain number."""


def composed(seed: int) -> tuple[str, list[str]]:
    """A script of flags drawn from slime's, in arrays, some of them given twice; and the names of those flags."""
    draw = random.Random(seed)
    flags = draw.sample(FLAGS, 40)
    switches = ("use-", "disable-", "debug-", "log-", "skip-", "custom-", "colocate", "partial-", "offload")
    rows = DIALECTS["slime"].rows
    words = []
    for flag in flags:
        key = rows[canonical(flag)].key
        if "path" in flag:
            value = "package.module.function"
        elif flag in VALUES:
            value = VALUES[flag]
        elif flag.startswith(switches) or getattr(rows[canonical(flag)].convert, "__name__", "") in ("on", "off"):
            value = ""
        else:
            value = str(draw.randint(1, 4)) if not key.endswith(("_key", "data", "dir", "host")) else "name"
        words.append(f"--{flag} {value}".strip())
    half = len(words) // 2
    lines = "\n  ".join(words[:half])
    rest = " \\\n  ".join(words[half:])
    return f"FIRST=(\n  {lines}\n)\n{TRAIN} \\\n  ${{FIRST[@]}} \\\n  {rest}\n", flags


@pytest.mark.parametrize("seed", range(30))
def test_scripts_of_drawn_flags_become_settings_and_no_flag_vanishes(seed: int, tmp_path: Path):
    text, flags = composed(seed)
    result = reading(tmp_path, text)
    written = settings_file(result.conversion, tmp_path / "run.sh", result.notes)
    assert [flag for flag in flags if f"--{flag}" not in written] == []
    (tmp_path / "written.toml").write_text(written, encoding="utf-8")
    if not result.conversion.problems:
        resolve([from_file(tmp_path / "written.toml")])
    else:  # the drawn flags contradict each other: the file names each contradiction
        with pytest.raises(SettingsError) as error:
            resolve([from_file(tmp_path / "written.toml")])
        assert sorted(str(error.value).splitlines()) == sorted(result.conversion.problems)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--eval-prompt-data /aime.jsonl", {"eval.data": {"aime": "/aime.jsonl"}}),
        ("--skip-eval-before-train", {"eval.before_train": False}),
        ("--update-weight-buffer-size 1073741824", {"sync.update_weight_buffer_size": 1024}),
        ("--custom-rm-path my.rewards.judge --rm-type math", {"score.custom_rm_path": "my.rewards:judge"}),
        ("--use-kl-loss --kl-loss-coef 0.01", {"algorithm.kl_loss_coef": 0.01, "algorithm.kl_loss_type": "k1"}),
        ("--kl-loss-coef 0.01", {}),
        ("--advantage-estimator gspo --eps-clip 1e-4 --eps-clip-high 2e-4",
         {"algorithm.name": "gspo", "algorithm.eps_clip": 1e-4, "algorithm.eps_clip_high": 2e-4}),
        ("--advantage-estimator on_policy_distillation --use-opd --opd-kl-coef 0.5 --opd-teacher-load /t",
         {"algorithm.name": "opd", "algorithm.opd_kl_coef": 0.5, "algorithm.opd_teacher_load": "/t"}),
        ("--loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
         {"algorithm.name": "sft"}),
        ("--actor-num-nodes 2 --rollout-num-gpus 16",
         {"cluster.actor_num_nodes": 2, "cluster.executor": "ray", "cluster.rollout_num_gpus": 16}),
        ("--colocate --rollout-num-gpus 4 --actor-num-gpus-per-node 4",
         {"cluster.colocate": True, "cluster.rollout_num_gpus": 4, "cluster.actor_num_gpus_per_node": 4}),
        ("--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /shared",
         {"sync.transport": "delta", "sync.update_weight_disk_dir": "/shared"}),
        ("--sglang-router-ip 10.0.0.1 --sglang-router-port 3000", {"engine.url": ["http://10.0.0.1:3000"]}),
        ("--use-tensorboard --tb-project-name p --tb-experiment-name e",
         {"track.with": ["stdout", "tensorboard"],
          "track.kwargs": {"tensorboard": {"log_dir": "tensorboard_log/p/e"}}}),
        ("--num-rollout 5 --num-rollout 7", {"run.num_rollout": 7}),
        ("""--multimodal-keys '{"image": "pictures"}'""", {"rollout.image_key": "pictures"}),
        ("""--multimodal-keys '{"image": "pictures", "video": "clips"}'""", {"rollout.image_key": None}),
        ("--train-backend fsdp --gradient-checkpointing --tensor-model-parallel-size 2",
         {"train.backend": None, "train.gradient_checkpointing": True, "megatron.tensor_model_parallel_size": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_flags_of_slime_become_settings(flags: str, expected: dict[str, Any], tmp_path: Path):
    settings = settings_of(tmp_path, f"{TRAIN} {flags}\n")
    assert {key: settings.get(key) for key in expected} == expected


def test_train_async_samples_one_round_ahead(tmp_path: Path):
    assert settings_of(tmp_path, TRAIN.replace("train.py", "train_async.py"))["run.async_level"] == 1


def test_what_slime_does_without_a_flag_is_set_where_it_is_done_otherwise_here(tmp_path: Path):
    text = settings_file(reading(tmp_path, TRAIN).conversion, tmp_path / "run.sh", [])
    settings = settings_of(tmp_path, TRAIN)
    assert settings["rollout.n_samples_per_prompt"] == 1
    assert settings["rollout.input_key"] == "input"
    assert 'lr_decay_style = "linear"  # the default of slime for lr-decay-style' in text
    assert "kl_loss_type" not in text  # there is no divergence whose estimator it could be


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('A=3; B="$A$A"; {} --num-rollout $((B + 0x10 - 2 ** 3))', 41),
        ('for n in 1 2 3; do N=$n; [ $n -ge 2 ] && break; done; {} --num-rollout $N', 2),
        ('i=0; while (( i < 5 )); do ((i++)); done; {} --num-rollout $i', 5),
        ('N=9; if [[ $N -gt 3 && "$N" != 10 ]]; then N=12; fi; {} --num-rollout $N', 12),
        ('f() {{ local a=$1; N=$((a * 2)); return; N=0; }}; f 21; {} --num-rollout $N', 42),
        ('P=models/qwen-8.tar.gz; F=${{P##*/}}; N=${{F//[!0-9]/}}; {} --num-rollout $N', 8),
        ('A=(1 2 3 4); {} --num-rollout ${{#A[@]}}', 4),
        ('A=(5 6 7); {} --num-rollout ${{A[-1]}}', 7),
        ('read_it() {{ echo 17; }}; {} --num-rollout $(read_it)', 17),
        ('X=N; N=4; {} --num-rollout ${{!X}}', 4),
        ('N=abcdef; {} --num-rollout ${{#N}}', 6),
        ('{} --num-rollout=11 # 12', 11),
        ("{} --num-rollout `echo 13`", 13),
        ('case abc in a*) N=14 ;; *) N=15 ;; esac; {} --num-rollout $N', 14),
        ('N=1; ( N=2 ); {} --num-rollout $N', 1),
        ('set -- 7 8; shift; {} --num-rollout "$1"', 8),
        ('{} --num-rollout ${{1:-16}}', 16),
        ('N=5; N+=0; {} --num-rollout $N', 50),
        ("N=$'1\\x38'; {} --num-rollout ${{N%\\\\*}}9", 19),
        ('if false; then exit 1; elif true; then N=18; fi; {} --num-rollout $N', 18),
        ('declare -i N=20; export N; {} --num-rollout $N', 20),
        ('N=$(basename /a/21.sh .sh); {} --num-rollout $N', 21),
        ('{} "$@" --num-rollout 22', 22),
        ('{} --num-rollout 23 "$@"', 23),
        ('E=(); {} --num-rollout 24 "${{E[@]}}"', 24),
        ("{} --num-rollout $(expr 5 \\* \\( 2 + 3 \\))", 25),
        ("for N in $(seq 2 8 26); do :; done; {} --num-rollout $N", 26),
        ("N=27; bash -lc \"{} --num-rollout $N\"", 27),
        ("srun --nodes=1 bash -c 'N=28; {} --num-rollout $N'", 28),
        ("read -r -d '' A <<EOF\n--num-rollout\n  29\nEOF\n{} $A", 29),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_language_of_the_shell_is_followed(script: str, expected: int, tmp_path: Path):
    text = script.replace("{}", TRAIN, 1).replace("{{", "{").replace("}}", "}")
    assert settings_of(tmp_path, text)["run.num_rollout"] == expected


@pytest.mark.parametrize(
    ("script", "line", "reason"),
    [
        ("N=$(nproc)\n{} --num-rollout $N", 2, "$(nproc) is a command, and nothing of the script is executed"),
        ("if nvidia-smi; then N=1; else N=2; fi\n{} --num-rollout $N", 2, "it depends on a condition"),
        ("{} --num-rollout $ROUNDS", 1, "ROUNDS is not set in the script or in the environment"),
        ("if [ $# -lt 1 ]; then exit 1; fi\nN=$1\n{} --num-rollout $N", 3, "1 is not set in the script"),
        ("N=$(seq 1 0 5)\n{} --num-rollout $N", 2, "$(seq 1 0 5) is a command, and nothing of the script is executed"),
        ("read N < file\n{} --num-rollout $N", 2, "it is read from a file"),
        ("A=()\nnvidia-smi && A+=(--num-rollout 3)\n{} ${A[@]}", 2, "it depends on a condition"),
    ],
)
def test_what_the_script_alone_does_not_tell_is_named_and_left_to_the_user(
    script: str, line: int, reason: str, tmp_path: Path
):
    conversion = reading(tmp_path, script.replace("{}", TRAIN)).conversion
    (omission,) = [omission for omission in conversion.omissions if omission.by_hand and not omission.first]
    assert omission.place == f"{tmp_path / 'run.sh'}:{line}"
    assert omission.reason.startswith(reason)
    assert omission.reason.endswith(". Set run.num_rollout by hand")
    assert "run.num_rollout" not in conversion.values


def test_a_size_that_follows_from_an_unknown_one_is_not_guessed(tmp_path: Path):
    settings = settings_of(tmp_path, f"{TRAIN} --colocate --actor-num-nodes $(wc -l < hosts)")
    assert settings["cluster.colocate"] is True
    assert "cluster.rollout_num_gpus" not in settings


def test_a_flag_whose_value_does_not_matter_needs_none(tmp_path: Path):
    assert settings_of(tmp_path, f"{TRAIN} --dump-details /dumps/$(date +%F)")["run.keep_samples"] == "train"


def test_images_of_verl_keep_their_column_and_their_tower(tmp_path: Path):
    tower = "actor_rollout_ref.actor.freeze_vision_tower=false"
    text = f"python3 -m verl.trainer.main_ppo data.train_files=/d.parquet data.image_key=pictures {tower}\n"
    settings = settings_of(tmp_path, text)
    assert (settings["rollout.image_key"], settings["train.freeze_vision_tower"]) == ("pictures", False)


def test_a_table_in_an_assignment_of_hydra_is_its_members(tmp_path: Path):
    optim = "actor_rollout_ref.actor.optim='{lr: 2e-6, weight_decay: 0.05, betas: [0.9, 0.95]}'"
    text = f"python3 -m verl.trainer.main_ppo data.train_files=/d.parquet data.train_batch_size=64 {optim}\n"
    settings = settings_of(tmp_path, text)
    assert [settings[f"train.{name}"] for name in ("lr", "weight_decay", "adam_beta2")] == [2e-6, 0.05, 0.95]


YAML = """\
base: &base {warmup_steps: 20, learning_rate: 1.0e-3}
rollout_batch_size: 128
response_length: ${oc.env:RESPONSE,4096}
pretrain: ${oc.env:MODEL}
actor_train:
  training_args:
    <<: *base
    learning_rate: 2.0e-5
"""


def test_merged_mappings_and_variables_of_the_environment_in_yaml_are_followed(tmp_path: Path):
    names = ("model.path", "rollout.max_response_len", "train.lr", "train.lr_warmup_iters")
    settings = settings_of(tmp_path, YAML, "run.yaml", environ={"MODEL": "/m"})
    assert [settings[name] for name in names] == ["/m", 4096, 2e-5, 20]
    conversion = reading(tmp_path, YAML, "run.yaml", environ={"RESPONSE": "512"}).conversion
    assert conversion.settings.rollout.max_response_len == 512
    reasons = [omission.reason for omission in conversion.omissions if omission.by_hand and not omission.first]
    assert reasons[0] == "${oc.env:MODEL} is resolved when that program runs. Set model.path by hand"
    assert reasons[1].startswith("ranks x per_device_train_batch_size")  # no device_mapping says how many ranks


def test_a_secret_of_the_environment_in_yaml_is_a_reference(tmp_path: Path):
    text = YAML + "exp_name: ${oc.env:WANDB_API_KEY}\n"
    result = reading(tmp_path, text, "run.yaml", environ={"MODEL": "/m", "WANDB_API_KEY": "abcdef0123456789"})
    assert "abcdef0123456789" not in settings_file(result.conversion, tmp_path / "run.yaml", [])


@pytest.mark.parametrize("text", ["a: &a\n  <<: *a\n  x: 1\n", "a: &a {<<: &b {x: 1}}\nb: &c {<<: [*a, *a]}\n"])
def test_mappings_that_merge_themselves_end_in_one_line(text: str, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"^[^\n]*run\.yaml"):
        reading(tmp_path, text, "run.yaml")


def test_a_pipeline_of_roll_reads_the_file_that_its_script_names(tmp_path: Path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "rlvr.yaml").write_text(YAML)
    start = "python examples/start_rlvr_pipeline.py --config_path conf --config_name rlvr"
    settings = settings_of(tmp_path, f"{start}\n", environ={"MODEL": "/m"})
    assert (settings["run.rollout_batch_size"], settings["model.path"]) == (128, "/m")
    settings = settings_of(tmp_path, f"{start} rollout_batch_size=16 response_length=64\n", environ={"MODEL": "/m"})
    assert (settings["run.rollout_batch_size"], settings["rollout.max_response_len"]) == (16, 64)


def test_a_switch_of_trl_that_is_turned_off_is_off(tmp_path: Path):
    text = "trl grpo --model_name_or_path /m --dataset_name /d --num_generations 4"
    assert settings_of(tmp_path, text)["train.dtype"] == "bfloat16"
    assert "train.dtype" not in settings_of(tmp_path, f"{text} --no_bf16")  # float32, as here


PROGRAM = """\
import os
from dataclasses import dataclass, field
from trl import GRPOConfig, GRPOTrainer

COMMON = dict(bf16=True, max_steps=2**5)

@dataclass
class Arguments:
    lr: float = 3e-6
    answers: int = field(default=8)
    rank: int = 1

arguments = Arguments(rank=16)
config = GRPOConfig(learning_rate=arguments.lr, num_generations=arguments.answers, **COMMON)
rows = load_dataset(os.environ["DATA"])["train"]
adapter = LoraConfig(r=arguments.rank)
trainer = GRPOTrainer(os.environ.get("MODEL", "small"), args=config, train_dataset=rows, peft_config=adapter)
"""


def test_arguments_of_a_python_program_are_followed_through_dataclasses_tables_and_the_environment(tmp_path: Path):
    settings = settings_of(tmp_path, PROGRAM, "run.py", environ={"DATA": "/d.jsonl"})
    assert (settings["model.path"], settings["rollout.data"]) == ("small", ["/d.jsonl"])
    assert (settings["train.lr"], settings["run.num_rollout"], settings["train.lora_rank"]) == (3e-6, 32, 16)
    assert settings["train.dtype"] == "bfloat16"
    assert settings_of(tmp_path, PROGRAM, "run.py", environ={"DATA": "/d", "MODEL": "/m"})["model.path"] == "/m"


def test_supervised_training_of_verl_is_sft(tmp_path: Path):
    text = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=/m optim.lr=1e-5 "
    settings = settings_of(
        tmp_path, text + "data.train_files=/d.parquet data.train_batch_size=64 trainer.total_epochs=2"
    )
    names = ("algorithm.name", "model.path", "train.lr", "train.global_batch_size", "run.num_epoch")
    assert [settings[name] for name in names] == ["sft", "/m", 1e-5, 64, 2]
    assert "engine.backend" not in settings


def test_a_sourced_file_outside_the_folder_is_read_only_where_it_is_allowed(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "models" / "small.sh").write_text("ROUNDS=5\n")
    text = f'source "$(dirname "${{BASH_SOURCE[0]}}")/../models/small.sh"\n{TRAIN} --num-rollout $ROUNDS\n'
    closed = reading(tmp_path, text, "examples/run.sh")
    assert "run.num_rollout" not in closed.conversion.values
    assert [str(note.place) for note in closed.notes] == [f"{tmp_path / 'examples' / 'run.sh'}:1"]
    assert "lies outside" in closed.notes[0].text
    opened = reading(tmp_path, text, "examples/run.sh", root=tmp_path)
    assert opened.conversion.settings.run.num_rollout == 5
    assert opened.notes == []


def test_variables_of_the_environment_count_as_they_would_for_the_shell(tmp_path: Path):
    settings = settings_of(tmp_path, f"{TRAIN} --num-rollout ${{ROUNDS:-3}}", environ={"ROUNDS": "9"})
    assert settings["run.num_rollout"] == 9


def test_a_key_in_the_script_is_written_nowhere(tmp_path: Path):
    result = reading(tmp_path, f"KEY=abcdef0123456789\n{TRAIN} --use-wandb --wandb-key $KEY --my-key $KEY")
    written = settings_file(result.conversion, tmp_path / "run.sh", [])
    assert 'api_key = "env:WANDB_API_KEY"' in written
    assert "abcdef0123456789" not in written


def test_of_two_training_commands_one_is_picked_by_its_line(tmp_path: Path):
    text = f"{TRAIN} --num-rollout 1\n{TRAIN} --num-rollout 2\n"
    with pytest.raises(SettingsError, match=r"run\.sh: has 2 training commands \(lines 1, 2\)\. Pick one by --line N"):
        reading(tmp_path, text)
    assert settings_of(tmp_path, text, line=2)["run.num_rollout"] == 2
    with pytest.raises(SettingsError, match=r"run\.sh:3: starts no training"):
        settings_of(tmp_path, text, line=3)
    with pytest.raises(SettingsError, match=r"run\.sh:1: is started 2 times with other flags\. Read a copy that"):
        reading(tmp_path, f"for N in 1 2; do {TRAIN} --num-rollout $N; done")


def answer(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_the_settings_that_are_written_are_valid_and_a_dry_run_says_what_the_run_would_be(
    tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    Path("recipe.yaml").write_text(
        f"model_name_or_path: {model_dir('llama')}\ndataset_name: prompts.jsonl\nnum_processes: 1\nloss_type: dapo\n"
        "per_device_train_batch_size: 4\nnum_generations: 2\nmax_completion_length: 8\nlearning_rate: 0.001\n"
        "max_steps: 3\nreport_to: none\noutput_dir: runs/small\n"
    )
    code, out, err = answer("settings", "from", "recipe.yaml", "--out", "run.toml")
    assert (code, out) == (0, "")
    assert err.startswith("recipe.yaml: TRL: ")
    assert answer("settings", "validate", "-c", "run.toml") == (0, "", "")
    code, out, _ = answer("run", "-c", "run.toml", "-s", "score.rm_type=exact", "--dry-run")
    assert code == 0
    assert "llama, 2 layers" in out
    assert "run.num_rollout" in out
    assert not Path("runs").exists()


def test_a_settings_file_that_is_there_is_kept_and_an_error_leaves_no_file(tmp_path: Path):
    script, out = tmp_path / "run.sh", tmp_path / "run.toml"
    script.write_text("echo 'unclosed\n")
    assert answer("settings", "from", str(script), "-o", str(out)) == (
        2, "", f"slimectl: {script}:1: this ' is never closed. Close it\n")  # fmt: skip
    assert not out.exists()
    out.write_text("mine")
    script.write_text(TRAIN)
    code, _, err = answer("settings", "from", str(script), "-o", str(out))
    assert (code, err) == (2, f"slimectl: {out}: already exists. Add --force to replace it, or choose another --out\n")
    assert out.read_text() == "mine"
    assert answer("settings", "from", str(script), "-o", str(out), "--force")[0] == 0
    assert "[model]" in out.read_text()


def test_an_unknown_stack_and_a_missing_file_are_one_line(tmp_path: Path):
    missing = tmp_path / "no.sh"
    line = f"slimectl: {missing}: no such file. Give a launch script, a YAML file or a Python file\n"
    assert answer("settings", "from", str(missing)) == (2, "", line)
    line = "slimectl: --from ray: give slime, verl, trl, openrlhf, roll\n"
    assert answer("settings", "from", __file__, "--from", "ray") == (2, "", line)


PAGE = Path(__file__).parents[2] / "docs" / "from-slime.md"
MARK = "<!-- tables -->\n"


def flag_table(dialect: Dialect) -> str:
    """The table of a stack as Markdown, for docs/from-slime.md: each group under a heading of its own."""
    head = ["", "| there | here | how it changes, or why not |", "|---|---|---|"]
    groups = dialect.groups.items()
    return "\n\n".join(
        "\n".join([f"### {dialect.title}: {group}", *head, *(_row(dialect, row) for row in rows)])
        for group, rows in groups
    )


def _row(dialect: Dialect, row: Row) -> str:
    aliases = [alias for alias, name in dialect.aliases.items() if name in map(canonical, row.names.split())]
    names = ", ".join(flag_name(dialect, name) for name in [*row.names.split(), *aliases])
    text = row.text.replace("|", r"\|")
    if row.default is not None:
        default = f"{inline(row.default)} there where it is not given"
        text = f"{text}; {default}" if text else default
    return f"| {names} | {f'`{row.key}`' if row.key else ''} | {text} |"


def page() -> str:
    """The page of the documentation with the tables as they are."""
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    tables = (f"## {dialect.title}\n\n{flag_table(dialect)}\n" for dialect in DIALECTS.values())
    return f"{head}{MARK}\n" + "\n".join(tables)


def test_the_page_has_the_tables_of_the_program():
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for file in sorted(SCRIPTS.glob("*/run.*")):
        written = read(file, environ={"HOME": "/home/user"})
        file.with_name("expected.toml").write_text(settings_file(written.conversion, file, written.notes), "utf-8")
