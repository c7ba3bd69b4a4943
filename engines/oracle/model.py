"""Hugging Face's model over expanded rows: simple and slow, one request at a time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from picbench.engines.oracle.expand import ExpandedRow, GivenSegment, expand
from picbench.engines.oracle.rule import Rule


def visible(rows: Sequence[ExpandedRow]) -> torch.Tensor:
    """Which keys each query sees, [queries, keys] of bool.

    No row sees a later position. A row of a compilation sees that compilation only; a row of the
    request sees the request and the reused rows of compilations.
    """
    position = torch.tensor([row.position for row in rows])
    owner = torch.tensor([-1 if row.compiled is None else row.compiled for row in rows])
    reused = torch.tensor([row.reused for row in rows])
    by_request = (owner[:, None] == -1) & reused[None, :]
    same_view = owner[:, None] == owner[None, :]
    return (position[None, :] <= position[:, None]) & (same_view | by_request)


class Oracle:
    """What the decoder in `folder` computes under a rule, in float32 on the CPU.

    Of any architecture whose layers all have full attention with rotary embeddings: the mask says
    what is seen, and positions are given. `model` is Hugging Face's, for checks against its plain
    forward. Raises ValueError for models with a sliding window, which the mask does not have.
    """

    def __init__(self, folder: str | Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        if _has_window(self.model.config):
            raise ValueError(f"{folder}: the oracle does not know sliding windows")

    def logprobs(
        self, segments: Sequence[GivenSegment], rule: Rule, continuation: Sequence[int]
    ) -> torch.Tensor:
        """Log-probabilities of each next token when `continuation` is generated.

        Row i of the result, [len(continuation), vocabulary], is the distribution that
        continuation[i] was chosen from: after the prompt and continuation[:i].
        """
        rows = expand(segments, continuation[:-1], rule)
        return self.logits(rows)[-len(continuation) :].log_softmax(-1)

    def greedy(self, segments: Sequence[GivenSegment], rule: Rule, count: int) -> tuple[int, ...]:
        """The `count` tokens that greedy decoding generates."""
        tokens: tuple[int, ...] = ()
        for _ in range(count):
            rows = expand(segments, tokens, rule)
            tokens += (int(self.logits(rows)[-1].argmax()),)
        return tokens

    @torch.inference_mode()
    def logits(self, rows: Sequence[ExpandedRow]) -> torch.Tensor:
        """The prediction after each row, [rows, vocabulary]."""
        bias = torch.zeros(len(rows), len(rows)).masked_fill(~visible(rows), float("-inf"))
        logits: torch.Tensor = self.model(
            input_ids=torch.tensor([[row.token for row in rows]]),
            position_ids=torch.tensor([[row.position for row in rows]]),
            attention_mask=bias[None, None],
            use_cache=False,
        ).logits
        return logits[0]


def _has_window(config: PreTrainedConfig) -> bool:
    """Whether a layer sees the last tokens only."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return getattr(config, "sliding_window", None) is not None


def distance(expected: torch.Tensor, reported: Sequence[Mapping[int, float]]) -> float:
    """The largest difference in log-probability over all tokens reported at all steps.

    `expected` is [steps, vocabulary]; `reported` holds {token id: logprob} for each step.
    """
    if len(reported) != len(expected):
        raise ValueError(f"{len(reported)} steps reported, {len(expected)} expected")
    return max(
        abs(float(row[token]) - logprob)
        for row, step in zip(expected, reported, strict=True)
        for token, logprob in step.items()
    )
