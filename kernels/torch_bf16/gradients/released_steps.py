"""Steps inside the backward pass: when each is taken, and how it is clipped."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_bf16.backends import StepInputs
from torch_bf16.engine.engine import Engine
from torch_bf16.errors import warn_once
from torch_bf16.parameters import parameters_in, parameters_of
from torch_bf16.rules import Rule
from torch_bf16.sharding import is_dtensor, local, shard_of, units, world_size

from .arrivals import Arrivals
from .backward import Passes
from .ddp_hook import ddp_modules
from .gathering import Gathering, Group, Waiting
from .hooked_parameters import HookedParameters, released, remove_with, weakly
from .norm import clip_coefficient, norm_over_ranks, norms_of
from .release_options import ReleaseOptions
from .released_buckets import Bucket, announce_buckets

__all__ = ["ReleasedSteps"]

_Norms = dict[tuple[Any, ...], list[Tensor]]


class _Pass(Waiting):
    """What a backward pass leaves to its end, or to the next bucket.

    Attributes:
        buckets: buckets that DDP is reducing, in the order in which it began.
        emptied: parameters of stepped buckets, which DDP gives a gradient at the end of the pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.buckets: list[Bucket] = []
        self.emptied: list[Tensor] = []


class _FollowWrapper:
    """The hook on a model: nothing in its copies, whose gradients are not released."""

    def __init__(self, follow: Callable[[], None] | None = None) -> None:
        self._follow = follow

    def __reduce__(self) -> Any:
        return _FollowWrapper, ()

    def __call__(self, *_: Any) -> None:
        if self._follow is not None:
            self._follow()


