"""What others have put on gradients goes on working once the model is cast, or is named."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from torch_bf16 import cast_model, prepare
from torch_bf16.model.gradient_hooks import NodeHooks


def node_of(p: torch.Tensor) -> Any:
    return p.expand_as(p).grad_fn.next_functions[0][0]  # pyright: ignore[reportOptionalMemberAccess]


class Replica(nn.Module):
    """Data parallelism written by hand, as in Megatron and picotron: it takes each gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.sums = {p: torch.zeros(p.shape) for p in module.parameters()}
        self.nodes = [node_of(p) for p in module.parameters()]
        self.handles = [
            node.register_hook(lambda *_, p=p: self.take(p))
            for node, p in zip(self.nodes, module.parameters(), strict=True)
        ]

    def take(self, p: nn.Parameter) -> None:
        assert p.grad is not None
        self.sums[p].add_(p.grad)
        p.grad = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def ran(model: nn.Module) -> list[Any]:
    model(torch.ones(2, 3).bfloat16()).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("mode", ["bf16-stochastic", "bf16-fp32-master"])
def test_a_wrapper_that_takes_gradients_takes_them_after_prepare_too(mode):
    replica = Replica(nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(replica.parameters())
    prepare(replica, optimizer, mode)
    gc.collect()
    for number in (1, 2):
        assert ran(replica) == [None, None]
        assert {total.mean().item() for total in replica.sums.values()} == {2.0 * number}


def test_a_hook_that_is_removed_after_the_cast_is_not_called():
    replica = Replica(nn.Linear(3, 4))
    cast_model(replica)
    replica.handles[0].remove()
    weight, bias = ran(replica)
    assert weight.dtype == torch.bfloat16
    assert bias is None


def test_a_hook_before_the_node_still_changes_the_gradient():
    model = nn.Linear(3, 4, bias=False)
    node = node_of(model.weight)
    node.register_prehook(lambda gradients: (gradients[0] * 3,))
    (gradient,) = ran(cast_model(model))
    assert gradient.unique().tolist() == [6.0]


def test_hooks_end_with_the_nodes_that_the_wrapper_holds():
    replica = Replica(nn.Linear(3, 4))
    module = cast_model(replica.module)
    gone = weakref.ref(replica)
    replica.nodes.clear()
    replica.handles.clear()
    del replica
    gc.collect()
    assert gone() is None
    assert all(gradient is not None for gradient in ran(module))


def test_a_graph_that_is_alive_is_no_hook():
    model = nn.Linear(3, 4)
    output = model(torch.ones(2, 3))
    assert NodeHooks.of(model.parameters()) == []
    cast_model(model)
    assert output.grad_fn is not None


def test_a_wrapper_that_holds_nodes_whose_hooks_hold_it_can_be_freed():
    replica = Replica(nn.Linear(3, 4))
    replica.nodes[0].register_hook(lambda *_, held=replica: None)
    cast_model(replica)
    gone = weakref.ref(replica)
    del replica
    gc.collect()
    assert gone() is None


def test_hooks_of_a_parameter_that_is_trained_only_later_stay():
    replica = Replica(nn.Linear(3, 4))
    replica.module.weight.requires_grad_(False)
    cast_model(replica)
    assert not replica.module.weight.requires_grad
    replica.module.weight.requires_grad_(True)
    assert ran(replica) == [None, None]


def test_hooks_stay_where_torch_swaps_tensors_as_for_shards():
    replica = Replica(nn.Linear(3, 4))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        cast_model(replica)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert ran(replica) == [None, None]


def test_a_model_can_be_cast_in_inference_mode():
    model = nn.Linear(3, 4)
    with torch.inference_mode():
        assert cast_model(model)(torch.ones(2, 3).bfloat16()).dtype == torch.bfloat16


def test_gradients_in_a_buffer_are_named():
    model = nn.Linear(3, 4)
    buffer = torch.zeros(16)
    model.weight.grad, model.bias.grad = buffer[:12].view(4, 3), buffer[12:]
    with pytest.warns(UserWarning, match=r"\(2 in all\) lie in larger buffers.* before what makes"):
        cast_model(model)


def test_gradients_in_memory_of_their_own_are_not(recwarn):
    model = nn.Linear(3, 4)
    model(torch.ones(2, 3)).sum().backward()
    cast_model(model)
    assert not [each for each in recwarn if "buffers" in str(each.message)]
