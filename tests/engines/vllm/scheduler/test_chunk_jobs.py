"""What becomes of a chunk whose compile has ended."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.chunk_cache.chunk_store import ChunkStore
from picbench.engines.planning.keys import Key
from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.plan import Canonical
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment
from picbench.engines.vllm.scheduler.chunk_jobs import ChunkJob, ChunkJobs


class Everything:
    """A pool in which every page is resident, and which no request uses."""

    def resident(self, page: Key) -> bool:
        return True

    def refresh(self, pages: Iterable[Key]) -> None:
        """Nothing: there is no order."""


@pytest.fixture
def canonical() -> Canonical:
    chunk = Segment(tuple(range(40)), chunk=True)
    policy = ChunkPolicy(range(0))
    return lay_out([chunk, Segment((0,))], lambda i, n: policy, LayoutConfig(16)).canonicals[0]


@pytest.mark.parametrize(("blocks", "compiled"), [(0, False), (2, False), (3, True), (4, True)])
def test_a_compile_without_its_blocks_has_compiled_nothing(
    canonical: Canonical, blocks: int, compiled: bool
) -> None:
    """Pages may be gone, and a tier must get them all; a block for one more token is not theirs."""
    pool: Any = Everything()
    store = ChunkStore(pool, tiers=True)
    jobs = ChunkJobs(store, lambda request, before: None)
    request: Any = SimpleNamespace(request_id="compile")
    job = ChunkJob(canonical, request, canonical.compile_plan(), "", "", False, True)
    assert len(canonical.pages) == 3
    store.prepare_compile(canonical, "compile")
    jobs.finish(job, tuple(range(7, 7 + blocks)), success=True)
    assert store.get(canonical.key).whole is compiled
    stored = [command.blocks for command in store.commands.stores]
    assert stored == ([(7, 8, 9)] if compiled else [])
