"""Jobs for Kubernetes and SkyPilot against the schemas of their receivers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from slimectl import recipes
from slimectl.cli.app import app

IMAGE = ("-s", "launch.image=registry/it:1", "-s", "launch.gpu_type=H100")
OPTIONS = (
    *("-s", 'launch.env=["HF_TOKEN","WANDB_API_KEY"]', "-s", "launch.cpus_per_node=32"),
    *("-s", "launch.memory_gib_per_node=256", "-s", 'launch.setup=["echo it\'s me"]'),
)
POD = (
    "-s",
    'launch.pod={hostNetwork=true,tolerations=[{key="team",operator="Exists"}]}',
    "-s",
    "launch.partition=queue",
)
# Fields of KubeRay's ray.io/v1 API, from its reference documentation. Kubernetes' own schema checks the pods.
RAY_JOB = {
    "entrypoint": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "rayClusterSpec": dict,
}
RAY_CLUSTER = {"headGroupSpec": dict, "workerGroupSpecs": list}
HEAD = {"rayStartParams": dict, "template": dict}
WORKERS = HEAD | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}


def job(recipe: str, on: str, *words: str) -> str:
    result = CliRunner().invoke(app, ["launch", recipe, "--on", on, *IMAGE, *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def check(fields: dict[str, type], value: dict[str, Any]) -> None:
    assert {name: type(part) for name, part in value.items()} == fields


def check_ray_job(manifest: dict[str, Any]) -> None:
    assert (manifest.pop("apiVersion"), manifest.pop("kind")) == ("ray.io/v1", "RayJob")
    metadata, spec = manifest.pop("metadata"), manifest.pop("spec")
    assert not manifest
    check(RAY_JOB, spec)
    check(RAY_CLUSTER, spec["rayClusterSpec"])
    head, workers = spec["rayClusterSpec"].values()
    check(HEAD, head)
    for group in workers:
        check(WORKERS, group)
    for group in (head, *workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group["template"].pop("spec")}
        kubernetes_validate.validate(pod, "1.37", strict=True)
        assert not group["template"]
        mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("words", [(), OPTIONS, POD], ids=["plain", "options", "pod"])
def test_pods_of_a_ray_job_fit_the_schema_of_kubernetes(words: tuple[str, ...]):
    for recipe in recipes.names():
        check_ray_job(yaml.safe_load(job(recipe, "kubernetes", "-s", "launch.claim=project", *words)))


def test_the_check_finds_a_wrong_field():
    manifest = yaml.safe_load(
        job("qwen3-8b-8xh100", "kubernetes", "-s", "launch.claim=it", "-s", "launch.pod={hostNet=1}")
    )
    with pytest.raises(kubernetes_validate.ValidationError, match="hostNet"):
        check_ray_job(manifest)


@pytest.mark.skipif("SKYPILOT_PYTHON" not in os.environ, reason="needs SKYPILOT_PYTHON")
def test_skypilot_parses_its_tasks(tmp_path: Path):
    cases = {"plain": (), "bucket": ("-s", "launch.claim=s3://runs"), "options": OPTIONS}
    files = []
    for recipe in recipes.names():
        for name, words in cases.items():
            files.append(tmp_path / f"{recipe}-{name}.yaml")
            files[-1].write_text(job(recipe, "skypilot", *words))
    bad = tmp_path / "bad.yaml"
    bad.write_text(files[0].read_text().replace("num_nodes", "nodes"))
    script = (
        "import sys, sky\n"
        "for file in sys.argv[1:]:\n"
        "    try: print(sky.Task.from_yaml(file).num_nodes)\n"
        "    except ValueError: print('refused')\n"
    )
    command = [os.environ["SKYPILOT_PYTHON"], "-c", script, *map(str, [*files, bad])]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "HOME": str(tmp_path),
        "HF_TOKEN": "a",
        "WANDB_API_KEY": "b",
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    machines = ["2" if recipe == "qwen3-30b-a3b-2x8h100" else "1" for recipe in recipes.names() for _ in cases]
    assert result.stdout.split() == [*machines, "refused"], result.stderr
