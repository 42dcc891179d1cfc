"""mimo: MiMo-7B; Qwen2's layers, and multi-token prediction layers that are copied unchanged."""

from __future__ import annotations

from slimectl.weights import qwen2
from slimectl.weights.family import Family

FAMILY = Family("mimo", ("mimo",), qwen2.architecture, qwen2.links, carried=(r"^model\.mtp_layers\.",))
