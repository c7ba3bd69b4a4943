"""Pydantic schemas of the lines of a request file, and of a trace that one is made from."""

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
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


class TracePart(BaseModel):
    """A part of prompts in RAGPulse's files: its id, under a name of its file's, and its length."""

    model_config = ConfigDict(frozen=True)

    id: int = Field(
        validation_alias=AliasChoices(
            "passage_id", "sys_prompt_id", "history_id", "user_input_id", "web_search_id"
        )
    )
    token_length: PositiveInt


class TraceLine(BaseModel):
    """A request in RAGPulse's trace; `timestamp` is in seconds, `hash_ids` are ids of parts."""

    model_config = ConfigDict(frozen=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)
    output_length: PositiveInt
    hash_ids: dict[str, list[int]] = Field(min_length=1)
    session_id: str


def _kind(line: Any) -> str | None:
    if not isinstance(line, dict):
        return None
    return "request" if "request" in line else "chunk"


_Either = Annotated[
    Annotated[ChunkSchema, Tag("chunk")] | Annotated[RequestSchema, Tag("request")],
    Discriminator(_kind),
]

LineSchema: TypeAdapter[ChunkSchema | RequestSchema] = TypeAdapter(_Either)
