"""Schemas of prompts: modules at fixed positions, with parameters and alternatives.

The markup of Prompt Cache (arXiv 2311.04934, section 3.2) as Python objects. A schema gives every
module its positions once; a request names the modules that it uses, fills their parameters and adds
text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from picbench.engines.request import Chunk, Request, Text
from picbench.errors import ConfigError, closest

#: Text, or the token ids of a text.
Words = str | Sequence[int]

#: From text to token ids, without special tokens; `ModelTokenizer.encode` is one.
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place in a module for up to `length` tokens of the request's."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class Module:
    """Content that requests use by name: words, and parameters between them.

    `position` is that of its first token; None: it follows what the schema has before it.
    """

    name: str
    content: Sequence[Words | Parameter]
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Modules that begin at the same position; a request uses at most one (the paper's union)."""

    modules: Sequence[Module]


@dataclass(slots=True)
class PlacedModule:
    """A module in tokens: `slots` are (parameter, index of its first token, without it).

    It has the positions [start, end), those of parameters included.
    """

    name: str
    start: int
    end: int
    tokens: tuple[int, ...] = ()
    slots: list[tuple[Parameter, int]] = field(default_factory=list)


class Schema:
    """Modules at fixed positions, from which requests are made.

    Modules follow one another in the order given; after alternatives the next one follows the
    longest. Raises ConfigError for two modules of one name, for modules without words, and for
    positions that overlap.
    """

    def __init__(self, parts: Sequence[Module | Alternatives], encode: Encode) -> None:
        self._encode = encode
        self._modules: dict[str, PlacedModule] = {}
        self.length = 0
        for part in parts:
            modules = part.modules if isinstance(part, Alternatives) else [part]
            placed = [self._place(module, self.length) for module in modules]
            self.length = max([self.length, *(module.end for module in placed)])

    def request(
        self,
        modules: Sequence[str] | Mapping[str, Mapping[str, Words]],
        text: Words,
        algorithm: str = "prompt-cache",
    ) -> Request:
        """A prompt of modules, in the schema's order, and of text after the whole schema.

        A mapping gives the parameters of modules by name; those left out stay empty. Raises
        ConfigError for unknown names, alternatives that are used together, and parameters of more
        tokens than they have positions.
        """
        given = modules if isinstance(modules, Mapping) else {name: {} for name in modules}
        used = sorted((self._find(name) for name in given), key=lambda module: module.start)
        for before, after in pairwise(used):
            if after.start < before.end:
                raise ConfigError(
                    f"modules {before.name!r} and {after.name!r} are alternatives",
                    hint="use one of them in a prompt",
                )
        chunks = [self._chunk(module, given[module.name]) for module in used]
        question = Text(tokens=tuple(self._ids(text)), position=self.length)
        return Request([*chunks, question], algorithm=algorithm)

    def _place(self, module: Module, after: int) -> PlacedModule:
        start = after if module.position is None else module.position
        if start < after:
            raise ConfigError(
                f"module {module.name!r} is at position {start}, what precedes it ends at {after}",
                hint="positions ascend, and modules do not overlap",
            )
        if module.name in self._modules:
            raise ConfigError(f"two modules are called {module.name!r}", hint="rename one of them")
        placed = PlacedModule(module.name, start, start)
        for words in module.content:
            if isinstance(words, Parameter):
                placed.slots.append((words, len(placed.tokens)))
                placed.end += words.length
            else:
                ids = tuple(self._ids(words))
                placed.tokens += ids
                placed.end += len(ids)
        if not placed.tokens:
            raise ConfigError(f"module {module.name!r} has no words", hint="give it content")
        self._modules[module.name] = placed
        return placed

    def _find(self, name: str) -> PlacedModule:
        if name not in self._modules:
            hint = closest(name, tuple(self._modules))
            raise ConfigError(f"unknown module {name!r} of the schema", hint=hint)
        return self._modules[name]

    def _chunk(self, module: PlacedModule, values: Mapping[str, Words]) -> Chunk:
        known = tuple(parameter.name for parameter, _ in module.slots)
        for name in values:
            if name not in known:
                hint = closest(name, known) if known else "it has none"
                raise ConfigError(f"unknown parameter {name!r} of {module.name!r}", hint=hint)
        tokens: tuple[int, ...] = ()
        slots, at = [], 0
        for parameter, index in module.slots:
            value = tuple(self._ids(values.get(parameter.name, ())))
            if len(value) > parameter.length:
                raise ConfigError(
                    f"parameter {parameter.name!r} of {module.name!r} has {len(value)} tokens",
                    hint=f"it has room for {parameter.length}",
                )
            tokens += module.tokens[at:index]
            slots.append((len(tokens), len(tokens) + len(value), parameter.length))
            tokens += value
            at = index
        tokens += module.tokens[at:]
        return Chunk(tokens=tokens, position=module.start, slots=tuple(slots))

    def _ids(self, words: Words) -> Sequence[int]:
        return self._encode(words) if isinstance(words, str) else words
