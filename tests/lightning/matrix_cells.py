"""The cells of the matrix, strategy by recipe by host by package, and how each of them trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_models import (
    FABRICS,
    MODES,
    TRAINERS,
    batches,
    bits,
    host,
    loader,
    make_module,
    make_trainer,
    network,
)
from sharded_training import everywhere
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate
from torch.nn import functional as F

import torch_bf16
from torch_bf16.sharding import local, shard_of

LIMIT, MICRO_BATCHES, STEPS, EPOCHS = 0.1, 2, 2, 2
RESHARDED = [*itertools.product(("fsdp1", "fsdp2"), (TRAINERS[0], FABRICS[1]))]


@dataclass(frozen=True)
class Cell:
    """How many processes, how they share the work, who trains and how it rounds."""

    strategy: str
    mesh: tuple[int, int]  # data, tensor
    package: str
    mode: str

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1]

    @property
    def id(self) -> str:
        return f"{self.strategy}-{self.world}-{self.package}-{self.mode}"


# After its first step DDP lays its buckets out anew, in every precision, and a resumed run does so
# at another step; more than two ranks then add in another order. With this option it does not.
DDP = "ddp_find_unused_parameters_true"
MESHES = {
    2: {"ddp": (2, 1), "fsdp1": (2, 1), "fsdp2": (2, 1), "tp": (1, 2)},
    4: {"ddp": (4, 1), "fsdp1": (4, 1), "fsdp2": (4, 1), "tp": (1, 4), "fsdp2+tp": (2, 2)},
}


def cells() -> list[Cell]:
    """Both packages with both recipes in two processes; with four, each package with one."""
    made = []
    for world, meshes in MESHES.items():
        for (strategy, mesh), hosts in itertools.product(meshes.items(), (TRAINERS, FABRICS)):
            pairs = [*itertools.product(hosts, MODES)]
            if world == 4:
                pairs = [*zip(hosts, MODES, strict=True)]
            made += [Cell(strategy, mesh, package, mode) for package, mode in pairs]
    return made


CELLS = cells()


def shard(net: nn.Module, cell: Cell, mesh: Any) -> None:
    """The user's own parallelism, in place."""
    if "tp" in cell.strategy:
        plan = {"0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(net, mesh["tensor_parallel"], plan)
    if "fsdp2" in cell.strategy:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(net, mesh=mesh["data_parallel"], mp_policy=policy)


def sharding(cell: Cell) -> Callable[[Any, Any], Any]:
    """The same, as Fabric calls it."""

    def parallelize(module, mesh):
        shard(module.net, cell, mesh)
        return module

    return parallelize


def flattening(strategies: Any) -> Any:
    """An FSDPStrategy of a host, which wraps for CPUs and saves what each rank has."""

    def wrap(self, module):
        return FullyShardedDataParallel(
            module,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )

    methods = {"_setup_model": wrap, "setup_module": wrap}
    kind = type("CPUFSDPStrategy", (strategies.FSDPStrategy,), methods)
    return kind(state_dict_type="sharded")


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # With this eps an update is nearly linear in the gradient: a wrong sum or mean shows in full.
    return torch.optim.AdamW(module.parameters(), lr=0.5, eps=1.0, weight_decay=0.01)


def muon(module: nn.Module) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest."""
    return torch_bf16.Muon(torch_bf16.param_groups(module, weight_decay=0.1, muon=True), lr=0.02)


def adafactor(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.1)


def micro_batches(index: int | None, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Those of one epoch for one rank of the data-parallel mesh; None gives all ranks the same."""
    return list(batches(count, seed=7 if index is None else 100 + index))


@dataclass
class Run:
    """What a training left behind, and what was seen before each clipping."""

    module: nn.Module
    optimizer: Any
    steps: int
    norms: list[tuple[float, float]]  # of the gradients in fp64, and the one that was clipped by
    save: Any

    def numbers(self) -> dict[str, torch.Tensor]:
        """Whole weights, and whole states as ``name/key``; replicas are found identical."""
        tensors: dict[str, torch.Tensor] = {}
        owners: dict[str, torch.Tensor] = {}
        for name, parameter in self.module.named_parameters():
            # FSDP1 leaves some ranks nothing of a parameter, and so no state.
            states = self.optimizer.state.get(parameter, {})
            held = {"": parameter, **{f"/{key}": torch.as_tensor(s) for key, s in states.items()}}
            tensors |= {name + key: each for key, each in held.items()}
            owners |= dict.fromkeys((name + key for key in held), parameter)
        return whole(tensors, owners)


class Named(nn.Module):
    """The network under the names that it has in the LightningModule; noise follows names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x)


def whole(
    tensors: dict[str, torch.Tensor], owners: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The whole tensors of which the ranks hold parts, and equal bits where they hold the same.

    ``owners`` are the parameters that they belong to, whose elements lie as theirs do; a rank may
    have nothing of one.
    """
    mine = {}
    for name, tensor in tensors.items():
        span, memory = shard_of(owners[name]).span, local(tensor).detach().reshape(-1)
        # Steps, and the factors of Adafactor, are whole on every rank.
        like = tensor.shape == owners[name].shape
        shape = span.shape if like else tensor.shape
        places = span.indices(memory.device) if like else torch.arange(len(memory))
        mine[name] = (shape, places, memory.clone())
    pieces = [(name, *each) for rank in everywhere(mine) for name, each in rank.items()]
    made: dict[str, torch.Tensor] = {}
    for name, shape, places, piece in pieces:
        tensor = made.setdefault(name, torch.zeros(shape, dtype=piece.dtype))
        tensor.view(-1)[places] = piece
    # Who held the same elements must have held the same bits, a NaN or a negative zero too.
    for name, _, places, piece in pieces:
        assert torch.equal(bits(made[name].view(-1)[places]), bits(piece)), name
    return dict(sorted(made.items(), key=lambda each: list(owners).index(each[0].split("/")[0])))


def norm_in_fp64(module: nn.Module) -> float:
    parameters = dict(module.named_parameters())
    there = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    grads = whole(there, parameters)
    return torch.stack([g.double().norm() for g in grads.values()]).norm().item()


def train(
    cell: Cell,
    rank: int,
    *,
    epochs: int = EPOCHS,
    together: bool = False,
    checkpoint: Path | None = None,
    same_data: bool = False,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Run:
    """Fit; ``together`` clips and accumulates; ``checkpoint`` is where it goes on from."""
    count = STEPS * MICRO_BATCHES if together else STEPS
    data = micro_batches(None if same_data else rank // cell.mesh[1], count)
    way = by_fabric if cell.package in FABRICS else by_trainer
    return way(cell, data, epochs, together, checkpoint, make)


def by_trainer(cell, data, epochs, together, checkpoint, make):
    pl = host(cell.package)
    norms = []

    def configure_model(self):
        shard(self.net, cell, self.device_mesh)

    def configure_optimizers(self):
        self.made = [make(self)]
        return self.made[0]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        exact = norm_in_fp64(self)
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if together:
            norms.append((exact, LIMIT / float(optimizer._engine.pending.coefficient)))

    hooks = {
        "configure_optimizers": configure_optimizers,
        "configure_gradient_clipping": configure_gradient_clipping,
    }
    strategy: Any = DDP
    if cell.strategy == "fsdp1":
        strategy = flattening(host(f"{cell.package}.strategies"))
    elif cell.strategy != "ddp":
        hooks["configure_model"] = configure_model
        # One package saves shards, the other one whole file.
        strategy = host(f"{cell.package}.strategies").ModelParallelStrategy(
            *cell.mesh, save_distributed_checkpoint=cell.package == TRAINERS[0]
        )
    module = make_module(pl, seed=3, **hooks)
    options = {"gradient_clip_val": LIMIT, "accumulate_grad_batches": MICRO_BATCHES}
    trainer = make_trainer(
        pl,
        cell.mode,
        devices=cell.world,
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        **(options if together else {}),
    )
    trainer.fit(module, loader(data), ckpt_path=checkpoint)
    return Run(module, module.made[0], trainer.global_step, norms, trainer.save_checkpoint)


def by_fabric(cell, data, epochs, together, checkpoint, make):
    package = host(cell.package)
    strategy: Any = DDP
    if cell.strategy == "fsdp1":
        strategy = flattening(host(f"{cell.package}.strategies"))
    elif cell.strategy != "ddp":
        strategies = host(f"{cell.package}.strategies")
        strategy = strategies.ModelParallelStrategy(sharding(cell), *cell.mesh)
    fabric = package.Fabric(
        accelerator="cpu", devices=cell.world, strategy=strategy, precision=cell.mode
    )
    fabric.launch()
    torch.manual_seed(3)
    model = fabric.setup_module(Named())
    made = make(model)
    optimizer = fabric.setup_optimizers(made)
    progress = {"steps": 0}
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    if checkpoint is not None:
        fabric.load(checkpoint, state)
        progress = state["progress"]
    norms = []
    while progress["steps"] < epochs * STEPS:
        parts = MICRO_BATCHES if together else 1
        for start in range(0, len(data), parts):
            for number, (x, y) in enumerate(data[start : start + parts], start=1):
                waits = fabric.no_backward_sync(model) if number < parts else nullcontext()
                with waits:
                    fabric.backward(F.cross_entropy(model(x), y) / parts)
            if together:
                exact = norm_in_fp64(model)
                norm = fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
                norms.append((exact, norm.item()))
            optimizer.step()
            optimizer.zero_grad()
            progress["steps"] += 1
    return Run(model.module, made, progress["steps"], norms, lambda path: fabric.save(path, state))


def in_fp32(cell: Cell, together: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Weights and norms of gradients that plain fp32 training on all the data ends with."""
    torch.manual_seed(3)
    net = network()
    optimizer = adamw(net)
    parts = MICRO_BATCHES if together else 1
    data = [micro_batches(index, STEPS * parts) for index in range(cell.mesh[0])]
    norms = []
    for _ in range(EPOCHS):
        for start in range(0, STEPS * parts, parts):
            pairs = [pair for rank in data for pair in rank[start : start + parts]]
            losses = [F.cross_entropy(net(x), y) for x, y in pairs]
            torch.stack(losses).mean().backward()
            norms.append(torch.stack([p.grad.norm() for p in net.parameters()]).norm().item())
            if together:
                nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], norms
