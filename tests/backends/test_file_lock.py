"""Locks between processes, which end with whoever holds them and with nothing else."""

import contextlib
import os

from torch_bf16.backends.file_lock import locked


def test_a_full_disk_is_no_error_when_the_lock_ends(tmp_path):
    path = tmp_path / "lock"
    path.symlink_to("/dev/full")
    with locked(path) as file, contextlib.suppress(OSError):
        file.write(b"x")


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    with locked(tmp_path / "lock") as file:
        # It has the same open file.
        childs = os.dup(file.fileno())
    with locked(tmp_path / "lock") as file:
        assert file is not None
    os.close(childs)
