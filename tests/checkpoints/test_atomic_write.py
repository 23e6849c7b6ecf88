"""Files that take the place of others once they are whole, whichever library writes them."""

import os
import stat

import pytest
import torch

from torch_bf16 import CheckpointError
from torch_bf16.checkpoints.atomic_write import replacing

CONTENT = {"weight": torch.arange(6.0)}


def write(path, between=None):
    """Write a file as an export does; ``between`` is called when the library has written it."""
    with replacing(path) as partial:
        if path.suffix == ".pt":
            torch.save(CONTENT, partial)
        else:
            pytest.importorskip("safetensors.torch").save_file(CONTENT, partial)
        if between is not None:
            between()


@pytest.fixture(params=["pt", "safetensors"])
def path(request, tmp_path):
    return tmp_path / f"out.{request.param}"


def test_a_file_that_another_process_writes_is_left_alone(path, tmp_path):
    fcntl = pytest.importorskip("fcntl")
    partial = tmp_path / f".{path.name}.partial"
    with partial.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=rf"another process is writing {path} right now"):
            write(path)
    assert partial.exists()
    assert not path.exists()
    write(path)
    assert os.listdir(tmp_path) == [path.name]


def test_one_writer_of_two_is_refused_and_the_file_is_whole(path, tmp_path):
    """Also where safetensors has just put a file of its own in place of the locked one."""
    pytest.importorskip("fcntl")
    with pytest.raises(CheckpointError, match=rf"another process is writing {path} right now"):
        write(path, between=lambda: write(path))
    if path.exists():
        assert path.read_bytes()
    else:
        assert path.suffix == ".pt"
    assert set(os.listdir(tmp_path)) <= {path.name}


def test_it_is_flushed_and_open_to_the_users_that_others_are(path, tmp_path, monkeypatch):
    (tmp_path / "other").touch()
    fsync, flushed = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.fstat(file)), fsync(file)))
    write(path)
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert any(os.path.samestat(each, path.stat()) for each in flushed)
    path.chmod(0o600)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_flushed_is_no_failure(path, monkeypatch):
    fsync = os.fsync

    def refuse(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(22, "Invalid argument")
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse)
    write(path)
    assert path.read_bytes()


def test_after_an_error_the_old_file_is_there_and_no_other(path, tmp_path):
    path.write_text("before")

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, between=interrupt)
    assert path.read_text() == "before"
    assert not (tmp_path / f".{path.name}.partial").exists() or path.suffix == ".safetensors"


@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkfifo, "a device or a pipe, which the file would"), (os.mkdir, "a folder")],
)
def test_what_is_no_file_is_not_replaced_by_one(make, kind, path, tmp_path):
    make(path)
    with pytest.raises(CheckpointError, match=rf"{path.name} is {kind}.*Nothing was written"):
        write(path)
    assert not path.is_file()
    assert os.listdir(tmp_path) == [path.name]
