"""The peak memory that `slimectl plan` foresees against the one that a training step reaches, on this machine's CPU.

    python benchmarks/plan.py                          # all cases, each in a process of its own
    python benchmarks/plan.py --policy fsdp --case deep

A case is a small model of random weights and a batch of two packs, so that the second pack meets the gradients of the
first; two steps, so that the optimizer has its state. Measured is the peak of the process' resident memory in those
steps (VmHWM, set back once the models are read) over what it is once the libraries are loaded and warm. Memory that is
freed is given back at once (MALLOC_MMAP_THRESHOLD_), as a GPU's allocator would reuse it. With experts oneDNN is off:
it keeps a kernel for every number of rows that an expert ever met, in bfloat16 600 MiB of them, and none on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `length` tokens of a sequence, `sequences` of them in a pack."""

    config: dict[str, Any]
    length: int
    sequences: int
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    recomputes: tuple[str, ...] = ("none",)
    policies: tuple[str, ...] = ("fsdp", "megatron")
    prompt: int = 32
    lora_rank: int | None = None
    ppo: bool = False
    """With a critic that learns first, and a reference that is asked."""
    tokens_per_image: int = 0
    """Of a model with a vision tower: tokens of the image of every prompt; 0 for no image."""
    freezes_tower: bool = True

    @property
    def side(self) -> int:
        """Pixels of a side of the image."""
        vision = self.config["vision_config"]
        return int(self.tokens_per_image**0.5) * vision["patch_size"] * vision["spatial_merge_size"]


def shape(
    model_type: str, hidden: int, ffn: int, layers: int, heads: int, groups: int, vocab: int, **more: Any
) -> dict:
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 64, "vocab_size": vocab,
        "max_position_embeddings": 4096, **more,
    }  # fmt: skip


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
VISION = {
    "model_type": "qwen2_5_vl", "tie_word_embeddings": True,
    "text_config": shape(
        "qwen2_5_vl_text", 384, 1024, 4, 6, 2, 8192, bos_token_id=256, eos_token_id=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    ),
    "vision_config": {
        "depth": 6, "hidden_size": 256, "intermediate_size": 704, "num_heads": 4, "out_hidden_size": 384,
        "patch_size": 8, "spatial_merge_size": 2, "window_size": 64, "fullatt_block_indexes": [2, 5],
    },
}  # fmt: skip
CASES = {
    "deep": Case(shape("qwen3", 384, 1024, 8, 6, 2, 8192), 512, 4, recomputes=("none", "full")),
    "wide": Case(shape("llama", 768, 2048, 3, 12, 12, 4096), 1024, 1),
    "words": Case(shape("qwen2", 256, 704, 2, 4, 2, 65536, tie_word_embeddings=True), 256, 8),
    "adapted": Case(shape("qwen3", 1024, 4096, 6, 16, 4, 8192), 512, 1, lora_rank=16),
    "ppo": Case(shape("qwen3", 512, 1536, 4, 8, 2, 8192), 512, 1, ppo=True),
    "vision": Case(VISION, 512, 4, ("float32",), ("none", "full"), ("fsdp",), prompt=448, tokens_per_image=256),
    "vision, trained": Case(
        VISION,
        512,
        4,
        ("float32",),
        ("none", "full"),
        ("fsdp",),
        prompt=448,
        tokens_per_image=256,
        freezes_tower=False,
    ),
    "experts": Case(shape("qwen3_moe", 384, 1024, 4, 6, 2, 4096, **EXPERTS), 512, 4, policies=("megatron",)),
}


@dataclass(frozen=True)
class Trial:
    """One process."""

    case: str
    policy: str
    dtype: str
    recompute: str
    model: str = field(default="")


def foreseen(trial: Trial) -> float:
    """Bytes by the formulas."""
    from slimectl.architectures.config import with_defaults
    from slimectl.planner import memory, plan
    from slimectl.planner.workload import Run
    from slimectl.settings.train import TrainSettings

    case = CASES[trial.case]
    model = plan.model_of(
        with_defaults(case.config), lora_rank=case.lora_rank, lora_targets=TrainSettings().lora_targets,
        critic=case.ppo, reference=case.ppo, freeze_vision_tower=case.freezes_tower,
    )  # fmt: skip
    run = Run(
        1, policy=trial.policy, dtype=trial.dtype, recompute=trial.recompute, seq_len=case.length,  # type: ignore[arg-type]
        max_tokens_per_gpu=case.length * case.sequences, response_share=1 - case.prompt / case.length, device="cpu",
        images=min(1, case.tokens_per_image), tokens_per_image=case.tokens_per_image,
    )  # fmt: skip
    return memory.peak(memory.figures(model.all, run))


