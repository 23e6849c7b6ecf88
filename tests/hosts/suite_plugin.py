"""A pytest plugin for suites of others: notes how each test ended, and forces a mode.

``pytest -p suite_plugin`` with two variables: ``BF16_SUITE_OUTCOMES``, a file that gets a line of
JSON as a test starts and one as it ends, and ``BF16_SUITE_MODE``, the precision of every Trainer
and Fabric of Lightning that was given none. Accelerate needs no help: ``BF16_MODE`` does it. Tests
that have an end in the file are left out, so that a run whose process died goes on;
``BF16_SUITE_UNTIL`` is the time after which no further test starts.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path

import pytest

OUTCOMES = Path(os.environ.get("BF16_SUITE_OUTCOMES", os.devnull))
UNTIL = float(os.environ.get("BF16_SUITE_UNTIL", "inf"))
CONNECTORS = (
    "lightning.fabric.connector._Connector",
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
)


def read(path: Path) -> dict[str, tuple[str, str]]:
    """What was noted last of each test: how it ended, and the first line of what it said."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: (outcome, said) for name, outcome, said in map(json.loads, lines)}


def note(name: str, outcome: str, said: str = "") -> None:
    with OUTCOMES.open("a") as file:
        file.write(json.dumps([name, outcome, said]) + "\n")


def force(connector, mode):
    """Let a connector that is given neither precision nor plugin for it take the mode."""
    from lightning.fabric.plugins.precision import Precision

    original = connector.__init__

    @functools.wraps(original)
    def __init__(self, *args, precision=None, plugins=None, **options):
        given = plugins if isinstance(plugins, (list, tuple, set)) else [plugins]
        asked = precision is not None or "LT_PRECISION" in os.environ
        if not asked and not any(isinstance(each, Precision) for each in given):
            precision = mode
        original(self, *args, precision=precision, plugins=plugins, **options)

    connector.__init__ = __init__


def pytest_collection_modifyitems(config, items):
    if mode := os.environ.get("BF16_SUITE_MODE"):
        # What no test has imported by now needs no force.
        for path in CONNECTORS:
            module, _, name = path.rpartition(".")
            if module in sys.modules:
                force(getattr(sys.modules[module], name), mode)
    known = read(OUTCOMES)
    over = [item for item in items if item.nodeid in known]
    if over:
        config.hook.pytest_deselected(items=over)
        items[:] = [item for item in items if item.nodeid not in known]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    done = yield
    # What is asked before a test would not keep that one from starting.
    if nextitem is not None and time.time() > UNTIL:
        item.session.shouldstop = "its time is over"
    return done


def pytest_runtest_logstart(nodeid, location):
    note(nodeid, "died")


def pytest_collectreport(report):
    if report.failed:
        note(report.nodeid, "error", "it cannot be collected")


def pytest_runtest_logreport(report):
    if report.passed and report.when != "call":
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    elif report.failed and report.when != "call":
        outcome = "error"
    crash = getattr(report.longrepr, "reprcrash", None)
    note(report.nodeid, outcome, crash.message.split("\n")[0][:300] if crash else "")
