"""Holds a GPU engine to the oracle.

    python -m picbench.measure.oracle_check --model DIR [--dtype float32] [--eager]

Prompts are random tokens of the model's vocabulary from a fixed seed. The last line says whether
every request agreed with the oracle; the exit code is 1 if one did not.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.request import Chunk, Request, Result, Text
from picbench.measure.random_tokens import Tokens

#: Largest difference in log-probability that passes, by type.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.35, "float16": 0.08}

LENGTHS = {"A": 150, "B": 35, "C": 81, "D": 400}
ORDERS = ("ABCD", "DCBA", "ABA", "C")


@dataclass(frozen=True, slots=True)
class Case:
    """A request, the oracle's rule for it, and what it tests."""

    name: str
    request: Request
    rule: Any


def cases(vocabulary: int) -> Iterator[Case]:
    """Plain prompts and each algorithm over chunks in several orders."""
    from picbench.engines.oracle import epic, full, mepic, naive

    rules = {"naive": naive(), "epic:k=16": epic(16), "mepic": mepic(), "full": full()}
    tokens = Tokens(vocabulary)
    for order in ORDERS:
        for algorithm, rule in rules.items():
            chunks = [Chunk(tokens=tokens.draw(LENGTHS[name], name)) for name in order]
            question = Text(tokens=tokens.draw(19, f"{order} {algorithm}"))
            segments = [Text(tokens=tokens.draw(21, "system")), *chunks, question]
            yield Case(f"{algorithm} {order}", Request(segments, algorithm=algorithm), rule)
    for length in (5, 333):
        request = Request([Text(tokens=tokens.draw(length, f"plain {length}"))])
        yield Case(f"plain {length}", request, full())


def check(config: EngineConfig, tolerance: float) -> bool:
    """Run all cases cold, one by one, then warm and together; print a line for each."""
    from picbench.engines.oracle import Oracle

    oracle = Oracle(config.model)
    found = list(cases(oracle.model.config.vocab_size))
    requests = [case.request for case in found]
    options: dict[str, Any] = {"max_tokens": 6, "logprobs": 8, "ignore_eos": True}
    with Engine(config) as engine:
        print(engine.describe())
        cold = engine.generate(requests, concurrency=1, **options)
        warm = engine.generate(requests, **options)
    good = True
    for case, *results in zip(found, cold, warm, strict=True):
        for name, result in zip(("cold", "warm"), results, strict=True):
            error, same = _compare(oracle, case, result)
            right = error < tolerance and (same or config.dtype != "float32")
            good &= right
            verdict = "ok" if right else "WRONG"
            print(f"{verdict:5} {case.name:16} {name} {error:.2e} {'' if same else 'other token'}")
    return good


def _compare(oracle: Any, case: Case, result: Result) -> tuple[float, bool]:
    """Largest difference in log-probability, and whether each token is the oracle's own choice."""
    from picbench.engines.oracle import distance

    kinds = ["chunk" if isinstance(s, Chunk) else "text" for s in case.request.segments]
    segments = list(zip(kinds, [s.tokens for s in case.request.segments], strict=True))
    expected = oracle.logprobs(segments, case.rule, result.tokens)
    assert result.logprobs is not None
    return distance(expected, result.logprobs), expected.argmax(-1).tolist() == list(result.tokens)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Llama in Hugging Face's format")
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE))
    parser.add_argument("--eager", action="store_true", help="neither compile nor capture graphs")
    parser.add_argument("--synchronous", action="store_true", help="schedule no step ahead")
    parser.add_argument("--unrotated", action="store_true", help="keep all keys unrotated at rest")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of the engine")
    given = parser.parse_args()
    # Triton multiplies float32 in TensorFloat-32 unless told otherwise when it is imported.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    config = EngineConfig(
        model=given.model,
        device="cuda",
        dtype=given.dtype,
        eager=given.eager,
        asynchronous=not given.synchronous,
        keys_without_rope=given.unrotated,
        tensor_parallel=given.tensor_parallel,
        context=2048,
        batch_tokens=512,
        max_requests=32,
    )
    good = check(config, TOLERANCE[given.dtype])
    print("all agree with the oracle" if good else "NOT all agree with the oracle")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
