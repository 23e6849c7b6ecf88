"""What torch calls at the end of ``import torch`` once torch-bf16 is installed."""


def autoload() -> None:
    """Do nothing yet."""
