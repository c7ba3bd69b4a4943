"""A request's PIC arguments: both forms, refusals, and the way to the scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.engines.algorithms import Registry
from picbench.engines.planning.documents import ChunkContexts, Context
from picbench.engines.planning.policy import Segment, Slot
from picbench.engines.request import Chunk, Request, Text
from picbench.engines.vllm.frontend import request_args
from picbench.engines.vllm.frontend.placements import overlapping
from picbench.engines.vllm.frontend.request_args import RequestArgs, cut
from picbench.errors import ConfigError


def read_args(extra, prompt_tokens):
    return request_args.read_args(extra, range(prompt_tokens), Registry())


@pytest.mark.parametrize(
    ("nested", "flat", "expected"),
    [
        (
            {"spans": [[1, 4], [4, 6]], "algorithm": "epic:k=8"},
            {"pic_spans": [1, 4, 4, 6], "pic_algorithm": "epic:k=8"},
            RequestArgs(((1, 4), (4, 6)), "epic:k=8"),
        ),
        (
            {"spans": [[1, 4]], "positions": [[1, 8], [5, 30]], "slots": [[0, 2, 3, 2]]},
            {"pic_spans": [1, 4], "pic_positions": [1, 8, 5, 30], "pic_slots": [0, 2, 3, 2]},
            RequestArgs(((1, 4),), positions=((1, 8), (5, 30)), slots=((0, 2, 3, 2),)),
        ),
        (
            {"spans": [[1, 4]], "dependent": [[1, 2], [4, 9]]},
            {"pic_spans": [1, 4], "pic_dependent": [1, 2, 4, 9]},
            RequestArgs(((1, 4),), dependent=((1, 2), (4, 9))),
        ),
        ({"usage": True}, {"pic_usage": 1}, RequestArgs((), usage=True)),
        ({"usage": False}, {"pic_usage": False}, RequestArgs((), usage=False)),
        # Separators in the prompt may say where these are: they need no spans.
        ({"positions": [[0, 5]]}, {"pic_positions": [0, 5]}, RequestArgs((), positions=((0, 5),))),
        ({"dependent": [[1, 3]]}, {"pic_dependent": [1, 3]}, RequestArgs((), dependent=((1, 3),))),
    ],
)
def test_nested_and_flat_forms_agree(nested, flat, expected):
    assert read_args({"pic": nested}, 10) == read_args(flat, 10) == expected


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


class Rows(list[Any]):
    """A list of rows that counts those that are read."""

    read = 0

    def __iter__(self) -> Any:
        for row in super().__iter__():
            self.read += 1
            yield row


@pytest.mark.parametrize(
    ("name", "row"),
    [("spans", [5, 6]), ("dependent", [5, 6]), ("positions", [5, 6]), ("slots", [0, 2, 4, 2])],
)
def test_a_list_longer_than_its_prompt_is_not_read_to_its_end(name, row):
    """A server reads nothing else meanwhile: two seconds for half a million spans."""
    rows = Rows([row] * 1000)
    with pytest.raises(ConfigError, match=rf"{name}\[1\]"):
        read_args({"pic": {"spans": [[0, 4]], name: rows}}, 10)
    assert rows.read == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pic_span": [0, 4]}, r"'pic_span' is no argument \(did you mean 'pic_spans'\?\)"),
        ({"pic_spans": [0, 4], "pic_x": 1}, "'pic_x' is no argument .there are: pic_spans"),
        ({"pic": {"span": [[0, 4]]}}, r"pic: 'span' is no argument \(did you mean 'spans'\?\)"),
        ({"pic": {"spans": [[0, 4]], 5: 1}}, "pic: 5 is no argument"),
        ({"Pic_Spans": [0, 4]}, r"'Pic_Spans' is no argument \(did you mean 'pic_spans'\?\)"),
        ({"PIC-SPANS": [0, 4]}, "did you mean 'pic_spans'"),
        ({"picSpans": [0, 4]}, "did you mean 'pic_spans'"),
        ({"pci_spans": [0, 4]}, "did you mean 'pic_spans'"),
        ({"pics_span": [0, 4]}, "did you mean 'pic_spans'"),
        ({"picalgoritm": "naive"}, "did you mean 'pic_algorithm'"),
        ({"Pic": {"spans": [[0, 4]]}}, "'Pic' is no argument"),
    ],
)
def test_misspelled_arguments_are_not_ignored(extra, message):
    """The request would be served as a plain one, without a word."""
    with pytest.raises(ConfigError, match=message):
        read_args(extra, 10)


@pytest.mark.parametrize("name", ["topic_spans", "picture", "picks", "spans", "kv_transfer_params"])
def test_arguments_of_others_are_theirs(name):
    assert read_args({name: [0, 4]}, 10) is None


def test_clients_cannot_say_that_a_request_was_checked():
    sent = {"pic": {"spans": [[0, 4]], "checked": True}}
    found = request_args.read_args(sent, range(9), Registry())
    assert found == RequestArgs(((0, 4),))
    assert not found.checked


def test_cut():
    assert cut(range(8), RequestArgs(((2, 4), (4, 6))), 0) == [
        Segment((0, 1)),
        Segment((2, 3), chunk=True),
        Segment((4, 5), chunk=True),
        Segment((6, 7)),
    ]
    assert cut(range(3), RequestArgs(()), 0) == [Segment((0, 1, 2))]
    documents = ChunkContexts.of([b"", Context.of((9, 8)).packed])
    assert cut(range(8), RequestArgs(((2, 4), (4, 6)), documents=documents), 0) == [
        Segment((0, 1)),
        Segment((2, 3), chunk=True),
        Segment((4, 5), chunk=True, context=Context.of((9, 8))),
        Segment((6, 7)),
    ]


def test_documents_in_both_forms():
    """Whole documents or up to the chunk's end; of several places the last one counts."""
    nested = {"spans": [[1, 3], [3, 5], [6, 8]], "documents": [None, [3, 4, 3, 4, 5, 9], []]}
    flat = {"pic_spans": [1, 3, 3, 5, 6, 8], "pic_documents": [0, 6, 3, 4, 3, 4, 5, 9, 0]}
    args = read_args({"pic": nested}, 10)
    assert [tuple(context) for context in args.documents.contexts()] == [(), (3, 4), ()]
    assert read_args(flat, 10) == args


