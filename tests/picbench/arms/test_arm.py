"""Arms from the command line."""

import pytest

from picbench.engines.algorithms import registry
from picbench.errors import ConfigError
from picbench.plugins import installed
from picbench.run.arm import parse_arms


def test_commas_and_repeats_mix_and_keep_their_order() -> None:
    arms = parse_arms(["mepic,full", " epic:k=8:pad=paper "])
    assert [arm.name for arm in arms] == ["mepic", "full", "epic:k=8:pad=paper"]


def test_only_algorithms_that_compile_chunks_leave_stock_vllm() -> None:
    arms = parse_arms(["full,prefix,naive,epic,mepic"])
    assert [arm.stock for arm in arms] == [True, True, False, False, False]
    assert not any(arm.stock for arm in parse_arms(["full,prefix"], same_engine=True))


def test_an_engine_serves_what_its_arm_is_called_unless_prompts_are_reordered() -> None:
    mepic, reorder = parse_arms(["mepic,reorder"])
    assert (mepic.served, mepic.reorders) == ("mepic", False)
    assert (reorder.name, reorder.algorithm, reorder.served) == ("reorder", "reorder", "prefix")
    assert (reorder.reorders, reorder.stock) == (True, True)


def test_a_default_spelled_out_is_the_same_arm() -> None:
    with pytest.raises(ConfigError, match="mepic is given twice"):
        parse_arms(["mepic", "mepic:pad=masked"])


def test_packages_are_searched_once_for_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes milliseconds."""
    searched: list[str] = []
    monkeypatch.setattr(
        registry, "installed", lambda group: searched.append(group) or installed(group)
    )
    assert len(parse_arms(["full,prefix,mepic", "epic:k=16"])) == 4
    assert searched == [registry.GROUP]
