"""What the slots of a request hold once its linked tokens are picked."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.planning.layout import lay_out
from picbench.engines.planning.pages import GAP
from picbench.engines.planning.policy import (
    ChunkPolicy,
    Deviation,
    DeviationSelection,
    LayoutConfig,
    Segment,
)
from picbench.engines.vllm.worker.slot_map import Pickable, SlotMap
from picbench.errors import EngineError

tokens = st.lists(st.integers(3, 900), min_size=1, max_size=40).map(tuple)
prompts = st.lists(st.builds(Segment, tokens=tokens, chunk=st.booleans()), min_size=1, max_size=5)


def pickable(prompt: Any, share: float) -> tuple[Pickable, Any] | None:
    selection = DeviationSelection(share, Deviation.KEYS)
    plan = lay_out(
        prompt,
        lambda index, length: ChunkPolicy(private=True, selection=selection),
        LayoutConfig(16),
    )
    return (Pickable.of(SlotMap.of(plan), plan.tokens), plan) if plan.picks else None


@given(prompts, st.floats(0, 1), st.randoms(use_true_random=False))
def test_every_token_has_one_slot_whatever_is_picked(prompt: Any, share: float, dice: Any) -> None:
    found = pickable(prompt, share)
    if found is None:
        return
    before, plan = found
    flat = [token for segment in prompt for token in segment.tokens]
    assert before.prompt.tolist() == flat
    picked = np.array(
        sorted(dice.sample(range(len(before.slots)), before.picks.count)), dtype=np.int64
    )
    after = before.arrange(picked)
    assert len(after.positions) == len(plan.tokens)
    seen = after.positions[after.positions != GAP]
    assert sorted(seen.tolist()) == list(range(len(flat)))
    # Computed slots are in logical order, hold the right tokens, and end with the prompt's last.
    computed = after.positions[after.first :]
    assert (np.diff(computed) > 0).all()
    assert [flat[p] for p in computed] == after.tokens.tolist()
    assert set(before.positions[before.slots[picked]].tolist()) <= set(computed.tolist())
    # The other copied slots still hold what was copied into them.
    kept = after.positions[: after.first] != GAP
    assert [plan.tokens[i] for i in np.flatnonzero(kept)] == [
        flat[p] for p in after.positions[: after.first][kept]
    ]


def test_tokens_of_a_part_of_the_slots() -> None:
    found = pickable([Segment((5, 6, 7), chunk=True), Segment((8, 9))], 0.5)
    assert found is not None
    after = found[0].arrange(np.array([1]))
    assert after.first == 16
    assert after.tokens.tolist() == [6, 8, 9]
    assert [
        (begin, part.tolist()) for begin, part in (after.fresh(16, 18), after.fresh(18, 25))
    ] == [
        (16, [6, 8]),
        (18, [9]),
    ]
    assert after.fresh(19, 20)[1].tolist() == []


def test_slots_that_leave_out_a_token_are_an_error() -> None:
    slot_map = SlotMap(((0, 3),), ((0, 2), (GAP, 1)), 4, picks=pickable_picks())
    with pytest.raises(EngineError, match="3 of 4 prompt tokens have slots"):
        Pickable.of(slot_map, [1, 2, 3])


def pickable_picks() -> Any:
    found = pickable([Segment((5, 6, 7), chunk=True), Segment((8, 9))], 0.5)
    assert found is not None
    return found[0].picks
