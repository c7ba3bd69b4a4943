"""Hints for misspelled names, and what pydantic refuses."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from picbench.errors import ConfigError, Refusal, check_counts, closest, first_refusal


@pytest.mark.parametrize(
    ("wrong", "known", "hint"),
    [
        ("mepik", ("epic", "mepic"), "did you mean 'mepic'?"),
        ("xyz", ("epic", "mepic"), "there are: epic, mepic"),
        ("xyz", (), "there are: none"),
    ],
)
def test_the_nearest_name_or_all_of_them(wrong: str, known: tuple[str, ...], hint: str) -> None:
    assert closest(wrong, known) == hint
    assert closest("tinny", ("tiny",), "shape:") == "did you mean 'shape:tiny'?"


class _Inner(BaseModel):
    count: int = Field(ge=1)


class _Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inner: list[_Inner] = []
    name: str = ""

    @model_validator(mode="after")
    def _named(self) -> "_Outer":
        if self.name == "Refused":
            raise ValueError("Another name is needed")
        return self


def refusal(values: object, **settings: Any) -> Refusal:
    with pytest.raises(ValidationError) as caught:
        _Outer.model_validate(values)
    return first_refusal(caught.value, **settings)


@pytest.mark.parametrize("count", [0, -3, False, True, 1.0, "2"])
def test_a_count_is_an_integer_of_at_least_one(count: object) -> None:
    check_counts(one=1, many=1 << 40, absent=None)
    with pytest.raises(ConfigError, match=f"^many must be at least 1, got {count!r} "):
        check_counts(one=1, many=count)


def test_the_first_field_is_named_by_its_path() -> None:
    found = refusal({"inner": [{"count": 1}, {"count": 0}], "other": 1})
    assert str(found) == "inner.1.count: Input should be greater than or equal to 1"
    assert (found.path, found.field, found.value) == (("inner", 1, "count"), "inner.1.count", 0)


def test_what_is_wrong_as_a_whole_has_no_field() -> None:
    assert str(refusal({"name": "Refused"})) == "Another name is needed"
    assert str(refusal([], lower=True)).startswith("input should be a valid dict")
    assert str(refusal({"Other": 1}, lower=True)) == "Other: extra inputs are not permitted"
