"""Whose threads the kernels run on, and that none is lost or left running."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from torch_bf16 import AdamW
from torch_bf16.backends.cpu import threads
from torch_bf16.backends.cpu.job import (
    compile_job,
    finish,
    finished,
    new_job,
    share,
    take,
    unpack,
)

KINDS = ((np.int64, 1),)
TURNS = ((np.int64, 2),)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch's", "Python's"])
def team(request, monkeypatch):
    if request.param == "Python's":
        monkeypatch.setattr(threads, "torchs_team", lambda: None)
    elif threads.torchs_team() is None:
        pytest.skip("torch's threads cannot be used here")


def seen_threads(max_threads, meanwhile=None):
    """Native ids of the threads that run a job of Python's; each waits for the others."""
    job, seen = new_job([], [], 0), []
    expected, end = min(max_threads, torch.get_num_threads()), time.monotonic() + 20

    def together():
        while len(seen) < expected and time.monotonic() < end:
            time.sleep(0.001)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(address):
        seen.append(threading.get_native_id())
        (meanwhile or together)()

    threads.run(work, job, max_threads)
    return seen


def test_a_job_runs_on_as_many_threads_as_torch_uses_now(two_threads, team):
    assert len(set(seen_threads(8))) == 2
    assert seen_threads(1) == [threading.get_native_id()]
    torch.set_num_threads(1)
    assert seen_threads(8) == [threading.get_native_id()]
    torch.set_num_threads(2)
    assert len(set(seen_threads(8))) == 2


ON_TORCHS_THREADS = """
import os, torch
from torch_bf16 import AdamW

torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.ones(2_000_000, 1, dtype=torch.bfloat16))
weight.grad = torch.ones_like(weight)
optimizer = AdamW([weight], lr=0.1)
optimizer.step()
torch.set_num_threads(2)
torch.ones(1024, 1024) @ torch.ones(1024, 1024)
before = set(os.listdir("/proc/self/task"))
optimizer.step()
assert set(os.listdir("/proc/self/task")) == before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="lists threads as Linux does")
@pytest.mark.skipif(threads.torchs_team() is None, reason="torch's threads cannot be used here")
def test_a_step_starts_no_thread_where_torch_has_started_its_own():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run(
        [sys.executable, "-c", ON_TORCHS_THREADS], env=environment, check=True, timeout=120
    )


def test_a_piece_that_fails_is_an_error_and_not_silence(two_threads, team, capfd):
    unpacked = unpack(KINDS)

    def run(job):
        numbers, written = unpacked(job)
        while True:
            first, last = take(numbers)
            if first == last:
                break
            if first <= 3 < last:
                raise ValueError("the fourth piece")
            for piece in range(first, last):
                written[piece] = 1
            finish(numbers, last - first)

    work, written = compile_job(run, "fails_at_the_fourth"), np.zeros(8, np.int64)
    hook, told = sys.unraisablehook, []
    sys.unraisablehook = told.append
    try:
        with pytest.raises(RuntimeError, match="broke off, for the reason printed above"):
            threads.run(work, new_job(KINDS, [written], 8), 2)
    finally:
        sys.unraisablehook = hook
    assert [str(each.exc_value) for each in told] == ["the fourth piece"]
    # Two take pieces 0 and 1, 2, 3, and then one by one.
    assert written.sum() in (3, 7)


def runs_of_pieces(count, sharing, running):
    """A job's first and last pieces of each turn, that so many threads in fact took: int64."""

    unpacked = unpack(TURNS)

    def run(job):
        numbers, turns = unpacked(job)
        while True:
            first, last = take(numbers)
            if first == last:
                break
            turns[first, 0] += 1
            turns[first, 1] = last
            finish(numbers, last - first)

    work = compile_job(run, "notes_its_turns")
    turns = np.zeros((count, 2), np.int64)
    job = new_job(TURNS, [turns], count)
    share(job, sharing)
    started = [threading.Thread(target=work, args=(job.ctypes.data,)) for _ in range(running)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert finished(job)
    # Each piece once: a turn begins where the one before it ends.
    firsts = turns[:, 0].nonzero()[0]
    assert (turns[firsts, 0] == 1).all()
    assert turns[firsts, 1].tolist() == [*firsts[1:].tolist(), count]
    return np.diff([*firsts, count]).tolist()


def test_turns_are_long_at_first_and_short_at_the_end():
    assert runs_of_pieces(100, sharing=1, running=1) == [100]
    assert runs_of_pieces(7, sharing=3, running=1) == [1] * 7
    turns = runs_of_pieces(1000, sharing=2, running=1)
    assert turns[0] == 250
    assert turns == sorted(turns, reverse=True)
    assert turns[-4:] == [1] * 4
    assert len(turns) < 30


def test_threads_together_take_each_piece_once():
    for count in (1, 2, 5, 64, 4097):
        runs_of_pieces(count, sharing=4, running=4)


def test_an_array_of_another_kind_is_refused():
    for wrong in (np.zeros(8, np.int32), np.zeros((8, 1), np.int64), np.zeros(8, np.int64)[::2]):
        with pytest.raises(TypeError, match="array 0 of a kernel is int"):
            new_job(KINDS, [wrong], 8)


def test_an_interrupt_waits_for_the_threads(two_threads, team):
    main, begun, done = threading.get_native_id(), threading.Event(), []

    def meanwhile():
        # Where the main thread ran Python's code the interrupt would end that, and not the job.
        if threading.get_native_id() == main:
            begun.wait(20)
        else:
            begun.set()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        seen_threads(2, meanwhile)
    assert done


def test_what_no_thread_can_be_started_for_is_done_and_not_left_for_later(two_threads, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "torchs_team", lambda: None)
    threads._pool.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        seen = seen_threads(2, lambda: None)
    # Its thread finds what could not be begun before.
    assert len(set(seen_threads(2))) == 2
    assert seen == [threading.get_native_id()]


def test_several_threads_of_python_may_step_at_once(two_threads, team):
    torch.manual_seed(0)
    started, gradient = torch.randn(600_001, 1).bfloat16(), torch.randn(600_001, 1).bfloat16()
    found = []

    def train():
        weight = torch.nn.Parameter(started.clone())
        weight.grad = gradient.clone()
        optimizer = AdamW([weight], lr=0.1)
        for _ in range(3):
            optimizer.step()
        found.append(weight.detach())

    train()
    running = [threading.Thread(target=train) for _ in range(4)]
    for each in running:
        each.start()
    for each in running:
        each.join(60)
    assert len(found) == 5
    assert all(torch.equal(found[0], each) for each in found)
