"""fp32 state dicts of modules whose hooks and overrides make something else of their weights."""

import pytest
import torch

import torch_bf16
from torch_bf16 import fp32_state_dict


class Fused(torch.nn.Module):
    """Its state dict has the parts of a weight, and of another only a copy."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Parameter(torch.randn(6, 4))
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module, state_dict, prefix, _metadata):
        first, second = state_dict.pop(prefix + "fused").chunk(2)
        state_dict |= {prefix + "first": first, prefix + "second": second.clone()}

    def state_dict(self):
        return {name: value.detach() for name, value in super().state_dict().items()}


def prepared(model):
    optimizer = torch.optim.AdamW(model.parameters())
    torch_bf16.prepare(model, optimizer, "bf16-fp32-master")
    return optimizer


@pytest.mark.parametrize("steps", [0, 1])
def test_what_hooks_and_overrides_make_of_a_weight_is_exact(steps):
    model = Fused()
    optimizer = prepared(model)
    parameters = [*model.parameters()]
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
    exported = fp32_state_dict(model, optimizer)
    first, second = optimizer.exact_weight(model.fused).chunk(2)
    expected = {"scale": optimizer.exact_weight(model.scale), "first": first, "second": second}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], each) for name, each in expected.items())
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))


def test_a_weight_that_no_module_has_is_not_given_rounded():
    model = Fused()
    model.register_buffer("other", torch.ones(2, dtype=torch.bfloat16))
    optimizer = prepared(model)
    assert fp32_state_dict(model, optimizer)["other"].dtype == torch.bfloat16
    model.kept = [model.scale]
    del model.scale
    model.register_state_dict_post_hook(lambda m, found, *_: found.update(end=m.kept[0][1:]))
    with pytest.raises(NotImplementedError, match=r"has 'end' in bf16, in the memory of a weight"):
        fp32_state_dict(model, optimizer)


def test_tied_weights_stay_tied():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    optimizer = prepared(model)
    exported = fp32_state_dict(model, optimizer)
    assert torch.equal(exported["b.weight"], optimizer.exact_weight(model["a"].weight))
    assert exported["a.weight"].data_ptr() == exported["b.weight"].data_ptr()


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_buffers_without_an_address_are_returned_as_they_are(layout):
    """Graph networks keep adjacency matrices in them."""
    model = torch.nn.Linear(3, 3)
    model.register_buffer("adjacency", getattr(torch.eye(3), layout)())
    model, optimizer = torch_bf16.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weights = torch_bf16.fp32_state_dict(model, optimizer)
    assert weights["adjacency"].layout == model.adjacency.layout
    assert weights["weight"].dtype == torch.float32
