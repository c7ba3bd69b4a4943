"""Which columns of a row its fields are in: rows of other schemas than LongBench's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from picbench.errors import ConfigError, DataError, closest
from picbench.workloads.sources.nested import (
    MISSING,
    ContextPassage,
    find,
    passages,
    strings,
    unpacked,
)
from picbench.workloads.yaml_data import read_data

#: What a row can have, and what each field is.
FIELDS: Mapping[str, str] = MappingProxyType(read_data("sources", "columns")["fields"])

#: Mappings by name.
NAMED: Mapping[str, str] = MappingProxyType(read_data("sources", "columns")["named"])

#: Where a row's columns are looked up: in its own object, then in those around it.
Scope = Sequence[Mapping[str, Any]]

#: The fields without which there is no row.
_NEEDED = ("input", "context", "answers")

_FORM = "FIELD=COLUMN[,FIELD=COLUMN...], a name such as squad, or a YAML file"


@dataclass(frozen=True, slots=True)
class Columns:
    """The column of each field, by name of the field.

    A column is a name, or names joined by dots for what lies deeper, where lists are passed
    through and a number picks one element; ``a+b`` are both one after the other, ``a|b`` is the
    first of them that a row has, and ``a|`` may be absent. Without any the row has LongBench's
    columns.
    """

    of: Mapping[str, str]

    def scopes(self, values: Mapping[str, Any]) -> Iterator[Scope]:
        """What the columns of each row of a record are looked up in; DataError without `each`."""
        return _scopes([values], self.of.get("each", ""))

    def row(self, scope: Scope) -> dict[str, Any]:
        """A row in LongBench's schema; DataError for a column that `scope` lacks."""
        if not self.of:
            return dict(scope[0]) | {"passages": None}
        row: dict[str, Any] = {
            "input": self._get(scope, "input") if self.of["input"] else "",
            "answers": strings(unpacked(self._get(scope, "answers"))),
        }
        if "passages" in self.of:
            row |= self._passages(scope)
        else:
            row["context"] = self._get(scope, "context")
        if "id" in self.of:
            row["_id"] = self._get(scope, "id")
        for field in ("gold_passages", "documents", "places"):
            if field in self.of:
                row[field] = unpacked(self._get(scope, field))
        return row

    def _passages(self, scope: Scope) -> dict[str, Any]:
        inside = {field: self.of.get(field, "") for field in ("title", "body", "supports")}
        found = passages(self._get(scope, "passages"), **inside)
        gold = [number for number, passage in enumerate(found) if passage.supports]
        if "gold_titles" in self.of:
            titles = _titles(self._get(scope, "gold_titles"), self.of.get("title", ""))
            gold = [number for number, passage in enumerate(found) if passage.title in titles]
        shown = [_shown(number, p) for number, p in enumerate(found, start=1)]
        shown[:-1] = [f"{passage}\n" for passage in shown[:-1]]
        row: dict[str, Any] = {"context": "".join(shown), "passages": shown}
        row |= {"gold_passages": gold} if gold else {}
        if "articles" in self.of:
            row |= _places(found, strings(unpacked(self._get(scope, "articles"))))
        return row

    def _get(self, scope: Scope, field: str) -> Any:
        found = find(scope, self.of[field])
        if found is MISSING:
            names = ", ".join(dict.fromkeys(name for values in scope for name in values))
            raise DataError(
                f"no column {self.of[field]!r} for {field!r}; there are: {names}",
                hint="`columns=FIELD=COLUMN,...` says which column a field is in",
            )
        return found


#: Rows whose columns are those of LongBench.
LONGBENCH_COLUMNS = Columns({})


def parse_columns(text: str) -> Columns:
    """Read ``NAME``, ``FIELD=COLUMN,...``, both (``squad,id=key``), or the path of a YAML file.

    Fields that are not named are those of the mapping called NAME, else LongBench's. Raises
    ConfigError for a field or a name that there is not.
    """
    of: dict[str, str] = {}
    for item in text.split(","):
        field, given, column = item.strip().partition("=")
        if given:
            of[_known(field.strip())] = column.strip()
        elif Path(field).suffix in (".yaml", ".yml"):
            of |= _read(Path(field))
        else:
            of |= _named(field)
    return Columns(_complete(of))


def _named(name: str) -> dict[str, str]:
    if name not in NAMED:
        raise ConfigError(
            f"`columns` {name!r}: no mapping is called that",
            hint=f"{closest(name, NAMED)}; or {_FORM}",
        )
    return dict(pair.split("=", 1) for pair in NAMED[name].split(","))


def _read(path: Path) -> dict[str, str]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"`columns` {path}: {reason}", hint=_FORM) from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ConfigError(f"`columns` {path}: not a map of fields to columns", hint=_FORM)
    base = _named(found.pop("like")) if "like" in found else {}
    return base | {_known(str(field)): column for field, column in found.items()}


def _known(field: str) -> str:
    if field not in FIELDS:
        raise ConfigError(f"`columns` {field!r}: no such field", hint=closest(field, FIELDS))
    return field


def _complete(of: Mapping[str, str]) -> dict[str, str]:
    if "context" in of and "passages" in of:
        # The later of the two was meant, where a named mapping has the other.
        first = next(field for field in of if field in ("context", "passages"))
        of = {field: path for field, path in of.items() if field != first}
    needed = (field for field in _NEEDED if field != "context" or "passages" not in of)
    return {field: field for field in needed} | dict(of)


def _scopes(scope: Scope, each: str) -> Iterator[Scope]:
    if not each:
        yield scope
        return
    name, _, rest = each.partition(".")
    elements = unpacked(scope[0].get(name))
    if not isinstance(elements, list) or not all(isinstance(e, dict) for e in elements):
        raise DataError(
            f"column {name!r} of 'each' is no list of objects; there are: {', '.join(scope[0])}",
            hint="`columns=each=COLUMN`",
        )
    for element in elements:
        yield from _scopes([element, *scope], rest)


def _places(found: Sequence[ContextPassage], articles: Sequence[str]) -> dict[str, list[int]]:
    """The document of each passage, and where in its text the passage is."""
    places = [str(text).find(p.body) for text, p in zip(articles, found, strict=False)]
    if len(articles) != len(found) or -1 in places:
        hint = "`columns=articles=COLUMN` has the whole text of each passage's document"
        raise DataError("a passage is not in the text of its article", hint=hint)
    return {"documents": [articles.index(text) for text in articles], "places": places}


def _titles(value: Any, title: str) -> set[str]:
    """Titles in a list of them, of (title, sentence) pairs or of objects, or in an object."""
    value = unpacked(value)
    if isinstance(value, dict):
        value = value.get(title or "title", [])
    found = value if isinstance(value, list) else []
    return {
        str(one[0] if isinstance(one, list) else one.get(title) if isinstance(one, dict) else one)
        for one in found
        if one
    }


def _shown(number: int, passage: ContextPassage) -> str:
    """A passage in LongBench's form."""
    title = f"{passage.title}\n" if passage.title else ""
    return f"Passage {number}:\n{title}{passage.body}"
