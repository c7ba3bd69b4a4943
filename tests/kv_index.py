"""What a router knows of servers by their KV events: the contract of vLLM's event stream.

A block is stored under a hash, after its parent or at the beginning; its tokens are what routers
look up. Dynamo's and llm-d's indexers keep the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import BlockStored

#: A block's parent, or None at the beginning, and its tokens.
Place = tuple[Any, tuple[int, ...]]


@dataclass(slots=True)
class KvIndex:
    """The blocks of one server, by hash and by place; each is stored before it is removed."""

    places: dict[Any, Place] = field(default_factory=dict)
    blocks: dict[Place, set[Any]] = field(default_factory=dict)

    def apply(self, events: Iterable[Any]) -> None:
        """Apply events in their order; what contradicts the ones before fails."""
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.places.clear()
                self.blocks.clear()
            elif kind == "BlockRemoved":
                for name in event.block_hashes:
                    place = self.places.pop(name)
                    self.blocks[place].discard(name)
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size, tokens = event.parent_block_hash, event.block_size, event.token_ids
        assert len(tokens) == size * len(event.block_hashes)
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        for number, name in enumerate(event.block_hashes):
            assert parent is None or parent in self.places
            place = (parent, tuple(tokens[number * size :][:size]))
            assert self.places.setdefault(name, place) == place
            self.blocks.setdefault(place, set()).add(name)
            parent = name

    def found(self, tokens: Sequence[int], size: int = 16) -> int:
        """How many blocks of these tokens, from the first on, the server has."""
        parents, count = {None}, 0
        for begin in range(0, len(tokens) - size + 1, size):
            block = tuple(tokens[begin : begin + size])
            parents = set().union(*(self.blocks.get((p, block), ()) for p in parents))
            if not parents:
                break
            count += 1
        return count
