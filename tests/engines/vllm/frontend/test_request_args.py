"""What a vLLM request may say about its chunks."""

import pytest

from picbench.engines.algorithms import Registry
from picbench.engines.planning.policy import Segment
from picbench.engines.vllm.frontend import request_args
from picbench.engines.vllm.frontend.request_args import cut
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


def test_cut():
    assert cut(range(8), [(2, 4), (4, 6)]) == [
        Segment((0, 1)),
        Segment((2, 3), chunk=True),
        Segment((4, 5), chunk=True),
        Segment((6, 7)),
    ]
    assert cut(range(3), []) == [Segment((0, 1, 2))]
