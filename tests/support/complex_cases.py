"""Complex parameters, and real twins of theirs, which must get the same bits."""

import torch
from optimizer_cases import RECIPES, make_optimizer
from torch import Tensor, nn


def real(tensor: Tensor) -> Tensor:
    """A tensor's real and imaginary parts, detached; itself if it is real."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def make_tensors(seed=0) -> dict[str, Tensor]:
    """Complex tensors of every kind that takes a path of its own, and two real ones."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=torch.complex64):
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "matrix": random(7, 5),
        "vector": random(9),
        "scalar": random(),
        "empty": random(0, 3),
        "transposed": random(5, 3).t(),
        "bf16": random(6, 4, dtype=torch.float32).bfloat16(),
        "fp32": random(3, 4, dtype=torch.float32),
    }


def make_pair(name, recipe, backend, seed=0, tensors=None, **options):
    """An optimizer of complex and real parameters, and one of their real twins, with the names."""
    tensors = tensors or make_tensors(seed)
    return [
        make_optimizer(
            name,
            RECIPES.get(recipe, recipe),
            backend,
            [(key, nn.Parameter(make(each).clone())) for key, each in tensors.items()],
            **options,
        )
        for make in (torch.Tensor.detach, real)
    ]


def random_gradients(optimizer, seed) -> list[Tensor]:
    """Random gradients for an optimizer's parameters, the same for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [
        torch.randn(p.shape, dtype=p.dtype if p.is_complex() else None, generator=generator).to(
            p.dtype
        )
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def conjugated(gradient: Tensor) -> Tensor:
    """The same complex numbers, lazily conjugated: their memory has other signs."""
    return gradient.conj().resolve_conj().conj() if gradient.is_complex() else gradient


def scattered(gradient: Tensor) -> Tensor:
    """The same numbers in memory that is not contiguous."""
    return torch.stack([gradient, gradient], -1)[..., 0]


def give(optimizers, gradients, form=torch.clone) -> None:
    """Give gradients to an optimizer, in a form, and to its real twin as they are."""
    ours, twin = ([p for g in each.param_groups for p in g["params"]] for each in optimizers)
    for parameter, other, gradient in zip(ours, twin, gradients, strict=True):
        parameter.grad = None if gradient is None else form(gradient)
        other.grad = None if gradient is None else real(gradient).clone()


def assert_like_twin(optimizer, twin) -> None:
    """Weights and states have the twin's bits, and the states are complex as their parameters."""
    pairs = zip(optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True)
    for parameter, other in pairs:
        assert torch.equal(real(parameter), other.detach())
        state, theirs = optimizer.state[parameter], twin.state[other]
        assert state.keys() == theirs.keys()
        for key in state.keys() - {"step"}:
            if parameter.is_complex():
                assert (state[key].dtype, state[key].shape) == (torch.complex64, parameter.shape)
            assert torch.equal(real(state[key]), theirs[key]), key


class Waves(nn.Module):
    """A layer before, and one after, a product with complex weights."""

    def __init__(self, real_twin=False):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, 8), nn.Linear(6, 1)
        wave, gain = torch.randn(5, 6, dtype=torch.complex64), torch.tensor(0.5 + 1j)
        self.wave, self.gain = (
            nn.Parameter(torch.view_as_real(each).clone() if real_twin else each)
            for each in (wave, gain)
        )

    def forward(self, x):
        wave, gain = (
            each if each.is_complex() else torch.view_as_complex(each)
            for each in (self.wave, self.gain)
        )
        spectrum = torch.fft.rfft(self.before(x).float()) @ wave * gain
        return self.after(torch.view_as_real(spectrum).sum(-1))
