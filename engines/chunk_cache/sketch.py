"""How often chunks were seen lately, in memory of a fixed size."""

from struct import Struct

from picbench.engines.planning.keys import Key

#: Counters of a row, and rows.
_WIDTH, _ROWS = 1 << 17, 4

#: All counters are halved after so many sightings: what was seen before that counts half, and what
#: was seen once is forgotten. Until then one new chunk in 400 shares all of its counters.
_AGE = _WIDTH // 4

_MOST = 255
_HALVES = bytes(count // 2 for count in range(_MOST + 1))

#: Four numbers out of a key, which is a hash. Its first byte says of what kind it is.
_NUMBERS = Struct("<x4I")


class FrequencySketch:
    """A count-min sketch with ageing, as TinyLFU has it (arXiv 1512.00727): 512 KiB.

    Counts may be too high, where chunks share counters in every row, and halve with age.
    """

    def __init__(self) -> None:
        self._rows = tuple(bytearray(_WIDTH) for _ in range(_ROWS))
        self._seen = 0
        # Chunks that were seen, and those of them that were seen again.
        self._first = self._again = 0

    @property
    def recurrence(self) -> float:
        """The share of new chunks that come again; a half before any was seen.

        The estimate of Krichevsky and Trofimov, which few chunks correct.
        """
        return (0.5 + self._again) / (1 + self._first)

    def count(self, key: Key) -> int:
        """How often a chunk was seen, or a bit more; at most 255."""
        return min(row[place] for row, place in self._places(key))

    def note(self, key: Key, times: int = 1) -> int:
        """Count a chunk, and return how often it was seen before.

        What counts several `times` says nothing of whether new chunks come again.
        """
        places = self._places(key)
        before = min(row[place] for row, place in places)
        # Only counters that are not too high already.
        for row, place in places:
            row[place] = max(row[place], min(before + times, _MOST))
        self._first += times == 1 and before == 0
        self._again += times == 1 and before == 1
        self._seen += 1
        if self._seen >= _AGE:
            self._seen = 0
            self._first, self._again = self._first // 2, self._again // 2
            for row in self._rows:
                row[:] = row.translate(_HALVES)
        return before

    def _places(self, key: Key) -> list[tuple[bytearray, int]]:
        numbers = _NUMBERS.unpack_from(key)
        return [(row, n % _WIDTH) for row, n in zip(self._rows, numbers, strict=True)]
