"""A process that has trained ends when gloo's threads have let go of its tensors."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time

import pytest
import torch

import torch_bf16
from torch_bf16.sharding import exit as end


def test_replicas_that_train_wait_when_they_end(monkeypatch):
    registered = []
    end.settle_at_exit.cache_clear()
    monkeypatch.setattr(end.atexit, "register", registered.append)
    torch_bf16.sync_masters(torch.nn.Linear(1, 1))
    assert registered == []  # one process has nobody to wait for
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for _ in range(2):
            torch_bf16.sync_masters(torch.nn.Linear(1, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert registered == [end._settle]
    end.settle_at_exit.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel tells what threads do")
def test_waits_for_threads_of_gloo_and_for_no_others():
    over = threading.Event()

    def work(name, seconds):
        libc = ctypes.CDLL(None)
        libc.prctl(15, name, 0, 0, 0)  # PR_SET_NAME
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the GIL

    gloo = threading.Thread(target=work, args=(b"pt_gloo_runloop", 1))
    other = threading.Thread(target=work, args=(b"other", 60))
    gloo.start()
    other.start()
    time.sleep(0.2)
    try:
        end._settle()
        assert not gloo.is_alive()
        assert other.is_alive()
    finally:
        over.set()
        other.join()


def test_does_not_wait_for_long_where_nothing_is_at_work():
    start = time.monotonic()
    end._settle()
    assert time.monotonic() - start < 5
