"""Token ids as arrays: a prompt of 32k tokens is joined, copied, sent and read as bytes.

As a list it is 32k objects, which each of these goes through one by one. Nothing here imports torch
or vllm.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # has no item type at run time


class TokenIds(Ids):
    """Token ids of four bytes each, where vLLM has a list of them and appends what it generates.

    Raises OverflowError for an id that does not fit.
    """

    __slots__ = ()

    def __new__(cls, ids: Iterable[int] = ()) -> Self:
        """Of other `TokenIds`, a copy."""
        return super().__new__(cls, "i", ids)  # type: ignore[return-value]

    def copy(self) -> list[int]:
        """The ids as a list, which vLLM may extend and pass on."""
        return self.tolist()

    def clear(self) -> None:
        """Remove all ids."""
        del self[:]
