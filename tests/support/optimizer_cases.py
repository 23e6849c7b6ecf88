"""Every optimizer, recipe and backend, as one table for the contract tests."""

import pytest
import torch
from torch import Tensor

import torch_bf16
from torch_bf16 import Recipe
from torch_bf16.plugin_api import parameters_of

# name -> our class, torch's if it has one, and options that make every term of the rule count
OPTIMIZERS = {
    "adamw": (torch_bf16.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adam": (torch_bf16.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (torch_bf16.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (
        torch_bf16.SGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
    ),
    "nesterov": (
        torch_bf16.SGD,
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "amsgrad": (
        torch_bf16.AdamW,
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    ),
    "nadam": (torch_bf16.NAdam, torch.optim.NAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "radam": (
        torch_bf16.RAdam,
        torch.optim.RAdam,
        {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "adagrad": (
        torch_bf16.Adagrad,
        torch.optim.Adagrad,
        {"lr": 0.01, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.1},
    ),
    "rmsprop": (torch_bf16.RMSprop, torch.optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}),
    "centered": (
        torch_bf16.RMSprop,
        torch.optim.RMSprop,
        {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.1},
    ),
    "lion": (torch_bf16.Lion, None, {"lr": 0.01, "weight_decay": 0.1}),
    "cautious": (
        torch_bf16.AdamW,
        None,
        {"lr": 0.01, "weight_decay": 0.1, "cautious": True},
    ),
    "cautious_lion": (
        torch_bf16.Lion,
        None,
        {"lr": 0.01, "weight_decay": 0.1, "cautious": True},
    ),
    "stable": (
        torch_bf16.AdamW,
        None,
        {"lr": 0.01, "weight_decay": 0.1, "update_clipping": True},
    ),
    "adopt": (torch_bf16.ADOPT, None, {"lr": 0.01, "weight_decay": 0.1}),
    "schedule_free_adamw": (
        torch_bf16.AdamWScheduleFree,
        None,
        {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 3},
    ),
    "schedule_free_sgd": (torch_bf16.SGDScheduleFree, None, {"lr": 0.1, "weight_decay": 0.1}),
}
RECIPES = {
    "stochastic": torch_bf16.get_recipe("bf16-stochastic"),
    "master": torch_bf16.get_recipe("bf16-fp32-master"),
    "mixed": Recipe("mixed", weights="bf16+fp32", exp_avg="bf16_stochastic", exp_avg_sq="fp32"),
}
BACKENDS = ("cpu", "eager")

# Those that take every recipe on every backend. The others share all code but the rule, whose
# kernels test_backends.py compares with the oracle; Numba takes seconds for each of them.
THOROUGH = ("adamw", "sgd", "momentum")
MODES = ("stochastic", "master")
# One that has a statistic of its own, and one whose weights are not what it iterates.
ALSO_ON_CPU = ("stable", "schedule_free_adamw")

PAIRS = [
    (name, recipe)
    for number, name in enumerate(OPTIMIZERS)
    for recipe in (RECIPES if name in THOROUGH else [MODES[number % 2]])
]
ON_CPU = [
    *((name, recipe) for name in THOROUGH for recipe in RECIPES),
    *((name, "master") for name in ALSO_ON_CPU),
]
CASES = [
    *((name, recipe, "cpu") for name, recipe in ON_CPU),
    *(
        (name, recipe, "eager")
        for name in OPTIMIZERS
        for recipe in (RECIPES if name in THOROUGH else MODES)
    ),
]

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
# Those that torch has, too.
every_torch_pair = pytest.mark.parametrize(
    ("name", "recipe"),
    [pair for pair in PAIRS if OPTIMIZERS[pair[0]][1]],
    ids=["-".join(pair) for pair in PAIRS if OPTIMIZERS[pair[0]][1]],
)
every_pair = pytest.mark.parametrize(("name", "recipe"), PAIRS, ids=map("-".join, PAIRS))
every_pair_on_cpu = pytest.mark.parametrize(("name", "recipe"), ON_CPU, ids=map("-".join, ON_CPU))
# ids such as adamw-master-cpu
every_case = pytest.mark.parametrize(("name", "recipe", "backend"), CASES, ids=map("-".join, CASES))


def backend_of(name):
    """The backend on which an optimizer is tested where one is enough."""
    return "cpu" if name in THOROUGH else "eager"


def make_optimizer(name, recipe, backend, params, **options):
    """An optimizer of the table; ``recipe`` is a key of RECIPES or a Recipe."""
    ours, _, defaults = OPTIMIZERS[name]
    options = {**defaults, **options, "recipe": RECIPES.get(recipe, recipe)}
    return ours(params, **options, backend=backend)


def make_parameters(seed=0) -> dict[str, torch.nn.Parameter]:
    """Fresh parameters of every kind that takes a path of its own."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {
        "matrix": random(7, 5),
        "vector": random(9),
        "scalar": random(),
        "empty": random(0, 3),
        "transposed": random(5, 3).t(),
        "channels_last": random(2, 3, 4, 2).to(memory_format=torch.channels_last),
        "fp32": random(3, 4, dtype=torch.float32),
        "fp32_transposed": random(3, 4, dtype=torch.float32).t(),
    }
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}


def set_gradients(parameters, seed) -> None:
    """Random gradients in the parameters' layout, the same for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def take_steps(optimizer, seeds) -> None:
    for seed in seeds:
        set_gradients(parameters_of(optimizer), seed)
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bit patterns in row-major order."""
    contiguous = tensor.detach().clone(memory_format=torch.contiguous_format)
    return contiguous.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def snapshot(optimizer, parameters=None) -> list[dict[str, Tensor]]:
    """The bits of every weight and of all its state, in order."""
    return [
        {"weight": bits(p), **{key: bits(t) for key, t in optimizer.state.get(p, {}).items()}}
        for p in (parameters_of(optimizer) if parameters is None else parameters)
    ]


def assert_same(a, b) -> None:
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.keys() == other.keys()
        for key in one:
            differing = (one[key] != other[key]).sum().item()
            assert differing == 0, f"{key} of parameter {number}: {differing} elements differ"


def differs(a, b) -> bool:
    return any(
        not torch.equal(one[key], other[key])
        for one, other in zip(a, b, strict=True)
        for key in one
    )
