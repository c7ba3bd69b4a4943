"""What is predicted of traces is what engines report, request by request."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mixed_traffic import Mixes, to_engine

from picbench.engines.algorithms import parse
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Result
from picbench.profile.reuse import ArmSimulation, RequestReuse
from picbench.run.schedule import ContextIndex
from picbench.workloads.traffic.trace import TracedRequest

pytestmark = pytest.mark.engine

MIXES = ("rag", "articles", "agents", "nothing")

ARMS = (
    *("prefix", "reorder", "mepic", "naive", "epic:k=16:copy=shared", "epic:k=0:copy=shared"),
    *("naive:anchor=head", "mepic:anchor=head:context=document"),
    *("prompt-cache", "block-attention", "minipic"),
)

#: Blocks of a pool that holds any one of the requests, and few of them.
SMALL = 44


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One layer, one head: what is reused does not depend on numbers."""
    from tiny_llama import write_model

    folder = write_model(
        "llama",
        tmp_path_factory.mktemp("grain"),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
    )
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        kv_blocks=SMALL,
        context=600,
        batch_tokens=2048,
        tiers="",
    )
    with Engine(config) as engine:
        yield engine


def served(engine: Engine, trace: Sequence[TracedRequest], arm: str) -> list[Result]:
    """The requests one after another, from an empty cache; reordered ones as they are sent."""
    algorithm, order = parse(arm), ContextIndex()
    engine.reset()
    found = []
    for request in trace:
        items = [(s.chunk, s.content, s.length) for s in request.segments]
        places = order.arrange(items) if algorithm.reorders else ()
        asked = to_engine(request, algorithm.served, places)
        found += engine.generate([asked], ignore_eos=True)
    return found


def reported(result: Result) -> tuple[int, ...]:
    counts, hits = result.counts, result.hits
    assert counts.reused is not None
    return (
        counts.reused + counts.compiled,
        counts.compile_work,
        hits.chunk,
        hits.prefix,
        hits.copied,
    )


def predicted(found: RequestReuse | None) -> tuple[int, ...]:
    assert found is not None
    blocks = found.chunk_blocks, found.prefix_blocks, found.copied_blocks
    return found.reused, found.compiled, *blocks


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("arm", ARMS)
def test_a_pool_that_is_too_small(engine: Engine, mix: str, arm: str) -> None:
    trace: list[TracedRequest] = getattr(Mixes(11, 14), mix)()
    before = sum(engine.evictions.values())
    real = [reported(result) for result in served(engine, trace, arm)]
    evicted = sum(engine.evictions.values()) - before
    simulation = ArmSimulation(parse(arm), exact=True, blocks=SMALL)
    assert [predicted(simulation.serve(request)) for request in trace] == real
    assert simulation.close().evicted_blocks == evicted
    unbounded = ArmSimulation(parse(arm), exact=True)
    for request in trace:
        unbounded.serve(request)
    # Otherwise nothing was tested: the pool makes a difference to what these have in common.
    assert evicted or mix != "nothing"
    assert unbounded.totals.reused >= simulation.totals.reused
