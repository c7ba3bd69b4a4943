"""What `lay_out` makes of an algorithm that fails."""

from typing import Any

import pytest

from picbench.engines.planning.layout import lay_out, measure
from picbench.engines.planning.policy import ChunkPolicy, LayoutConfig, Segment, answered
from picbench.errors import ConfigError

LAYOUT = LayoutConfig(16)
PROMPT = [Segment((1, 2, 3, 4), chunk=True), Segment((5,))]


def fails(index: int, length: int) -> ChunkPolicy:
    raise IndexError("no chunk")


def forgets(index: int, length: int) -> Any:
    return None


@pytest.mark.parametrize("plan", [lay_out, measure])
def test_the_call_and_the_line_that_failed_are_named(plan: Any) -> None:
    with pytest.raises(ValueError, match=r"plan_chunk\(0, 4\) raised IndexError: no chunk \(test_"):
        plan(PROMPT, fails, LAYOUT)
    with pytest.raises(ValueError, match=r"plan_chunk\(0, 4\) returned None, which is no Chunk"):
        plan(PROMPT, forgets, LAYOUT)


def test_what_an_algorithm_says_about_a_prompt_stays_as_it_is() -> None:
    def refuses(index: int, length: int) -> ChunkPolicy:
        raise ConfigError("too long", hint="cut it")

    with pytest.raises(ConfigError, match=r"^too long \(cut it\)$"):
        answered(refuses)(0, 4)
