"""The message in which the scheduler describes a planned request's KV slots to the workers.

Requests in which a chunk begins at different positions share its KV. On a CPU its keys are cached
without RoPE and rotated when they are read. On a GPU they are cached with RoPE at the positions
that they had when the chunk was compiled, which lets compiles run vLLM's own RoPE unchanged, and
re-rotated by the difference when they are read. All other keys are cached at their logical
positions. The message is sent once, in the request's sampling parameters.

For linked tokens that the worker picks the scheduler reserves slots. All that it plans depends on
how many there are, not on which they are, so that it never waits for the worker's answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from picbench.engines.planning.pages import GAP
from picbench.engines.planning.plan import Plan
from picbench.engines.planning.policy import Picks
from picbench.errors import EngineError
from picbench.kernels.slot_runs import SlotRuns

#: The key in `SamplingParams.extra_args` under which the scheduler sends a request's `SlotMap`.
SLOT_MAP = "pic_slot_map"

#: Positions slot by slot, as runs of consecutive ones: the first (GAP for gaps) and how many.
Runs = tuple[tuple[int, int], ...]
Positions = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SlotMap:
    """The planned slots of one request in compute order.

    `position_runs` are their logical positions (GAP: never visible), `cached_at_runs` the positions
    at which the keys of canonical slots were compiled (GAP: not canonical). Generated slots follow,
    the first at logical position `end`. `foreign` are the token ids that only pads have, which
    the sampler must not count as the user's. With `picks` the worker links further tokens of the
    chunks, and only then knows what the computed slots hold (`Arrangement`). The request's scores
    of canonical keys are divided by `temperature`.
    """

    position_runs: Runs
    cached_at_runs: Runs
    end: int
    foreign: tuple[int, ...] = ()
    picks: Picks | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The slots of a plan."""
        positions, cached_at = tuple(plan.position_runs()), tuple(plan.cached_at_runs())
        return cls(positions, cached_at, plan.end, plan.foreign, plan.picks, plan.temperature)

    @classmethod
    def plain(cls, slots: int) -> Self:
        """The slots of a prompt without a plan."""
        return cls(((0, slots),), ((GAP, slots),), slots)

    @classmethod
    def sent(cls, params: Any) -> Self | None:
        """The map in a request's `SamplingParams`; None for requests without a plan."""
        found = (params.extra_args or {}).get(SLOT_MAP) if params is not None else None
        return found if isinstance(found, cls) else None

    def positions(self) -> Positions:
        """Logical positions [slots]."""
        return _expand(self.position_runs)

    def canonical(self) -> NDArray[np.bool_]:
        """Which slots hold canonical KV, hidden ones included [slots]."""
        first, counts = _columns(self.cached_at_runs)
        return np.repeat(first != GAP, counts)

    @property
    def first_computed(self) -> int:
        """The first slot of a request's own that it computes: canonical ones come first."""
        return sum(count for first, count in self.cached_at_runs if first != GAP)

    def cached_at(self) -> Positions:
        """Positions at which the keys of canonical slots were compiled, else GAP [slots]."""
        return _expand(self.cached_at_runs)

    def slot_runs(self, row: int = 0) -> SlotRuns:
        """Positions of all slots, and by how many positions keys that are cached with RoPE are
        re-rotated when read, after the `row` of their temperature: 0 for computed slots and for
        hidden ones."""
        first, counts = _columns(self.position_runs)
        cached_at, cached = _columns(self.cached_at_runs)
        ends, cached_ends = np.cumsum(counts), np.cumsum(cached)
        cuts = np.sort(np.concatenate([[0], ends, cached_ends]))
        starts = cuts[np.append(True, cuts[1:] != cuts[:-1])].astype(np.int32)
        at = starts[:-1]
        run = np.searchsorted(ends, at, side="right")
        positions = np.where(first[run] < GAP, first[run] + at - (ends - counts)[run], GAP)
        run = np.searchsorted(cached_ends, at, side="right")
        since = at - (cached_ends - cached)[run]
        compiled = np.where(cached_at[run] < GAP, cached_at[run] + since, GAP)
        shifts = np.where((positions < GAP) & (compiled < GAP), row + positions - compiled, 0)
        return SlotRuns(starts, positions.astype(np.int32), shifts.astype(np.int32))


def _columns(runs: Runs) -> tuple[Positions, Positions]:
    """The first position of each run, and how many it has."""
    first, counts = np.fromiter(chain(*runs), np.int32, 2 * len(runs)).reshape(-1, 2).T
    return first, counts


