"""Arms, and engines that they share."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from picbench.engines.algorithms import notation
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request, Text
from picbench.errors import ConfigError
from picbench.plugins import installed
from picbench.run.arm import SharedEngines, parse_arms


def test_arms_keep_their_order_and_only_those_that_compile_chunks_leave_stock_vllm() -> None:
    arms = parse_arms(["full,prefix,naive", " epic:k=8:pad=paper "])
    assert [arm.name for arm in arms] == ["full", "prefix", "naive", "epic:k=8:pad=paper"]
    assert [arm.stock for arm in arms] == [True, True, False, False]
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
        notation, "installed", lambda group: searched.append(group) or installed(group)
    )
    assert len(parse_arms(["full,prefix,mepic", "epic:k=16"])) == 4
    assert searched == [notation.GROUP]


PROMPT, LOG = Request([Text(tokens=(1, 2))]), Path("arm.log")


class Recorder:
    """A server that notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for name in ("reset", "close", "kill"):
            setattr(self, name, partial(self.calls.append, name))

    def ready(self) -> Mapping[str, object]:
        self.calls.append("ready")
        return {"device": "cpu"}

    def run(self, requests: Sequence[Request], *_: object) -> None:
        self.calls += [f"{request.algorithm} {request.salt}" for request in requests]

    def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def warm_up(self, algorithm: str) -> None:
        self.calls.append(f"warm up {algorithm}")


class Shared(SharedEngines):
    """Keeps the calls of the engines that it starts, by their names."""

    def __init__(self) -> None:
        self.calls: dict[str, list[str]] = {}
        super().__init__(self.record)

    def record(self, name: str, *_: object) -> Any:
        server = Recorder()
        self.calls[name] = server.calls
        return server


def config(algorithm: str, *, stock: bool = False, order: str = "head") -> EngineConfig:
    return EngineConfig("m", algorithm=algorithm, stock=stock, compile_order=order)


def test_an_arm_finds_the_caches_empty_after_another() -> None:
    with Shared() as shared:
        mepic, epic = (shared.launch(n, config(n), LOG) for n in ("mepic", "epic:k=16"))
        assert mepic.ready()["shared"] is True
        epic.ready()
        for arm in (mepic, mepic, epic):
            arm.run([PROMPT], None)
        mepic.close()
    assert shared.calls["picbench"] == [
        *("ready", "warm up mepic", "warm up epic:k=16"),
        *("reset", "mepic None", "mepic None", "reset", "epic:k=16 None", "close"),
    ]


def test_in_stock_vllm_full_recompute_is_a_tenant_a_request() -> None:
    shared = Shared()
    full, prefix = (shared.launch(n, config(n, stock=True), LOG) for n in ("full", "prefix"))
    full.run([PROMPT, PROMPT], None)
    prefix.run([PROMPT], None)
    salted = ["None request 1", "None request 2"]
    assert shared.calls["stock"] == ["reset", *salted, "reset", "None None"]


def test_engines_are_closed_when_no_arm_needs_them_and_started_again_when_killed() -> None:
    shared = Shared()
    shared.launch("mepic", config("mepic", order="isps"), LOG)
    shared.launch("prefix", config("prefix", stock=True, order="isps"), LOG)
    shared.retain([config("mepic"), config("full", stock=True)])
    assert shared.calls == {"picbench": ["close"], "stock": []}
    mepic = shared.launch("mepic", config("mepic"), LOG)
    first = shared.calls.pop("picbench")
    mepic.kill()
    shared.launch("mepic", config("mepic"), LOG)
    assert (first, shared.calls["picbench"]) == (["kill"], [])
