"""Decoding from copies equals gathering anew in each step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Layout, PagedCase, make_case, relative_error
from torch import Tensor

from picbench.kernels.cpu.attention import AttentionBatch, attend
from picbench.kernels.cpu.copies import KvCopies
from picbench.kernels.cpu.kernel_calls import CopiedCall, GatheredCall, KernelCall
from picbench.kernels.cpu.reference import attend_reference
from picbench.kernels.paging import BLOCK_SIZE, GAP
from picbench.kernels.shape import HeadShape

pytest.importorskip("vllm")

SHAPE = HeadShape(4, 2, 64, torch.float32)
STEPS = 20
ROOM = 64


def layout(number: int, chunk: int, text: int) -> Layout:
    """A chunk with a hidden start and end in shared blocks, then text and `STEPS` tokens."""
    hidden = min(5, chunk)
    shared = [GAP] * hidden + list(range(hidden, chunk)) + [GAP] * (-chunk % BLOCK_SIZE)
    own = [*range(hidden), *range(chunk, chunk + text + STEPS)]
    kpos = shared + own
    blocks = [100 * number + b for b in range(-(-len(kpos) // BLOCK_SIZE))]
    return Layout(kpos, STEPS, blocks, rotated=torch.arange(len(kpos)) >= len(shared))


class Decoding:
    """Requests that decode side by side over caches with the same content."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.case = make_case(layouts, SHAPE)
        self.plain = make_case([replace(one, rotated=False) for one in layouts], SHAPE)
        self.kpos: list[Tensor] = self.case.description["kpos"]
        self.calls: list[KernelCall] = []

    def step(self, number: int, members: Sequence[int], copies: KvCopies | None) -> Tensor:
        """Attention of the members' token `number`."""
        described = self._describe(number, members)
        batch = AttentionBatch.build(
            **described,
            affine=[False] * len(members),
            rotated=[self.case.layouts[i].rotated for i in members],
            shape=SHAPE,
            copies=copies,
        )
        self.calls = list(batch.calls)
        query = self._query(number, members)
        out = torch.full_like(query, float("nan"))
        return attend(query, self.case.kv_cache, batch, self.case.scale, out)

    def expected(self, number: int, members: Sequence[int]) -> Tensor:
        query, cache = self._query(number, members), self.plain.kv_cache
        described = self._describe(number, members)
        return attend_reference(query, cache, **described, scale=self.case.scale)

    def check(self, number: int, members: Sequence[int], copies: KvCopies | None) -> None:
        found = self.step(number, members, copies)
        assert relative_error(found, self.expected(number, members)) <= 1e-5

    def _describe(self, number: int, members: Sequence[int]) -> dict[str, object]:
        kpos = [self.kpos[i] for i in members]
        lengths = [len(positions) - STEPS + number + 1 for positions in kpos]
        return self.case.description | {
            "query_start": list(range(len(members) + 1)),
            "seq_lens": lengths,
            "block_table": self.case.description["block_table"][list(members)],
            "kpos": kpos,
            "qpos": torch.stack([p[n - 1] for p, n in zip(kpos, lengths, strict=True)]),
        }

    def _query(self, number: int, members: Sequence[int]) -> Tensor:
        return self.case.query[[STEPS * i + number for i in members]]


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=4),
    room=st.sampled_from([2, 9, ROOM]),
    data=st.data(),
)
def test_any_mix_of_steps_equals_the_reference(
    sizes: list[tuple[int, int]], room: int, data: st.DataObject
) -> None:
    requests = Decoding([layout(i, *size) for i, size in enumerate(sizes)])
    copies = KvCopies(room)
    everyone = list(range(len(sizes)))
    for number in range(STEPS):
        members = data.draw(st.sampled_from([everyone, everyone[::-1], everyone[:1], everyone]))
        requests.check(number, members, copies)
    copies.retain([])
    assert copies.free == room


def _kinds(requests: Decoding) -> Iterator[tuple[type[KernelCall], int]]:
    for call in requests.calls:
        yield type(call), len(call.fills) if isinstance(call, CopiedCall) else 0


def test_all_requests_take_one_call_and_gather_once() -> None:
    requests, copies = Decoding([layout(0, 40, 9), layout(1, 20, 30)]), KvCopies(ROOM)
    found = []
    for number in range(STEPS):
        requests.check(number, [0, 1], copies)
        found += _kinds(requests)
    assert found == [(CopiedCall, 2)] + [(CopiedCall, 0)] * (STEPS - 1)


def test_requests_without_room_are_gathered() -> None:
    requests, copies = Decoding([layout(0, 40, 9), layout(1, 20, 30)]), KvCopies(4)
    requests.check(0, [0, 1], copies)
    assert list(_kinds(requests)) == [(CopiedCall, 1), (GatheredCall, 0)]
    requests.check(1, [1], copies)
    assert list(_kinds(requests)) == [(CopiedCall, 1)]


def test_memory_is_counted_from_the_blocks_that_copies_have_had() -> None:
    requests, copies = Decoding([layout(0, 40, 9), layout(1, 20, 30)]), KvCopies(ROOM)
    assert copies.nbytes == 0
    requests.check(0, [0, 1], copies)
    used = ROOM - copies.free
    cache = requests.case.kv_cache
    assert copies.nbytes == used * cache[0].nbytes > 0
    copies.layer(torch.empty_like(cache))
    assert copies.nbytes == 2 * used * cache[0].nbytes
    held = copies.nbytes
    copies.retain([])
    assert (copies.free, copies.nbytes) == (ROOM, held)
    requests.check(1, [0], copies)
    assert copies.nbytes == held


def test_a_request_in_other_blocks_is_copied_anew() -> None:
    requests, copies = Decoding([layout(0, 40, 9)]), KvCopies(ROOM)
    requests.check(0, [0], copies)
    moved = Decoding([replace(layout(0, 40, 9), blocks=[9, 3, 7, 1, 5, 2])])
    moved.kpos = requests.kpos
    moved.check(1, [0], copies)
    assert list(_kinds(moved)) == [(CopiedCall, 1)]


def test_nothing_of_another_request_is_read() -> None:
    first, second = Decoding([layout(0, 40, 30)]), Decoding([layout(0, 40, 3)])
    copies = KvCopies(8)
    first.check(0, [0], copies)
    # A request whose values are not finite leaves its blocks to the next one.
    copies.layer(first.case.kv_cache).fill_(float("nan"))
    second.case = _over(second.case, first.case.kv_cache)
    for number in range(STEPS):
        second.check(number, [0], copies)


def _over(case: PagedCase, kv_cache: Tensor) -> PagedCase:
    """The case with its content in another case's cache, whose layer is known."""
    kv_cache[: len(case.kv_cache)] = case.kv_cache
    return replace(case, kv_cache=kv_cache)
