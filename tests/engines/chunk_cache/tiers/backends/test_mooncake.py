"""The Mooncake tier against a master on this machine, over TCP; needs the extra `mooncake`."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest

from picbench.engines.chunk_cache.tiers.backends.mooncake import Mooncake
from picbench.engines.chunk_cache.tiers.guarded_tier import GuardedTier
from picbench.engines.chunk_cache.tiers.stack import TierStack
from picbench.engines.chunk_cache.tiers.tier import TierSpec, pageable

# The package is there without the system libraries that it loads on machines that never use it.
pytest.importorskip("mooncake.store", reason="Mooncake does not load here", exc_type=ImportError)

A, B = b"a" * 33, b"b" * 33


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    binary = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    assert binary is not None
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    options = [f"--port={ports[0]}", f"--metrics_port={ports[1]}", "--rpc_address=127.0.0.1"]
    with subprocess.Popen(
        [binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while not _listens(ports[0]):
            assert process.poll() is None
            sleep(0.05)
        yield f"127.0.0.1:{ports[0]}"
        process.kill()


@pytest.fixture(scope="module")
def tier(master: str) -> Iterator[Mooncake]:
    options = {"buffer": "32MiB"}
    opened = Mooncake.open(TierSpec("mooncake", master, 64 << 20, options), pageable)
    yield opened
    opened.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_values_come_back_until_they_are_deleted(tier: Mooncake) -> None:
    value = bytes(range(256)) * 20_000
    assert tier.put([(A, memoryview(value)), (B, b"short")]) == [True, True]
    assert tier.exists([A, B, b"c" * 33]) == [True, True, False]
    assert tier.get([B, b"c" * 33, A]) == [b"short", None, value]
    tier.delete([A, b"c" * 33])
    assert tier.get([A, B]) == [None, b"short"]


def test_a_value_is_replaced(tier: Mooncake) -> None:
    tier.put([(A, b"first")])
    assert tier.put([(A, b"second")]) == [True]
    assert tier.get([A]) == [b"second"]


def test_a_value_larger_than_the_pool_is_not_kept(tier: Mooncake) -> None:
    assert tier.put([(B, bytes(100 << 20))]) == [False]
    assert tier.put([(B, b"small")]) == [True]


def test_under_a_stack(tier: Mooncake) -> None:
    guarded = GuardedTier(tier, deadline=20)
    stack = TierStack([guarded])
    assert stack.store([(b"d" * 33, b"payload")]).result(20) == [(tier.name,)]
    (found,) = stack.fetch([(b"d" * 33, 7)]).result(20)
    assert found is not None
    assert found.data == b"payload"
