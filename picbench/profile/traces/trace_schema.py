"""Pydantic schemas of the lines of a user's trace."""

from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

#: Token ids, or only how many there are.
_Tokens = PositiveInt | Annotated[list[NonNegativeInt], Field(min_length=1)]


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
    output: PositiveInt = 16
    reply: PromptContent | None = None
