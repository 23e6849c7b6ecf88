"""Differences that are meant, by suite and reason: tests, functions, classes, files or folders."""

from __future__ import annotations

__all__ = ["DIFFERENCES"]

_PRECISION = "tests_pytorch/trainer/connectors/test_accelerator_connector.py"
_RESUMED = "tests/test_state_checkpointing.py"
_FABRIC = "tests_fabric/test_connector.py"
_TRAINER = "tests/trainer/test_trainer.py"
_BEST = "tests/trainer/test_trainer_checkpointing.py::TrainerBestModelTest"
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
    "fabric": {
        "XLA is refused by name": (
            f"{_FABRIC}::test_accelerator_choice_tpu",
            f"{_FABRIC}::test_connector_with_tpu_accelerator_instance",
            f"{_FABRIC}::test_connector_auto_selection",
            f"{_FABRIC}::test_xla_fsdp_automatic_strategy_selection",
            "tests_fabric/test_fabric.py::test_launch_and_strategies_unsupported_combinations[xla]",
        ),
        "it mocks the strategy's clipping by norm, and ours takes the norm in fp32": (
            "tests_fabric/test_fabric.py::test_grad_clipping[None-1]",
        ),
    },
    "accelerate": {
        "it keeps a state dict of before the first step; ours has states by then, which are live": (
            f"{_RESUMED}::CheckpointTest_use_pytorch::test_can_resume_training",
            f"{_RESUMED}::CheckpointTest_use_pytorch::test_can_resume_training_checkpoints_relative_path",
            f"{_RESUMED}::CheckpointTest_use_pytorch::test_can_resume_training_with_folder",
            f"{_RESUMED}::CheckpointTest_use_safetensors::test_can_resume_training",
            f"{_RESUMED}::CheckpointTest_use_safetensors::test_can_resume_training_checkpoints_relative_path",
            f"{_RESUMED}::CheckpointTest_use_safetensors::test_can_resume_training_with_folder",
        ),
        "it compares bf16 gradients and weights with those of a run in fp32": (
            "tests/test_grad_sync.py::SyncScheduler::test_gradient_sync_cpu_multi",
            "tests/test_grad_sync.py::SyncScheduler::test_gradient_sync_cpu_noop",
            "tests/test_cpu.py::MultiCPUTester::test_cpu",
        ),
    },
    "transformers": {
        "it compares bf16 weights with fp32 ones of before, or of a model that it loads in fp32": (
            f"{_TRAINER}::TrainerIntegrationPrerunTest::test_gradient_checkpointing",
            f"{_TRAINER}::TrainerIntegrationTest::test_load_best_model_at_end",
            f"{_TRAINER}::TrainerIntegrationTest::test_load_best_model_from_safetensors",
            f"{_BEST}::test_load_best_model_at_end",  # where newer sources have these two
            f"{_BEST}::test_load_best_model_from_safetensors",
        ),
    },
}
