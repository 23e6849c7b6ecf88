"""A port for processes that listen seconds after it was chosen."""

import contextlib
import random
import socket


def free_port() -> int:
    """Free now, and below those that the system gives to others in the meantime."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", random.SystemRandom().randrange(20_000, 32_000)))
            return probe.getsockname()[1]
