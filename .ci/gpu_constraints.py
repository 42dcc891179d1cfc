"""Resolve the versions for GPU machines from the packages' own metadata. Nothing is installed.

    pip install uv
    python .ci/gpu_constraints.py            # write constraints-gpu.txt and constraints-gpu-vllm.txt
    python .ci/gpu_constraints.py --check    # exit with 1 if the pinned versions no longer agree

SGLang and vLLM pin different versions of the same kernels, so each has its own set.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_34"
"""SGLang's wheels need glibc 2.34."""
COMMON = (
    "gpu", "megatron", "ray", "quickstart", "parquet", "vision", "zstd", "quantization",
    "wandb", "tensorboard", "swanlab", "mlflow", "prometheus",
)  # fmt: skip
EXTRAS = {"constraints-gpu.txt": ("sglang", *COMMON), "constraints-gpu-vllm.txt": ("vllm", *COMMON)}
OTHERS = "transformer-engine[pytorch]\nray[default]\n"
"""Packages that no extra asks for. pip compiles the first, and Dockerfile.gpu installs the second."""
TESTED = (
    "torch", "transformers", "sglang", "megatron-core", "mpmath", "ray", "reasoning-gym", "swanlab", "tensorboard",
    "wandb",
)  # fmt: skip
"""Packages whose versions come from constraints.txt, with which the tests run."""
NAMED = (
    "torch", "transformers", "sglang", "vllm", "megatron-core", "transformer-engine", "flash-attn-4",
    "flashinfer-python", "flash-linear-attention", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "ray", "numpy",
)  # fmt: skip
"""Packages whose versions are printed."""
PIN = re.compile(r"^([a-z0-9._-]+)==(\S+)", re.IGNORECASE | re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    """Return the version of every package that a constraints file pins."""
    return {name.lower().replace("_", "-"): version for name, version in PIN.findall(text)}


def resolve(extras: tuple[str, ...], fixed: dict[str, str], output: Path) -> str:
    """Write versions that all metadata allow to `output`. Return uv's explanation of a conflict, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        others, constraints = Path(folder, "others.in"), Path(folder, "constraints.txt")
        others.write_text(OTHERS)
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in fixed.items()))
        command = [
            sys.executable, "-m", "uv", "pip", "compile", str(ROOT / "pyproject.toml"), str(others),
            "--quiet", "--no-config", "--no-annotate", "--no-header",
            "--python-version", PYTHON, "--python-platform", PLATFORM,
            "--constraint", str(constraints), "--output-file", str(output),
            *(part for extra in extras for part in ("--extra", extra)),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
    return result.stderr.strip() if result.returncode else ""


def tested(file: str) -> dict[str, str]:
    """Return the versions of TESTED. vLLM needs a newer transformers, and it is not installed next to SGLang."""
    versions = pins((ROOT / "constraints.txt").read_text())
    return {name: versions[name] for name in TESTED if "vllm" not in file or name not in ("transformers", "sglang")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments, conflicts = parser.parse_args(), 0
    for name, extras in EXTRAS.items():
        file = ROOT / name
        fixed = pins(file.read_text()) if arguments.check else tested(name)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, name)
            conflict = resolve(extras, fixed, output)
            resolved = "" if conflict else output.read_text()
        if missing := sorted(pins(resolved).keys() - fixed.keys()) if arguments.check and not conflict else []:
            conflict = f"not pinned: {', '.join(missing)}"
        conflicts += bool(conflict)
        versions = pins(resolved)
        print(f"{name}: {conflict or f'{len(versions)} packages, no conflict'}")
        if not conflict:
            print("".join(f"  {package} {versions[package]}\n" for package in NAMED if package in versions), end="")
        if not conflict and not arguments.check:
            engine = extras[0]
            header = (
                f"# Versions for Linux with NVIDIA GPUs, Python {PYTHON} and {engine}. All metadata agree on them.\n"
                f"# Written by .ci/gpu_constraints.py. pip install -c {name} '.[{engine},gpu,megatron,ray]'\n"
            )
            file.write_text(header + resolved)
    sys.exit(bool(conflicts))


if __name__ == "__main__":
    main()
