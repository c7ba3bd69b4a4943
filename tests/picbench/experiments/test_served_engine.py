"""What a served engine is asked, and what it answers; vLLM is a fake."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.config import EngineConfig
from picbench.errors import EngineError
from picbench.experiments import warm_chunks as served_engine
from picbench.experiments.warm_chunks import (
    CHUNK,
    HEAD,
    QUESTION,
    FirstToken,
    ServedEngine,
    ask,
    draw,
)


@dataclass
class FakeVllm:
    """Answers a request in its second step."""

    answer: tuple[int, ...] = (7,)
    resets: bool = True
    asked: list[tuple[str, Any, Any]] = field(default_factory=list)
    left: int = 0

    @property
    def vllm_config(self) -> Any:
        """Of a model with a vocabulary of 1,000."""
        model = SimpleNamespace(get_vocab_size=lambda: 1000, max_logprobs=20)
        return SimpleNamespace(model_config=model)

    def add_request(self, tag: str, prompt: Any, params: Any) -> None:
        self.asked.append((tag, prompt, params))
        self.left = 2

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[Any]:
        self.left -= 1
        reply = SimpleNamespace(token_ids=self.answer, stop_reason="why")
        return [] if self.left else [SimpleNamespace(outputs=[reply], num_cached_tokens=1024)]

    def reset_prefix_cache(self) -> bool:
        return self.resets


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = FakeVllm()
    monkeypatch.setattr(served_engine, "launch_apart", lambda config: running(fake))
    monkeypatch.setattr("picbench.engines.conversion.check_request", lambda *given, **options: None)
    return fake


def running(fake: FakeVllm) -> Any:
    return SimpleNamespace(engine=fake, context=4096, pool=300)


def test_a_request_generates_one_token(llama: Path, vllm: FakeVllm) -> None:
    engine = ServedEngine(EngineConfig(str(llama)))
    found = engine.first_token(ask("mepic", draw(2, "any"), "one"))
    assert (found.prompt, found.cached) == (HEAD + 2 * CHUNK + QUESTION, 1024)
    assert found.ms > 0
    [(_, prompt, params)] = vllm.asked
    assert len(prompt["prompt_token_ids"]) == found.prompt
    assert (params.max_tokens, params.ignore_eos) == (1, True)
    assert params.extra_args["pic"].spans == ((64, 568), (568, 1072))


def test_requests_that_end_without_a_token_are_errors(llama: Path, vllm: FakeVllm) -> None:
    vllm.answer = ()
    engine = ServedEngine(EngineConfig(str(llama)))
    with pytest.raises(EngineError, match="no token: why"):
        engine.first_token(ask("mepic", draw(2, "any"), "one"))


def test_a_cache_in_use_cannot_be_dropped(llama: Path, vllm: FakeVllm) -> None:
    vllm.resets = False
    with pytest.raises(EngineError, match="hold blocks"):
        ServedEngine(EngineConfig(str(llama))).reset()


def test_fresh_is_what_was_not_cached() -> None:
    assert FirstToken(1.0, 32_400, 31_296).fresh == 1104
