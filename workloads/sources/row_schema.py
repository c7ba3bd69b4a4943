"""Pydantic schemas of row files and prompt files."""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from picbench.errors import first_refusal


class RowSchema(BaseModel):
    """One line of a data file, in LongBench's schema; other fields are ignored.

    Picbench's own fields are the passages (from 0) that the answer needs, for each passage the
    number of the document that it is from and its place there, and, from `columns`, the passages.
    """

    model_config = ConfigDict(strict=True)

    input: str
    context: str
    answers: Annotated[list[str], Field(min_length=1)]
    dataset: str | None = None
    id: str | int | None = Field(default=None, alias="_id")
    gold_passages: list[NonNegativeInt] | None = None
    documents: list[int] | None = None
    places: list[int] | None = None
    passages: list[str] | None = None


class PromptFileSchema(BaseModel):
    """LongBench's prompt file: its two maps in one file, or `dataset2prompt` alone, flat."""

    model_config = ConfigDict(strict=True)

    dataset2prompt: dict[str, str]
    dataset2maxlen: dict[str, PositiveInt] = {}

    @model_validator(mode="before")
    @classmethod
    def _wrap_flat(cls, value: Any) -> Any:
        flat = isinstance(value, dict) and "dataset2prompt" not in value
        return {"dataset2prompt": value} if flat else value


def first_problem(error: ValueError) -> str:
    """Return the first problem of a validation error as one phrase."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = first_refusal(error)
    return f"field {first.field!r}: {first.message}" if first.path else first.message
