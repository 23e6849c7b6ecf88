"""What our optimizers save and load, and what their messages call a parameter."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bf16.errors import StateMismatchError
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule
from torch_bf16.sharding.fsdp1 import bare_name, clean_name, is_flattened
from torch_bf16.sharding.zero import Whole
from torch_bf16.states import schema
from torch_bf16.states.fp32 import gatherable
from torch_bf16.states.recoding import Changes
from torch_bf16.states.views import from_view, same_memory, to_view

from .validation import check_options

__all__ = ["Checkpointed"]

_logger = logging.getLogger("torch_bf16")


def _show(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {key: to_view(each) for key, each in state_dict["state"].items()}
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if key in states and is_flattened(parameter):
                states[key] = gatherable(state_dict["state"][key], parameter, optimizer.recipe)
    return {**state_dict, "state": states}


class Checkpointed(torch.optim.Optimizer):
    """The half of an optimizer that state dicts pass through; :class:`BF16Optimizer` has the rest.

    Attributes:
        recipe: how numbers are stored; loading takes over the noise seed.
    """

    recipe: Recipe
    _names: dict[tuple[int, int], str]
    _whole: Whole | None = None

    def rule_of(self, group: dict[str, Any]) -> Rule:
        """The update rule of a parameter group."""
        raise NotImplementedError

    def rule_for(self, group: dict[str, Any], parameter: Tensor) -> Rule:
        """The update rule of a parameter, where its shape decides."""
        return self.rule_of(group)

    def _check_options(self, group: Mapping[str, Any], number: int) -> None:
        """Refuse options that no rule has."""
        check_options(group, number)

    def _invalidate(self) -> None:
        """Drop what was derived from the tensors of the last step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with one more entry, ``"torch_bf16"``: schema and recipe.

        What FSDP1 has flattened has all its numbers in fp32 there: it gathers the states of a unit
        only if they have one dtype and the same names.
        """
        # Before the user's own hooks, which see what is saved.
        hook = self.register_state_dict_post_hook(_show, prepend=True)
        try:
            state_dict = super().state_dict()
        finally:
            hook.remove()
        state_dict[schema.HEADER] = schema.header(self.recipe, self._known_names())
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of any recipe, or one of the ``torch.optim`` class it stands for.

        States keep their exact bits and dtypes where the recipe is the one they were saved with;
        torch would cast them to the parameter's. Otherwise they are rounded once into the formats
        of this optimizer's recipe, and a warning says which numbers that changed and how many.
        Where no exact master was saved, it starts from the weights that ``cast_module`` saw.
        Tensors are copied, except those that already are this optimizer's own, and the saved noise
        seed is taken over, so that a resumed run repeats the uninterrupted one bit for bit.

        Load the model's weights first: an exact master is stored as what its weight lacks.

        Raises:
            StateMismatchError: shapes or masters do not fit, or something is missing or damaged;
                nothing has been changed.
            ValueError: the number of groups or parameters differs, as in torch.
            NotImplementedError: it was saved with an option that is not supported.
        """
        if not isinstance(state_dict, dict):
            schema.check_whole(state_dict)
        loaded: dict[Tensor, dict[str, Any]] = {}
        changes, recipe, header = Changes(), self.recipe, None

        def take(optimizer, given):
            nonlocal recipe, header
            schema.check_whole(given)
            header = given.get(schema.HEADER)
            recipe = schema.check_header(header, self.recipe)
            loaded.update(self._read(given, changes))
            # torch would cast what it finds here to the parameters' dtype.
            return {**given, "state": {}, "param_groups": self._named_groups(given)}

        def put(optimizer):
            self.state.update(loaded)
            self._invalidate()
            self.recipe = recipe
            if changes.counts:
                level = logging.WARNING if changes.lost else logging.INFO
                _logger.log(level, "%s", schema.notice(header, recipe, changes))

        # After the user's own pre-hooks and before their post-hooks.
        hooks = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _named_groups(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """The saved groups; of what FSDP1 has flattened in another way, names say nothing."""
        groups = []
        for saved, live in zip(state_dict["param_groups"], self.param_groups, strict=False):
            if any(map(is_flattened, live["params"])):
                saved = {k: v for k, v in saved.items() if k != "param_names"}
                saved |= {k: v for k, v in live.items() if k == "param_names"}
            groups.append(saved)
        return [*groups, *state_dict["param_groups"][len(groups) :]]

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise what :meth:`load_state_dict` would raise, and load nothing.

        Only one parameter's states are copied at a time. Load hooks do not run.
        """
        schema.check_whole(state_dict)
        schema.check_header(state_dict.get(schema.HEADER), self.recipe)
        saved, live = (
            [len(group["params"]) for group in groups]
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        if saved != live:
            raise StateMismatchError(
                f"the state dict has groups of {saved} parameters and the optimizer of {live}; it "
                "was saved from another model. Nothing was changed"
            )
        deque(self._read(state_dict, Changes()), maxlen=0)

    def _read(self, state_dict, changes: Changes) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != [len(group["params"]) for group in saved_groups]:
            return  # torch itself refuses this in a moment
        self._check_order(state_dict)
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            self._check_options(saved, number)
            schema.check_hyperparameters(saved, group, number)
            for position, key in enumerate(saved["params"]):
                if state := state_dict["state"].get(key):
                    parameter, label = group["params"][position], self.label(number, position)
                    schema.check_has_memory(parameter, label)
                    own = self.state.get(parameter, {})
                    seen = to_view(own)
                    # What torch.distributed.checkpoint has loaded in place needs no copy.
                    copy = {
                        k: own[k]
                        if same_memory(v, seen.get(k))
                        else v.clone()
                        if isinstance(v, Tensor)
                        else v
                        for k, v in state.items()
                    }
                    copy = from_view(copy, parameter.ndim)
                    options = {**group, **saved}
                    yield parameter, self._complete(copy, parameter, options, label, changes)

    def _check_order(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse states in another order than the parameters, as far as names are known."""
        header: Any = state_dict.get(schema.HEADER)
        names = (header or {}).get("names") or []
        here: Any = self._known_names()
        for number, (saved, live) in enumerate(zip(names, here, strict=False)):
            if None in live or None in saved:
                continue
            saved, live = ([*map(bare_name, each)] for each in (saved, live))
            if saved != live and sorted(saved) == sorted(live):
                first = next(n for n, (a, b) in enumerate(zip(saved, live, strict=True)) if a != b)
                raise StateMismatchError(
                    f"group {number} of the state dict has its parameters in another order: number "
                    f"{first} is {saved[first]!r} there and {live[first]!r} here, and states go by "
                    "number. Make the optimizer of the parameters in the order of "
                    "model.named_parameters(). Nothing was changed"
                )

    def _complete(self, state, parameter, group, label: str, changes: Changes) -> dict[str, Any]:
        """A parameter's state as this optimizer keeps it; see :func:`schema.complete_state`."""
        rule = self.rule_for(group, parameter)
        return schema.complete_state(state, parameter, rule, self.recipe, label, changes)

    def label(self, group: int, position: int) -> str:
        """How errors call a parameter: its name where known, its place, shape and dtype."""
        parameter = self.param_groups[group]["params"][position]
        return (
            f"parameter {self._name(group, position)!r} (number {position} of group {group}, shape "
            f"{tuple(parameter.shape)}, {parameter.dtype})"
        )

    def _name(self, group: int, position: int) -> str:
        if self._whole is not None and (group, position) not in self._names:
            whole = self._whole.name(self.param_groups[group]["params"][position])
            if whole is not None:
                return bare_name(whole)
        names = self.param_groups[group].get("param_names")
        if names is not None:
            return bare_name(names[position])
        if (known := self._names.get((group, position))) is not None:
            return bare_name(known)
        before = sum(len(each["params"]) for each in self.param_groups[:group])
        return f"#{before + position}"

    def _known_names(self) -> list[list[str | None]]:
        if self._whole is not None:
            groups = enumerate(self.param_groups)
            named = [[self._name(g, n) for n in range(len(its["params"]))] for g, its in groups]
            return [[None if name.startswith("#") else name for name in its] for its in named]
        return [
            [clean_name(name) for name in group.get("param_names") or ()]
            or [self._names.get((number, n)) for n in range(len(group["params"]))]
            for number, group in enumerate(self.param_groups)
        ]
