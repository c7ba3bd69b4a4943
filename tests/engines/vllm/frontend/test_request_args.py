"""A request's PIC arguments: both forms, refusals, and the way to the scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.algorithms import Registry
from picbench.engines.planning.policy import Segment
from picbench.engines.vllm.frontend import request_args
from picbench.engines.vllm.frontend.request_args import RequestArgs, cut
from picbench.errors import ConfigError


def read_args(extra, prompt_tokens):
    return request_args.read_args(extra, prompt_tokens, Registry())


def test_nested_and_flat_forms_agree():
    nested = read_args({"pic": {"spans": [[1, 4], [4, 6]], "algorithm": "epic:k=8"}}, 10)
    flat = read_args({"pic_spans": [1, 4, 4, 6], "pic_algorithm": "epic:k=8"}, 10)
    assert nested == flat
    assert nested is not None
    assert nested.spans == ((1, 4), (4, 6))


@pytest.mark.parametrize("extra", [None, {}, {"other": 1}])
def test_plain_requests(extra):
    assert read_args(extra, 10) is None


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[4, 2]], "leaves the prompt"),
        ([[3, 3]], "leaves the prompt"),
        ([[0, 11]], "leaves the prompt of 10 tokens"),
        ([[-1, 4]], "leaves the prompt"),
        ([[0, 4], [3, 6]], "overlaps"),
        ([[5, 6], [0, 2]], "overlaps"),
        ([5], "each span is"),
        ([[1, 2, 3]], "each span is"),
        ([["a", 2]], "each span is"),
        ([[0.5, 2]], "each span is"),
        ([[False, 2]], "each span is"),
        (["04"], "each span is"),
        ("04", "not a list"),
        (5, "not a list"),
        (None, "not a list"),
    ],
)
def test_bad_spans_are_named(spans, message):
    with pytest.raises(ConfigError) as caught:
        read_args({"pic": {"spans": spans}}, 10)
    assert message in str(caught.value)


def test_other_bad_arguments():
    with pytest.raises(ConfigError, match="not a mapping"):
        read_args({"pic": [1, 2]}, 10)
    with pytest.raises(ConfigError, match="even number"):
        read_args({"pic_spans": [1, 2, 3]}, 10)
    with pytest.raises(ConfigError, match="unknown algorithm"):
        read_args({"pic": {"algorithm": "mepik"}}, 10)
    with pytest.raises(ConfigError, match="algorithm is 5, not a string"):
        read_args({"pic_algorithm": 5}, 10)
    with pytest.raises(ConfigError, match="tag is"):
        read_args({"pic": {"spans": [[0, 4]], "tag": [1]}}, 10)


def test_cut():
    assert cut(range(8), [(2, 4), (4, 6)]) == [
        Segment((0, 1)),
        Segment((2, 3), chunk=True),
        Segment((4, 5), chunk=True),
        Segment((6, 7)),
    ]
    assert cut(range(3), []) == [Segment((0, 1, 2))]


def request(extra_args: dict[str, Any] | None, tokens: int = 10) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(extra_args=extra_args)
    return SimpleNamespace(sampling_params=params, prompt_token_ids=[1] * tokens)


@pytest.mark.parametrize(
    "extra_args",
    [
        {"other": 1, "pic": {"spans": [[1, 4]], "algorithm": "epic:k=8"}},
        {"other": 1, "pic_spans": [1, 4], "pic_algorithm": "epic:k=8"},
    ],
)
def test_a_request_is_parsed_once(extra_args, monkeypatch):
    asked, registry = request(extra_args), Registry()
    shared = asked.sampling_params
    args = request_args.request_args(asked, registry)
    assert args == RequestArgs(((1, 4),), "epic:k=8")
    monkeypatch.setattr(request_args, "read_args", None)
    assert request_args.request_args(asked, registry) is args
    assert asked.sampling_params.extra_args["other"] == 1
    assert request_args.describes_chunks(asked.sampling_params.extra_args)
    assert shared.extra_args == extra_args


def test_arguments_can_be_sent_to_another_process():
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    asked, registry = request({"pic": {"spans": [[1, 4], [4, 6]], "tag": "7"}}), Registry()
    args = request_args.request_args(asked, registry)
    sent = MsgpackEncoder().encode(asked.sampling_params)
    received = request(None)
    received.sampling_params = MsgpackDecoder(SamplingParams).decode(sent)
    assert request_args.describes_chunks(received.sampling_params.extra_args)
    assert request_args.request_args(received, registry) == args


@pytest.mark.parametrize("missing", ["sampling_params", "prompt_token_ids"])
def test_pooling_requests_and_embedded_prompts_have_no_arguments(missing):
    asked = request({"pic": {"spans": [[1, 4]]}})
    setattr(asked, missing, None)
    assert request_args.request_args(asked, Registry()) is None
