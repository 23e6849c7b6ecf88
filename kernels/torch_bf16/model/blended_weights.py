"""bf16 weights that no optimizer trains and that a program blends with trained ones itself.

A target network (BYOL, DINO, SAC) or a plain average does ``target.mul_(0.996).add_(weight,
alpha=0.004)``. In bf16 each such write is rounded to nearest, and most numbers never move. No
function of torch that could be replaced stands in between, so within a few windows of steps the
optimizers compare some of these weights with what they were before. A warning names one that is
written again and again while only a few of its numbers change. Averages in lists and dicts, which
belong to no module, are found among all objects of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_bf16.living import LivingSet
from torch_bf16.locks import fork_safe_lock
from torch_bf16.parameters import parameters_in
from torch_bf16.torch_patches import Replacement, at_restore

from .copied_weights import leave_copies, note_copy
from .loose_averages import loose_averages
from .untrained_weights import never_trained, trained_by, untrained
from .watched_weight import WatchedWeight, is_comparable, is_plain

__all__ = ["exempt", "named_elsewhere", "warn_if_blended", "watch_blends"]


class _Window(NamedTuple):
    """Steps in which weights are watched, counted from when a model was cast or copied.

    Attributes:
        first: the step with which it begins.
        written_by: the step at which weights that were not written are left out.
        last: the step with which it ends.
    """

    first: int
    written_by: int
    last: int


# The first comes soon; averages may still be so close to their weights that nothing at all changes,
# or begin much later, so there are others. Those of GANs, whose optimizers take turns, are often
# moved after every tenth turn only.
_WINDOWS = (
    _Window(8, 24, 72),
    _Window(1000, 1032, 1128),
    _Window(10_000, 10_032, 10_128),
    _Window(100_000, 100_032, 100_128),
)
# Weights that are watched at a time, once it is known which are written, and searches for loose
# averages after a cast.
_SAMPLED, _SEARCHES = 4, 2


class _Watch:
    """What the steps of all optimizers of a process look at; threads may train models apart.

    Attributes:
        weights: those that are watched in the present window.
    """

    def __init__(self) -> None:
        self.weights: list[WatchedWeight] = []
        self._optimizers: LivingSet[Any] = LivingSet()
        self._lock = fork_safe_lock()
        # What is done at each step to come; None after the last window.
        self._steps: Iterator[WatchedWeight | None] | None = None
        self._has_warned = False
        self._searches = 0

    def model_was_cast(self) -> None:
        with self._lock:
            self._has_warned, self._searches = False, _SEARCHES
            self._begin()

    def weight_was_copied(self, copy: Tensor) -> None:
        with self._lock:
            if self._has_warned:
                leave_copies([copy])
            else:
                self._begin()

    def step(self, optimizer: torch.optim.Optimizer) -> WatchedWeight | None:
        """Do what is to be done at a step: the weight to warn of, if one was found."""
        if self._steps is None:
            return None
        with self._lock:
            # Before a window begins, too: what another optimizer trains is not an average.
            self._optimizers.add(optimizer)
            released = optimizer._engine.release  # pyright: ignore[reportAttributeAccessIssue]
            if self._steps is None or released is not None:
                return None
            try:
                return next(self._steps, None)
            except BaseException as error:
                # As an interrupt while the device was waited for: the iterator has ended.
                self._begin()
                # The step may need less memory than this.
                if isinstance(error, torch.OutOfMemoryError):
                    return None
                raise

    def exempt(self, module: nn.Module) -> None:
        if self._steps is None:
            return
        parameters = [*parameters_in(module)]
        exempted = {*map(id, parameters)}
        # What rounds it holds tensors of its own over the same memory, in no module.
        memory = _addresses(parameters)
        with self._lock:
            leave_copies(parameters)
            self.weights[:] = [
                each
                for each in self.weights
                if id(each.get()) not in exempted and each.address not in memory
            ]

    def named_elsewhere(self) -> None:
        with self._lock:
            self._has_warned, self._searches = True, 0
            leave_copies()
            self.weights[:] = [each for each in self.weights if each.kind not in ("copy", "loose")]

    def end(self) -> None:
        with self._lock:
            self._steps = None
            self.weights.clear()
            leave_copies()

    def _begin(self) -> None:
        self.weights.clear()
        self._steps = self._windows()

    def _windows(self) -> Iterator[WatchedWeight | None]:
        """What is done at each step, in turn; yields the weight to warn of, or None."""
        step = 1
        for window in _WINDOWS:
            for _ in range(step, window.first):
                yield None
            self._gather()
            for _ in range(window.first, window.written_by):
                yield None
            self._keep_written()
            for _ in range(window.written_by, window.last):
                yield None
                lossy = self._find_lossy()
                if lossy is not None:
                    self._has_warned = True
                    self.end()
                    yield lossy
            self.weights.clear()
            step = window.last
        self.end()
        yield None

    def _gather(self) -> None:
        """Watch all weights that may be blended."""
        trained = [*trained_by(self._optimizers)]
        self.weights.extend(untrained({*map(id, trained)}))
        if self._searches > 0 and not _swaps():
            self._searches -= 1
            self.weights.extend(loose_averages(trained, [*self._optimizers], _SAMPLED))

    def _keep_written(self) -> None:
        """Watch only weights that were written since the window began, and not by an optimizer."""
        # By now every optimizer that takes turns with others is known.
        trained = [*trained_by(self._optimizers)]
        # By address, because views of a weight move with it.
        moved = _addresses(trained)
        written = [each for each in self.weights if each.is_written() and each.address not in moved]
        self.weights[:] = written
        alone = never_trained({*map(id, trained)})
        for each in written:
            model = alone.get(id(each.get()))
            if each.kind == "in the model" and model is not None:
                each.kind, each.model = "in a model of its own", model
        modules = sorted({each.module for each in written if each.kind == "in the model"})
        for each in written:
            each.bits, each.modules = None, modules

    def _find_lossy(self) -> WatchedWeight | None:
        """Compare some weights with what they were: the first whose writes are lost."""
        for each in self.weights[:_SAMPLED]:
            if each.loses_writes(lambda: trained_by(self._optimizers)):
                return each
        self.weights[:] = [each for each in self.weights if not each.is_harmless]
        return None


_watch = _Watch()
at_restore(_watch.end)


def watch_blends() -> None:
    """Watch what is cast from now on, and copies of it; see :func:`warn_if_blended`."""
    _watch.model_was_cast()
    _DEEPCOPY.apply()


def warn_if_blended(optimizer: torch.optim.Optimizer) -> None:
    """Warn of a weight that is blended in bf16, if the present step is in one of the windows.

    Called at the start of each step, when trained weights are still those that a program may just
    have copied. Waits for the device once in each window, and more often only if such a weight was
    written.

    Args:
        optimizer: the one that steps. If it releases gradients, its weights have moved already, so
            only that it trains them is noted.
    """
    lossy = _watch.step(optimizer)
    if lossy is not None:
        lossy.warn()


def exempt(module: nn.Module) -> None:
    """Do not watch a module: an average that rounds stochastically or has a warning of its own."""
    _watch.exempt(module)


def named_elsewhere() -> None:
    """Watch only what is in cast models: another warning has named an average of one."""
    _watch.named_elsewhere()


def _noting(original: Any) -> Any:
    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new = id(self) not in memo
        copy = original(self, memo)
        if is_new and not _swaps() and is_comparable(copy):
            note_copy(copy, self)
            _watch.weight_was_copied(copy)
        return copy

    return deepcopy


_DEEPCOPY = Replacement("parameter_deepcopy", nn.Parameter, "__deepcopy__", _noting)


def _addresses(weights: list[Any]) -> set[int]:
    return {each.data_ptr() for each in weights if is_plain(each)}


def _swaps() -> bool:
    """Whether float() calls swap_tensors, which refuses a tensor with weak references."""
    return torch.__future__.get_swap_module_params_on_conversion()
