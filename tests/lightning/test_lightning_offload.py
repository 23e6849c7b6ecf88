"""``offload="states"`` by Trainer and Fabric: states in host memory, with the same bits."""

from __future__ import annotations

import pytest
from lightning_models import (
    FABRICS,
    TRAINERS,
    batches,
    differences,
    host,
    make_module,
    make_trainer,
    snapshot,
)
from slow_bus import ORDERS, use
from torch.nn import functional as F
from torch.optim import AdamW


def fitted(package, offload, release, tmp_path):
    own = host(f"lightning_bf16.{package.rpartition('.')[2]}")
    plugin = own.BF16Precision("bf16-fp32-master", offload=offload, release_gradients=release)
    module = make_module(host(package))
    clip = {} if release else {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    trainer = make_trainer(host(package), plugins=[plugin], **clip)
    trainer.fit(module, batches(6))
    path = tmp_path / f"{offload}.ckpt"
    trainer.save_checkpoint(path)
    again = make_module(host(package), seed=1)
    trainer = make_trainer(host(package), plugins=[plugin], max_epochs=2, **clip)
    trainer.fit(again, batches(6), ckpt_path=path)
    return snapshot(again, again.made[0]), again.made[0]


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("package", TRAINERS)
def test_a_trainer_clips_accumulates_and_resumes(monkeypatch, tmp_path, package, release):
    bus = use(monkeypatch, ORDERS[1])
    expected, _ = fitted(package, None, release, tmp_path)
    assert not bus.log
    found, optimizer = fitted(package, "states", release, tmp_path)
    assert not differences(found, expected)
    assert all(bus.holds(each["exp_avg"]) for each in optimizer.state.values())


@pytest.mark.parametrize("package", FABRICS)
def test_fabric_takes_the_option(monkeypatch, package):
    bus, found = use(monkeypatch, ORDERS[1]), []
    own = host(f"lightning_bf16.{package.rpartition('.')[2]}")
    for offload in (None, "states"):
        plugin = own.BF16Precision("bf16-stochastic", offload=offload)
        fabric = host(package).Fabric(accelerator="cpu", devices=1, plugins=[plugin])
        model = make_module(host(TRAINERS[FABRICS.index(package)])).net
        model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=0.01))
        for x, y in batches(3):
            fabric.backward(F.cross_entropy(model(x), y))
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(model, optimizer))
    assert not differences(*found)
    assert "down" in bus.log