def _expand(runs: Runs) -> Positions:
    first, counts = _columns(runs)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    values: Positions = np.repeat(first - starts, counts)
    # This lets runs of gaps ascend from GAP.
    values += np.arange(len(values), dtype=np.int32)
    return np.minimum(values, GAP, out=values)


Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The slots of a request in compute order, once its linked tokens are picked.

    `positions` [slots] are logical positions, GAP for canonical slots that linked tokens replace.
    `tokens` [slots - first] are the token ids of the computed slots, of which `first` is the first.
    """

    positions: Positions
    tokens: Tokens
    first: int


def arranged_tokens(
    arrangements: Iterable[Arrangement | None], computed: Iterable[int], scheduled: Iterable[int]
) -> Iterator[tuple[int, Tokens]]:
    """Token ids of a step that only workers know, and the place in the step of the first.

    Request i computes `scheduled[i]` tokens after its `computed[i]` slots; None is not arranged.
    """
    place = 0
    for one, start, count in zip(arrangements, computed, scheduled, strict=True):
        if one is not None:
            begin = max(start, one.first)
            tokens = one.tokens[begin - one.first : max(start + count, begin) - one.first]
            if len(tokens):
                yield place + begin - start, tokens
        place += count


@dataclass(frozen=True)
class Pickable:
    """A request before its linked tokens are picked.

    `positions` and `cached_at` [slots] are its slot map's; `prompt` [tokens] has ids in logical
    order.
    """

    picks: Picks
    positions: Positions
    cached_at: Positions
    first: int
    prompt: Tokens

    @classmethod
    def of(cls, slot_map: SlotMap, tokens: Sequence[int]) -> Self:
        """A request with picks; `tokens` [>= slots] are in compute order.

        Raises EngineError if the slots do not hold the whole prompt.
        """
        assert slot_map.picks is not None
        positions, cached_at = slot_map.positions(), slot_map.cached_at()
        seen = np.flatnonzero(positions != GAP)
        prompt = np.full(slot_map.end, -1, dtype=np.int32)
        prompt[positions[seen]] = np.asarray(tokens[: len(positions)], dtype=np.int32)[seen]
        if len(seen) != slot_map.end or (prompt < 0).any():
            raise EngineError(f"{len(seen)} of {slot_map.end} prompt tokens have slots")
        return cls(slot_map.picks, positions, cached_at, slot_map.first_computed, prompt)

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """Canonical slots of the tokens that may be picked, in logical order."""
        slots = np.flatnonzero(self.positions[: self.first] != GAP)
        order: NDArray[np.int64] = slots[np.argsort(self.positions[slots])]
        return order

    @property
    def computed(self) -> Positions:
        """Positions of the tokens that are computed whatever is picked, ascending."""
        positions = self.positions[self.first :]
        fixed: Positions = positions[positions != GAP]
        return fixed

    @property
    def stop(self) -> int:
        """The position after the last token that may be picked."""
        return int(self.positions[self.slots[-1]]) + 1

    def arrange(self, picked: NDArray[np.int64]) -> Arrangement:
        """Link the tokens `picked` [count], given as indices into `slots`."""
        positions = self.positions.copy()
        gone = self.slots[picked]
        linked, computed = positions[gone], positions[self.first :]
        positions[gone] = GAP
        computed[: len(linked)] = linked
        computed.sort()
        return Arrangement(positions, self.prompt[computed], self.first)


def drop_foreign_tokens(batch: Any, requests: Mapping[str, Any]) -> None:
    """Take the tokens that users did not send out of the prompts that penalties count.

    vLLM penalizes each token of a prompt once, so that linked tokens, which have two slots, and
    hidden pads, which repeat a token of the prompt, make no difference; visible pads do. Upstream:
    vllm/v1/worker/gpu_input_batch.py of vLLM 0.32.0, for model runner V1.

    `batch` is the runner's `InputBatch`, whose prompts [requests, longest] are filled up with
    `vocab_size`; None if no request of the batch has a penalty. `requests` are the runner's, by id.
    """
    prompts = batch.sampling_metadata.prompt_token_ids
    if prompts is None:
        return
    for prompt, request_id in zip(prompts, batch.req_ids, strict=True):
        slot_map = SlotMap.sent(requests[request_id].sampling_params)
        for token in slot_map.foreign if slot_map is not None else ():
            prompt.masked_fill_(prompt == token, batch.vocab_size)
