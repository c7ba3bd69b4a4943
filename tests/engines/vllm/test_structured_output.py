"""Structured output of requests with chunks, against stock vLLM on the same prompt."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import StructuredOutputsParams

from picbench.engines.vllm.device import CPU
from picbench.engines.vllm.launch import _start
from picbench.engines.vllm.settings import PicSettings, engine_arguments
from picbench.workloads.testbed import model_path

# By vLLM's use of its default backend.
pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")

PASSAGE = "The lighthouse keeper of Arden wrote a letter to the harbour master every evening. "
SECOND = "In the winter of the flood the old bridge was closed, and people crossed by boat. "
QUESTION = "Who wrote a letter every evening?"

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "sure": {"type": "boolean"}},
    "required": ["name", "sure"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "choice": {"choice": ["the keeper", "the master", "a boat"]},
    "regex": {"regex": r"(yes|no), [a-z]{3,6}"},
    "grammar": {"grammar": 'root ::= "a" [b-d]+ "."'},
}
#: What `CONSTRAINTS` allow.
ALLOWED = {
    "schema": re.compile(r'\{\s*("name"|$).*', re.S),
    "choice": re.compile("the keeper|the master|a boat"),
    "regex": re.compile(r"(yes|no), [a-z]{3,6}"),
    "grammar": re.compile(r"a[b-d]+\.?"),
}
PARSER = "marks"


class Marks(BaseThinkingReasoningParser):
    """Reasoning stands between two characters that the testbed model's tokenizer knows."""

    start_token, end_token = "[", "]"


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Any]]:
    """Stock vLLM and picbench's, with the testbed model, its tokenizer and a reasoning parser."""
    ReasoningParserManager.register_module(PARSER, module=Marks)
    common = {
        "model": str(model_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "kv_cache_memory_bytes": CPU.pool_bytes,
        "num_gpu_blocks_override": 200,
        "reasoning_parser": PARSER,
        "disable_log_stats": False,
    }
    ours = engine_arguments(PicSettings(algorithm="naive", tiers="", pad_token=2, bos_token=0))
    started = {
        "stock": _start(common | {"block_size": 32, "async_scheduling": False}, {}),
        "picbench": _start(common | ours, {}),
    }
    yield started
    for engine in started.values():
        engine.engine_core.shutdown()


def answer(
    engine: Any, tokens: list[int], pic: dict[str, Any] | None = None, **constraint: Any
) -> tuple[str, tuple[int, ...]]:
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(**constraint),
        extra_args={"pic": pic} if pic else None,
    )
    engine.add_request("0", {"prompt_token_ids": tokens}, params)
    done: list[Any] = []
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    [output] = done[0].outputs
    return output.text, tuple(output.token_ids)


def encode(engine: Any, text: str) -> list[int]:
    tokens: list[int] = engine.tokenizer.encode(text, add_special_tokens=False)
    return tokens


@pytest.mark.parametrize("way", ["first", "linked"])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_constraints_hold_as_in_stock(engines: dict[str, Any], kind: str, way: str) -> None:
    """The two plans that have stock's answer: see test_sampling."""
    closed = encode(engines["stock"], "[]")
    passage, second = (encode(engines["stock"], text) for text in (PASSAGE, SECOND))
    first, both = len(passage), len(passage) + len(second)
    tokens = [*passage, *second, *encode(engines["stock"], QUESTION), *closed]
    plans = {
        "first": {"spans": [[0, both]]},
        "linked": {"spans": [[0, first], [first, both]], "algorithm": "epic:k=64"},
    }
    found = answer(engines["picbench"], tokens, plans[way], **CONSTRAINTS[kind])
    assert found == answer(engines["stock"], tokens, **CONSTRAINTS[kind])
    assert ALLOWED[kind].fullmatch(found[0])


@pytest.mark.parametrize(("before", "inside"), [("]", "["), ("[", "]")])
def test_reasoning_ends_where_the_user_ended_it(
    engines: dict[str, Any], before: str, inside: str
) -> None:
    """The chunk comes after the text, but is computed before it; its mark is the last one."""
    lead, question = (encode(engines["stock"], text) for text in (SECOND, QUESTION))
    (mark,), (chunk_mark,) = (encode(engines["stock"], text) for text in (before, inside))
    chunk = [chunk_mark, *encode(engines["stock"], PASSAGE)]
    tokens = [mark, *lead, *chunk, *question]
    start = 1 + len(lead)
    linked = {"spans": [[start, start + len(chunk)]], "algorithm": "naive"}
    constraint = {"choice": ["yes", "no"]}
    constrained = inside == "]"
    for engine, pic in (("stock", None), ("picbench", linked)):
        text, _ = answer(engines[engine], tokens, pic, **constraint)
        assert (text in constraint["choice"]) == constrained, engine


def test_a_parser_that_fails_ends_its_request(
    engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["picbench"]
    tokens = encode(engine, f"{PASSAGE}{QUESTION}[]")
    pic = {"spans": [[0, len(encode(engine, PASSAGE))]]}
    calls = list[int]()

    def fail_once(self: Marks, input_ids: Any) -> bool:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("injected")
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Marks, "is_reasoning_end", fail_once)
        assert answer(engine, tokens, pic, choice=["yes", "no"]) == ("", ())
        assert answer(engine, tokens, pic, choice=["yes", "no"])[0] in ("yes", "no")
