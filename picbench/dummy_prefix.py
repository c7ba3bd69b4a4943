"""Tokenizers that put a space before what they are given, and text inside a prompt."""

import json
from copy import deepcopy
from typing import Any, TypeVar

T = TypeVar("T")


def inside_prompt(tokenizer: T) -> T:
    """`tokenizer` for text that stands after other text: it puts no space before it.

    SentencePiece's dummy prefix belongs to the first text of a prompt (Llama 2, Mistral 7B, Yi);
    the ids of a text inside would stand for a space that was not rendered. Decoding keeps the space
    that such ids begin with. Tokenizers without a dummy prefix, and those that are not of the
    package `tokenizers`, are returned as they are.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    names = ("normalizer", "pre_tokenizer", "decoder")
    given = {name: _state(getattr(backend, name, None)) for name in names}
    changed = {name: _without(state) for name, state in given.items()}
    if all(changed[name] == given[name] for name in names[:2]):
        return tokenizer
    from tokenizers import Tokenizer, models

    empty = json.loads(Tokenizer(models.BPE()).to_str())
    parts = Tokenizer.from_str(json.dumps(empty | changed))
    inside: Any = deepcopy(tokenizer)
    for name in names:
        setattr(inside.backend_tokenizer, name, getattr(parts, name))
    found: T = inside
    return found


def _state(component: Any) -> Any:
    return None if component is None else json.loads(component.__getstate__())


def _without(state: Any) -> Any:
    """The state of a component, or of those in a sequence, that adds and drops no first space."""
    match state:
        case {"type": "Sequence"}:
            lists = {name: parts for name, parts in state.items() if isinstance(parts, list)}
            kept = {name: list(filter(None, map(_without, lists[name]))) for name in lists}
            return state | kept
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return state | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return state | {"add_prefix_space": False}
        case {"type": "Strip", "start": _}:
            return state | {"start": 0}
    return state
