"""Sets of living objects."""

import gc
import threading

from torch_bf16.living import LivingSet


class Thing:
    pass


def test_what_lives_is_there_once_in_order_until_it_is_gone():
    living, things = LivingSet(), [Thing() for _ in range(4)]
    for each in [*things, things[0]]:
        living.add(each)
    assert [*living] == things
    del things[1:3], each
    gc.collect()
    assert [*living] == things


def test_members_may_come_and_go_during_an_iteration():
    living, things, over = LivingSet(), [Thing() for _ in range(100)], threading.Event()
    [*map(living.add, things)]

    def come_and_go():
        while not over.is_set():
            living.add(Thing())

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            found = [*living]
            living.add(Thing())
            assert found[:100] == things
        found.clear()
        for _ in range(len(things)):
            things.pop()
            assert [*living][: len(things)] == things
    finally:
        over.set()
        thread.join(60)
    assert [*living] == []