def test_the_flat_form_of_a_request_is_what_is_read_of_it():
    chunks = [Chunk(tokens=(1, 2)), Chunk(tokens=(3, 4), document=(9, 3, 4)), Chunk(tokens=())]
    request = Request([Text(tokens=(0,)), *chunks, Text(tokens=(5, 6)), Chunk(tokens=(7,))])
    args = read_args(request_args.flat_args(request, "epic:k=4"), 10)
    assert (args.spans, args.algorithm) == (((1, 3), (3, 5), (7, 8)), "epic:k=4")
    assert [tuple(context) for context in args.documents.contexts()] == [(), (9,), ()]
    assert "pic_documents" not in request_args.flat_args(Request(chunks[:1]), "mepic")


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[1, 2, 3]], "no entry for each of the 2 spans"),
        ("12", "no entry for each of the 2 spans"),
        ([None, 7], "documents[1] is no list of token ids"),
        ([None, "34"], "documents[1] is no list of token ids"),
        ([None, [3, -4]], "documents[1] is no list of token ids"),
        ([None, [3, 4.0]], "documents[1] is no list of token ids"),
        ([None, [3, True]], "documents[1] is no list of token ids"),
        ([None, [2**31]], "documents[1] is no list of token ids"),
        ([[0, 1, 2, 4], None], "documents[0] does not contain its chunk, spans[0]"),
    ],
)
def test_bad_documents_are_named(documents, message):
    with pytest.raises(ConfigError) as caught:
        read_args({"pic": {"spans": [[1, 4], [4, 6]], "documents": documents}}, 10)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"ids": b"", "places": [[0, 0]]},
        {"ids": b"\0\0\0", "places": [[0, 0], [0, 0]]},
        {"ids": b"\0\0\0\x80", "places": [[0, 0], [0, 1]]},
        {"ids": b"\0\0\0\0", "places": [[0, 0], [0, 2]]},
        {"ids": b"\0\0\0\0", "places": [[0, 0], [1, 0]]},
        {"ids": b"\0\0\0\0", "places": [[0, 0], [-1, 1]]},
        {"ids": "", "places": [[0, 0], [0, 0]]},
        {"ids": b"", "places": 5},
        {"ids": b"", "places": [[0], [0, 0]]},
    ],
)
def test_documents_that_no_process_sent(sent):
    with pytest.raises(ConfigError, match="documents are a mapping"):
        read_args({"pic": {"spans": [[1, 4], [4, 6]], "documents": sent}}, 10)


