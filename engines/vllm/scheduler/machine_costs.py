"""The costs of this machine: those of a measured one at first, corrected by what it serves.

An engine begins with what was fitted to the package's grid of its device, scaled by the shape of
its model. Each request that has the engine to itself then corrects the costs a little, in
proportion to what each was expected to have in it (normalised least mean squares; Widrow and Hoff's
rule). The two kinds of requests, those whose chunks are mapped and all others, have costs of their
own and share the corrections, so that an engine that serves only one kind does not misjudge the
other.
"""

from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple, Self

from picbench.engines.costs import KNOTS, RequestSize, StepCosts, total
from picbench.engines.model_config import head_size, kv_heads

#: The share of its error that a request corrects where it belongs, and in all costs alike.
_RATE, _COMMON_RATE = 0.1, 0.05

#: How many times faster or slower a machine may be, and beside that each cost of it.
_MOST_IN_ALL, _MOST_EACH = 64.0, 4.0

#: One kind of requests corrects far less often than the other if so many times as seldom.
_SELDOM = 16

#: A request that took longer than so many times what was expected, or shorter, counts as if it had
#: taken so long: another program may have had the machine.
_LONGEST = 2.0


class ModelShape(NamedTuple):
    """What costs grow with: weights that a token is multiplied with, elements of heads, layers."""

    weights: float
    heads: float
    layers: float

    @classmethod
    def of(cls, model: Mapping[str, Any], ranks: int = 1) -> Self:
        """The shape of a model's configuration, of which each of `ranks` GPUs has a part."""
        layers, hidden = int(model["num_hidden_layers"]), int(model["hidden_size"])
        heads = int(model["num_attention_heads"]) * head_size(model)
        inner = int(model.get("intermediate_size") or 0) * int(
            model.get("num_experts_per_tok") or 1
        )
        weights = hidden * (2 * heads + 2 * kv_heads(model) * head_size(model) + 3 * inner)
        return cls(weights * layers / ranks, heads * layers / ranks, layers)


#: The shape of a measured model, and the costs in seconds that `picbench.profile` fits to the
#: package's grid of it (cpu-testbed.json, h200-llama-3.1-8b.json): of the first token of a request
#: alone, plain and linked, and of what a request among others takes of the engine.
MEASURED: Mapping[str, tuple[ModelShape, Sequence[StepCosts]]] = {
    "cpu": (
        ModelShape(11_403_264, 3_072, 8),
        (
            StepCosts(0.00104, 0.137, 0.0212, 0.0369, 0.0, 0.0, 0.0, 0.129, 0.00041, 0.0),
            StepCosts(0.0158, 0.133, 0.0828, 0.0130, 0.000934, 0.00578, 0.0, 0.0938, 0.00528, 0.0),
            StepCosts(0.0, 0.147, 0.0399, 0.00972, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
            StepCosts(0.00708, 0.166, 0.0359, 0.006, 0.000521, 0.00492, 0.0, 0.0, 0.0, 0.0),
        ),
    ),
    "cuda": (
        ModelShape(6_979_321_856, 131_072, 32),
        (
            StepCosts(0.0118, 0.00688, 0.000496, 0.00106, 0.0, 0.0, 0.0, 0.00697, 0.0, 0.0134),
            StepCosts(
                0.0163, 0.00753, 0.000318, 0.000568, 1.14e-5, 0.000707, 0.0, 0.0, 0.0120, 0.00150
            ),
            StepCosts(
                0.000393, 0.00778, 0.000438, 0.00137, 0.0, 0.0, 0.00716, 0.00684, 0.0, 0.0127
            ),
            StepCosts(
                0.000125,
                0.00995,
                0.000327,
                0.000625,
                4.61e-05,
                0.000577,
                0.00322,
                0.0,
                0.0103,
                0.000431,
            ),
        ),
    ),
}


class MachineCosts:
    """What a request's first token takes on this machine, in seconds, were it alone.

    CUDA graphs serve steps of up to `graph_tokens`, 0 without graphs. Any thread may read.
    """

    def __init__(self, device: str, shape: ModelShape, graph_tokens: int) -> None:
        self.graph_tokens = graph_tokens
        known, costs = MEASURED["cuda" if device == "cuda" else "cpu"]
        weights, heads, layers = (own / other for own, other in zip(shape, known, strict=True))
        # On a GPU a step's start takes the host so long for each layer; a CPU computes then.
        start = layers if device == "cuda" else weights
        scale = (layers, weights, heads, heads, 1.0, layers, layers, start, weights, weights)
        self._costs = self._begun = [_times(one, scale) for one in costs]
        self._slowness, self._corrections = 1.0, (1.0,) * len(scale)
        self._corrected = [0, 0]

    def of(self, *, linked: bool, busy: bool = False) -> StepCosts:
        """The costs of requests whose chunks are mapped (`linked`), or of others; alone, or in a
        `busy` engine.
        """
        return self._costs[linked + 2 * busy]

    def first_token(self, size: RequestSize) -> float:
        """Seconds to the first token of a request alone; it is linked if it has chunks."""
        return total(self._costs[size.chunks > 0], size.first_token(self.graph_tokens))

    def work(self, size: RequestSize) -> float:
        """Seconds that a request takes of a busy engine, whose steps are large and run anyway."""
        thousands = size.computed / 1e3
        beyond = (thousands,) * len(KNOTS)
        return total(self.of(linked=size.chunks > 0, busy=True), (*size.prefill(), 0, 0, *beyond))

    def is_unsure(self, *, linked: bool) -> bool:
        """Whether requests of this kind have corrected costs far less often than the others."""
        return _SELDOM * self._corrected[linked] < self._corrected[not linked]

    def correct(self, factors: Sequence[float], seconds: float, *, linked: bool) -> None:
        """A request alone with these factors took so long."""
        self._corrected[linked] += 1
        parts = _times(self._begun[linked], factors)
        expected = total(self._corrections, parts)
        if expected <= 0:
            return
        ratio = _within(seconds / self._slowness / expected, _LONGEST)
        self._slowness = _within(self._slowness * ratio**_COMMON_RATE, _MOST_IN_ALL)
        step = _RATE * (ratio - 1) * expected / total(parts, parts)
        pairs = zip(self._corrections, parts, strict=True)
        self._corrections = tuple(_within(known + step * part, _MOST_EACH) for known, part in pairs)
        corrected = tuple(self._slowness * one for one in self._corrections)
        self._costs = [_times(begun, corrected) for begun in self._begun]


def _within(value: float, most: float) -> float:
    """The value, but at least 1 / most and at most that."""
    return min(most, max(1 / most, value))


def _times(one: Sequence[float], other: Sequence[float]) -> StepCosts:
    return StepCosts(*map(mul, one, other))
