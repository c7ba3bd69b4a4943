"""Schemas: where modules stand, what requests are made of them, and what is refused."""

import pytest

from picbench.engines.planning.schema import Alternatives, Module, Parameter, Schema
from picbench.engines.request import Chunk, Text
from picbench.errors import ConfigError


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


PARTS = [
    Module("system", [(1,), "abc"]),
    Alternatives([Module("long", ["defgh"]), Module("short", ["ij"])]),
    Module("trip", ["for ", Parameter("days", 3), " days", Parameter("end", 2)]),
    Module("late", ["xyz"], position=40),
]


@pytest.fixture
def schema() -> Schema:
    return Schema(PARTS, encode)


def test_modules_stand_where_the_schema_says_whatever_a_prompt_leaves_out(schema):
    everything = schema.request(["late", "long", "system", "trip"], "?")
    assert [s.position for s in everything.segments] == [0, 4, 9, 40, 43]
    short = schema.request(["short", "trip"], "?")
    assert [s.position for s in short.segments] == [4, 9, 43]
    assert everything.algorithm == "prompt-cache"
    assert everything.segments[0] == Chunk(tokens=(1, *encode("abc")), position=0)
    assert short.segments[-1] == Text(tokens=tuple(encode("?")), position=43)


def test_parameters_are_filled_and_keep_their_positions(schema):
    [trip, _] = schema.request({"trip": {"days": "12"}}, "?").segments
    assert trip.tokens == tuple(encode("for 12 days"))
    assert trip.slots == ((4, 6, 3), (11, 11, 2))
    [empty, _] = schema.request(["trip"], "?", algorithm="naive").segments
    assert empty.tokens == tuple(encode("for  days"))
    assert empty.slots == ((4, 4, 3), (9, 9, 2))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["tripp"], "unknown module 'tripp' of the schema .*did you mean 'trip'"),
        (["long", "short"], "'long' and 'short' are alternatives"),
        ({"trip": {"day": "1"}}, "unknown parameter 'day' of 'trip' .*did you mean 'days'"),
        ({"long": {"day": "1"}}, "unknown parameter 'day' of 'long' .*it has none"),
        ({"trip": {"days": "1234"}}, "'days' of 'trip' has 4 tokens .*room for 3"),
    ],
)
def test_bad_prompts_are_refused(schema, modules, message):
    with pytest.raises(ConfigError, match=message):
        schema.request(modules, "?")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([*PARTS, Module("trip", ["x"])], "two modules are called 'trip'"),
        ([*PARTS, Module("over", ["x"], position=42)], "'over' is at position 42, .* ends at 43"),
        ([Module("none", [Parameter("all", 4)])], "module 'none' has no words"),
    ],
)
def test_bad_schemas_are_refused(parts, message):
    with pytest.raises(ConfigError, match=message):
        Schema(parts, encode)
