"""What a first round of a load may take: a guess, until rounds say what they took."""

from dataclasses import dataclass

from picbench.engines.config import BLOCK_SIZE
from picbench.measure.serving.decode_waves import DecodeScene
from picbench.measure.serving.load_traffic import LoadTraffic, MixedTraffic


@dataclass(frozen=True, slots=True)
class CostGuess:
    """A device's tokens of prompts a second, and the seconds of a step that decodes."""

    tokens_s: float
    step_s: float

    def prompts(self, *tokens: float) -> float:
        """Seconds for prompts of this many tokens in all."""
        return sum(tokens) / self.tokens_s

    def load(self, traffic: LoadTraffic, *, reused: bool = False) -> float:
        """Seconds of a load in one arm, its corpus among them.

        With `reused` chunks, a request computes a block of each chunk of the corpus.
        """
        computed = BLOCK_SIZE if reused and traffic.corpus else traffic.length
        served = self.prompts(traffic.requests * traffic.chunks * computed)
        together = traffic.running or traffic.requests
        served += self.step_s * traffic.reply * traffic.requests / together
        arriving = traffic.requests / traffic.rate if traffic.rate else 0.0
        return self.prompts(traffic.corpus * traffic.length) + max(served, arriving)

    def mixed(self, traffic: MixedTraffic) -> float:
        """Seconds of one arm beside long prompts."""
        long = traffic.arrivals * traffic.chunks * traffic.length
        return self.prompts(long) + self.step_s * traffic.reply

    def wave(self, scene: DecodeScene) -> float:
        """Seconds of requests that decode together, over chunks that are there."""
        linked = scene.requests * (scene.chunks * BLOCK_SIZE + scene.question)
        return self.prompts(linked) + self.step_s * scene.reply
