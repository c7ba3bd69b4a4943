"""Lists of words and phrases, written down compactly."""


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """The parts of a text between vertical bars."""
    return tuple(text.split("|"))
