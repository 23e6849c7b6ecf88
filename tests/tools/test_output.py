"""What commands print and write, and how they end."""

import errno
import io
import json
import math
import os
import sys

import pytest

from torch_bf16.tools import output
from torch_bf16.tools.output import exit_status, number, progress_line, share, write_json


def test_a_record_is_json_for_every_reader(tmp_path):
    found = {"a": [1.0, math.nan, (math.inf, 2)], "b": {"c": -math.inf, "d": "NaN", "e": None}}
    file = tmp_path / "record.json"
    write_json(found, file)
    read = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert read == {"a": [1.0, None, [None, 2]], "b": {"c": None, "d": "NaN", "e": None}}
    assert [*tmp_path.iterdir()] == [file]


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json({"a": 1}, pipe)
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    link, file = tmp_path / "record.json", tmp_path / "disk" / "record.json"
    link.symlink_to(file)
    for value in (1, 2):
        write_json({"a": value}, link)
        assert link.is_symlink()
        assert json.loads(file.read_text()) == {"a": value}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])
def test_a_file_that_cannot_be_replaced_is_written_where_it_is(tmp_path, monkeypatch, code):
    # As in a folder that is closed, or where a container mounts one file.
    def refused(*_):
        raise OSError(code, os.strerror(code))

    file = tmp_path / "record.json"
    file.write_text("before")
    monkeypatch.setattr(os, "replace", refused)
    write_json({"a": 1}, file)
    assert json.loads(file.read_text()) == {"a": 1}
    assert [*tmp_path.iterdir()] == [file]


def test_a_name_that_the_terminal_cannot_show_does_not_end_a_report(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert exit_status("doctor", lambda: print("\u5c42.weight \udce9.pt") or 0) == 0
    assert stream.buffer.getvalue() == b"\\u5c42.weight \\udce9.pt\n"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 3, "0"),
        (0.0004, 3, "0.000400"),
        (0.00123, 3, "0.00123"),
        (9.9996, 3, "10.0"),
        (99.6, 2, "100"),
        (1234.5, 3, "1,234"),
        (-0.5, 2, "-0.50"),
        (1.23e-7, 3, "1.23e-07"),
        (math.inf, 3, "inf"),
        (None, 3, "-"),
    ],
)
def test_numbers_have_the_digits_that_count(value, digits, text):
    assert number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (0.0, "0%"), (0.00019, "0.019%"), (0.05, "5.0%"), (0.0996, "10%")),
        *((0.123, "12%"), (1.0, "100%")),
    ],
)
def test_shares_have_two_digits(value, text):
    assert share(value) == text


def test_a_line_of_progress_is_as_wide_as_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_line() as show:
        show("x" * 100)
    assert terminal.getvalue().count("x") == 19


def test_a_command_whose_reader_went_away_has_not_succeeded(monkeypatch):
    def stopped():
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert exit_status("bench", stopped) == 141


def test_a_device_that_is_full_is_said_without_a_traceback(capsys):
    def full():
        raise output.torch.OutOfMemoryError("CUDA out of memory")

    assert exit_status("compare", full) == 2
    assert "python -m torch_bf16 compare: CUDA out of memory" in capsys.readouterr().err
