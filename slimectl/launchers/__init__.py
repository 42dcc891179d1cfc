"""Writes a run as a job: a shell script, a Slurm job, a Ray job, a KubeRay manifest or a SkyPilot task."""
