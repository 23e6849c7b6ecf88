"""Schedule-free optimizers are switched by the hosts, without a line in the script."""

from __future__ import annotations

import pytest
import torch
from lightning_models import batches, differences, make_module, make_trainer, network, snapshot
from torch.nn import functional as F

import torch_bf16


def configure(self):
    options = {"lr": 0.05, "recipe": self.trainer.precision_plugin.recipe}
    self.made = [torch_bf16.AdamWScheduleFree(self.named_parameters(), **options)]
    return self.made[0]


class Modes:
    """Which mode each step of a kind saw."""

    def __init__(self):
        self.seen = {}

    def hooks(self):
        def hook(kind, own):
            def method(module, batch, batch_idx):
                modes = {g["train_mode"] for g in module.made[0].param_groups}
                self.seen.setdefault(kind, set()).update(modes)
                return own(module, batch)

            return method

        def loss(module, batch):
            return F.cross_entropy(module(batch[0]), batch[1])

        return {
            "training_step": hook("train", loss),
            "validation_step": hook("validate", loss),
            "test_step": hook("test", loss),
            "predict_step": hook("predict", lambda module, batch: module(batch[0])),
            "configure_optimizers": configure,
        }


def fit(pl, mode, validate=True, sanity=0, **options):
    modes = Modes()
    module = make_module(pl, **modes.hooks())
    trainer = make_trainer(pl, mode, max_epochs=2, num_sanity_val_steps=sanity, **options)
    trainer.fit(module, batches(6), batches(2, seed=1) if validate else None)
    return trainer, module, modes.seen


@pytest.mark.parametrize("options", [{"sanity": 1}, {"val_check_interval": 2}], ids=str)
def test_a_trainer_validates_tests_and_predicts_with_the_average(pl, mode, options):
    trainer, module, seen = fit(pl, mode, **options)
    trainer.test(module, batches(1))
    trainer.predict(module, batches(1))
    sanity = {True} if "sanity" in options else set()  # before the first step there is no average
    assert seen["train"] == {True}
    assert seen["validate"] - sanity == seen["test"] == seen["predict"] == {False}
    (optimizer,) = module.made
    averages = [p.detach().clone() for p in module.parameters()]
    optimizer.train()
    assert not any(map(torch.equal, module.parameters(), averages))


def test_validation_changes_no_bit_of_a_fit(pl, mode):
    runs = [fit(pl, mode, validate) for validate in (True, False)]
    found = [snapshot(module, module.made[0]) for _, module, _ in runs]
    assert not differences(*found)


def test_a_trainer_s_checkpoint_holds_the_average_and_resumes_to_the_bit(pl, mode, tmp_path):
    path = tmp_path / "half.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            if trainer.current_epoch == 0:
                before = [p.detach().clone() for p in module.parameters()]
                assert module.made[0].param_groups[0]["train_mode"]
                trainer.save_checkpoint(path)
                assert all(map(torch.equal, module.parameters(), before))
                self.trained = before

    save = Save()
    _, whole, _ = fit(pl, mode, validate=False, callbacks=[save])
    saved = torch.load(path, weights_only=False)
    weights = [saved["state_dict"][name] for name, _ in whole.named_parameters()]
    assert not any(map(torch.equal, weights, save.trained))
    assert saved["optimizer_states"][0]["param_groups"][0]["train_mode"] is False

    module = make_module(pl, seed=1, configure_optimizers=configure)
    trainer = make_trainer(pl, mode, max_epochs=2)
    trainer.fit(module, batches(6), ckpt_path=path)
    assert not differences(snapshot(whole, whole.made[0]), snapshot(module, module.made[0]))


def test_in_fabric_an_optimizer_follows_no_module_that_it_does_not_train(fabric_package, mode):
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, precision=mode)
    models, optimizers = [], []
    for _ in range(2):
        models.append(fabric.setup_module(network()))
        parameters, recipe = models[-1].named_parameters(), fabric.strategy.precision.recipe
        optimizers.append(torch_bf16.AdamWScheduleFree(parameters, lr=0.05, recipe=recipe))
        fabric.setup_optimizers(optimizers[-1])
    later = fabric.setup_module(network())
    for each in (models[1], later):
        each.eval()
    assert [each.param_groups[0]["train_mode"] for each in optimizers] == [True, False]


def test_fabric_follows_the_module_and_saves_averages(fabric_package, mode, tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        net = network()
        fabric = fabric_package.Fabric(accelerator="cpu", devices=1, precision=mode)
        optimizer = torch_bf16.AdamWScheduleFree(net.named_parameters(), lr=0.05, recipe=mode)
        apart = seed == 0
        model, *both = [fabric.setup(net)] if apart else fabric.setup(net, optimizer)
        return fabric, model, fabric.setup_optimizers(optimizer) if apart else both[0]

    def train(fabric, model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    data = [*batches(8)]
    fabric, model, optimizer = made(0)
    train(fabric, model, optimizer, data[:4])
    trained = [p.detach().clone() for p in model.parameters()]
    model.eval()
    averages = [p.detach().clone() for p in model.parameters()]
    assert not any(map(torch.equal, averages, trained))
    model.train()
    assert all(map(torch.equal, model.parameters(), trained))
    fabric.save(tmp_path / "half", {"model": model, "optimizer": optimizer})
    assert all(map(torch.equal, model.parameters(), trained))
    saved = torch.load(tmp_path / "half", weights_only=False)["model"]
    assert all(map(torch.equal, saved.values(), averages))

    other = made(1)
    other[0].load(tmp_path / "half", {"model": other[1], "optimizer": other[2]})
    for run in ((fabric, model, optimizer), other):
        train(*run, data[4:])
    found = [snapshot(each, o.optimizer) for _, each, o in ((fabric, model, optimizer), other)]
    assert not differences(*found)


def test_fabric_s_wrapper_refuses_a_share_that_changed_too(fabric_package):
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, precision="bf16-stochastic")
    net = network()
    model, optimizer = fabric.setup(
        net, torch_bf16.AdamWScheduleFree(net.named_parameters(), lr=0.05)
    )
    (data,) = batches(1)
    fabric.backward(F.cross_entropy(model(data[0]), data[1]))
    optimizer.step()
    optimizer.param_groups[0]["betas"] = 0.5, 0.999
    with pytest.raises(ValueError, match=r"was 0\.9 in the step before"):
        optimizer.eval()


def test_a_checkpoint_in_another_precision_is_the_hosts_own(pl, tmp_path):
    def configure_optimizers(self):
        self.made = [torch_bf16.AdamWScheduleFree(self.named_parameters(), lr=0.05)]
        return self.made[0]

    module = make_module(pl, configure_optimizers=configure_optimizers)
    trainer = make_trainer(pl, "bf16-true")
    trainer.fit(module, batches(3))
    module.made[0].train()
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], p) for name, p in module.named_parameters())
