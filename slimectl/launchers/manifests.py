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
USER = 1000
"""User of the images. A volume is made writable for the group with this number."""
NOTE_PROCESS = "echo $$ > /tmp/slimectl.pid"
END_RUN = """\
if read -r run < /tmp/slimectl.pid && kill -TERM "$run"; then
    while kill -0 "$run" 2> /dev/null; do sleep 1; done
fi"""
"""Before Kubernetes stops the pod of the head, the run saves. Without this only Ray would be told."""


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

    Each machine is a pod. If a pod is lost, the operator starts the job again, which resumes the run. The run saves
    before the head's pod is stopped. Raises SettingsError without an image or a claim.
    """
    options = job.options
    job = replace(job, folder=options.folder)
    if not options.image:
        raise SettingsError("launch.image: Kubernetes needs a container image with slimectl. Set it.")
    if not options.claim:
        raise SettingsError("launch.claim: a run in Kubernetes needs a volume for its checkpoints. Set it.")
    count = job.nodes - 1
    script = "\n".join(
        ["#!/bin/bash", *prelude(job), NOTE_PROCESS, f'exec "${{command[@]}}" {shlex.join(ON_CLUSTER)}', ""]
    )
    head, wait = _pod(job, "ray-head"), {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(options.term_s)}
    [container] = head["spec"]["containers"]
    container["env"] = [*container["env"], wait]  # `ray job stop` kills after 3 seconds
    container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", "-c", END_RUN]}}}
    sizes = {"replicas": count, "minReplicas": count, "maxReplicas": count}
    workers = {"groupName": "workers", **sizes, "rayStartParams": {}, "template": _pod(job, "ray-worker")}
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job),
        "spec": {
            "entrypoint": shlex.join(["bash", "-c", script]),
            "backoffLimit": options.requeues,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": {}, "template": head},
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
    """Return the template of a machine's pod: one container with all its GPUs, the claim, shared memory and secrets.

    Fields of launch.pod replace those of the pod.
    """
    options = job.options
    amounts = {
        "cpu": options.cpus_per_node,
        "memory": options.memory_gib_per_node and f"{options.memory_gib_per_node}Gi",
        GPU: job.gpus_per_node or None,
    }
    asked = {name: amount for name, amount in amounts.items() if amount}
    mounts = [{"name": "project", "mountPath": options.folder}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": options.env_from, "key": name}}} for name in options.env
    ]
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": options.term_s,
        "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [
            {
                "name": container,
                "image": options.image,
                "workingDir": options.folder,
                "env": secrets,
                "resources": {"limits": asked, "requests": asked},
                "volumeMounts": mounts,
            }
        ],
        "volumes": [
            {"name": "project", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if job.gpus_per_node:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists"}]
        if options.gpu_type:
            spec["nodeSelector"] = {f"{GPU}.product": options.gpu_type}
    return {"spec": spec | options.pod}


def sky_task(job: Job) -> str:
    """Return a SkyPilot task. Managed jobs (`sky jobs launch`) start it again after a preemption.

    Raises SettingsError if GPUs are needed and their kind is not set, or if nothing installs slimectl.
    """
    options = job.options
    if not options.image and not options.setup:
        raise SettingsError(
            "launch.setup: machines of SkyPilot have no slimectl. Set launch.image, or install it there."
        )
    # Without a cache a file in a bucket cannot grow. A single upload at a time keeps the order of the writes.
    cached = {"mode": "MOUNT_CACHED", "config": {"mount_cached": {"transfers": 1}}}
    storage = {options.folder: {"source": options.claim, **cached}} if options.claim else None
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
        "secrets": dict.fromkeys(options.env),  # sky takes the values from the environment
        "setup": "\n".join(options.setup) or None,
        "run": _on_sky_machines(job) if job.uses_ray else local_script(job),
    }
    return _yaml({name: value for name, value in task.items() if value})


SKY_RAY = """\
export RAY_AUTH_MODE=disabled  # the machines share no secret. SkyPilot's network admits only them
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
    # SkyPilot's own Ray has the default port of the dashboard's agent.
    start = f"ray start --num-gpus={job.gpus_per_node} --disable-usage-stats --dashboard-agent-listen-port=52366"
    ray = SKY_RAY.format(port=RAY_PORT, start=start, wait=wait_for_machines(job.nodes))
    return "\n".join(["#!/bin/bash", *prelude(job), ray])


def _yaml(value: dict[str, Any]) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=200)
    return text