@pytest.mark.parametrize("flat", [[3, 1, 2], [-1], [1.0, 2], "1", 5, [2, 1, 2, 3]])
def test_bad_flat_documents(flat):
    with pytest.raises(ConfigError, match="pic_documents needs the length"):
        read_args({"pic_spans": [1, 4], "pic_documents": flat}, 10)


def test_positions_cut_texts_and_move_chunks():
    args = RequestArgs(((2, 4),), positions=((1, 10), (2, 20), (6, 90)))
    assert cut(range(8), args, 0) == [
        Segment((0,)),
        Segment((1,), position=10),
        Segment((2, 3), chunk=True, position=20),
        Segment((4, 5)),
        Segment((6, 7), position=90),
    ]


def test_slots_become_placeholders():
    args = RequestArgs(((2, 6), (6, 8)), slots=((0, 3, 5, 4), (1, 6, 6, 1)))
    assert cut(range(9), args, 99) == [
        Segment((0, 1)),
        Segment((2, 99, 99, 99, 99, 5), chunk=True, slots=(Slot(1, 4, (3, 4)),)),
        Segment((99, 6, 7), chunk=True, slots=(Slot(0, 1, ()),)),
        Segment((8,)),
    ]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"positions": [[2, 9]]}, r"positions\[0\] = \[2, 9\] is inside the chunk \[1, 4\]"),
        ({"positions": [[4, 9], [1, 20]]}, r"positions\[1\] = \[1, 20\] leaves .* or its order"),
        ({"positions": [[10, 9]]}, "leaves the prompt of 10 tokens"),
        ({"positions": [[0, -1]]}, "positions are 0 or more"),
        ({"positions": [5]}, r"positions\[0\] is 5"),
        ({"positions": "12"}, "positions are '12', not a list"),
        ({"slots": [[0, 4, 6, 9]]}, r"slots\[0\] = \[0, 4, 6, 9\] is not in its chunk"),
        ({"slots": [[1, 2, 3, 9]]}, "is not in its chunk"),
        ({"slots": [[0, 1, 3, 2], [0, 2, 4, 2]]}, r"slots\[1\] = .* overlaps the one before it"),
        ({"slots": [[0, 1, 4, 2]]}, "has 3 tokens for 2 positions"),
        ({"slots": [[0, 1, 1, 0]]}, "has 0 tokens for 0 positions"),
        ({"slots": [[1, 1, 2]]}, r"slots\[0\] is \[1, 1, 2\]"),
        ({"dependent": [[0, 2]]}, r"dependent\[0\] = \[0, 2\] is partly inside the chunk \[1, 4\]"),
        ({"dependent": [[0, 5]]}, "is partly inside the chunk"),
        ({"dependent": [[1, 3], [2, 4]]}, r"dependent\[1\] = \[2, 4\] overlaps \[1, 3\]"),
        ({"dependent": [[5, 11]]}, "leaves the prompt of 10 tokens"),
        ({"dependent": [5]}, r"dependent\[0\] is 5"),
    ],
)
def test_bad_places_are_refused(places, message):
    with pytest.raises(ConfigError, match=message):
        read_args({"pic": {"spans": [[1, 4]], **places}}, 10)


def test_dependent_tokens_are_indices_of_their_chunk():
    args = RequestArgs(((2, 6), (6, 9)), dependent=((0, 2), (3, 5), (6, 8)))
    assert [segment.dependent for segment in cut(range(9), args, 0)] == [(), (1, 2), (0, 1)]
    assert cut(range(9), args, 0)[1].tokens == (2, 3, 4, 5)


def test_dependent_tokens_are_counted_with_the_slots_before_them():
    args = RequestArgs(((2, 8),), slots=((0, 4, 5, 3),), dependent=((2, 3), (4, 7)))
    (chunk,) = [segment for segment in cut(range(8), args, 99) if segment.chunk]
    assert [chunk.tokens[index] for index in chunk.dependent] == [2, 5, 6]


class Counted(tuple[Any, ...]):
    """A slot or a span that counts how often it is looked at."""

    __slots__ = ()
    looked = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looked += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        Counted.looked += 1
        return super().__iter__()


