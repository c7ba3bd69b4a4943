"""The errors that picbench raises, in one tree.

    PicBenchError           hint: which field or file to change
    ├── ConfigError         exit 2: a field, a file or a request is wrong
    │   └── DataError       exit 2: a row of a data set is wrong (file and line)
    ├── InvalidRun          exit 3: the run's numbers mean nothing, or would mean nothing
    ├── IncomparableRuns    exit 3: two runs did not measure the same thing
    └── EngineError         exit 4: the engine failed after some results were kept

This module imports nothing, so that every package of picbench may raise from the tree.
"""


class PicBenchError(Exception):
    """What every error of picbench derives from.

    `message` says what is wrong and where, `hint` what to try. Both name fields in backticks, with
    or without a value (`data=hub`). The command line prints them on one line, with its flags in
    place of the fields, and exits with `exit_code`.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (an arm runs in its own), and the default protocol
        # would lose the keyword-only hint.
        return (_rebuild, (type(self), self.message, self.hint))


class ConfigError(PicBenchError):
    """A configuration field or a request is wrong."""


class DataError(ConfigError):
    """A row of a data set is malformed; the message names file and line."""


class InvalidRun(PicBenchError):  # noqa: N818
    """A run's numbers mean nothing, or would: its engine gives wrong answers."""

    exit_code = 3


class IncomparableRuns(PicBenchError):  # noqa: N818
    """Two runs did not measure the same thing."""

    exit_code = 3


class EngineError(PicBenchError):
    """The engine failed; results that were written before are kept."""

    exit_code = 4


def _rebuild(kind: type[PicBenchError], message: str, hint: str) -> PicBenchError:
    return kind(message, hint=hint)
