"""Tables whose reader goes away."""

import os
import subprocess
import sys

import pytest

from picbench.cli.guard import PIPE_CLOSED
from picbench.run.result import print_all


def test_a_reader_that_goes_away_is_an_error_and_no_exit() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with pytest.raises(BrokenPipeError):
        print_all(stream, "a line")
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_command_whose_reader_went_away_is_no_regression() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stream:
        command = [sys.executable, "-P", "-m", "picbench", "explain", "mepic"]
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (PIPE_CLOSED, b"")
