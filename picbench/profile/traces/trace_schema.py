"""Pydantic schemas of the lines of a user's trace."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from picbench.profile.traces.content_table import INVENTED

#: More tokens than any prompt has; longer ones would take the memory of the machine.
_MOST = 10_000_000

_Count = Annotated[int, Field(ge=1, le=_MOST)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=INVENTED)]], Field(min_length=1)]


def _form(tokens: Any) -> str:
    """Which of both forms of `tokens` is meant, so that an error is about that one."""
    return "ids" if isinstance(tokens, list) else "count"


#: Token ids, or only how many there are.
_Tokens = Annotated[
    Annotated[_Count, Tag("count")] | Annotated[_Ids, Tag("ids")], Discriminator(_form)
]


class PromptContent(BaseModel):
    """Content of a prompt: its text, its token ids, or their number.

    `chunk` names a chunk, `id` a text that other prompts have, too. What was named before may be
    named alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: str | None = None
    tokens: _Tokens | None = None
    chunk: str | None = None
    id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.text is not None and self.tokens is not None:
            raise ValueError("has 'text' and 'tokens', one of them is enough")
        if self.chunk is not None and self.id is not None:
            raise ValueError("has 'chunk' and 'id', which are both names")
        named = self.chunk if self.chunk is not None else self.id
        if self.text is None and self.tokens is None and named is None:
            raise ValueError("needs 'text', 'tokens', or the name of what came before")
        return self


class PromptLine(BaseModel):
    """A request: what its prompt is made of, when it came, what it generated.

    `arrival` is in seconds, `output` the number of generated tokens. `reply` is what was generated,
    which later prompts may contain.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    parts: Annotated[list[PromptContent], Field(min_length=1)]
    arrival: float | None = Field(None, ge=0, allow_inf_nan=False)
    output: _Count = 16
    reply: PromptContent | None = None
