"""What is kept up to date is what counting everything anew would give."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from picbench.engines.vllm.scheduler.attribution import Attribution

BLOCKS, SIZE, KINDS = 12, 4, 5
names = st.sampled_from("abcd")
#: Blocks, the same one several times perhaps, each with one of few rows of codes.
rows = st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 4), (3, 3, 4, 4), (4, 2, 0, 1)])
parts = st.lists(st.tuples(st.integers(0, BLOCKS - 1), rows), max_size=6)

Held = list[tuple[int, tuple[int, ...]]]


def arrays(part: Held) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([block for block, _ in part], dtype=np.int64)
    return ids, np.array([row for _, row in part], dtype=np.uint8).reshape(-1, SIZE)


def anew(held: Held) -> tuple[list[int], list[bool]]:
    """Slots of each kind and the blocks in use, block by block."""
    counts, used = [0] * KINDS, [False] * BLOCKS
    for block in range(BLOCKS):
        seen = [row for other, row in held if other == block]
        used[block] = bool(seen)
        for codes in zip(*seen, strict=True):
            counts[min(codes)] += 1
    return counts, used


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.found = Attribution(BLOCKS, SIZE, KINDS)
        self.held: dict[str, Held] = {}

    @rule(name=names, part=parts)
    def add(self, name: str, part: Held) -> None:
        self.found.add(name, *arrays(part))
        self.held.setdefault(name, []).extend(part)

    @rule(name=names)
    def drop(self, name: str) -> None:
        self.found.drop(name)
        self.held.pop(name, None)

    @rule(extra=st.lists(parts, max_size=3))
    def blocks_for_a_moment(self, extra: list[Held]) -> None:
        counts, used = self.found.count([arrays(part) for part in extra])
        every = [entry for part in (*self.held.values(), *extra) for entry in part]
        assert (counts.tolist(), used.tolist()) == anew(every)

    @invariant()
    def counts_are_those_of_counting_anew(self) -> None:
        counts, used = self.found.count([])
        assert (counts.tolist(), used.tolist()) == anew([e for h in self.held.values() for e in h])


TestPool = Pool.TestCase
TestPool.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


@given(parts)
def test_what_was_counted_is_not_changed_by_what_comes(part: Held) -> None:
    found = Attribution(BLOCKS, SIZE, KINDS)
    before, _ = found.count([])
    found.add("a", *arrays(part))
    assert before.sum() == 0
