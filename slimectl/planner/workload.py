"""Figures with their formulas and text form, and the training step that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slimectl.architectures.parallel import ParallelLayout

GIB = 2**30


@dataclass(frozen=True)
class Figure:
    """One line of a plan.

    >>> Figure("weights", 2 * 10**9, "bytes", "2 bytes x 1,000,000,000").text
    '1.86 GiB'
    """

    name: str
    value: float
    unit: str
    formula: str

    @property
    def text(self) -> str:
        """The value with its unit, as text."""
        match self.unit:
            case "bytes":
                return sized(self.value)
            case "parameters":
                return parameters(self.value)
            case "FLOP":
                return f"{counted(self.value)}FLOP"
        return f"{counted(self.value)} {self.unit}".rstrip()


def sized(count: float) -> str:
    """Format bytes with three digits.

    >>> sized(512), sized(3 * 2**20), sized(1.5 * 2**40)
    ('512 B', '3.00 MiB', '1.50 TiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1000:
            return f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {unit}"
    return f"{count / 1024:.2f} TiB"


def parameters(count: float) -> str:
    """Format a number of parameters with three digits. B is 10^9.

    >>> parameters(886_272), parameters(596_049_920), parameters(1_720_574_976), parameters(1_026_408_209_408)
    ('886 k', '596 M', '1.72 B', '1.03 T')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count / 1000:.3g} k"


def counted(count: float) -> str:
    """Format a number: in full up to a million, then with three digits.

    >>> counted(8192), counted(596_049_920), counted(4.2e15), counted(0.25)
    ('8,192', '596 M', '4.2 P', '0.25')
    """
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return f"{count:,.0f}" if count == int(count) or count >= 100 else f"{count:.3g}"


def total(name: str, figures: Iterable[Figure], suffix: str = "") -> Figure:
    """Sum several figures in bytes. The formula lists their names."""
    figures = list(figures)
    formula = " + ".join(figure.name for figure in figures) + suffix
    return Figure(name, sum(figure.value for figure in figures), "bytes", formula)


Recompute = Literal["none", "selective", "full"]

# Constants of the policies, which this layer cannot import. tests/planner/test_run.py checks that they are equal.
DENSE_SCORES = 2**26
"""Largest number of attention scores in memory at once, on a CPU in bfloat16."""
CHUNK_LOGITS = 2**23
"""Number of logits that the head computes at once."""
KEPT_LOGITS = 2**25
"""Number of log-probabilities that the head saves from forward for backward."""


@dataclass(frozen=True)
class Run:
    """Policy, ranks, dtype and batch sizes of a training step.

    A pack is the input of one forward pass: `max_tokens_per_gpu` tokens for every context-parallel rank, or one
    sequence if that is longer. `distributed_optimizer` is Megatron's. FSDP always shards.
    """

    world: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    policy: Literal["fsdp", "megatron"] = "megatron"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: Recompute = "none"
    seq_len: int = 8192
    max_tokens_per_gpu: int = 8192
    response_share: float = 1.0
    device: Literal["cpu", "cuda"] = "cuda"
    distributed_optimizer: bool = True
    recompute_modules: Sequence[str] = ("core_attn",)
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    optimizer: Literal["adamw", "muon"] = "adamw"
    offload: Literal["optimizer", "parameters"] | None = None
    images: int = 0
    """Images of a sequence."""
    tokens_per_image: int = 0

    @property
    def image_tokens(self) -> int:
        """Image tokens of a sequence."""
        return self.images * self.tokens_per_image

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model, over one rank too where its parameters are in host memory."""
        return self.policy == "fsdp" and (self.world > 1 or self.offload == "parameters")

    @property
    def moments(self) -> tuple[float, str]:
        """Bytes of a parameter's two moments, and their name. In int8, 256 numbers share a scale of 4 bytes."""
        width = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / 256}[self.state_dtype]
        return 2 * width, f"two moments, {self.state_dtype}"

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation includes `module`."""
        return self.recompute == "selective" and module in self.recompute_modules

    @property
    def bytes(self) -> int:
        """Bytes of an element in forward and backward."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def data(self) -> int:
        """Number of data-parallel replicas of the model."""
        return self.layout.data(self.world) if self.policy == "megatron" else self.world

    @property
    def pack(self) -> int:
        """Tokens of a pack."""
        return max(self.max_tokens_per_gpu * self.layout.context, self.seq_len)

    @property
    def tokens(self) -> int:
        """Tokens of a pack on one context-parallel rank."""
        return -(-self.pack // self.layout.context)

    @property
    def responses(self) -> int:
        """Response tokens among them, for which the head computes logits."""
        return round(self.tokens * self.response_share)

    def holds_scores(self, heads: int) -> bool:
        """Whether the policy's attention keeps its scores in memory, because flash attention is slow."""
        sequences = max(1, self.pack // self.seq_len)
        scores = sequences * heads * self.seq_len**2
        return self.device == "cpu" and self.bytes == 2 and scores <= DENSE_SCORES
