"""Jobs that are YAML: a RayJob for KubeRay (ray.io/v1), and a SkyPilot task."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import yaml

from slimectl.errors import SettingsError
from slimectl.launchers.job import RAY_PORT, Job
from slimectl.launchers.shell import ON_CLUSTER, local_script, prelude, wait_for_machines

GPU = "nvidia.com/gpu"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes scripts as blocks, and repeats values instead of referring to them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def ray_job_manifest(job: Job) -> str:
    """Return a RayJob. KubeRay makes the cluster, runs the driver in it, and removes it at the end.

    Each machine is a pod. If a pod is lost, the operator starts the job again, which resumes the run. Raises
    SettingsError without an image or a claim.
    """
    options = job.options
    job = replace(job, folder=options.folder)
    if not options.image:
        raise SettingsError("launch.image: Kubernetes needs a container image with slimectl. Set it.")
    if not options.claim:
        raise SettingsError("launch.claim: a run in Kubernetes needs a volume for its checkpoints. Set it.")
    count = job.nodes - 1
    sizes = {"replicas": count, "minReplicas": count, "maxReplicas": count}
    workers = {"groupName": "workers", **sizes, "rayStartParams": {}, "template": _pod(job, "ray-worker")}
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job),
        "spec": {
            "entrypoint": shlex.join(["bash", "-c", local_script(job, options=ON_CLUSTER)]),
            "backoffLimit": options.requeues,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": {}, "template": _pod(job, "ray-head")},
                "workerGroupSpecs": [workers] if count else [],
            },
        },
    }
    return _yaml(manifest)


def _metadata(job: Job) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": job.options.partition} if job.options.partition else {}
    names = {"generateName": f"{job.label}-", "namespace": job.options.namespace}  # a job that ended keeps its name
    return names | ({"labels": labels} if labels else {})


def _pod(job: Job, container: str) -> dict[str, Any]:
    """Return the template of a machine's pod: one container with all its GPUs, the claim, and shared memory."""
    options = job.options
    amounts = {
        "cpu": options.cpus_per_node,
        "memory": options.memory_gib_per_node and f"{options.memory_gib_per_node}Gi",
        GPU: job.gpus_per_node or None,
    }
    asked = {name: amount for name, amount in amounts.items() if amount}
    mounts = [{"name": "project", "mountPath": options.folder}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": options.term_s,
        "containers": [
            {
                "name": container,
                "image": options.image,
                "workingDir": options.folder,
                "resources": {"limits": asked, "requests": asked},
                "volumeMounts": mounts,
            }
        ],
        "volumes": [
            {"name": "project", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if options.gpu_type and job.gpus_per_node:
        spec["nodeSelector"] = {f"{GPU}.product": options.gpu_type}
    return {"spec": spec}


def sky_task(job: Job) -> str:
    """Return a SkyPilot task. Managed jobs (`sky jobs launch`) start it again after a preemption.

    Raises SettingsError if GPUs are needed and their kind is not set.
    """
    options = job.options
    storage = {options.folder: {"source": options.claim, "mode": "MOUNT"}} if options.claim else None
    runs = f"{options.folder}/runs" if storage else "runs"
    job = replace(
        job,
        folder="",
        run=f"{runs}/{job.name}",
        arguments=(*job.arguments, "--name", job.name, "-s", f"run.dir={runs}"),
    )
    resources: dict[str, Any] = {}
    if job.gpus_per_node:
        if not options.gpu_type:
            raise SettingsError("launch.gpu_type: SkyPilot needs the kind of GPU. Set it, e.g. H100")
        resources["accelerators"] = f"{options.gpu_type}:{job.gpus_per_node}"
    if options.cpus_per_node:
        resources["cpus"] = f"{options.cpus_per_node}+"
    if options.memory_gib_per_node:
        resources["memory"] = f"{options.memory_gib_per_node}+"
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    task = {
        "name": job.label,
        "num_nodes": job.nodes,
        "workdir": ".",
        "file_mounts": storage,
        "resources": resources,
        "setup": "\n".join(options.setup) or None,
        "run": _on_sky_machines(job) if job.uses_ray else local_script(job),
    }
    return _yaml({name: value for name, value in task.items() if value})


SKY_RAY = """\
head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
port={port}
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
    until {start} --address="$head:$port"; do sleep 5; done
    sleep 5  # Ray goes to the background. The job ends when the first machine's script ends.
    exit
fi
{start} --head --node-ip-address="$head" --port="$port"
{wait}
exec "${{command[@]}}" --executor ray --ray-address "$head:$port"
"""


def _on_sky_machines(job: Job) -> str:
    """Return a script for every machine: Ray joins, and the first one runs."""
    start = f"ray start --num-gpus={job.gpus_per_node} --disable-usage-stats"
    ray = SKY_RAY.format(port=RAY_PORT, start=start, wait=wait_for_machines(job.nodes))
    return "\n".join(["#!/bin/bash", *prelude(job), ray])


def _yaml(value: dict[str, Any]) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=200)
    return text
