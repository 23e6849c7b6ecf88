"""A small convolutional network on scikit-learn's digits, in four precisions.

python examples/digits_cnn.py

It has batch norm, dropout and convolutions, because not only language models can be trained in
bf16. The control is ``model.to(torch.bfloat16)``. Needs scikit-learn, downloads nothing.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import torch_bf16

CONTROL = "bf16, to the nearest"
PRECISIONS = ("fp32", "bf16-fp32-master", "bf16-stochastic", CONTROL)


def make_network() -> nn.Sequential:
    def stage(channels: int, wider: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels, wider, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *stage(1, 32), *stage(32, 64), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 2 * 2, 10)
    )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (n, 1, 8, 8) in fp32 and labels (n,): 1,437 for training, 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(each, dtype=torch.float32) / 16 for each in parts[:2])
    train_y, test_y = (torch.tensor(each) for each in parts[2:])
    return train_x.view(-1, 1, 8, 8), train_y, test_x.view(-1, 1, 8, 8), test_y


def train(network: nn.Sequential, precision: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return training loss and test accuracy, both computed with the weights in fp32."""
    train_x, train_y, test_x, test_y = digits()
    optimizer = torch.optim.SGD(network.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    steps = args.epochs * len(train_x) // args.batch_size
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if precision == CONTROL:
        network.to(torch.bfloat16)
    elif precision != "fp32":
        torch_bf16.prepare(network, optimizer, precision)
    torch.manual_seed(args.seed)
    for _ in range(steps):
        chosen = torch.randint(len(train_x), (args.batch_size,))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
            logits = network(train_x[chosen])
        F.cross_entropy(logits.float(), train_y[chosen]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    network.float().eval()
    with torch.no_grad():
        loss = F.cross_entropy(network(train_x), train_y).item()
        accuracy = (network(test_x).argmax(1) == test_y).double().mean().item()
    return loss, accuracy


def main(arguments: list[str] | None = None) -> dict[str, tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    torch.manual_seed(args.seed)
    fresh = make_network()
    found = {}
    print(f"{'':24}{'training loss':>14}{'test accuracy':>15}")
    for precision in PRECISIONS:
        found[precision] = loss, accuracy = train(copy.deepcopy(fresh), precision, args)
        print(f"{precision:24}{loss:14.5f}{100 * accuracy:13.1f} %")
    return found


if __name__ == "__main__":
    main()
