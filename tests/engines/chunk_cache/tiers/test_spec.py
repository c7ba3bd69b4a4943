"""Tier specs: parsing, opening, errors."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.chunk_cache.tiers.backends.lmcache import LMCache
from picbench.engines.chunk_cache.tiers.backends.mooncake import Mooncake
from picbench.engines.chunk_cache.tiers.notation import describe_tiers, open_tiers, parse_tiers
from picbench.engines.chunk_cache.tiers.tier import TierSpec, pageable, parse_size
from picbench.errors import ConfigError


def test_a_list_of_tiers() -> None:
    text = "host:4GiB, disk:/var/kv:1.5TB?deadline=500ms ,redis://u:p@h:6379/0:10GiB?ttl=1h"
    host, disk, redis = parse_tiers(text)
    assert host == TierSpec("host", "", 4 << 30, {}, 2.0, "host:4GiB")
    assert (disk.location, disk.capacity, disk.deadline) == ("/var/kv", 1_500_000_000_000, 0.5)
    assert (redis.location, redis.capacity) == ("//u:p@h:6379/0", 10 << 30)
    assert redis.options == {"ttl": "1h"}
    assert redis.text == "redis://***@h:6379/0:10GiB?ttl=1h"
    assert parse_tiers("") == []


@pytest.mark.parametrize("secret", ["u:p@ss", "u:@@"])
def test_no_part_of_a_password_is_told(secret: str) -> None:
    text = f"redis://{secret}@h:6379/0:10GiB?ttl=1h"
    assert parse_tiers(text)[0].text == "redis://***@h:6379/0:10GiB?ttl=1h"


def test_an_address_that_cannot_be_read_tells_no_password() -> None:
    with pytest.raises(ConfigError, match="cannot read the address") as caught:
        parse_tiers("redis://:abc/def@h:6379/0")
    assert "abc" not in f"{caught.value}"
    assert "def" not in f"{caught.value}"


def test_a_size_of_nothing_is_not_the_default() -> None:
    for text in ("host:0GiB", "redis://h:6379:0GiB"):
        with pytest.raises(ConfigError, match="it is 0"):
            parse_tiers(text)


def test_a_port_is_no_capacity() -> None:
    (spec,) = parse_tiers("redis://h:6379")
    assert (spec.location, spec.capacity) == ("//h:6379", None)


@given(number=st.integers(0, 10**6), unit=st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_in_binary_units(number: int, unit: str) -> None:
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_size(f"{number}{unit}") == number << 10 * power


@pytest.mark.parametrize(
    "text",
    ["", "4", "GiB", "4 potatoes", "-1GiB", "4GiB!", "1e3B", "nanGiB", "infGiB", "9" * 400 + "B"],
)
def test_not_sizes(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hots:4GiB", "did you mean 'host'"),
        ("cloud", "there are: disk, host"),
        ("host", "a capacity is missing"),
        ("host:4", "'4' is not a size"),
        ("host:0GiB", "a capacity is missing"),
        ("host:1GiB?color=red", "unknown option 'color'"),
        ("host:1GiB?deadline=2", "deadline=2 is not a duration"),
        ("host:1GiB?deadline=0s", "deadline=0s is not a duration"),
        ("host:1GiB,host:2GiB", "named twice"),
        ("mooncake:", "the master's address is missing"),
        ("mooncake:h:1?buffer=big", "buffer=big is not a size"),
        ("lmcache:h", "is not host:port"),
        ("lmcache:h:1:4GiB", "has no bound"),
    ],
)
def test_what_is_wrong_is_said_with_the_flag(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="`tiers`") as caught:
        open_tiers(parse_tiers(text))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("host:nanGiB", "'nanGiB' is not a size"),
        ("host:infGiB", "'infGiB' is not a size"),
        ("host:-1GiB", "'-1GiB' is not a size"),
        ("host", "a capacity is missing"),
        ("host:1GiB?color=red", "unknown option 'color'"),
        ("host:1GiB?deadline=" + "9" * 400 + "s", "is not a duration"),
        ("disk:/kv:nanGiB", "a capacity is missing"),
        ("disk:infGiB", "a capacity is missing"),
        ("redis://h:6379:nanGiB", "cannot read the address"),
        ("redis:h", "cannot read the address: it does not begin with //"),
        ("redis:", "a server is missing"),
        ("redis://h:1GiB?ttl=nans", "ttl=nans is not a duration"),
        ("redis://h:1GiB?tls=yes", "tls=yes is not possible"),
        ("mooncake:h:1:infGiB", "'h:1:infGiB' does not end in a port"),
        ("mooncake:h:1?buffer=nanGiB", "buffer=nanGiB is not a size"),
        ("lmcache:h:1:nanGiB", "'h:1:nanGiB' is not host:port"),
    ],
)
def test_what_a_kind_does_not_take_is_refused_before_it_is_opened(text: str, problem: str) -> None:
    """A dry run opens no tier, and an engine takes a minute until it does."""
    with pytest.raises(ConfigError, match="`tiers`") as caught:
        parse_tiers(text)
    assert problem in str(caught.value)
    assert text.partition("?")[0] in str(caught.value)


def test_masters_that_are_elected_are_named_by_a_url() -> None:
    (spec,) = parse_tiers("mooncake:etcd://a:2379;b:2379/x:4GiB")
    assert (spec.location, spec.capacity) == ("etcd://a:2379;b:2379/x", 4 << 30)


def test_tiers_of_a_wrong_list_are_closed_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_tiers(parse_tiers(f"disk:{tmp_path}:1MiB,disk:{tmp_path}:2MiB"))
    (tmp_path / "index.sqlite").rename(tmp_path / "moved")  # no process has a write-ahead log open
    assert not list(tmp_path.glob("*-wal"))


@pytest.mark.parametrize("kind", [LMCache, Mooncake])
def test_a_missing_client_names_the_extra(
    kind: type[LMCache | Mooncake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind.kind, None)
    spec = TierSpec(kind.kind, "127.0.0.1:1", text="x")
    with pytest.raises(ConfigError, match=rf"pip install 'picbench\[{kind.kind}\]'"):
        kind.open(spec, pageable)


def test_every_kind_describes_itself_without_its_client() -> None:
    code = (
        "import sys\n"
        "from picbench.engines.chunk_cache.tiers.notation import describe_tiers, parse_tiers\n"
        "parse_tiers('host:1GiB')\n"
        "assert len(describe_tiers()) >= 5\n"
        "print({'torch', 'vllm', 'redis', 'lmcache', 'mooncake'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
    assert all(name and summary and notation for name, summary, notation in describe_tiers())
