"""Options of a conversion, from the command line to the writer. Imports nothing that `--help` does not need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from slimectl.errors import SettingsError

PRECISIONS = {
    "dtype": ("float32", "bfloat16", "float16"), "quantize": ("fp8", "fp8_tensor", "fp8_channel", "int4")
}  # fmt: skip


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion writes, from which config, and how it is verified. The texts are the help of the command.

    `dtype` None keeps the dtype of each tensor (GGUF is dequantized to float32). `config` and `card` supply the config
    that a torch_dist folder may lack. They must not contradict each other. Raises SettingsError.
    """

    to: Annotated[str, "Layout to write: hf or torch_dist"] = "hf"
    dtype: Annotated[str | None, "Data type: float32, bfloat16 or float16. Default: unchanged"] = None
    quantize: Annotated[str | None, "Quantize to fp8 (blocks), fp8_tensor, fp8_channel (rows) or int4 (groups)"] = None
    block: Annotated[tuple[int, int], "Rows and columns of an fp8 block"] = (128, 128)
    group: Annotated[int, "Columns of an int4 group"] = 128
    config: Annotated[Path | None, "Hugging Face directory with the config and tokenizer"] = None
    card: Annotated[str | None, "Model card that the model must match"] = None
    verify: Annotated[bool | None, "Read the result back and compare. Default: for models below 2 GB"] = None
    logits: Annotated[int | None, "Compare logits on this many tokens. Default: 16 for models below 1 GB"] = None
    max_shard_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.to not in ("hf", "torch_dist"):
            raise SettingsError(f"--to {self.to}: not a layout that can be written. Choose hf or torch_dist")
        for flag, values in PRECISIONS.items():
            value = getattr(self, flag)
            if value is not None and value not in values:
                raise SettingsError(f"--{flag} {value}: not a known value. Known values: {', '.join(values)}")
        if self.quantize and self.to != "hf":
            raise SettingsError(
                f"--quantize {self.quantize}: Megatron does not train on quantized weights. Leave it out or use --to hf"
            )
        if min(self.block) < 1:
            raise SettingsError(f"--block {self.block[0]} {self.block[1]}: rows and columns must be at least 1")
        if self.quantize == "int4" and (self.group < 8 or self.group % 8):
            raise SettingsError(f"--group {self.group}: must be a multiple of 8. Engines support 32 and 128")

    @property
    def needs_numbers(self) -> bool:
        """Whether quantized sources have to be dequantized."""
        return bool(self.to == "torch_dist" or self.dtype or self.quantize)

    @property
    def facts(self) -> dict[str, Any]:
        """The options that determine the result, for its manifest."""
        return {
            "to": self.to, "dtype": self.dtype, "quantize": self.quantize, "max_shard_bytes": self.max_shard_bytes,
            **({"block": list(self.block)} if self.quantize == "fp8" else {}),
            **({"group": self.group} if self.quantize == "int4" else {}),
            **({"config": str(self.config)} if self.config else {}), **({"card": self.card} if self.card else {}),
        }  # fmt: skip
