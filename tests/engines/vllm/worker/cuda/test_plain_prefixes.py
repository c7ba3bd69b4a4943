"""Which requests without a plan begin alike."""

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.vllm.worker.cuda.planned_requests import LEAST_SAVED, PlainPrefixes

CELL = 2


def prefixes(*requests: tuple[str, int, list[int]]) -> PlainPrefixes:
    found = PlainPrefixes(CELL)
    for name, prompt, blocks in requests:
        found.add(name, prompt, 8, blocks)
    return found


def test_those_with_a_cell_in_common_wait() -> None:
    found = prefixes(("a", 70, [1, 2, 3, 4, 5]), ("b", 70, [1, 2, 6, 7, 8]), ("c", 70, [9, 2, 3]))
    assert found.waiting == {"a", "b"}
    assert found.take("a", 69) is None
    taken = found.take("a", 70)
    assert taken is not None
    assert taken.blocks == (1, 2, 3, 4)
    assert found.waiting == {"b"}
    found.remove("a")
    assert not found.waiting


def test_a_cell_must_be_full_and_of_the_prompt() -> None:
    assert not prefixes(("a", 31, [1, 2]), ("b", 31, [1, 2])).waiting
    assert not prefixes(("a", 80, [1]), ("b", 80, [1])).waiting


def test_little_that_is_shared_does_not_pay() -> None:
    long = [("long", 16 * 400, list(range(100, 500)))]
    pair = [(name, 48, [1, 2, 3]) for name in "ab"]
    assert prefixes(*pair).waiting == {"a", "b"}
    assert not prefixes(*pair, *long).waiting


def test_a_request_that_comes_back_has_the_blocks_that_it_has_now() -> None:
    found = prefixes(("a", 40, [1, 2]), ("b", 40, [1, 2]))
    found.add("b", 40, 8, [3, 4])
    assert not found.waiting


# Blocks of a tree: what precedes a block is known from it.
PROMPTS = st.lists(st.integers(1, 2), max_size=7).map(
    lambda turns: [int("".join(map(str, turns[: i + 1]))) for i in range(len(turns))]
)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), PROMPTS), max_size=30))
def test_counts_are_those_of_the_requests_that_run(
    events: list[tuple[int, bool, list[int]]],
) -> None:
    found, running = PlainPrefixes(CELL), dict[str, list[int]]()
    for number, comes, blocks in events:
        name = str(number)
        if comes:
            found.add(name, 16 * len(blocks), 8, blocks)
            running[name] = blocks
        else:
            found.remove(name)
            running.pop(name, None)
        total = sum(map(len, running.values()))
        cells = [tuple(b[: i + CELL]) for b in running.values() for i in range(0, len(b) - 1, CELL)]
        saved = CELL * (len(cells) - len(set(cells)))
        expected = {
            name
            for name, own in running.items()
            if len(own) >= CELL and sum(_common(own, b) >= CELL for b in running.values()) > 1
        }
        assert found.waiting == (expected if saved >= LEAST_SAVED * total else set())


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
