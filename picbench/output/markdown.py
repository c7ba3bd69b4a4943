"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int | None = None) -> str:
    """A table with a line for each row; columns from number `right` on are aligned to the right."""
    left = len(head) if right is None else right
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))
