"""Every kind does what `Tier` says, whatever the order of calls."""

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis as redis_client
from held import held
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis_process import RedisProcess

from picbench.engines.chunk_cache.tiers.backends.disk import Disk
from picbench.engines.chunk_cache.tiers.backends.host import Host
from picbench.engines.chunk_cache.tiers.backends.redis import Redis
from picbench.engines.chunk_cache.tiers.tier import Tier

CAPACITY = 100

keys = st.integers(0, 6).map(lambda number: bytes([number]) * 33)
values = st.binary(min_size=1, max_size=60) | st.binary(min_size=CAPACITY - 1, max_size=130)


class Contract(RuleBasedStateMachine):
    """A tier beside a model of it: a bounded dictionary in order of use.

    Subclasses give `make` and say whether what it makes outlives `close`.
    """

    lasting: bool
    make: Callable[[], Tier]
    clean: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make()
        self.model: OrderedDict[bytes, bytes] = OrderedDict()

    def teardown(self) -> None:
        self.tier.close()
        self.clean()

    @rule(items=st.lists(st.tuples(keys, values), max_size=4))
    def put(self, items: list[tuple[bytes, bytes]]) -> None:
        # The buffer is spoiled afterwards, which must not matter.
        buffers = [(key, bytearray(value)) for key, value in items]
        kept = self.tier.put(buffers)
        for _, buffer in buffers:
            buffer[:] = bytes(len(buffer))
        assert kept == [self._put(key, value) for key, value in items]

    @rule(wanted=st.lists(keys, max_size=4))
    def get(self, wanted: list[bytes]) -> None:
        found = [None if value is None else bytes(value) for value in self.tier.get(wanted)]
        assert found == [self.model.get(key) for key in wanted]
        for key in wanted:
            if key in self.model:
                self.model.move_to_end(key)

    @rule(wanted=st.lists(keys, max_size=4))
    def exists(self, wanted: list[bytes]) -> None:
        assert self.tier.exists(wanted) == [key in self.model for key in wanted]

    @rule(unwanted=st.lists(keys, max_size=3))
    def delete(self, unwanted: list[bytes]) -> None:
        self.tier.delete(unwanted)
        for key in unwanted:
            self.model.pop(key, None)

    @rule()
    def reopen(self) -> None:
        if self.lasting:
            self.tier.close()
            self.tier = self.make()

    @invariant()
    def counts_are_right_and_bounded(self) -> None:
        nbytes = sum(map(len, self.model.values()))
        assert held(self.tier) == (len(self.model), nbytes)
        assert nbytes <= CAPACITY

    def _put(self, key: bytes, value: bytes) -> bool:
        if len(value) > CAPACITY:
            return False
        self.model.pop(key, None)
        while sum(map(len, self.model.values())) + len(value) > CAPACITY:
            self.model.popitem(last=False)
        self.model[key] = value
        return True


def check(make: Callable[[], Tier], clean: Callable[[], Any], *, lasting: bool, runs: int) -> None:
    attributes = {"make": staticmethod(make), "clean": staticmethod(clean), "lasting": lasting}
    machine: Any = type("ContractOfKind", (Contract,), attributes)
    chosen = settings(max_examples=runs, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(machine, settings=chosen)


def test_host() -> None:
    check(lambda: Host(CAPACITY), lambda: None, lasting=False, runs=100)


def test_disk(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))

    def make() -> Tier:
        folder.mkdir(exist_ok=True)
        return Disk(folder, CAPACITY)

    check(make, lambda: shutil.rmtree(folder), lasting=True, runs=12)


def test_redis(redis_process: RedisProcess) -> None:
    library: ModuleType = redis_client
    client = redis_process.client()

    def make() -> Tier:
        address = redis_process.address
        return Redis(address, name="redis", client_library=library, capacity=CAPACITY)

    check(make, client.flushall, lasting=True, runs=25)
    client.close()


def test_the_value_that_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    """It is used when it is read or put again, not when it is asked for."""
    wanted = first, second, third, fourth = [bytes([number]) * 33 for number in range(4)]
    value = b"v" * (CAPACITY // 3)
    for tier in (Host(CAPACITY), Disk(tmp_path, CAPACITY)):
        tier.put([(key, value) for key in (first, second, third)])
        tier.get([first])
        tier.exists([second])
        tier.put([(fourth, value)])
        assert tier.exists(wanted) == [True, False, True, True]
        tier.put([(third, value)])
        tier.put([(second, value)])
        assert tier.exists(wanted) == [False, True, True, True]
        tier.put([(first, value)])
        assert tier.exists(wanted) == [True, True, True, False]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_answers_have_the_length_of_the_question(count: int, tmp_path: Path) -> None:
    for tier in (Host(CAPACITY), Disk(tmp_path, CAPACITY)):
        asked = [bytes([i]) for i in range(count)]
        assert tier.exists(asked) == [False] * count
        assert tier.get(asked) == [None] * count
        tier.close()
