"""A Redis tier against a real server: shared, bounded, full, killed and started again."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from held import held
from redis_process import RedisProcess

from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.backends.redis import Redis
from picbench.engines.chunk_cache.tiers.guarded_tier import Backoff, GuardedTier
from picbench.engines.chunk_cache.tiers.notation import (
    open_tiers,
    parse_tiers,
    probe_tiers,
    refuse_passwords,
)
from picbench.engines.chunk_cache.tiers.stack import TierStack
from picbench.engines.chunk_cache.tiers.tier import Tier, pageable
from picbench.errors import ConfigError

A, B, C = b"a" * 33, b"b" * 33, b"c" * 33
WAIT = 20.0


@pytest.fixture(autouse=True)
def empty(redis_process: RedisProcess) -> Iterator[None]:
    yield
    with redis_process.client() as client:
        client.config_set("maxmemory", 0)
        client.flushall()


def open_redis(process: RedisProcess, rest: str = "") -> Tier:
    (spec,) = parse_tiers(process.address + rest)
    return Redis.open(spec, pageable)


def test_two_engines_share_values_and_bound(redis_process: RedisProcess) -> None:
    mine, theirs = (open_redis(redis_process, ":100B") for _ in range(2))
    mine.put([(A, bytes(40)), (B, bytes(40))])
    assert theirs.get([A]) == [bytes(40)]
    theirs.put([(C, bytes(40))])
    assert mine.exists([A, B, C]) == [True, False, True]
    assert held(mine)[1] == 80
    mine.close()
    theirs.close()


def test_large_values_come_back_equal(redis_process: RedisProcess) -> None:
    tier = open_redis(redis_process, ":64MiB")
    value = bytes(range(256)) * (5 << 12)
    assert tier.put([(A, memoryview(value)), (B, bytearray(value))]) == [True, True]
    assert tier.get([B, A]) == [value, value]
    tier.close()


@pytest.mark.parametrize("capacity", ["", ":1MiB"])
def test_values_expire_if_told_to(redis_process: RedisProcess, capacity: str) -> None:
    tier = open_redis(redis_process, f"{capacity}?ttl=1h")
    tier.put([(A, b"value")])
    with redis_process.client() as client:
        assert 0 < client.pttl(b"picbench:v:" + A) <= 3_600_000
    tier.close()


@pytest.mark.parametrize("capacity", ["", ":1GiB"])
def test_a_server_without_memory_keeps_what_it_has(
    redis_process: RedisProcess, capacity: str
) -> None:
    tier = open_redis(redis_process, capacity)
    tier.put([(A, b"value")])
    with redis_process.client() as client:
        client.config_set("maxmemory", 1)
    assert tier.put([(A, b"other"), (B, bytes(1000))]) == [False, False]
    assert tier.get([A, B]) == [b"value", None]
    with redis_process.client() as client:
        client.config_set("maxmemory", 0)
    assert tier.put([(B, bytes(1000))]) == [True]
    assert held(tier)[1] == 1005
    tier.close()


def test_only_its_own_values_are_counted(redis_process: RedisProcess) -> None:
    with redis_process.client() as client:
        client.set("another client's", "value")
    tier = open_redis(redis_process)
    tier.put([(bytes([i, j]), b"12345") for i in range(50) for j in range(50)])
    assert held(tier) == (2500, 12_500)
    tier.close()


def test_killed_and_started_again_in_the_middle(
    redis_process: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tier = open_redis(redis_process, ":1MiB?deadline=5s")
    guarded = GuardedTier(tier, deadline=WAIT, backoff=Backoff(first=0.0, longest=0.0))
    stack = TierStack([GuardedTier(Host(1 << 20)), guarded])
    assert stack.store([(A, b"first")]).result(WAIT) == [("host", tier.name)]
    redis_process.kill()
    for key in (B, C):
        assert stack.store([(key, b"value")]).result(WAIT) == [("host",)]
    found = stack.fetch([(A, 5), (b"d" * 33, 5), (B, 5)]).result(WAIT)
    assert [answer and bytes(answer.data) for answer in found] == [b"first", None, b"value"]
    redis_process.start()
    assert stack.store([(C, b"value")]).result(WAIT) == [("host", tier.name)]
    assert tier.get([A, C])[0] is None  # the server forgot it, and said so
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "Requests go on without it" in m]) == 1
    assert len([m for m in messages if "answers again" in m]) == 1
    assert stack.counters()[tier.name].errors >= 3
    stack.close()


def test_a_server_that_is_not_there_yet_is_no_error_at_start(redis_process: RedisProcess) -> None:
    redis_process.kill()
    stack = open_tiers(parse_tiers(f"host:1MiB,{redis_process.address}"))
    assert stack.store([(A, b"value")]).result(WAIT) == [("host",)]
    stack.close()
    redis_process.start()


def test_names_and_messages_hold_no_password(
    redis_process: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    (spec,) = parse_tiers(f"redis://user:secret@127.0.0.1:{redis_process.port}/0")
    guarded = GuardedTier(Redis.open(spec, pageable))
    assert guarded.exists([A]) == [False]  # the server wants no password
    assert guarded.counters().errors == 1
    assert "secret" not in caplog.text + guarded.name + repr(spec)
    guarded.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("redis://host:port/0", "cannot read the address"),
        ("redis:", "a server is missing"),
        ("redis://host/0?tls=maybe", "tls=maybe"),
        ("redis://host/0?ttl=1", "ttl=1 is not a duration"),
        ("redis://user:secret@host/0?tlt=1h", "did you mean 'ttl'"),
    ],
)
def test_what_cannot_be_read_is_one_clear_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="`tiers` redis:") as caught:
        Redis.open(parse_tiers(text)[0], pageable)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_cluster_is_refused(tmp_path: Path, redis_process: RedisProcess) -> None:
    nodes = RedisProcess(redis_process._binary, tmp_path, "--cluster-enabled", "yes")
    nodes.start()
    try:
        with pytest.raises(ConfigError, match="is a node of a Redis Cluster"):
            probe_tiers(nodes.address)
    finally:
        nodes.kill()
    probe_tiers(redis_process.address)


def test_the_password_may_be_a_secret(
    redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with redis_process.client() as client:
        client.execute_command("ACL", "SETUSER", "own", "on", ">hidden", "~*", "+@all")
    address = redis_process.address.replace("//", "//own@")
    with pytest.raises(ConfigError, match="cannot be used"):
        probe_tiers(address)
    (tmp_path / "password").write_text("hidden\n")
    monkeypatch.setenv("PICBENCH_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    probe_tiers(address)
    (tmp_path / "password").write_text("\n")
    with pytest.raises(ConfigError, match="PICBENCH_REDIS_PASSWORD_FILE has no secret"):
        probe_tiers(address)


def test_passwords_are_refused_where_others_see_them() -> None:
    for text in ("redis://:hidden@host/0", "host:4GiB,redis://own:hidden@host/0"):
        with pytest.raises(ConfigError, match="has a password") as caught:
            refuse_passwords(text)
        assert "hidden" not in str(caught.value)
    refuse_passwords("host:4GiB,redis://own@host:6379/0,disk:/kv@a:b:4GiB")
