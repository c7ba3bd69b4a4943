"""Copies on streams: right in whatever order the streams get on."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from queued_streams import QueuedStreams
from torch import Tensor

from picbench.engines.vllm.transfer.copies import Pending
from picbench.engines.vllm.transfer.pool_rows import PoolRows
from picbench.engines.vllm.transfer.stream_copies import Staging, StreamCopies

BLOCKS, ROWS = 9, 12
some_blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5, unique=True)


class Traffic(RuleBasedStateMachine):
    """Steps write blocks as soon as nothing is loaded into them; what is copied is checked.

    `pool` is what the blocks hold once all that is queued was done.
    """

    @initialize(joined=st.booleans(), buffer=st.integers(1, 3), buffers=st.integers(1, 3))
    def begin(self, joined: bool, buffer: int, buffers: int) -> None:
        whole = torch.zeros(2, BLOCKS, 1, 2, 2)
        layers = list(whole) if joined else [layer.clone() for layer in whole]
        self.layers = layers
        self.rows = PoolRows(layers)
        self.streams = QueuedStreams()
        staging = Staging(buffer * self.rows.row_bytes, buffers, buffers, share=1)
        self.copies = StreamCopies(self.rows, self.streams, staging)
        self.memory = self.copies.lasting_memory(ROWS)
        self.memory.zero_()
        self.pool = [0] * BLOCKS
        self.kept = [0] * ROWS
        self.stores: list[tuple[Pending, list[int], list[int]]] = []
        self.loads: list[tuple[Pending, list[int], list[int]]] = []
        self.number = 0

    @rule(blocks=some_blocks)
    def step(self, blocks: list[int]) -> None:
        self.number += 1
        free = [block for block in blocks if block not in self._loading()]
        for block in free:
            self.pool[block] = self.number
        value, layers = self.number, self.layers

        def write() -> None:
            for layer in layers:
                layer[free] = float(value)

        self.streams.run(self.streams.steps(), write)

    @rule(blocks=some_blocks, first=st.integers(0, ROWS - 1))
    def store(self, blocks: list[int], first: int) -> None:
        blocks = [block for block in blocks if block not in self._loading()]
        rows = self._unused(first, len(blocks))
        if blocks and len(rows) == len(blocks):
            values = [self.pool[block] for block in blocks]
            self.stores.append((self.copies.store(blocks, self.memory, rows), rows, values))

    @rule(blocks=some_blocks, first=st.integers(0, ROWS - 1))
    def load(self, blocks: list[int], first: int) -> None:
        blocks = [block for block in blocks if block not in self._loading()]
        rows = self._unused(first, len(blocks))
        if blocks and len(rows) == len(blocks):
            self.copies.mark()
            copy = self.copies.load(self.memory, rows, blocks)
            self.loads.append((copy, rows, blocks))

    @precondition(lambda self: hasattr(self, "streams"))
    @rule(order=st.permutations(range(5)), entries=st.integers(1, 9))
    def go_on(self, order: list[int], entries: int) -> None:
        for _ in range(entries):
            queues = self.streams.queues
            self.streams.go_on([queues[i] for i in order if i < len(queues)])
        self._check_done()

    def teardown(self) -> None:
        if hasattr(self, "streams"):
            self.streams.drain()
            self._check_done()
            assert not self.stores
            assert not self.loads
            for block, value in enumerate(self.pool):
                assert all(torch.all(layer[block] == value) for layer in self.layers)

    def _check_done(self) -> None:
        for stored in [s for s in self.stores if s[0].done()]:
            self.stores.remove(stored)
            _, rows, values = stored
            for row, value in zip(rows, values, strict=True):
                self.kept[row] = value
                assert torch.equal(_floats(self.memory[row]), torch.full((8,), float(value)))
        for loaded in [load for load in self.loads if load[0].done()]:
            self.loads.remove(loaded)
            _, rows, blocks = loaded
            for row, block in zip(rows, blocks, strict=True):
                self.pool[block] = self.kept[row]
                assert all(torch.all(layer[block] == self.kept[row]) for layer in self.layers)

    def _loading(self) -> set[int]:
        return {block for _, _, blocks in self.loads for block in blocks}

    def _unused(self, first: int, count: int) -> list[int]:
        """Rows that are not copied, from `first` on and around."""
        used = {row for _, rows, _ in (*self.stores, *self.loads) for row in rows}
        order = [(first + i) % ROWS for i in range(ROWS)]
        return [row for row in order if row not in used][:count]


def _floats(row: Tensor) -> Tensor:
    return row.view(torch.float32).reshape(-1)


def test_copies_are_right_in_any_order() -> None:
    chosen = settings(max_examples=150, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(Traffic, settings=chosen)  # type: ignore[no-untyped-call]


def test_few_copies_cross_the_link() -> None:
    """A chunk in consecutive rows is one copy, whatever its blocks are."""
    rows = PoolRows(list(torch.rand(2, BLOCKS, 1, 2, 2)))
    streams = QueuedStreams()
    copies = StreamCopies(rows, streams, Staging(4 * rows.row_bytes, 2, 2, share=1))
    memory = copies.lasting_memory(4)
    copy = copies.store([7, 1, 4, 2], memory, [0, 1, 2, 3])
    assert not copy.done()
    link = streams.queues[1]
    # Wait for the rows, copy them, say that the buffer is free, and that the store is done.
    assert len(link.entries) == 4
    streams.drain()
    assert copy.done()
    assert copies.workspace_bytes == 4 * 4 * rows.row_bytes


def test_warming_up_changes_nothing() -> None:
    layers = list(torch.rand(2, BLOCKS, 1, 2, 2))
    before = [layer.clone() for layer in layers]
    streams = QueuedStreams()
    copies = StreamCopies(PoolRows(layers), streams)
    copies.warm_up()
    copies.close()
    streams.drain()
    assert all(map(torch.equal, layers, before))
