"""Documents between marks in a server's prompts, which become chunks.

A prompt is cut at its marks after the chat template has made it, so that a document may come from a
message, a tool's result, or a template's ``documents=``. Documents and what is between them are
tokenized apart, and the spans of the documents' tokens reach `process_inputs` with the prompt.

Upstream: vllm/renderers/base.py of vLLM 0.32.0, `BaseRenderer`. Replaced, in the renderer of an
engine with the setting `marks` alone, are `_tokenize_prompt` (:628) and the same in a thread,
`_tokenize_prompt_async` (:159); and `_process_tokens` (:936) and `_process_tokens_async` (:1002),
which make an engine's input of a prompt's tokens and leave out what they do not know.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from picbench.dummy_prefix import inside_prompt
from picbench.engines.vllm.compat import check_signature, extend
from picbench.engines.vllm.frontend.patches import RequestError
from picbench.engines.vllm.frontend.request_args import ARGS
from picbench.engines.vllm.marks import DocumentMarks, TextSpan
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MarkedTokenizer:
    """A renderer's `_tokenize_prompt`; prompts without marks are left to `upstream`.

    `inside` tokenizes text after other text; special tokens, `lead` and `tail`, surround a prompt.
    """

    renderer: Any
    upstream: Callable[[Any, Any], Any]
    marks: DocumentMarks
    inside: Any
    lead: list[int]
    tail: list[int]

    def __call__(self, prompt: Any, params: Any) -> Any:
        """Upstream's `TokensPrompt`, with the arguments of its chunks. Raises RequestError.

        Offsets of tokens count characters of marks, too: they are in what the client sent.
        """
        text = prompt["prompt"]
        try:
            spans = self.marks.cut(text)
        except ConfigError as error:
            raise RequestError(error.message, hint=error.hint) from error
        without = "".join(text[span.start : span.end] for span in spans)
        if len(without) == len(text):
            return self.upstream(prompt, params)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        chunks: list[tuple[int, int, str | None]] = []
        asked = self.renderer._wants_offsets(prompt, params)
        for span, (tokens, places) in zip(spans, self._encoded(text, spans, asked), strict=True):
            if span.chunk:
                chunks.append((len(ids), len(ids) + len(tokens), span.document))
            ids += tokens
            offsets += [(span.start + first, span.start + last) for first, last in places]
        start, stop, lead, tail = self._kept(len(ids), params)
        ids = [*lead, *ids[start:stop], *tail]
        offsets = [(0, 0)] * len(lead) + offsets[start:stop] + [(0, 0)] * len(tail)
        built = self.renderer._build_tokens_prompt(
            ids, {**prompt, "prompt": without}, offset_mapping=offsets if asked else None
        )
        moved = len(lead) - start
        clipped = [(max(a, start) + moved, min(b, stop) + moved, key) for a, b, key in chunks]
        chunks = [chunk for chunk in clipped if chunk[0] < chunk[1]]
        return built | ({ARGS: _arguments(ids, chunks)} if chunks else {})

    def _encoded(
        self, text: str, spans: Sequence[TextSpan], offsets: bool
    ) -> Iterator[tuple[list[int], Sequence[tuple[int, int]]]]:
        """Yield ids and offsets of each span; the first text is the one after a special token."""
        texts = [text[span.start : span.end] for span in spans]
        tokenizer = self.renderer.tokenizer
        head = 1 + (texts[0] in tokenizer.all_special_tokens) if texts else 0
        for encode, some in ((tokenizer, texts[:head]), (self.inside, texts[head:])):
            if some:
                more = {"return_offsets_mapping": offsets, "return_attention_mask": False}
                got = encode(some, add_special_tokens=False, truncation=False, **more)
                places = got["offset_mapping"] if offsets else [()] * len(some)
                yield from zip(got["input_ids"], places, strict=True)

    def _kept(self, length: int, params: Any) -> tuple[int, int, list[int], list[int]]:
        """Which of a prompt's tokens are left, from and to, and the special tokens around them.

        As upstream, `truncate_prompt_tokens` counts special tokens, and removes them only on the
        side that a request names (vllm/renderers/params.py, get_encode_kwargs).
        """
        lead, tail = (self.lead, self.tail) if params.add_special_tokens else ([], [])
        most, side = params.truncate_prompt_tokens, params.truncation_side
        if most is not None and most < 0:
            most = params.max_truncation_tokens
        if most is None or len(lead) + length + len(tail) <= most:
            return 0, length, lead, tail
        lead, tail = [] if side == "left" else lead, [] if side == "right" else tail
        room = max(0, most - len(lead) - len(tail))
        if (side or self.renderer.tokenizer.truncation_side) == "left":
            return length - room, length, lead, tail
        return 0, room, lead, tail


def read_marks(renderer: Any, marks: DocumentMarks) -> None:
    """Have an engine's renderer read marks; done again, it does nothing.

    Raises ConfigError for renderers whose chat templates do not make text, and for methods that
    differ from upstream's.
    """
    from vllm.renderers.hf import HfRenderer
    from vllm.tokenizers import cached_tokenizer_from_config, maybe_make_thread_pool
    from vllm.utils.async_utils import make_async

    if isinstance(renderer._tokenize_prompt, MarkedTokenizer):
        return
    config, tokenizer = renderer.model_config, renderer.tokenizer
    if not isinstance(renderer, HfRenderer) or tokenizer is None or config.enable_prompt_embeds:
        raise ConfigError(
            "`marks` are read in text, which this server does not make of every prompt",
            hint="leave tokenizer_mode, skip_tokenizer_init and enable_prompt_embeds off",
        )
    check_signature(renderer._tokenize_prompt, "prompt, params")
    check_signature(renderer._wants_offsets, "prompt, params")
    check_signature(renderer._build_tokens_prompt, "token_ids, prompt, offset_mapping")
    # The renderer's own is a pool of copies, which a changed part would not reach.
    inside = copy(inside_prompt(cached_tokenizer_from_config(config)))
    maybe_make_thread_pool(inside, config.renderer_num_workers + 1)
    upstream, special = renderer._tokenize_prompt, _special_tokens(tokenizer)
    marked = MarkedTokenizer(renderer, upstream, marks, inside, *special)
    changed: Any = renderer
    changed._tokenize_prompt = marked
    changed._tokenize_prompt_async = make_async(marked, executor=renderer._executor)
    extend(renderer, "_process_tokens", _keep, "prompt, skip_mm_cache")
    extend(renderer, "_process_tokens_async", _keep_async, "prompt, skip_mm_cache")


def _keep(upstream: Any, prompt: Any, **kwargs: Any) -> Any:
    return upstream(prompt, **kwargs) | ({ARGS: prompt[ARGS]} if ARGS in prompt else {})


async def _keep_async(upstream: Any, prompt: Any, **kwargs: Any) -> Any:
    return await upstream(prompt, **kwargs) | ({ARGS: prompt[ARGS]} if ARGS in prompt else {})


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a prompt."""
    whole, bare = (list(tokenizer("a", add_special_tokens=a)["input_ids"]) for a in (True, False))
    starts = range(len(whole) - len(bare) + 1)
    start = next((n for n in starts if whole[n : n + len(bare)] == bare), 0)
    return whole[:start], whole[start + len(bare) :]


def _arguments(ids: list[int], chunks: list[tuple[int, int, str | None]]) -> dict[str, Any]:
    """The arguments (see `request_args`) of chunks: start, end, and the id of a document."""
    texts = defaultdict[str | None, list[int]](list)
    documents: list[list[int] | None] = []
    for start, end, key in chunks:
        texts[key] += ids[start:end]
        documents.append(None if key is None else list(texts[key]))
    spans = [[start, end] for start, end, _ in chunks]
    names = [key for _, _, key in chunks]
    found = {"documents": documents, "names": names} if any(documents) else {}
    return {"spans": spans, **found}
