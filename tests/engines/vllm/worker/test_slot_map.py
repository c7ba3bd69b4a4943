from picbench.engines.algorithms import parse
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import LayoutConfig, Segment
from picbench.engines.vllm.worker.slot_map import turns

BLOCK = 16


def plan(algorithm: str, *pieces: Segment) -> Plan:
    chosen = parse(algorithm)
    layout = LayoutConfig(block_size=BLOCK, scope="", pad=chosen.pads, pad_token=0, bos_token=1)
    return lay_out(list(pieces), chosen.plan_chunk, layout, prefix_keys=[])


def text(count: int, first: int = 0) -> Segment:
    return Segment(tuple(range(first, first + count)))


def chunk(count: int, first: int) -> Segment:
    return Segment(tuple(range(first, first + count)), chunk=True)


def rests(found: Plan) -> dict[bytes, tuple[int, ...]]:
    return {
        page.name: page.positions
        for canonical in found.canonicals
        for page in canonical.compile_plan().pages
    }


def check(found: Plan) -> None:
    """Every visible canonical slot is turned from where it was compiled to where it is seen."""
    turned = [0] * len(found.positions)
    for start, end, turn in turns(found):
        turned[start:end] = [turn] * (end - start)
    where = rests(found)
    slot = 0
    for page in found.pages:
        rest = where.get(page.copy_of or page.name) if page.canonical else page.positions
        assert rest is not None
        for position, there in zip(page.positions, rest, strict=True):
            if position != GAP:
                assert position == there + turned[slot]
            slot += 1


def test_chunks_are_turned_to_where_they_stand() -> None:
    found = plan("naive", text(5), chunk(20, 100), chunk(40, 200), text(3, 300))
    assert turns(found) == [(0, 32, 5), (32, 80, 25)]
    check(found)


def test_every_algorithm() -> None:
    pieces = [text(21), chunk(150, 100), chunk(35, 400), text(7, 30), chunk(150, 100), text(9, 60)]
    for algorithm in (
        "naive",
        "naive:anchored=on",
        "naive:pad=paper",
        "epic:k=0",
        "epic:k=16",
        "mepic",
        "mepic:pad=paper:anchored=on",
    ):
        check(plan(algorithm, *pieces))


def test_a_chunk_that_leads_the_prompt_is_read_as_it_rests() -> None:
    assert turns(plan("naive", chunk(32, 100), text(4))) == []


def test_compile_requests_are_not_turned() -> None:
    found = plan("naive:anchored=on", text(5), chunk(20, 100), text(3, 300))
    [canonical] = found.canonicals
    assert turns(canonical.compile_plan()) == []
