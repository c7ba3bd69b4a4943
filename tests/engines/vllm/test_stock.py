"""With plain requests the PIC engine answers as stock vLLM does."""

import pytest

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Request, Text
from picbench.errors import ConfigError


def generate(llama, draw, dtype: str, **kwargs):
    base = draw(300, 1)
    prompts = [base, base[:200] + draw(150, 2), draw(77, 3), draw(1, 4)]
    requests = [Request([Text(tokens=p)]) for p in prompts]
    config = EngineConfig(
        model=str(llama), dtype=dtype, kv_blocks=400, context=1024, batch_tokens=256, **kwargs
    )
    with Engine(config) as engine:
        options = {"max_tokens": 8, "logprobs": 5, "ignore_eos": True}
        return [r for _ in range(2) for r in engine.generate(requests, **options)]


def distance(a, b) -> float:
    pairs = zip(a.logprobs, b.logprobs, strict=True)
    return max(abs(x[t] - y[t]) for x, y in pairs for t in x.keys() & y.keys())


def test_float32_agrees_to_rounding(llama, draw):
    stock = generate(llama, draw, "float32", stock=True, algorithm="prefix")
    ours = generate(llama, draw, "float32", algorithm="mepic")
    assert [r.tokens for r in ours] == [r.tokens for r in stock]
    assert max(map(distance, ours, stock)) < 1e-3
    # Stock pages by 32, so it can only find less.
    assert all(a.counts.reused >= b.counts.reused for a, b in zip(ours, stock, strict=True))
    assert stock[4].counts.reused > 0


def test_bfloat16_is_no_further_from_float32_than_stock_is(llama, draw):
    exact = generate(llama, draw, "float32", stock=True, algorithm="full")
    stock = generate(llama, draw, "bfloat16", stock=True, algorithm="full")
    ours = generate(llama, draw, "bfloat16", algorithm="full")
    firsts = [[abs_first(r, e) for r, e in zip(run, exact, strict=True)] for run in (ours, stock)]
    assert sum(firsts[0]) < 1.5 * sum(firsts[1]) + 0.05


def abs_first(result, exact) -> float:
    """Difference in log-probability of the first token's candidates."""
    x, y = result.logprobs[0], exact.logprobs[0]
    return max(abs(x[t] - y[t]) for t in x.keys() & y.keys())


def test_stock_refuses_what_it_cannot_serve(llama):
    with pytest.raises(ConfigError, match="stock vLLM cannot serve 'mepic'"):
        Engine(EngineConfig(model=str(llama), stock=True, algorithm="mepic"))
