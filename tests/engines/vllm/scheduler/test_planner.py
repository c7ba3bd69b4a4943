"""Plans that are made before a request gets to the scheduler."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.frontend import engine_core
from picbench.engines.vllm.frontend.limits import Limits
from picbench.engines.vllm.scheduler.planner import RequestPlanner
from picbench.engines.vllm.settings import PicSettings
from picbench.errors import ConfigError

LIMITS = Limits(capacity=4096, positions=4096, blocks=512, block_size=16, layers=2)


def received(tokens: list[int], pic: dict[str, Any] | None, max_tokens: int = 1) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=max_tokens, extra_args=pic and {"pic": pic})
    return Request("a", tokens, params, None)


def prompt(seed: int, chunks: int = 6) -> Any:
    """A request for chunks that others ask for, too, in an order of its own."""
    order = random.Random(seed).sample(range(8), chunks)
    tokens = [7] * 20 + [100 * n + i for n in order for i in range(40)] + [seed] * 10
    spans = [[20 + 40 * place, 60 + 40 * place] for place in range(chunks)]
    return received(tokens, {"spans": spans, "tag": str(seed)})


def arrive(planner: RequestPlanner, request: Any) -> Any:
    found = planner.read(request)
    assert found is not None
    return planner.plan(request, *found)


def test_an_early_plan_is_the_one_that_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = RequestPlanner(PicSettings(), LIMITS)
    request, alone = prompt(1), arrive(RequestPlanner(PicSettings(), LIMITS), prompt(1))
    planner.plan_early(request)
    with monkeypatch.context() as patch:
        patch.setattr(RequestPlanner, "_plan", None)  # it would be called, and fail
        early = arrive(planner, request)
    assert (early.plan.keys, early.need, early.tag) == (alone.plan.keys, alone.need, "1")
    assert arrive(planner, request).plan is not early.plan


@pytest.mark.parametrize("pic", [{"spans": [[20, 60]], "algorithm": "none"}, {"spans": [[9, 5]]}])
def test_what_is_wrong_is_told_on_arrival(pic: dict[str, Any]) -> None:
    planner, request = RequestPlanner(PicSettings(), LIMITS), received(list(range(64)), pic)
    planner.plan_early(request)
    with pytest.raises(ConfigError):
        arrive(planner, request)


def test_a_request_that_never_fits_is_told_on_arrival() -> None:
    planner = RequestPlanner(PicSettings(), LIMITS)
    request = received(list(range(64)), {"spans": [[20, 60]]}, max_tokens=9000)
    planner.plan_early(request)
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override"):
        arrive(planner, request)


@pytest.mark.parametrize("pic", [None, {"spans": []}, {"spans": [[0, 9]], "algorithm": "prefix"}])
def test_requests_without_a_plan_stay(pic: dict[str, Any] | None) -> None:
    planner, request = RequestPlanner(PicSettings(), LIMITS), received(list(range(64)), pic)
    planner.plan_early(request)
    assert not planner._early


def test_plans_of_requests_that_never_arrive_are_forgotten() -> None:
    planner, request = RequestPlanner(PicSettings(), LIMITS), prompt(1)
    planner.plan_early(request)
    assert len(planner._early) == 1
    del request
    gc.collect()
    assert not planner._early


def test_threads_make_the_same_plans() -> None:
    planner, alone = RequestPlanner(PicSettings(), LIMITS), RequestPlanner(PicSettings(), LIMITS)
    planner._pages = type(planner._pages)(100)  # so that chunks come and go
    requests = [prompt(seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(planner.plan_early, requests))
    assert len(planner._early) == 40
    for seed, request in enumerate(requests):
        assert arrive(planner, request).plan.keys == arrive(alone, prompt(seed)).plan.keys


def test_engine_cores_have_what_they_receive_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCore

    def preprocess_add_request(self: Any, request: str) -> tuple[str, int]:
        return request.upper(), 3

    monkeypatch.setattr(EngineCore, "preprocess_add_request", preprocess_add_request)
    engine_core.plan_on_receipt()
    engine_core.plan_on_receipt()
    planned: list[str] = []
    ours = SimpleNamespace(scheduler=SimpleNamespace(plan_early=planned.append))
    stock = SimpleNamespace(scheduler=SimpleNamespace())
    assert EngineCore.preprocess_add_request(ours, "a") == ("A", 3)  # type: ignore[arg-type]
    assert EngineCore.preprocess_add_request(stock, "b") == ("B", 3)  # type: ignore[arg-type]
    assert planned == ["A"]


def test_an_unknown_engine_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(EngineCore, "preprocess_add_request", lambda self, request, more: None)
    with pytest.raises(ConfigError, match="picbench was written for"):
        engine_core.plan_on_receipt()
