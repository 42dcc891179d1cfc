"""Jobs that are shell scripts: on this machine, on a Ray cluster, and for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from slimectl.launchers.job import Job

ON_CLUSTER = ("--executor", "ray", "--ray-address", "auto")
"""Options with which a run joins the Ray cluster of its machine."""
ALL_JOINED = """\
import sys, time, ray
address, count, end = sys.argv[1], int(sys.argv[2]), time.time() + 600
while time.time() < end:
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, ignore_reinit_error=True)
        if sum(node["Alive"] for node in ray.nodes()) >= count:
            sys.exit()
    except ConnectionError:
        pass
    time.sleep(2)
sys.exit(f"Ray at {address}: {count} machines have not joined within 10 minutes")"""


def local_script(job: Job, *, options: Sequence[str] = ()) -> str:
    """Return a script that starts the run on this machine with more options, or resumes it."""
    suffix = "".join(f" {shlex.quote(option)}" for option in options)
    return "\n".join(["#!/bin/bash", *prelude(job), f'exec "${{command[@]}}"{suffix}', ""])


def ray_script(job: Job) -> str:
    """Return a script that submits the run to a running Ray cluster, which resumes it if it exists."""
    address = f" --address={shlex.quote(job.address)}" if job.address else ""
    entry = shlex.join(["bash", "-c", local_script(job, options=ON_CLUSTER)])
    return f"#!/bin/bash\n# shellcheck disable=SC2016\nexec ray job submit{address} --no-wait -- {entry}\n"


def slurm_script(job: Job) -> str:
    """Return a batch script for sbatch.

    With Ray, the machine of the batch shell has the head and the driver, and `srun` starts Ray on the others. Before
    the time limit Slurm sends USR1: the run saves, and the job requeues itself. SIGTERM (scancel, preemption) makes the
    run save too. After a preemption, or if a machine is lost, Slurm itself requeues the job.
    """
    options = ' --executor ray --ray-address "$head:$port"' if job.uses_ray else ""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _sbatch(job)),
        *prelude(job),
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {job.options.requeues} ]; then',
        f'    echo "job $SLURM_JOB_ID was started again {job.options.requeues} times (launch.requeues)"',
        "    exit 1",
        "fi",
        "set +e  # exit codes are handled below",
        *(_ray(job) if job.uses_ray else ()),
        f'"${{command[@]}}"{options} &',
        "run=$!",
        "# shellcheck disable=SC2317",  # it cannot see that a signal calls the function
        "again() {",
        '    kill -TERM "$run"',
        '    wait "$run"',
        "    code=$?",
        f'    if [ "$code" = 143 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.options.requeues} ]; then',
        '        echo "time limit: requeueing job $SLURM_JOB_ID, which resumes the run"',
        '        scontrol requeue "$SLURM_JOB_ID"',
        "    fi",
        '    exit "$code"',
        "}",
        "trap again USR1",
        "trap : TERM",  # the run gets it too
        'wait "$run" || wait "$run"',  # a signal ends the first one
        "",
    ]
    return "\n".join(lines)


def _sbatch(job: Job) -> Iterator[str]:
    options = job.options
    yield f"--job-name={job.label}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    if job.gpus_per_node:
        kind = f"{options.gpu_type}:" if options.gpu_type else ""
        yield f"--gpus-per-node={kind}{job.gpus_per_node}"
    if options.cpus_per_node:
        yield f"--cpus-per-task={options.cpus_per_node}"
    if options.memory_gib_per_node:
        yield f"--mem={options.memory_gib_per_node}G"
    yield f"--time={options.time_limit}"
    yield f"--signal=B:USR1@{options.term_s}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--output={job.label}-%j.log"
    if options.partition:
        yield f"--partition={options.partition}"
    if options.account:
        yield f"--account={options.account}"
    yield from options.options


def prelude(job: Job) -> list[str]:
    """Return the lines that change to the job's folder, set up the environment, and choose to start or to resume.

    A failure ends the job. Unset variables do not, because scripts that activate environments read some.
    """
    return [
        "set -eo pipefail",
        *([f"cd {shlex.quote(job.folder)}"] if job.folder else []),
        *job.options.setup,
        f"command=({job.start})",
        f"if [ -f {shlex.quote(f'{job.run}/manifest.json')} ]; then command=({job.resume}); fi",
    ]


def _ray(job: Job) -> Iterator[str]:
    """Yield the lines that start Ray on every machine of the job and wait until all have joined."""
    start = f"ray start --num-gpus={job.gpus_per_node} --disable-usage-stats"
    # Ray 2.60 starts with a token that every other process must have. srun and the run inherit these.
    yield "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN"
    yield "RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | base64 -w 0)"
    yield "port=$((20000 + SLURM_JOB_ID % 10000))"  # other jobs may have a cluster on the same machine
    # Debian maps the name to 127.0.1.1, which other machines cannot reach.
    yield "head=$(hostname --ip-address | tr ' ' '\\n' | grep -v -e '^127\\.' -e : | head -n 1)"
    yield "head=${head:-$(hostname --all-ip-addresses | cut -d ' ' -f 1)}"
    yield f'{start} --head --node-ip-address="$head" --port="$port" --block >/dev/null &'
    yield "trap 'kill %1' EXIT"
    if job.nodes > 1:
        worker = "\n".join(["set -e", *job.options.setup, f'exec {start} --address="$1" --block'])
        yield "# shellcheck disable=SC2016"
        yield f"srun --nodes={job.nodes - 1} --ntasks={job.nodes - 1} --relative=1 \\"
        yield f'    bash -c {shlex.quote(worker)} worker "$head:$port" &'
    yield wait_for_machines(job.nodes)


def wait_for_machines(count: int) -> str:
    """Return a shell line that waits until `count` machines have joined the Ray cluster at $head:$port."""
    return f'python3 -c {shlex.quote(ALL_JOINED)} "$head:$port" {count} || exit 1'
