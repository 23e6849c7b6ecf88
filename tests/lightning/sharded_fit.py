"""One of the two processes that test_lightning_sharded.py starts: ``FOLDER``; ranks as torchrun's.

Fits with FSDP2 and with tensor parallelism, clipped and accumulated; saves after the first epoch
and goes on from there in a new Trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning_models import MODES, batches, host, make_module, make_trainer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import torch_bf16

STEPS_PER_EPOCH = 3


def fsdp2(self):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(self.net, mesh=self.device_mesh["data_parallel"], mp_policy=policy)


def tensor_parallel(self):
    plan = {"0": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


WAYS = {"fsdp2": (fsdp2, (2, 1)), "tensor-parallel": (tensor_parallel, (1, 2))}


def fitted(pl, way, mode, epochs, checkpoint=None):
    configure_model, (data, tensor) = WAYS[way]
    strategies = host(f"{pl.__name__}.strategies")
    module = make_module(pl, seed=3, configure_model=configure_model)
    trainer = make_trainer(
        pl,
        mode,
        devices=2,
        strategy=strategies.ModelParallelStrategy(data, tensor),
        max_epochs=epochs,
        gradient_clip_val=0.05,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
    )
    trainer.fit(module, batches(2 * STEPS_PER_EPOCH), ckpt_path=checkpoint)
    assert trainer.global_step == epochs * STEPS_PER_EPOCH
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, torch_bf16.BF16Optimizer)
    assert any(isinstance(p, DTensor) for p in module.parameters())
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
    return trainer, module, optimizer


def bits(module, optimizer):
    found = {}
    for name, parameter in module.named_parameters():
        for key, tensor in {"": parameter, **optimizer.state[parameter]}.items():
            found[name, key] = getattr(tensor, "_local_tensor", tensor).detach().clone()
    return found


def main(folder):
    pl = host("lightning.pytorch")
    for way in WAYS:
        for mode in MODES:
            _, *whole = fitted(pl, way, mode, 2)
            trainer, *_ = fitted(pl, way, mode, 1)
            checkpoint = folder / f"{way}-{mode}.ckpt"
            trainer.save_checkpoint(checkpoint)
            _, *resumed = fitted(pl, way, mode, 2, checkpoint)
            one, other = bits(*whole), bits(*resumed)
            assert one.keys() == other.keys()
            for key, tensor in one.items():
                assert torch.equal(tensor, other[key]), (way, mode, key)
            print("resumed", way, mode, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
