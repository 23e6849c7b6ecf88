"""Parameter groups from a model, by pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from torch_bf16.argument_checks import check_module
from torch_bf16.sharding import shard_of

__all__ = ["param_groups"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float | None = None,
    no_decay: Iterable[str | type[nn.Module]] = (),
    groups: Mapping[str | type[nn.Module], Mapping[str, Any]] | None = None,
    muon: bool = False,
) -> list[dict[str, Any]]:
    """The trainable parameters of a model, in groups, each with its name and exactly once.

    Parameters with at most one dimension and those of embeddings are not decayed. Names key the
    rounding noise, so that it does not depend on how parameters are grouped.

    A key is a shell-style pattern of qualified parameter names (``"*.pos_embed"``) or a module
    class, which stands for the parameters that its modules hold themselves.

    Args:
        model: only read. A tied parameter counts at its first place.
        weight_decay: decay of the parameters that are decayed; None leaves it to the optimizer.
        no_decay: keys of further parameters that are not decayed.
        groups: key -> options of a group (``lr``, ``betas`` ...), which override the other
            arguments; the first key that fits counts.
        muon: give each group ``use_muon``, whether :class:`torch_bf16.Muon` orthogonalises its
            updates: True for matrices outside of embeddings, and for stacks of at least two, such
            as experts, that are not a convolution's. Put the output layer into ``groups`` with
            ``{"use_muon": False}``.

    Returns:
        Groups with different options, for any optimizer.

    Raises:
        ValueError: a key fits no parameter, there is none to train, or an argument has another
            type.

    Example:
        >>> groups = torch_bf16.param_groups(model, weight_decay=0.1)
        >>> [[name for name, _ in group["params"]] for group in groups]
        [['weight'], ['bias']]
        >>> optimizer = torch_bf16.AdamW(groups, lr=1e-3)
    """
    check_module("param_groups", model)
    if isinstance(no_decay, (str, type)):
        raise ValueError(f"no_decay={no_decay!r} must be a sequence of keys: ({no_decay!r},)")
    if isinstance(no_decay, Iterator):
        no_decay = [*no_decay]
    if not isinstance(groups or {}, Mapping):
        raise ValueError(
            f"groups={groups!r} must map keys to options of a group, for example "
            '{"*.bias": {"lr": 1e-4}}'
        )
    groups = groups or {}
    _check_keys("no_decay", no_decay)
    _check_keys("groups", groups)
    for key, given in groups.items():
        if not isinstance(given, Mapping) or "params" in given:
            raise ValueError(
                f"groups[{key!r}]={given!r} must map names of options to values, for example "
                '{"lr": 1e-4}; the parameters are those that the key fits'
            )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError(f"this {type(model).__name__} has no parameter that requires a gradient")
    fitting = {key: _fitting(key, model, named) for key in (*no_decay, *groups)}
    if unknown := [key for key, names in fitting.items() if not names]:
        shown = list(named) if len(named) <= 8 else [*list(named)[:8], "..."]
        raise ValueError(
            f"{', '.join(map(repr, unknown))}: no trainable parameter of this "
            f"{type(model).__name__} fits; there are {', '.join(shown)}"
        )
    embeddings = _fitting(_EMBEDDINGS, model, named)
    convolutions = _fitting(_CONVOLUTIONS, model, named)
    exempt = embeddings.union(*(fitting[key] for key in no_decay))
    by_options: dict[Any, dict[str, Any]] = {}
    for name, parameter in named.items():
        options: dict[str, Any] = {}
        shape = tuple(parameter.shape) if parameter.is_complex() else shard_of(parameter).shape
        if name in exempt or len(shape) <= 1:
            options["weight_decay"] = 0.0
        elif weight_decay is not None:
            options["weight_decay"] = weight_decay
        if muon:
            # A stack of one matrix, or of rows, is an embedding of positions or of a token.
            stack = len(shape) == 3 and min(shape) > 1 and name not in convolutions
            matrix = stack or (len(shape) == 2 and name not in embeddings)
            options["use_muon"] = matrix and not parameter.is_complex()
        options.update(next((groups[key] for key in groups if name in fitting[key]), {}))
        key = tuple(sorted((option, _key(value)) for option, value in options.items()))
        by_options.setdefault(key, {"params": [], **options})["params"].append((name, parameter))
    return list(by_options.values())


def _key(value: Any) -> str:
    """A hashable key for the value of an option; a tensor counts by its identity, not its value."""
    if isinstance(value, Mapping):
        return repr([(name, _key(each)) for name, each in value.items()])
    if isinstance(value, (list, tuple)):
        return repr([_key(each) for each in value])
    return f"tensor {id(value)}" if isinstance(value, Tensor) else repr(value)


def _fitting(key: Any, model: nn.Module, named: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of the parameters that a pattern fits, or that modules of a class hold."""
    if isinstance(key, str):
        return {name for name in named if fnmatchcase(name, key)}
    modules = [each for each in model.modules() if isinstance(each, key)]
    held = {id(p) for each in modules for p in each.parameters(recurse=False)}
    return {name for name, p in named.items() if id(p) in held}


def _check_keys(argument: str, keys: Any) -> None:
    known = isinstance(keys, Iterable) and all(
        isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))
        for key in keys
    )
    if not known:
        raise ValueError(
            f"{argument}={keys!r} must hold patterns of parameter names (str) or module classes"
        )
