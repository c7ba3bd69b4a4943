"""No sealed value survives a change, a cut or another key."""

from hypothesis import assume, given
from hypothesis import strategies as st

from picbench.engines.chunk_cache.tiers.envelope import (
    HEADER_BYTES,
    enclose,
    seal,
    stamp,
    unseal,
)

keys = st.binary(min_size=1, max_size=40)
payloads = st.binary(max_size=300)


@given(key=keys, payload=payloads)
def test_what_is_sealed_is_unsealed(key: bytes, payload: bytes) -> None:
    sealed = seal(key, payload)
    assert len(sealed) == HEADER_BYTES + len(payload)
    opened = unseal(key, sealed)
    assert opened == payload
    assert opened is not None
    assert opened.readonly


@given(key=keys, payload=payloads)
def test_sealing_in_two_steps_is_the_same(key: bytes, payload: bytes) -> None:
    assert stamp(key, enclose(payload)) == seal(key, payload)


@given(key=keys, payload=payloads, data=st.data())
def test_a_flipped_bit_shows(key: bytes, payload: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal(key, payload))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert unseal(key, sealed) is None


@given(key=keys, payload=payloads, data=st.data())
def test_a_cut_or_longer_value_shows(key: bytes, payload: bytes, data: st.DataObject) -> None:
    sealed = bytes(seal(key, payload))
    cut = data.draw(st.integers(0, len(sealed) - 1))
    assert unseal(key, sealed[:cut]) is None
    assert unseal(key, sealed + b"\0") is None


@given(key=keys, other=keys, payload=payloads)
def test_another_keys_value_shows(key: bytes, other: bytes, payload: bytes) -> None:
    assume(key != other)
    assert unseal(other, seal(key, payload)) is None
