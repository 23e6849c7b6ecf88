"""Trainer and Fabric with DeepSpeedStrategy: what each rank of ``ranks`` runs.

Lightning's strategy is for GPUs; here it is told that the CPU is one, and that gloo is the backend.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed_stall
import torch
import torch.distributed as dist
from deepspeed_cases import inner, state_digest
from deepspeed_refusals import message
from deepspeed_training import digest, start, weights
from torch.utils.data import DataLoader, TensorDataset

MODE = "bf16-stochastic"


def _on_cpus(kind: Any, module: Any, cpu: Any, stage: int, **options: Any) -> Any:
    module.CUDAAccelerator = cpu
    module._validate_device_index_selection = lambda devices: None
    on_cpus = type(
        "OnCpus", (kind,), {"root_device": property(lambda self: torch.device("cpu", 0))}
    )
    return on_cpus(stage=stage, process_group_backend="gloo", logging_level=40, **options)


def _environment() -> Any:
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Environment(LightningEnvironment):
        creates_processes_externally = True  # pyright: ignore[reportAssignmentType]

        def world_size(self) -> int:
            return dist.get_world_size()

        def global_rank(self) -> int:
            return dist.get_rank()

        def local_rank(self) -> int:
            return dist.get_rank()

        def set_world_size(self, size: int) -> None:
            assert size == dist.get_world_size()

        def set_global_rank(self, rank: int) -> None:
            assert rank == dist.get_rank()

    return Environment()


def _data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )


def _module(network: Any = None, lr: float = 1e-2) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        """As people write one."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network or _network()
            self.losses: list[float] = []
            self.dtypes: set[torch.dtype] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self(x), y)
            self.dtypes |= {x.dtype, loss.dtype}
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.97**n)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Module()


def _trainer(stage: int, epochs: int, folder: Path, precision: Any = MODE, **options: Any) -> Any:
    start()
    import lightning.pytorch.strategies.deepspeed as module
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import CPUAccelerator

    kind = module.DeepSpeedStrategy
    plugins = [_environment()]
    if not isinstance(precision, str):
        plugins, precision = [*plugins, precision], None
    return Trainer(
        strategy=_on_cpus(kind, module, CPUAccelerator, stage, **options),
        accelerator="cpu",
        devices=dist.get_world_size(),
        precision=precision,
        plugins=plugins,
        max_epochs=epochs,
        gradient_clip_val=1.0,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def trainer(stage: int, folder: Path) -> dict[str, Any]:
    """A fit, in one run and in two."""
    found: dict[str, Any] = {"weights": [], "states": []}
    for cut in (None, 1):
        module = _module()
        made = _trainer(stage, cut or 2, folder)
        made.fit(module, _data())
        if cut is not None:
            made.save_checkpoint(str(folder / "cut.ckpt"))
            module = _module()
            made = _trainer(stage, 2, folder)
            made.fit(module, _data(), ckpt_path=str(folder / "cut.ckpt"))
        engine = made.strategy.model
        found["weights"].append(digest(weights(engine)))
        found["states"].append(state_digest(engine))
        if cut is None:
            losses = module.losses
            found["learned"] = sum(losses[-4:]) < 0.8 * sum(losses[:4])
            found["dtypes"] = {str(each) for each in module.dtypes}
            found["optimizer"] = type(inner(engine)).__module__
            found["decayed"] = {each["lr"] < 1e-2 for each in inner(engine).param_groups}
    return found


def small_steps(stage: int, folder: Path) -> dict[str, float]:
    """How far steps of 1e-5 go."""

    def train(way: str) -> Any:
        precision = MODE if way == deepspeed_stall.OURS else "bf16-true"
        config = deepspeed_stall.config(way, stage)
        made = _trainer(stage, 1, folder, precision, config=config)
        made.fit(_module(deepspeed_stall.network(), deepspeed_stall.LR), deepspeed_stall.loader())
        return made.strategy.model

    return deepspeed_stall.ways(train)


def fabric(stage: int) -> dict[str, Any]:
    start()
    import lightning.fabric.strategies.deepspeed as module
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators import CPUAccelerator

    made = Fabric(
        strategy=_on_cpus(module.DeepSpeedStrategy, module, CPUAccelerator, stage),
        accelerator="cpu",
        devices=dist.get_world_size(),
        precision=MODE,
        plugins=[_environment()],
    )
    made.launch()
    network = _network()
    network, optimizer = made.setup(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    losses = []
    for x, y in made.setup_dataloaders(_data()):
        loss = torch.nn.functional.mse_loss(network(x), y)
        made.backward(loss, model=network)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine = network._forward_module
    return {
        "optimizer": type(inner(engine)).__module__,
        "learned": sum(losses[-4:]) < 0.8 * sum(losses[:4]),
        "dtypes": {str(loss.dtype)},
        "weights": digest(weights(engine)),
    }


def refusals(folder: Path) -> dict[str, str]:
    from lightning_bf16 import BF16Precision

    def fit(precision: Any) -> None:
        _trainer(2, 1, folder, precision).fit(_module(), _data())

    return {
        "offload": message(lambda: _trainer(2, 1, folder, offload_optimizer=True)),
        "released": message(lambda: _trainer(2, 1, folder, BF16Precision(release_gradients=True))),
        "keep_fp32": message(lambda: fit(BF16Precision(keep_fp32=["network.1"]))),
        "no ZeRO": message(lambda: _trainer(0, 1, folder)),
        "flags": message(
            lambda: _trainer(2, 1, folder, config={"bf16": {"enabled": False}, **_stage(2)})
        ),
    }


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


def alone(folder: Path) -> dict[str, Any]:
    """What is asked on one rank."""
    _find_group()
    return {"trainer": {1: trainer(1, folder / "fit")}, "small steps": small_steps(2, folder)}


def _find_group() -> None:
    """Tell Lightning the address of the group that exists already."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def everything(folder: Path) -> dict[str, Any]:
    _find_group()
    return {
        "trainer": {stage: trainer(stage, folder / str(stage)) for stage in (2, 3)},
        "fabric": {stage: fabric(stage) for stage in (1, 3)},
        "refusals": refusals(folder),
    }
