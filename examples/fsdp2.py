"""FSDP2 by hand, started by torchrun, with a checkpoint that any number of processes resumes.

torchrun --nproc_per_node 2 examples/fsdp2.py --precision bf16-stochastic
torchrun --nproc_per_node 1 examples/fsdp2.py --precision bf16-stochastic --steps 200 --resume
torchrun --nproc_per_node 2 examples/fsdp2.py --optimizer muon

Muon orthogonalises the matrices of hidden layers, each on the process that owns it in the step, and
steps the rest as AdamW does; with this adjustment both take AdamW's learning rate.

On CPUs the processes communicate by gloo, on GPUs by NCCL. Given the same gradients, weights and
states have the bits of one process; the gradients themselves are sums over processes in fp32.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from gpt import GPT, GPTConfig, add_size_arguments, next_byte_loss
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_bf16
from torch_bf16.tools.compare.corpus import batches, load_corpus


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="bf16-stochastic", help="a recipe's name, or fp32")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--steps", type=int, default=100)
    add_size_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, default=Path("fsdp2-checkpoint"))
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    args = parser.parse_args(arguments)
    if (args.precision, args.optimizer) == ("fp32", "muon"):
        parser.error("--optimizer muon is for a recipe: fp32 here is torch's AdamW")
    return args


def sharded(model: GPT, precision: str, mesh: distributed.DeviceMesh) -> GPT:
    """Shard each block as a group of its own, and the rest as another group; in place."""
    policy = MixedPrecisionPolicy()
    if precision != "fp32":
        torch_bf16.cast_model(model, precision)
        # Gradients are sent and summed in fp32. Autocast casts what products take; torch's default
        # would round every floating-point input of a group to bf16.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    if args.precision == "fp32":
        return torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    if args.optimizer == "muon":
        groups = torch_bf16.param_groups(model, weight_decay=0.1, muon=True)
        options = {"lr": args.lr, "adjust_lr_fn": "match_rms_adamw"}
        return torch_bf16.Muon(groups, **options, recipe=args.precision)
    return torch_bf16.AdamW(
        model.named_parameters(), lr=args.lr, weight_decay=0.1, recipe=args.precision
    )


def train(args: argparse.Namespace, device: torch.device) -> float:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if args.batch_size % ranks:
        # FSDP averages over the processes, so that a window of a smaller share would weigh more.
        raise SystemExit(
            f"--batch-size {args.batch_size} cannot be divided by {ranks} processes; "
            f"{args.batch_size // ranks * ranks + ranks} can"
        )
    torch.manual_seed(0)
    corpus = load_corpus(args.corpus_bytes)
    model = GPT(GPTConfig(context=args.context, width=args.width, layers=args.layers)).to(device)
    model = sharded(model, args.precision, distributed.init_device_mesh(device.type, (ranks,)))
    optimizer = make_optimizer(model, args)
    if rank == 0 and args.precision != "fp32":
        print(torch_bf16.describe(model, optimizer), flush=True)

    start = 0
    if args.resume:
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "step": 0}
        dcp.load(state, checkpoint_id=args.checkpoint)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        start = state["step"]
        if start >= args.steps:
            raise SystemExit(
                f"{args.checkpoint} has {start} steps already: --steps {args.steps} must be more"
            )

    loss = torch.tensor(float("nan"))
    for step in range(start, args.steps):
        shape = {"batch_size": args.batch_size, "context": args.context}
        (batch,) = batches(corpus.train, n=1, seed=step, **shape)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision != "fp32"):
            loss = next_byte_loss(model, batch[rank::ranks].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and ((step + 1) % 20 == 0 or step + 1 == args.steps):
            print(f"step {step + 1}: loss {loss.item():.4f} on rank 0", flush=True)

    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": args.steps}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(args.checkpoint, overwrite=True))
    return loss.item()


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(args, device)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
