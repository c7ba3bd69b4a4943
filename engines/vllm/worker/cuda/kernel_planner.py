"""Attention of planned requests by the kernels in `picbench.kernels.cuda`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from picbench.engines.vllm.worker.cuda.metadata import AttentionCalls, PlannedAttention
from picbench.engines.vllm.worker.cuda.planned_batch import PlannedBatch, PlannedRequest
from picbench.kernels.cuda.decode.attention import DecodeBatch
from picbench.kernels.cuda.decode.request_table import RequestTable
from picbench.kernels.cuda.decode.shared.shared_decode import SharedDecodeBatch
from picbench.kernels.cuda.decode.shared.shared_table import SharedRequestTable
from picbench.kernels.cuda.prefill.gather_rotated import PAGE
from picbench.kernels.cuda.prefill.link import LinkBatch, LinkRequest, link
from picbench.kernels.cuda.prefill.logical_order import LogicalOrder
from picbench.kernels.cuda.visible_blocks import Ints
from picbench.kernels.cuda.warm_up import warm_up_decode, warm_up_link
from picbench.kernels.cuda.workspace import CudaWorkspace
from picbench.kernels.rope import RopeTable
from picbench.kernels.shape import HeadShape
from picbench.kernels.slot_runs import SlotRuns


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """The first `count` requests of a step, one token each."""

    batch: DecodeBatch
    count: int

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """See `PlannedAttention.attend`."""
        self.batch.attend(query[: self.count], kv_cache, scale, out[: self.count])


@dataclass(frozen=True, slots=True)
class LinkCall:
    """Requests that compute several tokens."""

    batch: LinkBatch

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor) -> None:
        """See `PlannedAttention.attend`."""
        link(query, kv_cache, self.batch, scale, out)


class KernelPlanner:
    """A `Planner` for layers of one shape; it owns the device memory that the kernels need.

    `table` has a row for each of `most` planned requests, and a last one that stays empty, for the
    requests without a plan that decode together with them. With a `SharedRequestTable` requests
    that decode read the blocks which several of them see once, in steps where that is faster.
    """

    graphs = True

    def __init__(
        self,
        table: RequestTable,
        most: int,
        rope: RopeTable,
        shape: HeadShape,
        workspace: CudaWorkspace,
    ) -> None:
        self.table = table
        self._plain_row = most
        self._decode = DecodeBatch(table, most, shape, rope)
        self._shared = (
            SharedDecodeBatch(table, most, shape, rope)
            if isinstance(table, SharedRequestTable)
            else None
        )
        self._rope, self._shape, self._workspace = rope, shape, workspace
        bytes_a_token = 2 * shape.num_kv_heads * shape.head_size * shape.dtype.itemsize
        self._room = workspace.nbytes // bytes_a_token

    @property
    def shares(self) -> bool:
        """See `Planner.shares`."""
        return self._shared is not None

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        shared = 0 if self._shared is None else self._shared.nbytes
        return self.table.nbytes + self._decode.nbytes + shared + self._workspace.nbytes

    def warm_up(self, kv_cache: Tensor) -> None:
        """See `Planner.warm_up`."""
        warm_up_decode(kv_cache, self._decode)
        if self._shared is not None:
            warm_up_decode(kv_cache, self._shared)
        warm_up_link(kv_cache, self._rope, self._shape, self._workspace)

    def plan(self, batch: PlannedBatch, block_table: Tensor) -> AttentionCalls:
        """See `Planner.plan`."""
        calls: list[PlannedAttention] = []
        if batch.decoded:
            # A graph is replayed for as many requests as it was captured with.
            padded = len(block_table) if batch.decodes else batch.decoded
            decode = self._shared if batch.shares and self._shared is not None else self._decode
            step = rows_and_lengths(batch, padded, self._plain_row)
            decode.fill_from_host(block_table[:padded], step)
            calls.append(DecodeCall(decode, padded))
        for group in self._groups(batch, batch.leading):
            linked = LinkBatch.build(group, block_table, self._rope, self._shape, self._workspace)
            calls.append(LinkCall(linked))
        return AttentionCalls(tuple(calls))

    def _groups(self, batch: PlannedBatch, first: int) -> Iterator[list[LinkRequest]]:
        """Adjacent requests whose keys fit the workspace together, or one that does not."""
        requests = enumerate(_requests(batch, first), start=first)
        for linked, run in groupby(requests, key=lambda pair: pair[1] is not None):
            if linked:
                stops = (batch.computed + batch.scheduled).tolist()
                yield from self._fitting([r for _, r in run if r is not None], stops)

    def _fitting(
        self, requests: Sequence[LinkRequest], stops: Sequence[int]
    ) -> Iterator[list[LinkRequest]]:
        group: list[LinkRequest] = []
        used = 0
        for request in requests:
            # Each request's keys are copied into pages of its own.
            slots = -(-stops[request.index] // PAGE) * PAGE
            if group and used + slots > self._room:
                yield group
                group, used = [], 0
            group.append(request)
            used += slots
        yield group


def rows_and_lengths(batch: PlannedBatch, count: int, plain_row: int) -> Ints:
    """Row of the request table and slots of `count` decoding requests [2, count], for `fill`.

    Requests that vLLM's attention serves have length 0 and are left out. Requests after the batch's
    pad a graph: their length is -1, and their outputs zeros instead of those of an older step.
    """
    host = np.zeros((2, count), dtype=np.int32)
    host[1, batch.decoded :] = -1
    rows, lengths = host[:, : batch.decoded]
    planned = batch.known.planned[: batch.decoded]
    rows[:] = np.where(planned, batch.known.rows[: batch.decoded], 0 if batch.stock else plain_row)
    lengths[:] = batch.computed[: batch.decoded] + 1
    if batch.stock:
        lengths[~planned] = 0
    return host


def _requests(batch: PlannedBatch, first: int) -> Iterator[LinkRequest | None]:
    """The requests from `first` on, None for one that vLLM's attention serves."""
    start = int(batch.scheduled[:first].sum())
    for i in range(first, len(batch.known.requests)):
        request, stop = batch.known.requests[i], start + int(batch.scheduled[i])
        if request is None and batch.stock:
            yield None
        else:
            order = _order(request, int(batch.computed[i] + batch.scheduled[i]))
            yield LinkRequest(i, start, stop, order, torch.from_numpy(batch.logical(i)))
        start = stop


def _order(request: PlannedRequest | None, stop: int) -> LogicalOrder:
    """The logical order of the first `stop` slots, or of more.

    The keys that a query sees precede it in the order of all planned slots and are computed no
    later than the query, so one order serves all steps of a prefill. Resumed requests also prefill
    tokens that they had generated.
    """
    if request is None:
        return LogicalOrder.of_runs(SlotRuns.plain(stop))
    if stop <= request.planned:
        return request.order
    kpos, shifts = request.positions(0, stop), request.rope_shifts(stop)
    return LogicalOrder.of(torch.from_numpy(kpos), torch.from_numpy(shifts))