def measured(trial: Trial) -> int:
    """Bytes that two steps add to this process' peak."""
    import torch

    from slimectl.checkpoints.hf import HFCheckpoint
    from slimectl.policies.lora import LoraOptions
    from slimectl.policies.options import TrainerOptions
    from slimectl.policies.recompute import Recompute
    from slimectl.settings.train import TrainSettings
    from slimectl.types import TrainingSample

    case = CASES[trial.case]
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = "num_experts" not in case.config
    # One token more than is computed: the last predicts nothing. Groups of one: nothing is shared.
    response = case.length + 1 - case.prompt
    rows = [
        TrainingSample(tokens_of(case, g), response, [1.0 / response] * response, group=g, images=images_of(trial, g))
        for g in range(2 * case.sequences)
    ]
    maker, critic_maker = makers_of(trial)
    torch.nn.functional.linear(torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)).sum().backward()
    before = resident()
    lora = None
    if case.lora_rank is not None:
        lora = LoraOptions(case.lora_rank, 2.0 * case.lora_rank, TrainSettings().lora_targets)
    options = TrainerOptions(
        max_tokens_per_pack=case.length * case.sequences, dtype=trial.dtype, freeze_vision_tower=case.freezes_tower,
        recompute=Recompute(trial.recompute), lora=lora,
    )  # fmt: skip
    policy = maker(Path(trial.model), HFCheckpoint(), options)
    learners, reference = [policy], None
    if case.ppo:
        learners = [critic_maker(Path(trial.model), HFCheckpoint(), options), policy]
        reference = maker(Path(trial.model), HFCheckpoint(), replace(options, trains=False))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the steps, not of reading the checkpoint
    for _ in range(2):
        if reference is not None:
            reference.log_probs(rows)
        for learner in learners:
            learner.forward_backward(rows, NegativeLogProb())
            learner.optim_step()
    return peak_resident() - before


def tokens_of(case: Case, group: int) -> list[int]:
    """The tokens of a row; behind the first stand those of its image."""
    tokens = [(7 * group + i) % 4096 for i in range(case.length + 1)]
    if case.tokens_per_image:
        from slimectl.checkpoints.create import VISION_TOKENS, byte_tokenizer

        image = byte_tokenizer(tuple(VISION_TOKENS.values())).convert_tokens_to_ids(VISION_TOKENS["image_token_id"])
        tokens = [0 if token == image else token for token in tokens]
        tokens[1 : 1 + case.tokens_per_image] = [image] * case.tokens_per_image
    return tokens


def images_of(trial: Trial, group: int) -> list[dict[str, str]]:
    """The image of a row, decoded already: a processor keeps patches of up to 64 MiB for every user of its process."""
    case = CASES[trial.case]
    if not case.tokens_per_image:
        return []
    import base64
    import io

    import PIL.Image

    from slimectl.data.images import processor_of

    buffer = io.BytesIO()
    PIL.Image.new("RGB", (case.side, case.side), (group, 0, 0)).save(buffer, format="PNG")
    image = {"bytes": base64.b64encode(buffer.getvalue()).decode()}
    processor_of(trial.model).patches(image)
    return [image]


def makers_of(trial: Trial) -> tuple[Any, Any]:
    """The classes of policy and critic, their libraries loaded."""
    if trial.policy == "fsdp":
        import transformers.models.auto.modeling_auto  # noqa: F401

        from slimectl.policies.fsdp.policy import FsdpCritic, FsdpPolicy

        return FsdpPolicy, FsdpCritic
    from slimectl.policies.megatron.policy import MegatronCritic, MegatronPolicy

    return MegatronPolicy, MegatronCritic


class NegativeLogProb:
    needs_entropy = False

    def __call__(self, pack: Any) -> tuple[Any, dict[str, Any]]:
        return -(pack.weights_T * pack.logprobs_T).sum(), {}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int:
    """VmHWM, which can be reset; ru_maxrss cannot."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def in_own_process(trial: Trial) -> int:
    command = [sys.executable, __file__, "--trial", json.dumps(trial.__dict__)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=False
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    return int(result.stdout.splitlines()[-1])


def create(config: dict[str, Any], folder: Path) -> None:
    """Stored in bfloat16, as published models are: what is frozen needs no more."""
    import torch

    from slimectl.checkpoints.create import create_model
    from slimectl.checkpoints.hf import HFCheckpoint

    create_model(config, folder, seed=0)
    HFCheckpoint(dtype=torch.bfloat16).write(folder, list(HFCheckpoint().read(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=("fsdp", "megatron"), help="only this trainer")
    parser.add_argument("--case", choices=CASES, help="only this case")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trial:
        print(measured(Trial(**json.loads(options.trial))))
        return
    print(f"{'case':<15} {'policy':<9} {'dtype':<9} {'recompute':<9} {'foreseen':>9} {'measured':>9}  ratio")
    for name, case in CASES.items():
        if options.case not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            create(case.config, model)
            for policy in case.policies:
                if options.policy not in (None, policy):
                    continue
                for dtype in case.dtypes:
                    for recompute in case.recomputes:
                        trial = Trial(name, policy, dtype, recompute, str(model))
                        formula, real = foreseen(trial), in_own_process(trial)
                        print(
                            f"{name:<15} {policy:<9} {dtype:<9} {recompute:<9} {formula / 2**20:>5.0f} MiB"
                            f" {real / 2**20:>5.0f} MiB  {formula / real:.2f}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
