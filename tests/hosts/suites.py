"""The suites of the hosts that `compare.py` runs: where they lie, and what their tests import."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SUITES", "Suite"]


@dataclass(frozen=True)
class Suite:
    """Tests of one host.

    Attributes:
        host: the distribution that is tested.
        folder: where pytest runs, below the folder of sources.
        tests: what it runs there.
        needs: what these tests import beyond the host, for pip.
        selected: which of them, by pytest's ``-k``.
    """

    host: str
    folder: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    selected: str = ""


# Processes that import torch anew for each test are tried by tests/lightning; old checkpoints are
# a download.
_IN_ONE_PROCESS = "not spawn and not fork and not ddp and not spike and not legacy_checkpoints"
_LEARN = ("cloudpickle", "joblib", "narwhals", "scikit-learn", "scipy", "threadpoolctl")
_BOARD = ("absl-py", "grpcio", "markdown", "protobuf", "tensorboard", "werkzeug")

SUITES = {
    "lightning": Suite(
        "lightning",
        "lightning/tests",
        (
            "tests_pytorch/plugins",
            "tests_pytorch/trainer/connectors",
            "tests_pytorch/trainer/optimization",
            "tests_pytorch/checkpointing",
            "tests_pytorch/callbacks",
            "tests_pytorch/core",
            "tests_pytorch/models/test_hooks.py",
            "tests_pytorch/overrides",
        ),
        (*_LEARN, *_BOARD, "expecttest"),
        _IN_ONE_PROCESS,
    ),
    "fabric": Suite(
        "lightning",
        "lightning/tests",
        (
            "tests_fabric/plugins/precision",
            "tests_fabric/strategies",
            "tests_fabric/test_connector.py",
            "tests_fabric/test_fabric.py",
            "tests_fabric/test_wrappers.py",
        ),
        (*_BOARD, "expecttest"),
        _IN_ONE_PROCESS,
    ),
    "accelerate": Suite(
        "accelerate",
        "accelerate",
        (
            "tests/test_accelerator.py",
            "tests/test_cpu.py",
            "tests/test_data_loader.py",
            "tests/test_dataclasses.py",
            "tests/test_grad_sync.py",
            "tests/test_hooks.py",
            "tests/test_kwargs_handlers.py",
            "tests/test_metrics.py",
            "tests/test_optimizer.py",
            "tests/test_scheduler.py",
            "tests/test_state_checkpointing.py",
            "tests/test_tracking.py",
            "tests/test_utils.py",
        ),
        ("parameterized", *_BOARD),
    ),
    "transformers": Suite(
        "transformers",
        "transformers",
        ("tests/trainer",),
        ("parameterized", "evaluate", "sentencepiece", *_BOARD),
    ),
}
