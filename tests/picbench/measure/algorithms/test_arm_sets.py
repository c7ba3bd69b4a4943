"""Which arms are compared: all of them exist, and the models have those they were tuned for."""

import pytest

from picbench.engines.algorithms import Registry, names
from picbench.errors import ConfigError
from picbench.experiments.arm_scores import ARMS_OF, DROP_ARMS, MEPIC, OWN, arms_of, labels


def test_every_algorithm_is_compared_that_serves_prompts_as_they_are() -> None:
    compared = {arm.partition(":")[0] for arm in arms_of("testbed")}
    assert compared == set(names()) - {"reorder"}


@pytest.mark.parametrize("model", ARMS_OF)
def test_the_first_arm_is_full_recompute_and_none_is_twice(model: str) -> None:
    arms = arms_of(model)
    assert arms[0] == "full"
    assert len(arms) == len(set(arms)) == len(ARMS_OF[model])
    assert MEPIC in arms


def test_chosen_arms_are_beside_full_recompute() -> None:
    assert arms_of("testbed", only=("mepic", "mepic:blocks=1")) == ("full", "mepic")
    with pytest.raises(ConfigError, match="mepik"):
        arms_of("testbed", only=("mepik",))


def test_a_model_without_arms_is_refused() -> None:
    with pytest.raises(ConfigError, match="`model` testbed:blok: not a testbed") as error:
        arms_of("testbed:blok")
    assert "testbed:block" in error.value.hint


def test_arms_are_canonical_and_ours_are_among_them() -> None:
    registry = Registry()
    arms = {*DROP_ARMS, *(arm for model in ARMS_OF for arm in arms_of(model))}
    assert {registry.parse(arm).spec for arm in arms} == arms
    assert set(OWN) <= set(arms_of("testbed"))


def test_the_static_choice_is_called_static() -> None:
    found = labels(["mepic", "cacheblend:r=0.15:select=first"])
    assert found["mepic"] == "mepic"
    assert found["cacheblend:r=0.15:select=first"].startswith("cacheblend (static)")
