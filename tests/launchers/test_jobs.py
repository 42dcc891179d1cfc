"""`slimectl launch`: what each scheduler gets, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
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
    assert "launch." not in text


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


def test_a_skypilot_task_keeps_its_runs_in_the_bucket():
    task = yaml.safe_load(job(TWO, "--on", "skypilot", "-s", "launch.gpu_type=H100", "-s", "launch.claim=s3://mine"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["file_mounts"] == {"/workspace": {"source": "s3://mine", "mode": "MOUNT"}}
    assert "-s run.dir=/workspace/runs" in task["run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((TWO, "--on", "kubernetes"), "launch.image: Kubernetes needs a container image with slimectl. Set it."),
        ((TWO, "--on", "skypilot"), "launch.gpu_type: SkyPilot needs the kind of GPU. Set it, e.g. H100"),
        (
            ("qwen3-8b-8xh100", "-s", "cluster.colocate=false"),
            'cluster.executor: the run needs 2 machines. Set cluster.executor = "ray".',
        ),
        (
            (TWO, "-s", "run.grace_s=300"),
            "launch.term_s: 120 leaves no time to save after run.grace_s: 300. Raise the first, or lower the second.",
        ),
        ((TWO, "-s", "launch.time_limit=tomorrow"), "launch.time_limit"),
        ((TWO, "--submit", "-s", "launch.gpu_memory_gib=16"), "the run does not fit into 16 GiB per GPU"),
        (("qwen3-8b-8xh10",), "Did you mean qwen3-8b-8xh100?"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_a_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    code, _, err = launch(*words)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_scheduler_is_named_and_the_job_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = launch("quickstart", "-s", "train.device=cpu", "--submit")
    assert code == 4
    assert "sbatch: not found. On a machine that has it: sbatch runs/quickstart.slurm.sh" in err
    assert (tmp_path / "runs" / "quickstart.slurm.sh").read_text().startswith("#!/bin/bash\n#SBATCH")
