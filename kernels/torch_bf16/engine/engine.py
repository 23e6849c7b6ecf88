"""What an optimizer of ours keeps between steps besides its states, in one private attribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_bf16.backends import StepInputs
from torch_bf16.errors import warn
from torch_bf16.living import LivingSet
from torch_bf16.locks import fork_safe_lock
from torch_bf16.sharding import Shard, shard_of

from .data_writes import DataWatch
from .names import ParameterNames
from .pending import Pending
from .plan import Plan
from .setting import Setting
from .versions import Snapshot
from .write_history import WriteHistory

__all__ = ["Engine", "Observer", "begun_optimizers", "engine_of", "has_living_master"]


class Observer(Protocol):
    """Something that is notified of each update, such as :class:`torch_bf16.UpdateMonitor`."""

    def before_update(self, members: Sequence[Any], inputs: StepInputs) -> None:
        """Gradients exist; nothing is updated yet.

        Args:
            members: a :class:`Member` for each parameter, or the fp32 copies that a class without
                a fused rule steps on. Both have ``shard`` and ``group``.
            inputs: what gradients are multiplied by, and whether the step will be skipped.
        """

    def after_update(self) -> None:
        """Everything is updated."""


class Accumulation(Protocol):
    """How gradients are summed; see :mod:`torch_bf16.gradients.accumulation`."""

    def hook_parameters(self) -> None:
        """Hook new parameters; called after a group was added, and before a release hooks them."""

    def remove(self) -> None:
        """Leave sums to torch again; called before another takes its place, or on conversion."""


class Release(Protocol):
    """Steps inside the backward pass; see :mod:`torch_bf16.gradients.release`."""

    by_last_step: bool

    def discard(self) -> None:
        """Forget backward passes without a step; called by ``zero_grad``."""

    def finish(self, left: list[Tensor]) -> bool:
        """Step what still has a gradient; called by ``step``. Returns whether anything stepped."""
        ...

    def hook_parameters(self, *, anew: bool = False) -> None:
        """Hook new parameters, or ``anew`` all of them, behind the hooks of a new accumulation.

        Called after a group was added, and once an accumulation has its hooks.
        """

    def remove(self) -> None:
        """Return to ordinary steps; called before another release takes its place."""

    def steps_next(self, parameter: Tensor) -> bool:
        """Whether the next gradient may lead to a step; called before it is added to a sum."""
        ...


# Of living optimizers that have begun: many that are made one after the other have not, so that
# making each of them looks through none.
_engines: LivingSet[Engine] = LivingSet()


def _unknown() -> None:
    return None


class Engine:
    """What one optimizer keeps between steps; copies keep names, release options and last norm.

    It is a separate object because the wrappers of Lightning and Fabric run our methods on
    themselves: they read the optimizer's attributes, but an attribute set on them stays there.

    Attributes:
        names: names of the parameters.
        pending: how the next step is to be scaled, or whether it is to be skipped.
        plan: the plan of the last step.
        setting: the setting that the plan was made for.
        overview: what the plans of the present step share; see :mod:`torch_bf16.optim.overview`.
        snapshots: versions, dtypes and shapes of parameters after the last step.
        loaded: versions of parameters when their states were loaded, and whether these have an
            exact master. No snapshots: weights that are loaded after them are those that the states
            were saved with.
        captured: plans that CUDA graphs refer to; kept alive for them.
        accumulation: how gradients are summed, if not by torch.
        release: release of gradients inside the backward pass.
        release_options: the constructor's argument ``release``, which copies apply again.
        last_norm: fp32 norm of the gradients of the last step, 0-d, if released gradients are
            clipped by it.
        reduction_checked: whether gradients are known to be reduced as the recipe asks, or a
            warning has said that they are not.
        host: name of a host that takes a step by several calls, each with some of the groups.
        divided: what that host does with what the optimizer holds, for its description.
        steps: how many steps were taken or skipped.
        writes: what is known of writes by others to the weights.
        shares: each group, and its share of the average in the last step, if schedule-free.
        model: a weak reference to the module whose parameters the optimizer was given, if known;
            not copied, because copies step for other parameters.
        optimizer: a weak reference to the optimizer itself, not to a wrapper that runs its methods.
        state_dicts: held while a state dict is made or loaded, with hooks of this one call on the
            optimizer: other threads may save, too.
    """

    def __init__(self, names: ParameterNames | None = None) -> None:
        self.names = ParameterNames() if names is None else names
        self.captured: set[Plan] = set()
        self.accumulation: Accumulation | None = None
        self.release: Release | None = None
        self.release_options: bool | Mapping[str, Any] = False
        self.last_norm: Tensor | None = None
        self.reduction_checked = False
        self.host: str | None = None
        self.divided: str | None = None
        self.steps = 0
        self.writes = WriteHistory()
        self.shares: list[tuple[Mapping[str, Any], float]] = []
        self.model: Callable[[], nn.Module | None] = _unknown
        self.optimizer: Callable[[], Any] = _unknown
        self.pending = Pending()
        self.state_dicts = fork_safe_lock()
        self.invalidate()

    def begin(self) -> None:
        """Let others find this optimizer, which is about to step, load states or write weights."""
        _engines.add(self)

    def requests_for_next_step(self, too_late: str) -> Pending:
        """The pending requests to the next step, for the caller to add to.

        Args:
            too_late: end of the error if gradients are released; says what works instead.

        Raises:
            NotImplementedError: gradients are released, so that the step was taken inside
                backward(), or a host takes the step by several calls.
        """
        self.check_host()
        if self.release is not None:
            raise NotImplementedError(
                f"gradients are released, so that the step runs inside backward() and {too_late}"
            )
        return self.pending

    def count(self, inputs: StepInputs) -> None:
        """Count a step that was taken or skipped."""
        self.steps += 1
        self.pending.count(inputs)

    def discard(self) -> None:
        """Forget the requests to the next step, and the backward passes made for it so far."""
        self.pending.reset()
        if self.release is not None:
            self.release.discard()

    def check_host(self) -> None:
        """Refuse requests to the next step if a host takes it by several calls.

        Raises:
            NotImplementedError: a host takes the step by several calls.
        """
        if self.host is not None:
            raise NotImplementedError(
                f"{self.host} takes a step by several calls and clips by itself, so that its step "
                "cannot be scaled or skipped here: set gradient_clipping in its configuration"
            )

    def hook_parameters(self) -> None:
        """Register the hooks of accumulation and release on new parameters."""
        for each in (self.accumulation, self.release):
            if each is not None:
                each.hook_parameters()

    def load_norm(self, norm: float | None, *, begun: bool) -> None:
        """Clip the next released step by a norm from a state dict.

        Args:
            norm: the saved norm, None if the state dict has none.
            begun: whether the saved run had taken steps.
        """
        has_norm = norm is not None
        self.last_norm = torch.tensor(norm, dtype=torch.float32, device="cpu") if has_norm else None
        if begun and not has_norm and self.release is not None and self.release.by_last_step:
            warn(
                "the state dict has no norm of the last step, by which this optimizer clips: the "
                "next step clips each gradient by its own norm. get_optimizer_state_dict drops the "
                "entry 'torch_bf16', which has it: save that of optimizer.state_dict(), too",
            )

    def invalidate(self) -> None:
        """Drop everything that was derived from the tensors of the last step.

        Requests to the next step stay: they are of gradients.
        """
        self.pending.forget_skipped()
        self.plan: Plan | None = None
        self.setting: Setting | None = None
        self.overview: Any = None
        self.snapshots: dict[Tensor, Snapshot] = {}
        self.loaded: dict[Tensor, tuple[int, bool]] = {}
        self._shown: tuple[int, ...] = ()
        self._others: dict[tuple[int, ...], tuple[Setting | None, Plan | None]] = {}

    def settle(self, fixed: tuple[Any, ...], groups: Sequence[Mapping[str, Any]]) -> Setting:
        """The current setting: the same object for as long as nothing in it changes.

        Called once when a step begins.

        Args:
            fixed: what else decides how parameters step; compared by ``==``.
            groups: the optimizer's parameter groups.
        """
        self.overview = None
        if self.setting is None or not self.setting.holds(fixed, groups):
            self.setting = Setting(fixed, groups)
            self.name_parameters(self.setting.parameters)
        return self.setting

    def name_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Name the parameters that the optimizer has now, if a model has named others before."""
        if self.names.given:
            self.names.give(parameters, self.model(), keep=self.host is not None)

    def keep_snapshots(self, current: Iterable[Any]) -> None:
        """Keep only the snapshots of these parameters: each keeps its parameter alive."""
        kept = {*map(id, current)}
        for parameter in [p for p in self.snapshots if id(p) not in kept]:
            del self.snapshots[parameter]

    def select(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Switch to the plan for the parameters that a host shows now, and keep the last plan."""
        if self.host is None:
            return
        shown = tuple(id(each) for group in groups for each in group["params"])
        if shown != self._shown:
            self._others[self._shown] = self.setting, self.plan
            self.setting, self.plan = self._others.pop(shown, (None, None))
            self._shown = shown

    def stepped_by_another(self, shard: Shard) -> bool:
        """Whether a step of another optimizer of ours has left a parameter as it is now."""
        others = (each.snapshots.get(shard.parameter) for each in _engines if each is not self)
        version = shard.version()
        return any(each is not None and each.version == version for each in others)

    def version_left(self, parameter: Tensor) -> tuple[int | None, bool]:
        """The version that a step or a load left of a parameter, and whether it has a master then.

        ``(None, False)`` if there was neither.
        """
        if (snapshot := self.snapshots.get(parameter)) is not None:
            return snapshot.version, bool(snapshot.masters)
        return self.loaded.get(parameter, (None, False))

    def watches(self, parameters: Iterable[Tensor]) -> Iterator[DataWatch | None]:
        """The watches over writes to these parameters, lazily, for those that have a snapshot."""
        snapshots = map(self.snapshots.get, parameters)
        return (each.data for each in snapshots if each is not None)

    def __getstate__(self) -> dict[str, Any]:
        names = "names", "release_options", "last_norm"
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["names"])
        self.release_options, self.last_norm = state["release_options"], state["last_norm"]


def begun_optimizers() -> list[Any]:
    """The living optimizers that may have stepped, loaded states or written weights."""
    # One that was given back its own class has its engine no more, which an error may keep alive.
    found = ((engine, engine.optimizer()) for engine in _engines)
    return [each for engine, each in found if each is not None and engine_of(each) is engine]


def has_living_master(parameter: Tensor) -> bool:
    """Whether an optimizer has an exact master of a weight that is as this optimizer left it."""
    if parameter.dtype != torch.bfloat16:
        return False
    left = (each.version_left(parameter) for each in _engines)
    versions = {version for version, has_master in left if has_master}
    return bool(versions) and shard_of(parameter).version() in versions


def engine_of(optimizer: torch.optim.Optimizer) -> Engine | None:
    """The engine of an optimizer of ours; None for any other optimizer."""
    return getattr(optimizer, "_engine", None)
