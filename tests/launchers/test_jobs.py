"""`slimectl launch`: what each scheduler gets, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from slimectl.cli.app import app

TWO = "qwen3-30b-a3b-2x8h100"
SCRIPTS = ["local", "ray", "slurm"]


def launch(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["launch", *words])
    return result.exit_code, result.stdout, result.stderr


def job(*words: str) -> str:
    code, out, err = launch(*words)
    assert code == 0, err
    return out


@pytest.mark.parametrize("on", SCRIPTS)
def test_scripts_are_valid_bash(on: str, tmp_path: Path):
    file = tmp_path / "job.sh"
    file.write_text(job(TWO, "--on", on, "-s", 'launch.setup=["export A=\'it is\'", "module load cuda"]'))
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(file)], check=True)


def test_a_slurm_job_asks_for_the_machines_and_gpus_of_the_cluster_section():
    text = job(TWO, "-s", "launch.gpu_type=h100", "-s", "launch.partition=gpu", "-s", 'launch.options=["--exclusive"]')
    for option in ("--nodes=2", "--gpus-per-node=h100:8", "--partition=gpu", "--exclusive", "--signal=B:USR1@120"):
        assert f"#SBATCH {option}\n" in text
    assert f"command=(slimectl run {TWO})\n" in text
    assert f"then command=(slimectl run --resume runs/{TWO}); fi" in text
    assert "-s launch." not in text


def test_split_gpus_of_one_machine_are_one_job_of_eight():
    text = job("qwen3-8b-8xh100-async")
    assert "#SBATCH --nodes=1\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text
    assert "ray start" not in text


def test_a_run_on_cpus_asks_for_no_gpu():
    assert "--gpus" not in job("quickstart", "-s", "train.device=cpu")


def test_a_kubernetes_job_is_a_ray_job_with_a_pod_per_machine():
    manifest = yaml.safe_load(job(TWO, "--on", "kubernetes", "-s", "launch.image=me/it", "-s", "launch.claim=project"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    cluster = manifest["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (1, 1, 1)
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        [container] = template["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert container["volumeMounts"][0] == {"name": "project", "mountPath": "/workspace"}
    assert "cd /workspace" in manifest["spec"]["entrypoint"]
    assert manifest["spec"]["entrypoint"].rstrip().endswith("--executor ray --ray-address auto\n'")


def test_pods_get_secrets_tolerate_gpu_nodes_and_take_fields_of_the_user():
    own = ("-s", 'launch.env=["HF_TOKEN"]', "-s", "launch.env_from=team", "-s", "launch.pod={hostNetwork=true}")
    text = job(TWO, "--on", "kubernetes", "-s", "launch.image=i", "-s", "launch.claim=c", *own)
    cluster = yaml.safe_load(text)["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        secret = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "team", "key": "HF_TOKEN"}}}
        assert pod["containers"][0]["env"][0] == secret
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        assert pod["securityContext"]["fsGroup"] == 1000  # the user of the images
        assert pod["hostNetwork"] is True


def test_a_run_in_kubernetes_saves_before_its_pod_ends(tmp_path: Path):
    program = tmp_path / "slimectl"
    program.write_text("#!/bin/bash\ntrap 'touch saved; exit 143' TERM\ntouch ready\nwhile :; do sleep 0.02; done\n")
    program.chmod(0o755)
    options = (
        "-s",
        "train.device=cpu",
        "-s",
        "launch.image=i",
        "-s",
        "launch.claim=c",
        "-s",
        f"launch.folder={tmp_path}",
    )
    text = job("quickstart", "--on", "kubernetes", *options).replace("/tmp/slimectl.pid", "slimectl.pid")
    spec = yaml.safe_load(text)["spec"]
    [container] = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(spec["entrypoint"], shell=True, executable="/bin/bash", cwd=tmp_path, env=environment) as run:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        with subprocess.Popen(container["lifecycle"]["preStop"]["exec"]["command"], cwd=tmp_path):
            assert run.wait() == 143
    assert (tmp_path / "saved").exists()


def test_skypilot_asks_the_environment_for_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sky = tmp_path / "sky"
    sky.write_text('#!/bin/sh\necho "$@" > arguments\n')
    sky.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    own = ("-s", "launch.image=i", "-s", 'launch.env=["HF_TOKEN"]', "-s", "train.device=cpu")
    assert "HF_TOKEN: null" in job("quickstart", "--on", "skypilot", "--submit", *own)
    assert "--secret HF_TOKEN runs/quickstart.skypilot.yaml" in (tmp_path / "arguments").read_text()


def test_a_skypilot_task_keeps_its_runs_in_the_bucket():
    bucket = ("-s", "launch.gpu_type=H100", "-s", "launch.image=me/it", "-s", "launch.claim=s3://mine")
    task = yaml.safe_load(job(TWO, "--on", "skypilot", *bucket))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    mount = task["file_mounts"]["/workspace"]
    assert (mount["source"], mount["mode"]) == ("s3://mine", "MOUNT_CACHED")  # files grow, which needs a cache
    assert "-s run.dir=/workspace/runs" in task["run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((TWO, "--on", "kubernetes"), "launch.image: Kubernetes needs a container image with slimectl. Set it."),
        (
            (TWO, "--on", "skypilot"),
            "launch.setup: machines of SkyPilot have no slimectl. Set launch.image, or install it",
        ),
        (
            (TWO, "--on", "skypilot", "-s", "launch.image=i"),
            "launch.gpu_type: SkyPilot needs the kind of GPU. Set it, e.g. H100",
        ),
        (
            ("qwen3-8b-8xh100", "-s", "cluster.colocate=false"),
            'cluster.executor: the run needs 2 machines. Set cluster.executor = "ray".',
        ),
        (
            (TWO, "-s", "run.grace_s=300"),
            "launch.term_s: 120 leaves no time to save after run.grace_s: 300. Raise the first, or lower the second.",
        ),
        (
            (TWO, "-s", "launch.time_limit=60"),
            "launch.time_limit: write it as [DAYS-]HH:MM:SS, in quotes in a file, not 60 (command line)",
        ),
        (
            (TWO, "-s", "launch.time_limit=00:03:00"),  # 120 s, and the 60 s of sbatch
            "launch.time_limit: 00:03:00 leaves no time to run. Slurm signals the job launch.term_s: 120 seconds "
            "before the limit, and up to 60 seconds earlier.",
        ),
        (
            (TWO, "-s", "launch.partition=a b"),
            "launch.partition: must not contain blanks, not 'a b' (command line)",
        ),
        ((TWO, "-o", "missing/job.sh"), "missing/job.sh: No such file or directory"),
        (
            ("../mine.toml", "--on", "skypilot"),
            "../mine.toml: the job has only the files of this folder. Copy the file here.",
        ),
        ((TWO, "-s", "launch.pod={containers=[]}"), "launch.pod: containers of the pod are the job's own"),
        ((TWO, "-s", 'launch.env=["HF_TOKEN=abc"]'), "launch.env: list names of variables, without their values"),
        ((TWO, "--submit", "-s", "launch.gpu_memory_gib=16"), "the run does not fit into 16 GiB per GPU"),
        (("qwen3-8b-8xh10",), "Did you mean qwen3-8b-8xh100?"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_a_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine.toml").write_text('[model]\ncard = "tiny"\n[rollout]\ndata = ["p.jsonl"]\n')
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    code, _, err = launch(*words)
    assert code == (1 if "-o" in words else 2)
    assert message in err
    assert list(here.iterdir()) == []


def test_a_missing_scheduler_is_named_and_the_job_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = launch("quickstart", "-s", "train.device=cpu", "--submit")
    assert code == 4
    assert "sbatch: not found. On a machine that has it: sbatch runs/quickstart.slurm.sh" in err
    assert (tmp_path / "runs" / "quickstart.slurm.sh").read_text().startswith("#!/bin/bash\n#SBATCH")


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("on", ["local", "slurm"])
@pytest.mark.parametrize(
    ("setup", "runs"),
    [
        ('["echo $NOT_SET"]', True),  # scripts that activate environments read unset variables
        ('["module load cuda/99"]', False),
        ('["false | cat # comment"]', False),
        ('"false"', False),
    ],
)
def test_a_setup_line_that_fails_ends_the_job_before_the_run(
    on: str, setup: str, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "with blanks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = job("quickstart", "--on", on, "-s", "train.device=cpu", "-s", f"launch.setup={setup}", "--name", "my run")
    program(tmp_path, "slimectl", 'printf "%s\\n" "$PWD" "$@"')
    result = subprocess.run(
        ["bash"], input=text, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd="/"
    )
    expected = ["run", "quickstart", "-s", "train.device=cpu", "--name", "my run"] if runs else []
    assert [line for line in result.stdout.splitlines() if line] == ([str(folder), *expected] if runs else [])
    assert (result.returncode == 0) == runs


def test_a_job_that_was_started_too_often_ends(tmp_path: Path):
    text = job("quickstart", "-s", "train.device=cpu", "-s", "launch.requeues=2")
    program(tmp_path, "slimectl", "echo run")
    for restarts, printed in (("2", "run\n"), ("3", "job 7 was started again 2 times (launch.requeues)\n")):
        variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_RESTART_COUNT": restarts, "SLURM_JOB_ID": "7"}
        assert subprocess.run(["bash"], input=text, capture_output=True, text=True, env=variables).stdout == printed


def test_the_job_of_a_run_that_exists_resumes_it_with_the_settings_given_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ("quickstart", "--name", "my run", "-s", "run.num_rollout=400", "-s", "launch.partition=gpu")
    assert "command=(slimectl run --resume 'runs/my run');" in job(*words)
    folder = tmp_path / "runs" / "my run"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    _, out, err = launch(*words)
    assert "command=(slimectl run --resume 'runs/my run' -s run.num_rollout=400);" in out
    assert err == (
        "runs/my run: already exists. The job resumes it with its own settings and -s. For a new run, add --name.\n"
    )


def test_a_job_elsewhere_names_the_variables_that_it_does_not_get(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLIMECTL_TRAIN_LR", "0.1")
    _, _, err = launch("quickstart", "--on", "skypilot", "-s", "train.device=cpu", "-s", "launch.image=i")
    assert "SLIMECTL_TRAIN_LR" in err
    assert err.startswith("the job does not get SLIMECTL_")
    assert "SLIMECTL_TRAIN_LR" not in launch("quickstart", "--on", "slurm")[2]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("8b", "run-8b"),  # Kubernetes names services after it, which start with a letter
        ("My Run.2", "my-run-2"),
        ("a" * 39 + ".b", "a" * 39),  # 40 characters would end with a dash
        ("漢字", "run"),
    ],
)
def test_labels_are_names_of_services(name: str, label: str):
    text = job("quickstart", "--name", name, "--on", "kubernetes", "-s", "launch.image=i", "-s", "launch.claim=c")
    assert yaml.safe_load(text)["metadata"]["generateName"] == f"{label}-"


def test_an_engine_in_the_trainers_process_shares_its_gpu():
    assert "#SBATCH --gpus-per-node=1\n" in job("quickstart")
    assert "#SBATCH --gpus-per-node=2\n" in job("quickstart", "-s", "cluster.executor=ray")