def test_no_dependent_token_goes_through_all_slots():
    slots = tuple(Counted((0, at, at + 1, 2)) for at in range(0, 4000, 4))
    Counted.looked = 0
    args = RequestArgs(((0, 4000),), slots=slots, dependent=((0, 4000),))
    (chunk,) = cut(range(4000), args, -1)
    assert [chunk.tokens[index] for index in chunk.dependent] == [
        token for token in range(4000) if token % 4
    ]
    assert Counted.looked < 50 * len(slots)


@given(st.sets(st.integers(0, 20), max_size=12).map(sorted), st.integers(0, 20), st.data())
def test_overlapping_spans_are_those_with_a_common_token(ends, start, data):
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    end = data.draw(st.integers(start + 1, 21))
    asked = set(range(start, end))
    expected = [span for span in spans if not asked.isdisjoint(range(*span))]
    assert overlapping(spans, start, end) == expected


def test_no_chunk_goes_through_the_dependent_tokens_of_all():
    spans = tuple((at, at + 4) for at in range(0, 4000, 4))
    dependent = tuple(Counted((at, at + 1)) for at, _ in spans)
    Counted.looked = 0
    segments = cut(range(4000), RequestArgs(spans, dependent=dependent), 0)
    assert {segment.dependent for segment in segments} == {(0,)}
    assert Counted.looked < 50 * len(spans)


@pytest.mark.parametrize("flat", [{"pic_slots": [0, 1, 2, 1]}, {"pic_documents": [1, 7]}])
def test_flat_arguments_of_chunks_that_there_are_none_of(flat):
    with pytest.raises(ConfigError):
        read_args(flat, 10)


@pytest.mark.parametrize("flat", [{"pic_positions": [1]}, {"pic_slots": [1, 2]}])
def test_flat_places_have_whole_rows(flat):
    with pytest.raises(ConfigError, match="of integers"):
        read_args({"pic_spans": [1, 4], **flat}, 10)


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


@pytest.mark.parametrize(
    "extra_args",
    [
        None,
        {"pic_algorithm": "epic:k=8", "other": 1},
        {"pic": {"algorithm": "epic:k=8"}},
        {"pic_spans": [], "pic_dependent": [3, 5]},
    ],
)
def test_marks_add_spans_to_what_a_client_sent(extra_args):
    marked = request(extra_args)
    sent = marked.sampling_params.extra_args
    request_args.add_marked(marked, {"spans": [[1, 3]], "documents": [[9, 1, 1]]})
    named = {"pic_spans": [1, 3], "pic_documents": [3, 9, 1, 1]}
    if extra_args and "pic" in extra_args:
        named = {"pic": {"spans": [[1, 3]], "documents": [[9, 1, 1]], **extra_args["pic"]}}
    wanted = request({**(extra_args or {}), **named})
    registry = Registry()
    found = request_args.request_args(marked, registry)
    assert found == request_args.request_args(wanted, registry)
    # Callers may share the arguments between requests.
    assert sent == extra_args


@pytest.mark.parametrize(
    "extra_args",
    [
        {"pic_spans": [0, 2]},
        {"pic_documents": [2, 1, 2]},
        {"pic": {"spans": [[0, 2]]}},
        {"pic": {"documents": [[1]]}},
    ],
)
def test_a_prompt_has_marks_or_spans(extra_args):
    with pytest.raises(ConfigError, match="has marks, and the request names spans or documents"):
        request_args.add_marked(request(extra_args), {"spans": [[1, 3]]})


def test_arguments_can_be_sent_to_another_process():
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    places: dict[str, Any] = {"positions": [[1, 8], [6, 30]], "slots": [[0, 2, 3, 2]]}
    places["documents"] = [None, [5, 1, 1]]
    asked = request({"pic": {"spans": [[1, 4], [4, 6]], "tag": "7", **places}})
    registry = Registry()
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


@given(cuts=st.lists(st.integers(0, 40), max_size=8, unique=True), extra=st.integers(0, 3))
def test_prompts_of_which_only_spans_are_known_are_cut_like_any_other(
    cuts: list[int], extra: int
) -> None:
    ends = iter(sorted(cuts))
    spans = tuple(zip(ends, ends, strict=False))
    tokens = list(range(100, 140 + extra))
    # An empty span of dependent tokens changes nothing but the way.
    marked = RequestArgs(spans, dependent=((5, 5),))
    assert cut(tokens, RequestArgs(spans), 0) == cut(tokens, marked, 0)
