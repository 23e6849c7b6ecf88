"""Fixtures over both packages and both modes."""

from __future__ import annotations

from pathlib import Path

import entry_points_once  # noqa: F401  (before the hosts)
import pytest
from forkserver import IMPORTS
from lightning_models import FABRICS, MODES, TRAINERS, host
from unhooked import Unhooked

import lightning_bf16  # noqa: F401  (makes the modes known)

HERE = Path(__file__).parent
IMPORTS += [*TRAINERS, *FABRICS]

# All from the hosts, none says anything about these tests.
HOST_WARNINGS = (
    "ignore:.*does not have many workers:UserWarning",  # the data are two tensors in memory
    "ignore:.*but have no `val_dataloader`:UserWarning",  # most tests fit without validating
    "ignore:.*isinstance\\(treespec, LeafSpec\\).*:FutureWarning",  # torch, used by Lightning
)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            for warning in HOST_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def unhooked():
    """Runs programs as in a fresh interpreter that has imported torch and nothing of ours."""
    processes = Unhooked(["torchmetrics"], ["accelerate", "lightning", "pytorch_lightning"])
    yield processes
    processes.close()


@pytest.fixture(params=TRAINERS)
def pl(request):
    """The package whose Trainer is tested."""
    return host(request.param)


@pytest.fixture(params=FABRICS)
def fabric_package(request):
    """The package whose Fabric is tested."""
    return host(request.param)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param
