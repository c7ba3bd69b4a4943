"""The LMCache tier against LMCache's own server; needs the extra `lmcache`."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from time import sleep

import pytest

from picbench.engines.chunk_cache.tiers.backends.lmcache import LMCache
from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.stack import TierStack
from picbench.engines.chunk_cache.tiers.tier import TierSpec, pageable

pytest.importorskip("lmcache", reason="the extra lmcache is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # LMCache's imports warn

A, B, C, D = b"\0" + b"a" * 32, b"b" * 33, b"c" * 33, b"d" * 33


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(number)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        while not _listens(number):
            assert server.poll() is None
            sleep(0.05)
        yield number
        server.kill()


@pytest.fixture
def tier(port: int) -> Iterator[LMCache]:
    opened = LMCache.open(TierSpec("lmcache", f"127.0.0.1:{port}"), pageable)
    yield opened
    opened.delete([A, B])
    opened.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_values_come_back_until_they_are_deleted(tier: LMCache) -> None:
    value = bytes(range(256)) * 20_000
    assert tier.put([(A, memoryview(value)), (B, b"short")]) == [True, True]
    assert tier.exists([A, B, C]) == [True, True, False]
    assert tier.get([B, C, A]) == [b"short", None, value]
    tier.delete([A, C])
    assert tier.get([A, B]) == [None, b"short"]


def test_keys_that_differ_in_leading_zeros_differ(tier: LMCache) -> None:
    tier.put([(A, b"with"), (A[1:], b"without")])
    assert tier.get([A, A[1:]]) == [b"with", b"without"]


def test_empty_values_are_not_kept(tier: LMCache) -> None:
    assert tier.put([(A, b"")]) == [False]


def test_under_a_stack(tier: LMCache) -> None:
    stack = TierStack([GuardedTier(tier)])
    assert stack.store([(D, b"payload")]).result(20) == [(tier.name,)]
    (found,) = stack.fetch([(D, 7)]).result(20)
    assert found is not None
    assert found.data == b"payload"
    stack.close()


def test_a_server_that_is_not_there_is_an_outage() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        location = f"127.0.0.1:{probe.getsockname()[1]}"
        guarded = GuardedTier(LMCache.open(TierSpec("lmcache", location), pageable))
        assert guarded.get([A]) == [None]
        assert guarded.counters().errors == 1
