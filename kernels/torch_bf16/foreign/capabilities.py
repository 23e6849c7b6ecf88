"""What is known about an optimizer's own ``step``: from its class, the user and its first steps."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torch_bf16.errors import full_name
from torch_bf16.parameters import parameters_of

from .advice import refusal
from .contents import within
from .eight_bit import eight_bit, overridden
from .idle_parameters import IdleKinds
from .list_options import names_of_lists
from .runner import looks_up, own_attributes

__all__ = [
    "ELEMENTWISE",
    "Traits",
    "check_steps_on_copies",
    "is_elementwise",
    "rewrites_weights",
]

ELEMENTWISE = frozenset(
    {
        "lion_pytorch.lion_pytorch.Lion",
        "pytorch_optimizer.optimizer.adabelief.AdaBelief",
        "pytorch_optimizer.optimizer.adan.Adan",
        "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
        "pytorch_optimizer.optimizer.adopt.ADOPT",
        "pytorch_optimizer.optimizer.lion.Lion",
        "torch.optim.adadelta.Adadelta",
        "torch.optim.adamax.Adamax",
        "torch.optim.asgd.ASGD",
        "torch.optim.rprop.Rprop",
    }
)
"""Classes whose source shows that each element is updated by its own numbers alone.

A subclass may do anything, so it is not one of them.
"""

# Options with which some of these classes use a norm or a mean of a tensor, or of all tensors.
_OPTIONS_OVER_TENSORS = ("adanorm", "cautious", "max_grad_norm", "stable_adamw", "use_gc")

# Classes whose step checks that weights are bf16, as AdamWBF16 rounds in it.
_OF_BF16 = ("simpletuner.helpers.training.optimizers.adamw_bfloat16.AdamWBF16",)

_OBSERVED_STEPS = 3


@dataclass
class Traits:
    """What is known about an optimizer's own step; its first steps add to it.

    Attributes:
        elementwise: whether the user said that the step is elementwise.
        couples: whether a parameter's update depends on which others step with it.
        narrow: states that the step makes in bf16 or fp16 even for fp32 parameters.
        left_to_observe: how many steps are still to be observed.
        named: states that the user has named, and that no step has made yet.
        idle: whether the step moves parameters without a gradient.
        indexes: whether the step reads a group by its number, such as ``param_groups[0]``.
    """

    elementwise: bool = False
    couples: bool = False
    narrow: set[str] = field(default_factory=set)
    left_to_observe: int = _OBSERVED_STEPS
    named: set[str] = field(default_factory=set)
    idle: IdleKinds = field(default_factory=dict)
    indexes: bool = False


def check_steps_on_copies(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a step evidently cannot run on copies, without running it.

    Raises:
        NotImplementedError: it cannot; the message says why, and what to use.
    """
    if why := _obstacle(optimizer):
        raise NotImplementedError(refusal(type(optimizer), why, eight_bit(optimizer)))


def is_elementwise(
    kind: type[torch.optim.Optimizer], group: Mapping[str, Any], traits: Traits
) -> bool:
    """Whether parts of a tensor can step separately, according to the user or the known classes."""
    is_listed = full_name(kind) in ELEMENTWISE
    return traits.elementwise or (is_listed and not any(map(group.get, _OPTIONS_OVER_TENSORS)))


