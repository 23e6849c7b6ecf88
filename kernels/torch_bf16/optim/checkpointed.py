"""What our optimizers save and load, and what their messages call a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bf16 import checkpoint
from torch_bf16.recipe import Recipe
from torch_bf16.rules import Rule

from .admission import check_options

__all__ = ["Checkpointed"]


class Checkpointed(torch.optim.Optimizer):
    """The half of an optimizer that state dicts pass through; :class:`BF16Optimizer` has the rest.

    Attributes:
        recipe: how numbers are stored; loading takes over the noise seed.
    """

    recipe: Recipe
    _names: dict[tuple[int, int], str]

    def rule_of(self, group: dict[str, Any]) -> Rule:
        """The update rule of a parameter group."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what was derived from the tensors of the last step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict with one more entry, ``"torch_bf16"``: schema and recipe."""
        state_dict = super().state_dict()
        state_dict[checkpoint.HEADER] = checkpoint.header(self.recipe)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this recipe, or one of the ``torch.optim`` class it stands for.

        States keep their exact bits and dtypes; torch would cast them to the parameter's. fp32
        moments of a ``torch.optim`` optimizer are rounded into the recipe's formats, and exact
        masters start from the weights that ``cast_module`` saw. Tensors are copied, and the saved
        noise seed is taken over, so that a resumed run repeats the uninterrupted one bit for bit.

        Raises:
            StateMismatchError: recipe, shapes or masters do not fit, or something is missing;
                nothing has been changed.
            ValueError: the number of groups or parameters differs, as in torch.
            NotImplementedError: it was saved with an option that is not supported.
        """
        if not isinstance(state_dict, dict):
            checkpoint.check_whole(state_dict)
        loaded: dict[Tensor, dict[str, Any]] = {}
        recipe = self.recipe

        def take(optimizer, given):
            nonlocal recipe
            checkpoint.check_whole(given)
            recipe = checkpoint.check_header(given.get(checkpoint.HEADER), self.recipe)
            loaded.update(self._read(given))
            # torch would cast what it finds here to the parameters' dtype.
            return {**given, "state": {}}

        def put(optimizer):
            self.state.update(loaded)
            self._forget()
            self.recipe = recipe

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

    def _read(self, state_dict) -> dict[Tensor, dict[str, Any]]:
        saved_groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != [len(group["params"]) for group in saved_groups]:
            return {}  # torch itself refuses this in a moment
        read = {}
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            check_options(saved, number)
            checkpoint.check_hyperparameters(saved, group, number)
            rule = self.rule_of({**group, **saved})
            for position, key in enumerate(saved["params"]):
                if state := state_dict["state"].get(key):
                    parameter = group["params"][position]
                    label = self.label(number, position)
                    copy = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
                    read[parameter] = checkpoint.complete_state(
                        copy, parameter, rule, self.recipe, label
                    )
        return read

    def label(self, group: int, position: int) -> str:
        """How errors call a parameter: its name where known, its place, shape and dtype."""
        parameter = self.param_groups[group]["params"][position]
        return (
            f"parameter {self._name(group, position)!r} (number {position} of group {group}, shape "
            f"{tuple(parameter.shape)}, {parameter.dtype})"
        )

    def _name(self, group: int, position: int) -> str:
        names = self.param_groups[group].get("param_names")
        if names is not None:
            return names[position]
        known = self._names.get((group, position))
        if known is not None:
            return known
        before = sum(len(each["params"]) for each in self.param_groups[:group])
        return f"#{before + position}"
