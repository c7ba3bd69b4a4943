"""Hugging Face's model over expanded rows: simple and slow, one request at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, PreTrainedModel

from picbench.engines.oracle.picked import FULL_LAYERS, Asked, Blend, BlendedRows
from picbench.engines.oracle.rule import ExpandedRow, GivenSegment, Rule, expand

#: Scales of LongRoPE's frequencies, for short prompts and for long ones.
_FACTORS = "short_factor", "long_factor"


def visible(rows: Sequence[ExpandedRow]) -> torch.Tensor:
    """Which keys each query sees, [queries, keys] of bool.

    No row sees a later position. A row of a compilation sees that compilation only; a row of the
    request sees the reused rows of the request and of compilations.
    """
    position = torch.tensor([row.position for row in rows])
    owner = torch.tensor([-1 if row.compiled is None else row.compiled for row in rows])
    reused = torch.tensor([row.reused for row in rows])
    request = owner == -1
    same_view = (owner[:, None] == owner[None, :]) & ~request[:, None]
    by_request = request[:, None] & reused[None, :]
    return (position[None, :] <= position[:, None]) & (same_view | by_request)


class Oracle:
    """What the decoder in `folder` computes under a rule, in float32 on the CPU.

    Of any architecture whose layers all have full attention with rotary embeddings: the mask says
    what is seen, and positions are given. `model` is Hugging Face's, for checks against its plain
    forward. Of two sets of frequencies (LongRoPE) it has those for `context` tokens, whatever is
    asked. Raises ValueError for models with a sliding window, which the mask does not have.
    """

    def __init__(self, folder: str | Path, context: int | None = None) -> None:
        whole = AutoConfig.from_pretrained(folder)
        config = whole.get_text_config()
        rope = config.rope_parameters or {}
        if "long_factor" in rope:
            longest = context or config.max_position_embeddings
            short = longest <= rope["original_max_position_embeddings"]
            rope |= dict.fromkeys(_FACTORS, rope[_FACTORS[0 if short else 1]])
        self.model: PreTrainedModel = getattr(transformers, whole.architectures[0]).from_pretrained(
            folder, config=whole, dtype=torch.float32, attn_implementation="eager"
        )
        kinds = getattr(config, "layer_types", None)
        windows = [kind for kind in kinds or () if kind != "full_attention"]
        if windows or (kinds is None and getattr(config, "sliding_window", None) is not None):
            raise ValueError(f"{folder}: the oracle does not know sliding windows")

    def logprobs(
        self,
        segments: Sequence[GivenSegment],
        rule: Rule | Blend | Asked,
        continuation: Sequence[int],
    ) -> torch.Tensor:
        """Log-probabilities of each next token when `continuation` is generated.

        Row i of the result, [len(continuation), vocabulary], is the distribution that
        continuation[i] was chosen from: after the prompt and continuation[:i].
        """
        logits = self._next(segments, continuation[:-1], rule)
        return logits[-len(continuation) :].log_softmax(-1)

    def logits(
        self, rows: Sequence[ExpandedRow], later: Sequence[ExpandedRow] | None = None
    ) -> torch.Tensor:
        """The prediction after each row, [rows, vocabulary].

        `later` are the same rows as the layers after the first `FULL_LAYERS` see them.
        """
        with ExitStack() if later is None else self._masked_later(_bias(later)):
            logits: torch.Tensor = self._forward(rows, cache=False).logits
        return logits[0]

    def picked(self, segments: Sequence[GivenSegment], rule: Blend | Asked) -> set[int]:
        """The tokens that are picked, as positions of the prompt."""
        if isinstance(rule, Asked):
            out = self._forward(rule.rows(segments), cache=False, attentions=True)
            return rule.pick(segments, out.attentions)
        rows = BlendedRows.of(segments, (), rule)
        layer = self._forward(rows.rows, cache=True).past_key_values.layers[FULL_LAYERS - 1]
        return rows.pick((layer.keys if rule.deviation == "k" else layer.values)[0])

    def attention(self, segments: Sequence[GivenSegment], rule: Rule, asking: int) -> torch.Tensor:
        """What the last `asking` tokens of the prompt attend to, averaged over them.

        [layers, heads, tokens of the prompt]: of each token in the way in which they see it.
        """
        rows = expand(segments, (), rule)
        seen = [i for i, row in enumerate(rows) if row.compiled is None or row.reused]
        order = sorted(seen, key=lambda i: rows[i].position)
        layers = self._forward(rows, cache=False, attentions=True).attentions
        return torch.stack([layer[0][:, -asking:].mean(1)[:, order] for layer in layers])

    def _next(
        self,
        segments: Sequence[GivenSegment],
        continuation: Sequence[int],
        rule: Rule | Blend | Asked,
    ) -> torch.Tensor:
        if isinstance(rule, Rule):
            rows = expand(segments, continuation, rule)
            with self._tempered(rows, rule.temperature):
                return self.logits(rows)
        picked = self.picked(segments, rule) if rule.picked is None else rule.picked
        if isinstance(rule, Asked):
            return self.logits(expand(segments, continuation, rule.rule(segments, picked)))
        blended = BlendedRows.of(segments, continuation, rule)
        return self.logits(blended.rows, blended.later(picked))

    @torch.inference_mode()
    def _forward(
        self, rows: Sequence[ExpandedRow], *, cache: bool, attentions: bool = False
    ) -> Any:
        return self.model(
            input_ids=torch.tensor([[row.token for row in rows]]),
            position_ids=torch.tensor([[row.position for row in rows]]),
            attention_mask=_bias(rows),
            use_cache=cache,
            output_attentions=attentions,
        )

    @contextmanager
    def _tempered(self, rows: Sequence[ExpandedRow], temperature: float) -> Iterator[None]:
        """Divide what the request's rows score of compiled ones, by an attention of our own."""
        request = torch.tensor([row.compiled is None for row in rows])
        divisor = torch.where(request[:, None] & ~request, temperature, 1.0)

        def attend(
            module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
        ) -> tuple[torch.Tensor, None]:
            groups = query.shape[1] // key.shape[1]
            key, value = (kv.repeat_interleave(groups, dim=1) for kv in (key, value))
            scores = query @ key.transpose(2, 3) * scaling / divisor + mask
            return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

        if temperature == 1:
            yield
            return
        AttentionInterface.register("tempered", attend)
        self.model.set_attn_implementation("tempered")
        try:
            yield
        finally:
            self.model.set_attn_implementation("eager")

    @contextmanager
    def _masked_later(self, bias: torch.Tensor) -> Iterator[None]:
        """Give the layers after the first `FULL_LAYERS` a mask of their own."""

        def replace_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"attention_mask": bias}

        model: Any = self.model
        with ExitStack() as hooks:
            for layer in list(model.get_decoder().layers)[FULL_LAYERS:]:
                hook = layer.register_forward_pre_hook(replace_mask, with_kwargs=True)
                hooks.callback(hook.remove)
            yield


def _bias(rows: Sequence[ExpandedRow]) -> torch.Tensor:
    """What is added to the scores of attention, [1, 1, queries, keys]."""
    bias = torch.zeros(len(rows), len(rows)).masked_fill(~visible(rows), float("-inf"))
    return bias[None, None]


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
