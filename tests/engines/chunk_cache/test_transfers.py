"""Results of two ranks, and commands that are taken once."""

from picbench.engines.chunk_cache.transfers import CopyCommand, TransferCommands, TransferResults

A, B, C = b"a", b"b", b"c"


def test_two_ranks_have_only_what_both_have() -> None:
    one = TransferResults(present={A, B}, stored={C}, pending=1)
    other = TransferResults(present={A}, absent={B}, refused={C})
    both = one.merge(other)
    assert both.present == {A}
    assert both.absent == {B}
    assert both.stored == set()
    assert both.refused == {C}
    assert both.pending == 1


def test_commands_are_taken_once() -> None:
    commands = TransferCommands(copies=[CopyCommand("a", 1, 2)], clear=True)
    assert commands
    taken = commands.take()
    assert taken.copies == [CopyCommand("a", 1, 2)]
    assert taken.clear
    assert not commands
    commands.lookups.append(A)
    assert not taken.lookups