class ReleasedSteps:
    """A handle on released gradients; see :func:`torch_bf16.release_gradients`.

    Attributes:
        by_last_step: whether gradients are clipped by the norm of the previous step.
    """

    def __init__(self, model: nn.Module | None, optimizer: Any, options: ReleaseOptions) -> None:
        engine: Engine = optimizer._engine
        if engine.release is not None:
            engine.release.remove()
        self._options = options
        self.by_last_step = options.max_norm is not None and options.norm == "last_step"
        self._optimizer = weakref.ref(optimizer)
        # Groups hold plans, and these all states, which whoever keeps this handle need not keep.
        weakref.finalize(optimizer, weakly(self.make_groups)).atexit = False
        self._passes = Passes(_Pass, self._end)
        self._hooked = HookedParameters(optimizer, self, released, convertible=True)
        self.make_groups()
        # By id of the parameter; the hooks keep the parameters alive.
        self._order: dict[int, int] = {}
        self._exchanged: set[int] = set()
        self._arrivals = Arrivals(options.accumulation_steps)
        # By DDP module, the ids of the parameters whose buckets it announces.
        self._reduced: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self._shown = model is not None
        # What fully_shard leaves out (ignored_params) is reduced by the program, if by anybody.
        self._sharded = model is not None and any(True for _ in units(model))
        self._ranks: int | None = None
        self._norms: dict[Any, list[Tensor]] = defaultdict(list)
        # One object for all parameters of a step: comparing it with itself costs nothing.
        self._setting: Any = None
        self._module_hooks: list[Any] = []
        remove_with(self, self._module_hooks)
        if model is not None:
            for each in ddp_modules(model):
                self._follow(each)
            follow = _FollowWrapper(weakly(self.follow_wrapper))
            self._module_hooks.append(model.register_forward_pre_hook(follow))
        self.hook_parameters()
        engine.release = self

    @property
    def last_norm(self) -> Tensor | None:
        """fp32 norm of all gradients of the last step, 0-d, before clipping.

        None before the first step, and if ``norm`` is not ``"last_step"``.
        """
        engine = self._engine
        return None if engine is None else engine.last_norm

    @property
    def _engine(self) -> Engine | None:
        return getattr(self._optimizer(), "_engine", None)

    @property
    def abandoned(self) -> bool:
        """Whether the optimizer is gone: no step is taken any more."""
        return self._optimizer() is None

    def trains(self, parameters: Container[int]) -> bool:
        """Whether the optimizer has any of these parameters, by id, frozen or not."""
        return any(id(p) in parameters for p in parameters_of(self._optimizer()))

    def remove(self) -> None:
        """Return to ordinary steps, after ``backward()``."""
        for hook in self._module_hooks:
            hook.remove()
        self._hooked.drop(self._hooked.by_id)
        engine = self._engine
        if engine is not None and engine.release is self:
            # The last norm is saved until an ordinary step makes it an old one.
            engine.release, engine.release_options = None, False

    def finish(self, left: list[Tensor]) -> bool:
        """Take the remaining steps, and reset: the next backward pass is for the next step.

        Args:
            left: parameters that still have a gradient, which is freed.

        Returns:
            Whether any parameter has taken its step, now or within the backward pass.
        """
        optimizer: Any = self._optimizer()
        if getattr(optimizer, "grad_scale", None) is not None:
            raise NotImplementedError(
                "gradients are released and torch.amp.GradScaler scales the loss: the steps inside "
                "backward() saw scaled gradients, so the weights of this step are wrong. bf16 has "
                "the range of fp32 and needs no scaling: train without GradScaler"
            )
        if left:
            self._left.members = left
            self._take_each(self._left)
            self._left.members = []
        if self._norms:
            optimizer._engine.last_norm = norm_over_ranks(self._norms)
        stepped = bool(self._arrivals.stepped)
        self._norms.clear()
        self._arrivals.reset()
        self._setting = self._ranks = None
        self.hook_parameters()
        return stepped

    def discard(self) -> None:
        """Restart the count of passes when gradients are zeroed, unless a step was taken."""
        self._arrivals.discard()

    def steps_next(self, parameter: Tensor) -> bool:
        """Whether the next gradient of a parameter may lead to its step."""
        return self._arrivals.is_complete(parameter, following=1)

    def hook_parameters(self, *, anew: bool = False) -> None:
        """Hook the parameters that are new, or no longer frozen.

        Args:
            anew: hook all again, behind hooks that were registered meanwhile.
        """
        optimizer: Any = self._optimizer()
        if anew:
            self._hooked.drop(self._hooked.by_id)
        elif optimizer._engine.accumulation is not None:
            # Its hooks come first, because steps need the sums.
            optimizer._engine.accumulation.hook_parameters()
        self._order = {key: number for number, key in enumerate(self._hooked.update())}
        # Not gathered: ranks exchange something in their steps, and might group them differently.
        self._exchanged = {
            id(p)
            for group in optimizer.param_groups
            if _looks_at_all(optimizer.rule_of_group(group))
            for p in group["params"]
            if shard_of(p).sharded
        }

    def hook(self, parameter: Tensor) -> list[Any]:
        """Take a parameter's steps within the backward pass; returns the hook's handle."""
        return [parameter.register_post_accumulate_grad_hook(weakly(self._arrive))]

    def reduced(self, bucket: Bucket) -> None:
        """Take the steps of buckets whose reduction is over, and queue a new bucket.

        Args:
            bucket: parameters of this optimizer whose gradients DDP begins to reduce.
        """
        running = self._passes.current()
        early, complete = [*self._reduced.values()], self._arrivals.is_complete
        bucket.keep(lambda p: complete(p) and any(id(p) in keys for keys in early))
        if running is None or not bucket.parameters:
            return
        self._take_buckets(running)
        running.buckets.append(bucket)
        for parameter in bucket.parameters:
            # DDP has copied the gradient.
            parameter.grad = None

    def make_groups(self) -> None:
        """Forget which steps are taken together."""
        self._gathering = Gathering(self._take)
        self._alone: dict[Tensor, Group] = {}
        self._buckets: dict[tuple[int, ...], Group] = {}
        self._left = Group()

    def follow_wrapper(self) -> None:
        """Follow the DDP module that runs the model, which may have been wrapped afterwards."""
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and wrapper not in self._reduced:
            self._follow(wrapper)

    def _follow(self, module: DistributedDataParallel) -> None:
        """Take steps of a DDP module's buckets as it reduces them, or warn why that cannot be."""
        why = announce_buckets(module)
        self._reduced[module] = set() if why else {id(each) for each in parameters_in(module)}
        if why:
            _warn_of_ordinary_steps(why)

    def _is_left(self, parameter: Any) -> bool:
        """Whether the gradient is still to be reduced: a step now would use one rank's part."""
        if (self._reduced or self._sharded) and not is_dtensor(parameter):
            return True
        if self._shown:
            return False
        if self._ranks is None:
            self._ranks = world_size()
        if self._ranks == 1:
            return False
        if is_dtensor(parameter) and parameter.device_mesh.size() == self._ranks:
            return False
        _warn_of_ordinary_steps(
            f"there are {self._ranks} ranks, and which module reduces gradients is unknown. Call "
            "torch_bf16.release_gradients(model, optimizer) with the model as it was wrapped"
        )
        return True

    def _arrive(self, parameter: Tensor) -> None:
        if self.abandoned:
            self.remove()
            return
        if not self._arrivals:
            in_groups = self._hooked.drop_strangers()
            self._order = {key: number for number, key in enumerate(in_groups)}
        if id(parameter) not in self._order:
            return
        self._arrivals.count(parameter)
        stepped = id(parameter) in self._arrivals.stepped
        if stepped or self._gathering.waits(parameter) is not None:
            # Otherwise the next step would use it as an ordinary gradient.
            parameter.grad = None
            outcome = "The second gradients were not" if stepped else "Neither gradient was"
            steps = self._options.accumulation_steps
            raise NotImplementedError(
                f"another backward pass reached a parameter whose step was taken in pass {steps}, "
                "as its gradient was released. Call optimizer.step() after that pass, or say how "
                "many make a step: accumulation_steps=n in release_gradients(...), or release="
                f"{{'accumulation_steps': n}}. If one of them was of another model's loss, which "
                "reaches this one (a generator's), call requires_grad_(False) on this model, or "
                f"self.toggle_optimizer(...) in Lightning, during that pass. {outcome} used"
            )
        running = self._passes.current()
        if not self._arrivals.is_complete(parameter) or self._is_left(parameter):
            return
        gradient = local(parameter.grad)  # pyright: ignore[reportArgumentType]
        if running is None or self._by_its_own or id(parameter) in self._exchanged:
            self._take_alone(parameter)
        else:
            self._gathering.add(running, parameter, gradient, None, gradient.dtype)

    @property
    def _by_its_own(self) -> bool:
        """Whether each gradient is clipped by its own norm."""
        by_last = self.by_last_step and self.last_norm is not None
        return self._options.max_norm is not None and not by_last

    def _end(self, running: _Pass) -> None:
        self._gathering.finish(running)
        self._take_buckets(running, all_of_them=True)
        for parameter in running.emptied:
            parameter.grad = None
        self._arrivals.end_pass(self._hooked.by_id.values())

    def _take_buckets(self, running: _Pass, *, all_of_them: bool = False) -> None:
        while running.buckets and (all_of_them or running.buckets[0].done()):
            bucket = running.buckets.pop(0)
            parameters = bucket.parameters
            key = tuple(map(id, parameters))
            bucket.give_gradients()
            self._take_each(self._buckets.setdefault(key, Group(*parameters)))
            running.emptied += parameters

    def _take_each(self, group: Group) -> None:
        """Take the steps of all members, one by one if each is clipped by its own norm."""
        if not self._by_its_own:
            self._take(group, dict.fromkeys(range(len(group.members))))
            return
        for parameter in group.members:
            self._take_alone(parameter)

    def _take_alone(self, parameter: Tensor) -> None:
        self._take(self._alone.setdefault(parameter, Group(parameter)), {0: None})

    def _take(self, group: Group, numbers: dict[int, None]) -> None:
        """Take the steps of some members of a group, all with one coefficient."""
        optimizer: Any = self._optimizer()
        taken = [each for n in numbers if (each := group.members[n]).grad is not None]
        if optimizer is None or not taken:
            return
        # In the order of plans.
        taken.sort(key=lambda each: self._order[id(each)])
        if self._setting is None:
            optimizer._check_step()
            self._setting = optimizer._setting()
        bound, inputs = self._options.max_norm, StepInputs()
        norms: _Norms = {}
        # A plan steps every parameter with a gradient, and the others' sums may be incomplete.
        others = [each for n, each in enumerate(group.members) if n not in numbers]
        aside = [(each, each.grad) for each in others if each.grad is not None]
        for parameter, _ in aside:
            parameter.grad = None
        try:
            with torch.set_grad_enabled(False):
                if bound is not None:
                    norms = norms_of(taken)
                    inputs = StepInputs(self._coefficient(taken, norms, bound))
                group.made = optimizer._update(taken, group.made, self._setting, inputs)
        finally:
            for parameter, gradient in aside:
                parameter.grad = gradient
        # Only now: an update that failed, say for lack of memory, may be tried again.
        self._arrivals.stepped.update(map(id, taken))
        if self.by_last_step:
            for groups, parts in norms.items():
                self._norms[groups] += parts
        for parameter in taken:
            parameter.grad = None

    def _coefficient(self, parameters: list[Tensor], norms: _Norms, max_norm: float) -> Tensor:
        if self.by_last_step and self.last_norm is not None:
            return clip_coefficient(self.last_norm.to(parameters[0].device), max_norm)
        # The norm of whole parameters: FSDP2 releases a group in the same order on every rank.
        return clip_coefficient(norm_over_ranks(norms), max_norm)


def _looks_at_all(rule: Rule) -> bool:
    """Whether ranks that hold parts of a tensor exchange something in its step."""
    return bool(rule.stage_states) or rule.statistic is not None


def _warn_of_ordinary_steps(why: str) -> None:
    """Warn once that a release changes nothing, and why."""
    warn_once(
        f"gradients are released, and stay until optimizer.step(), which takes all steps: {why}"
    )
