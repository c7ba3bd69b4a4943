"""What prefix caching leaves, told by why a prompt stops being like an earlier one."""

from picbench.profile.headroom import DOCUMENTS, HISTORY, REPEATED, TOOLS, Headroom
from picbench.workloads.traffic.trace import TracedRequest, TraceSegment


def segment(name: int, length: int, role: str = "", *, chunk: bool = False) -> TraceSegment:
    return TraceSegment(name, length, chunk, role=role)


def served(*prompts: tuple[TraceSegment, ...], blocks: int | None = None) -> Headroom:
    found = Headroom(exact=False, blocks=blocks)
    for prompt in prompts:
        found.serve(TracedRequest(prompt, output=1))
    return found


HEAD = segment(1, 64)
ONE, OTHER = (segment(n, 160, "document", chunk=True) for n in (2, 3))


def test_documents_in_another_order() -> None:
    found = served((HEAD, ONE, OTHER), (HEAD, OTHER, ONE), (HEAD, ONE, OTHER))
    assert found.moved == {DOCUMENTS: 320, HISTORY: 0, TOOLS: 0, REPEATED: 0}
    assert found.found == 64 + 64 + 320 - 16  # The last block is computed again.


def test_tools_that_changed() -> None:
    tools, others = segment(5, 80, "tools"), segment(6, 80, "tools")
    system, user = segment(7, 96, "system"), segment(8, 48, "user")
    found = served((tools, system, user), (others, system, user))
    assert found.moved == {DOCUMENTS: 0, HISTORY: 0, TOOLS: 144, REPEATED: 0}


def test_history_that_was_edited() -> None:
    head = segment(7, 96, "system")
    turns = [segment(10 + n, 64, "user" if n % 2 == 0 else "assistant") for n in range(4)]
    found = served((head, *turns), (head, *turns[1:]))
    assert found.moved == {DOCUMENTS: 0, HISTORY: 192, TOOLS: 0, REPEATED: 0}


def test_what_a_conversation_says_again() -> None:
    """A file that a tool reads twice: all before it is as it was."""
    head, asked = segment(7, 96, "system"), segment(8, 64, "user")
    file, answer = segment(9, 160, "tool", chunk=True), segment(10, 64, "assistant")
    found = served((head, asked), (head, asked, answer, file), (head, asked, answer, file, file))
    assert found.moved == {DOCUMENTS: 0, HISTORY: 0, TOOLS: 0, REPEATED: 160}


def test_short_text_and_new_text_is_no_headroom() -> None:
    short = segment(4, 20)
    found = served((HEAD, short, segment(20, 99)), (ONE, short, segment(21, 99)))
    assert sum(found.moved.values()) == 0


def test_what_a_pool_evicted_is_what_a_tier_would_save() -> None:
    texts = [segment(n, 320) for n in range(30, 34)]
    prompts = [(text,) for text in (*texts, *texts)]
    assert served(*prompts).expired == 0
    assert served(*prompts, blocks=22).expired == served(*prompts).found == 4 * 304
