"""Optimizers of other packages through convert(); CONTRIBUTING says how to install them."""

import pytest
import torch
from foreign_cases import exact_weights, make_run, train
from optimizer_cases import bits

from torch_bf16 import Recipe

PEERS = {
    "pytorch_optimizer.Lion": {"lr": 1e-3},
    "pytorch_optimizer.AdaBelief": {"lr": 1e-2},
    "pytorch_optimizer.Adan": {"lr": 1e-2},
    "pytorch_optimizer.Lamb": {"lr": 1e-2},
    "pytorch_optimizer.Prodigy": {"lr": 1.0},
    "pytorch_optimizer.ADOPT": {"lr": 1e-2},
    "pytorch_optimizer.CAME": {"lr": 1e-2},
    "pytorch_optimizer.AdEMAMix": {"lr": 1e-2},
    "pytorch_optimizer.LARS": {"lr": 1e-2},
    "pytorch_optimizer.MADGRAD": {"lr": 1e-2},
    "pytorch_optimizer.APOLLO": {"lr": 1e-2},
    "lion_pytorch.Lion": {"lr": 1e-3},
    "prodigyopt.Prodigy": {"lr": 1.0},
    "transformers.optimization.Adafactor": {"lr": 1e-2, "relative_step": False},
    "optimi.AdamW": {"lr": 1e-2},
}
NEAREST = Recipe("nearest", weights="bf16_nearest", exp_avg="fp32", exp_avg_sq="fp32")
# These warn of what they are about to do when they are imported or made.
pytestmark = pytest.mark.filterwarnings("ignore")


def maker(name, **options):
    module, kind = name.rsplit(".", 1)
    package = pytest.importorskip(module)
    return lambda parameters: getattr(package, kind)(parameters, **PEERS[name], **options)


@pytest.mark.parametrize("name", PEERS)
def test_with_exact_masters_it_is_the_fp32_run_bit_for_bit(name):
    fp32, reference = make_run(maker(name), None)
    model, optimizer = make_run(maker(name), "bf16-fp32-master")
    nearest, control = make_run(maker(name), NEAREST)
    for run in ((model, optimizer), (fp32, reference), (nearest, control)):
        train(*run, range(100))
    expected = [bits(p) for p in fp32.parameters()]
    assert all(map(torch.equal, map(bits, exact_weights(model, optimizer)), expected))
    assert not all(map(torch.equal, map(bits, exact_weights(nearest, control)), expected))


@pytest.mark.parametrize(
    "name", ["pytorch_optimizer.ScheduleFreeAdamW", "schedulefree.AdamWScheduleFree"]
)
def test_schedule_free_is_refused(name):
    module, kind = name.rsplit(".", 1)
    package = pytest.importorskip(module)
    with pytest.raises(NotImplementedError, match=r"its train\(\) and eval\(\) rewrite"):
        make_run(lambda parameters: getattr(package, kind)(parameters), "bf16-stochastic")


def test_a_wrapper_is_refused():
    peers = pytest.importorskip("pytorch_optimizer")
    with pytest.raises(NotImplementedError, match="wraps another optimizer, AdamW"):
        make_run(
            lambda parameters: peers.Lookahead(torch.optim.AdamW(parameters)), "bf16-stochastic"
        )
