"""What pydantic refuses in values from outside, in a phrase for a message."""

from dataclasses import dataclass

from pydantic import ValidationError

#: What pydantic puts before the message of a ValueError that a schema raises itself.
_RAISED = "Value error, "


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a value was refused: where it is in what was given, pydantic's message, and the value.

    As text it is `field.path: message`, or the message alone where all that was given is refused.
    """

    path: tuple[int | str, ...]
    message: str
    value: object

    @property
    def field(self) -> str:
        """The path with dots; empty for all that was given."""
        return ".".join(map(str, self.path))

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.path else self.message


def first_refusal(error: ValidationError, *, lower: bool = False) -> Refusal:
    """The first of what an error lists, with its message in `lower` case if asked for.

    One is enough: the next is said once it is corrected, and is often only its consequence.
    """
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix(_RAISED)
    return Refusal(first["loc"], message.lower() if lower else message, first["input"])
