"""Pydantic schemas of the lines of a request file."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    TypeAdapter,
)


class _RequestFileLine(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class HeaderSchema(_RequestFileLine):
    """The first line."""

    format: Literal["picbench-requests"]
    version: Literal[1]
    dataset: str = Field(min_length=1)
    synthetic: bool
    settings: dict[str, Any] = Field(default_factory=dict)
    sha256: str | None = None


class TextSchema(_RequestFileLine):
    """Text of one request."""

    text: str = ""
    tokens: list[NonNegativeInt] = Field(min_length=1)


class UseSchema(_RequestFileLine):
    """A reference to a chunk of an earlier line."""

    chunk: str


class ChunkSchema(_RequestFileLine):
    """A chunk."""

    chunk: str
    text: str = ""
    tokens: list[NonNegativeInt] = Field(min_length=1)
    preload: bool = False
    before: TextSchema | None = None


class RequestSchema(_RequestFileLine):
    """A request."""

    request: str = Field(min_length=1)
    user: NonNegativeInt = 0
    arrival: float | None = Field(None, ge=0, allow_inf_nan=False)
    max_tokens: PositiveInt
    answers: list[str] = Field(default_factory=list)
    parts: list[TextSchema | UseSchema] = Field(min_length=1)


def _kind(line: Any) -> str | None:
    if not isinstance(line, dict):
        return None
    return "request" if "request" in line else "chunk"


_Either = Annotated[
    Annotated[ChunkSchema, Tag("chunk")] | Annotated[RequestSchema, Tag("request")],
    Discriminator(_kind),
]

LineSchema: TypeAdapter[ChunkSchema | RequestSchema] = TypeAdapter(_Either)
