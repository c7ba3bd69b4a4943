"""Which requests warm an engine up."""

from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.request import Chunk, Request
from picbench.engines.warm_up_requests import warm_up_requests


def tokens(request: Request) -> int:
    return sum(len(segment.tokens or ()) for segment in request.segments)


def chunks(request: Request) -> int:
    return sum(isinstance(segment, Chunk) for segment in request.segments)


@given(st.integers(1, 100_000), st.sampled_from(["cpu", "cuda"]), st.booleans())
def test_no_prompt_is_longer_than_the_engine_serves(longest: int, device: str, pic: bool) -> None:
    found = list(warm_up_requests(longest, device, chunks=pic))
    assert all(0 < tokens(request) <= longest for request in found)
    assert chunks(found[0]) == 0


def test_engines_with_chunks_link_few_and_many_tokens() -> None:
    assert [chunks(r) for r in warm_up_requests(9000, "cpu", chunks=True)] == [0, 1, 12]
    assert [chunks(r) for r in warm_up_requests(700, "cpu", chunks=True)] == [0, 12]


def test_prompts_on_gpus_fill_steps() -> None:
    assert [chunks(r) for r in warm_up_requests(9787, "cuda", chunks=True)] == [0, 1, 12, 19]
    assert tokens(list(warm_up_requests(131_072, "cuda", chunks=False))[-1]) == 32_040
