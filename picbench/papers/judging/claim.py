"""A published trend as something that measurements can decide."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Quantity(BaseModel):
    """What is compared with a bound: it holds between `least` and `most`, fails outside."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    least: float | None = None
    most: float | None = None

    @model_validator(mode="after")
    def _has_a_bound(self) -> "_Quantity":
        if self.least is None and self.most is None:
            raise ValueError("a claim needs least or most")
        return self


class ScoreQuantity(_Quantity):
    """Scores of `arms`, each less (or, as `ratio`, over) that of the arm after it, row by row.

    An arm of another model than the testbed is ``MODEL/ARM``. Every pair on each of `datasets`
    has to hold (empty: all that were measured).
    """

    kind: Literal["score"]
    arms: list[str] = Field(min_length=2)
    ratio: bool = False
    datasets: list[str] = Field(default_factory=list)


class RunQuantity(_Quantity):
    """A metric of an experiment at the points `at` (empty: all), seed by seed.

    The value of `arm`, over that of `over` where that is named. With `against` all of it is divided
    by its value at that point: growth; as `exponent`, its logarithm is divided by that of the
    ratio of both points' prompts. Several names of an arm, or of a point in `against`, are
    alternatives, of which the first that was measured counts.
    """

    kind: Literal["run"]
    experiment: str
    metric: str
    arm: str | list[str]
    over: str | list[str] = Field(default_factory=list)
    at: list[str] = Field(default_factory=list)
    against: str | list[str] = Field(default_factory=list)
    exponent: bool = False


class NotMeasured(BaseModel):
    """Nothing here can decide it, and `why`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none"]
    why: str


class Claim(BaseModel):
    """A trend that a paper prints: where, and in which words or numbers.

    `note` says what a reader has to know about our answer, whatever it is; `device_notes` what they
    have to know about the answer that a device gave.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str
    source: str
    published: str
    judge: Annotated[ScoreQuantity | RunQuantity | NotMeasured, Field(discriminator="kind")]
    note: str = ""
    device_notes: Mapping[Literal["cpu", "cuda"], str] = Field(default_factory=dict)

    def on(self, device: str, gaps: str) -> Self:
        """The claim with what is to be said of this device, and of `gaps` in what it measured."""
        own = (text for name, text in self.device_notes.items() if name == device)
        notes = (gaps, self.note, *own)
        return self.model_copy(update={"note": " ".join(filter(None, notes)), "device_notes": {}})

    def model_post_init(self, _: Any) -> None:
        """Texts end up in cells of tables."""
        texts = (self.claim, self.source, self.published, self.note, *self.device_notes.values())
        if any("|" in text for text in texts):
            raise ValueError("a text of a claim has no vertical bar")
