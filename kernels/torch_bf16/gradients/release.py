"""Gradient release: the step runs inside the backward pass, and a gradient dies with its step.

After "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (Lv et al.,
2023, https://arxiv.org/abs/2306.09782).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torch_bf16.argument_checks import check_max_norm, check_module
from torch_bf16.backends import StepInputs
from torch_bf16.engine.engine import Engine, engine_of
from torch_bf16.engine.pending import clip_coefficient
from torch_bf16.sharding import local, shard_of, unit_shapes

from .backward import Passes, released
from .gathering import Gathering, Group, Waiting
from .norm import norm_over_ranks, norms_of

__all__ = ["GradientRelease", "release_gradients"]

_NORMS = ("parameter", "last_step")


def release_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    norm: str = "parameter",
) -> GradientRelease:
    """Take each parameter's step inside ``backward()``, and free its gradient with it.

    Gradients wait until 32 MiB of them share one kernel call, larger ones alone, so that they cost
    the largest of them and 32 MiB, and not 2 bytes per parameter. Weights and states are, bit for
    bit, those of ``optimizer.step()`` after the whole backward pass. ``optimizer.step()`` still
    counts the step, for LR schedulers too, and takes it for parameters whose gradient came by
    another way; so learning rates must be set before ``backward()``. With FSDP2, gradients are
    released as groups of them are reduced, and the norm of a sharded parameter is one small
    all-reduce. What cannot work:

    - DDP, whose reducer needs all gradients to the end of the pass: use ``fully_shard``.
    - Accumulation over several backward passes: use larger batches, or an accumulation format.
    - Clipping by the global norm of this step, ``total_norm``, ``scale_next_step``: the step runs
      before all gradients exist. What is not ours is not refused:
      ``torch.nn.utils.clip_grad_norm_`` finds no gradient to clip.
    - ``GradScaler``: bf16 has fp32's range and needs no loss scaling.

    Args:
        model: the module as it is called: after ``fully_shard`` wrapped it.
        optimizer: one of this package, or converted; its parameters get hooks.
        max_norm: bound of the norm that ``norm`` names; None clips nothing.
        norm: ``"parameter"`` clips each gradient by its own norm; ``"last_step"`` multiplies all by
            the coefficient that the global norm of the step before asks for, and clips as
            ``"parameter"`` in the first step.

    Returns:
        A handle; ``remove()`` returns to ordinary steps.

    Raises:
        ValueError: an argument cannot be meant.
        NotImplementedError: the combination is one of those above.

    Example:
        >>> handle = torch_bf16.release_gradients(model, optimizer, max_norm=1.0)
        >>> model(torch.randn(8, 4)).square().mean().backward()  # updates the weights
        >>> optimizer.step()
        >>> handle.remove()
    """
    engine = engine_of(optimizer)
    if engine is None:
        raise ValueError(
            f"release_gradients was given a {type(optimizer).__name__}, which takes its step for "
            "all parameters at once; make it a torch_bf16 optimizer, or torch_bf16.convert it first"
        )
    if norm not in _NORMS:
        raise ValueError(f"norm={norm!r} is unknown; use one of {', '.join(_NORMS)}")
    check_module("release_gradients", model)
    check_max_norm(max_norm)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    why = None
    # Only a class that has no fused rule says what its states mean.
    if hasattr(optimizer, "roles"):
        why = (
            f"{type(optimizer).__name__} has no fused rule, and its own step may look at all "
            "parameters together. Use an optimizer of torch_bf16, or step after the backward pass"
        )
    elif any(parameter in released for parameter in parameters) and engine.release is None:
        why = "another optimizer has released those of the same parameters. Remove that one first"
    elif any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        why = _DDP
    elif any(map(unit_shapes, parameters)):
        why = (
            "FSDP1 reduces them together, into the gradient of a flat parameter. Shard the model "
            "with fully_shard, whose gradients can be released, or step after the backward pass"
        )
    elif engine.host is not None:
        why = f"{engine.host} reduces them, and takes the step. Leave that to it"
    elif (sums := engine.accumulation) is not None and sums.format != "bf16_nearest":
        why = (
            f"they are accumulated in {sums.format!r}, and a released gradient is gone after one "
            "backward pass. Make the recipe with accumulate='bf16_nearest', or do not release them"
        )
    elif optimizer.observers:  # pyright: ignore[reportAttributeAccessIssue]
        why = "an UpdateMonitor watches the optimizer, which looks at whole steps. Remove it first"
    if why:
        raise NotImplementedError(f"gradients cannot be released: {why}")
    return GradientRelease(model, optimizer, max_norm, norm)


_DDP = (
    "DDP reduces them in buckets, which hold all of them to the end of the backward pass. Shard "
    "the model with fully_shard, whose gradients can be released, or step after the backward pass"
)


class GradientRelease:
    """A handle on released gradients; see :func:`release_gradients`.

    Attributes:
        last_norm: fp32 norm of all gradients of the last step, 0-d, before clipping; None until
            then, and where ``norm`` is not ``"last_step"``.
    """

    def __init__(self, model: nn.Module, optimizer: Any, max_norm: float | None, norm: str) -> None:
        engine: Engine = optimizer._engine
        if engine.release is not None:
            engine.release.remove()
        self.last_norm: Tensor | None = None
        self._max_norm, self._by_last_step = max_norm, norm == "last_step"
        self._optimizer = weakref.ref(optimizer)
        self._gathering = Gathering(self._take)
        self._passes = Passes(Waiting, self._gathering.finish)
        self._alone: dict[Tensor, Group] = {}
        # By id; the parameters are hooked.
        self._order: dict[int, int] = {}
        self._exchanged: set[int] = set()
        self._stepped: set[int] = set()
        self._norms: dict[Any, list[Tensor]] = defaultdict(list)
        # The same object for all parameters of a step: comparing it with itself costs nothing.
        self._setting: Any = None
        self._hooks: list[Any] = [model.register_forward_pre_hook(_refuse_ddp)]
        self._hooked: set[Tensor] = set()
        self._hook_parameters()
        engine.release = self

    def remove(self) -> None:
        """Return to ordinary steps, after ``backward()``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._hooked:
            released.pop(parameter, None)
        self._hooked.clear()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._engine.release is self:
            optimizer._engine.release = None

    def state_dict(self) -> dict[str, Tensor | None]:
        """What a resumed run needs to repeat this one where ``norm="last_step"``."""
        return {"last_norm": self.last_norm}

    def load_state_dict(self, state_dict: dict[str, Tensor | None]) -> None:
        """Go on with the saved norm."""
        self.last_norm = state_dict["last_norm"]

    def finish(self) -> None:
        """Count the step: the next backward pass belongs to the next one."""
        if getattr(self._optimizer(), "grad_scale", None) is not None:
            raise NotImplementedError(
                "gradients are released and torch.amp.GradScaler scales the loss: the steps inside "
                "backward() saw scaled gradients, so the weights of this step are wrong. bf16 has "
                "the range of fp32 and needs no scaling: train without GradScaler"
            )
        if self._norms:
            self.last_norm = norm_over_ranks(self._norms)
        self._norms.clear()
        self._stepped.clear()
        self._setting = None
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        optimizer: Any = self._optimizer()
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self._order = {id(parameter): number for number, parameter in enumerate(every)}
        # Ranks would put others together than those with whom they exchange parts.
        self._exchanged = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if optimizer.rule_for(group, parameter).stage_states and shard_of(parameter).sharded
        }
        for parameter in every:
            # A frozen parameter takes no hook; it is looked at again after each step.
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked.add(parameter)
                released[parameter] = True
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._step))

    def _step(self, parameter: Tensor) -> None:
        if self._optimizer() is None:
            self.remove()
            return
        stepped = id(parameter) in self._stepped
        if stepped or self._gathering.waits(parameter) is not None:
            # Else the next step would take it for one that came by another way.
            parameter.grad = None
            which = "The second gradients were" if stepped else "Neither gradient was"
            raise NotImplementedError(
                "a second backward pass reached a parameter whose gradient was released and whose "
                "step was taken: accumulating gradients is impossible then. Call optimizer.step() "
                "after each backward(), or remove() the release and accumulate gradients, e.g. "
                f"with Recipe(accumulate='bf16_stochastic'). {which} not used"
            )
        running, gradient = self._passes.current(), local(parameter.grad)  # pyright: ignore
        by_its_own = self._max_norm is not None and not (
            self._by_last_step and self.last_norm is not None
        )
        if running is None or by_its_own or id(parameter) in self._exchanged:
            self._take(self._alone.setdefault(parameter, Group(parameter)), {0: None})
        else:
            self._gathering.add(running, parameter, gradient, None, gradient.dtype)

    def _take(self, group: Group, there: dict[int, None]) -> None:
        """Take the steps of some members of a group, all by one coefficient."""
        optimizer: Any = self._optimizer()
        taken = [each for n in there if (each := group.members[n]).grad is not None]
        if optimizer is None or not taken:
            return
        # As plans have them.
        taken.sort(key=lambda each: self._order[id(each)])
        if self._setting is None:
            self._setting = optimizer._setting()
        bound = self._max_norm
        told = StepInputs(1.0 if bound is None else self._coefficient(taken, bound))
        self._stepped.update(map(id, taken))
        group.made = optimizer._update(taken, group.made, self._setting, told)
        for parameter in taken:
            parameter.grad = None

    @torch.no_grad()
    def _coefficient(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        norms = norms_of(parameters)
        if self._by_last_step:
            for groups, some in norms.items():
                self._norms[groups] += some
            if self.last_norm is not None:
                return clip_coefficient(self.last_norm.to(parameters[0].device), max_norm)
        # The whole parameter's: FSDP2 releases those of a group in the same order on every rank.
        return clip_coefficient(norm_over_ranks(norms), max_norm)


def _refuse_ddp(module: nn.Module, arguments: Any) -> None:
    # Where DDP came later than the release: its reducer would average gradients that are gone.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise NotImplementedError(f"gradients cannot be released: {_DDP}")