def rewrites_weights(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class has ``train()`` and ``eval()``: those of schedule-free ones swap weights."""
    return callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None))


def _obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step cannot run on copies, if that is evident without running it."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return "it evaluates the closure several times per step, outside any update rule"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it updates what sparse gradients touch, and gradients here are dense"
    # fairseq's CompositeOptimizer is such a class, around wrappers of optimizers.
    missing = [name for name in ("defaults", "param_groups") if not hasattr(optimizer, name)]
    # Others set these two themselves, and torch's own step() does without hooks then.
    missing = missing or ["hooks"] * (not hasattr(optimizer, "_optimizer_step_pre_hooks"))
    if missing:
        return (
            "its constructor does not call torch.optim.Optimizer's, so it has no "
            f"{' and no '.join(missing)}. If it holds optimizers that take its steps, "
            "torch_bf16.convert(each, recipe, model=model) converts them, and it is then left as "
            "it is"
        )
    if optimizer.defaults.get("differentiable"):
        return (
            "it was made with differentiable=True, and nothing can be differentiated through steps "
            "on copies. Leave that option out"
        )
    by_parameter = isinstance(getattr(optimizer, "optimizer_dict", None), Mapping)
    if by_parameter or type(optimizer).__name__ == "LayerWiseDummyOptimizer":
        return "its step does nothing, and one optimizer for each parameter steps in backward()"
    if name := _hook_on_parameters(optimizer):
        return (
            f"its constructor has put the hook {name} on its parameters, which works on gradients "
            "and weights in backward(), outside of step(), where no recipe reaches them"
        )
    if names := _arguments_of_step(type(optimizer)):
        return f"its step requires {' and '.join(names)}, and a converted one takes a closure only"
    if full_name(type(optimizer)) in _OF_BF16:
        return "its step asserts that weights are bfloat16, and each step gets float32 copies"
    if others := overridden(optimizer):
        return (
            f"its GlobalOptimManager overrides {', '.join(others)} of single parameters, which "
            "options of parameter groups can do in its place"
        )
    parameters = {*map(id, parameters_of(optimizer))}
    attributes = own_attributes(optimizer)
    places = ((name, each) for name, each in attributes.items() if name != "defaults")
    kept = [(name, inner) for name, each in places for inner in within(each)]
    # First: a wrapper may also keep the model, and what it wraps can be converted.
    for name, inner in kept:
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            if parameters.isdisjoint(map(id, parameters_of(inner))):
                continue  # it steps tensors of its own, such as a schedule
            what = f"optimizer.{name}, recipe, model=model) converts that one"
            if attributes[name] is not inner:
                what = "each, recipe, model=model) converts each optimizer that it holds there"
            return (
                f"it wraps another optimizer, {type(inner).__name__}, in its attribute {name}, "
                f"which takes the steps: torch_bf16.convert({what}, and the wrapper is then left "
                "as it is" + _of_ascent(optimizer)
            )
    for name, inner in kept:
        if inner is optimizer:
            return (
                f"its attribute {name} refers to itself, and what it writes there would be lost: "
                "each step runs on another instance of its class"
            )
        if isinstance(inner, nn.Module) or id(inner) in parameters:
            return f"it keeps the model's own tensors in its attribute {name}"
        if isinstance(inner, Tensor) and inner.numel() > 1:
            return f"it keeps tensors in its attribute {name}, outside `state`"
    if name := _attribute_of_parameters(optimizer):
        return (
            f"it keeps {name} as an attribute of parameters, and each step would get copies of "
            "them, without it; `state` is the place for what belongs to a parameter"
        )
    return _pairs_frozen(optimizer) or looks_up(attributes, optimizer.param_groups, parameters)


def _arguments_of_step(kind: type[torch.optim.Optimizer]) -> list[str]:
    """What each call of a class's step must be given, other than a closure."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, each in [*inspect.signature(kind.step).parameters.items()][1:]
        if each.kind in named and each.default is each.empty and name != "closure"
    ]


def _hook_on_parameters(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of a hook that the optimizer's constructor has put on accumulated gradients.

    Hooks of others, such as a log of gradients, are not the optimizer's business.
    """
    kinds = type(optimizer).__mro__
    makers = [inspect.unwrap(each.__init__) for each in kinds[: kinds.index(torch.optim.Optimizer)]]
    # Functions that its constructors name, of their module or imported there.
    named = {
        id(each.__globals__.get(name))
        for each in makers
        if inspect.isfunction(each)
        for name in each.__code__.co_names
    }
    for p in parameters_of(optimizer):
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
            function = hook.func if isinstance(hook, functools.partial) else hook
            held = [getattr(function, "__self__", None), *getattr(hook, "args", ())]
            if inspect.isfunction(function):
                held += inspect.getclosurevars(function).nonlocals.values()
            if id(function) in named or any(each is optimizer for each in held):
                return getattr(function, "__qualname__", type(function).__name__)
    return None


def _pairs_frozen(optimizer: torch.optim.Optimizer) -> str | None:
    """Why a step may need frozen parameters, which it would not get.

    One of LoRA-FA goes through its lists of names for a frozen factor and the trained one after it.
    """
    for group in optimizer.param_groups:
        # param_names is an option of torch.optim, and tells nothing about the step.
        names = {*names_of_lists(group, optimizer.defaults)} - {"param_names"}
        if names and not all(p.requires_grad for p in group["params"]):
            return (
                f"its groups hold frozen parameters, and an entry for each parameter in the option "
                f"{min(names)}: by these it may pair frozen parameters with trained ones, and each "
                "step gets copies of trained ones only"
            )
    return None


def _of_ascent(wrapper: torch.optim.Optimizer) -> str:
    """What bf16 does to an implementation of SAM, which most name their methods like this."""
    if not callable(getattr(wrapper, "first_step", None)):
        return ""
    return (
        "; but what its first_step adds to bf16 weights is rounded to nearest, in a large model "
        "most of it away: add it to the fp32 numbers of torch_bf16.exact_weights(model, optimizer)"
    )


def _attribute_of_parameters(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of an attribute that parameters have and the code of the optimizer's class uses."""
    parameters = parameters_of(optimizer)
    own = {name for p in parameters for name in vars(p)} - set(dir(optimizer))
    kinds = type(optimizer).__mro__
    written = kinds[: kinds.index(torch.optim.Optimizer)]
    functions = (
        inspect.unwrap(each) for kind in written for each in vars(kind).values() if callable(each)
    )
    codes = (getattr(each, "__code__", None) for each in functions)
    options = {key for group in optimizer.param_groups for key in group}
    used = {name for code in codes if code is not None for name in _names_in(code, options)}
    return min(own & used, default=None)


def _names_in(code: types.CodeType, options: Set[str]) -> Iterator[str]:
    """Attributes that a function may read, also in the functions and generators inside it.

    A text beside ``getattr`` may be one, unless it is an option of groups.
    """
    yield from code.co_names
    by_text = not {"getattr", "hasattr"}.isdisjoint(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each, options)
        elif by_text and isinstance(each, str) and each not in options:
            yield each
