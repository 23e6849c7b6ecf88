"""Locks in a forked child, which has none of its parent's other threads."""

import os
import threading

import pytest

from torch_bf16.backends.certificates import certificate
from torch_bf16.locks import fork_safe_lock
from torch_bf16.model import copied_weights, remainders

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def succeeds_in_child(function):
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "lock",
    [fork_safe_lock(), certificate._lock, copied_weights._lock, remainders._lock],
    ids=["new", "certificate", "copied_weights", "remainders"],
)
def test_what_another_thread_holds_is_free_in_a_child(lock):
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    try:
        assert succeeds_in_child(lambda: lock.acquire(timeout=1))
        assert not lock.acquire(blocking=False), "the parent's lock is still held"
    finally:
        done.set()
        other.join(60)


def test_what_the_forking_thread_holds_is_its_own_in_the_child_too():
    lock = fork_safe_lock()

    def taken_by_another():
        taken = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        other.start()
        other.join(60)
        return taken[0]

    with lock:
        assert succeeds_in_child(lambda: not taken_by_another())
        assert succeeds_in_child(lambda: lock.release() is None and taken_by_another())
