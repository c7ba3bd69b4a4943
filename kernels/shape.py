"""The heads of an attention layer."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, KV heads, head size and element type that a group of layers shares."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.num_heads // self.num_kv_heads

    def with_kv_heads(self, kv_heads: int) -> "HeadShape":
        """The shape of `kv_heads` KV heads and their query heads."""
        return replace(self, num_heads=kv_heads * self.group, num_kv_heads=kv_heads)
