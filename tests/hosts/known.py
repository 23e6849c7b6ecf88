"""Differences that are meant, by suite and reason: tests, functions, classes, files or folders."""

from __future__ import annotations

__all__ = ["DIFFERENCES"]

_PRECISION = "tests_pytorch/trainer/connectors/test_accelerator_connector.py"
_LIGHTNING_OPTIMIZER = "tests_pytorch/core/test_lightning_optimizer.py"

DIFFERENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "lightning": {
        "XLA is refused by name": (
            f"{_PRECISION}::test_accelerator_choice_tpu",
            f"{_PRECISION}::test_connector_with_tpu_accelerator_instance",
            f"{_PRECISION}::test_connector_auto_selection",
        ),
        "LBFGS is refused by name": (
            "tests_pytorch/trainer/optimization/test_backward_calls.py"
            "::test_backward_count_with_closure",
            f"{_LIGHTNING_OPTIMIZER}::test_lightning_optimizer_automatic_optimization_lbfgs_zero_grad",
        ),
        "it mocks the step of torch.optim.SGD, and ours takes it": (
            "tests_pytorch/trainer/optimization/test_manual_optimization.py"
            "::test_step_with_optimizer_closure_with_different_frequencies",
            f"{_LIGHTNING_OPTIMIZER}::test_lightning_optimizer_automatic_optimization_optimizer_step",
            f"{_LIGHTNING_OPTIMIZER}"
            "::test_lightning_optimizer_manual_optimization_and_accumulated_gradients",
        ),
        "it asks whether type(optimizer) is torch.optim.Adam, and it is a subclass of it": (
            "tests_pytorch/callbacks/test_lr_monitor.py::test_multiple_optimizers_basefinetuning",
        ),
        "it compares a bf16 weight with the fp32 one that it was": (
            "tests_pytorch/callbacks/test_pruning.py"
            "::test_lottery_ticket_hypothesis_correctly_reset",
        ),
        "it compares a whole checkpoint, which holds our plugin's mode and seed": (
            "tests_pytorch/models/test_hooks.py::test_trainer_model_hook_system_fit",
            "tests_pytorch/models/test_hooks.py"
            "::test_trainer_model_hook_system_fit_no_val_and_resume_max_epochs",
            "tests_pytorch/models/test_hooks.py"
            "::test_trainer_model_hook_system_fit_no_val_and_resume_max_steps",
            "tests_pytorch/models/test_hooks.py::test_load_from_checkpoint_hook_calls",
        ),
    },
}
