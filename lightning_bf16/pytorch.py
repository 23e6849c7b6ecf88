"""The plugin and the callback for the Trainer of ``lightning.pytorch``."""

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, HalfPrecision

from .deepspeed import DeepSpeedBody
from .monitor import MonitorBody
from .train_modes import TrainModesBody
from .trainer import TrainerBody

__all__ = ["BF16DeepSpeedPrecision", "BF16Monitor", "BF16Precision"]


class _TrainModes(TrainModesBody, Callback):
    __doc__ = TrainModesBody.__doc__


class BF16Precision(TrainerBody, FSDPPrecision, HalfPrecision):
    __doc__ = TrainerBody.__doc__
    _train_modes = _TrainModes


class BF16DeepSpeedPrecision(DeepSpeedBody, TrainerBody, DeepSpeedPrecision):
    """What :class:`BF16Precision` becomes under ``DeepSpeedStrategy``."""

    _train_modes = _TrainModes


class BF16Monitor(MonitorBody, Callback):
    __doc__ = MonitorBody.__doc__
