"""The figures of the documentation, each for light and for dark pages: python docs/figures.py.

Each is drawn from a computation here or from a record in examples/results; what a page says of one
in numbers is what its function returns. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

import torch_bf16
from torch_bf16 import numerics
from torch_bf16.tools import output

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
matplotlib.use("svg")
import gpu_table
from gpu_table import RESULTS
from matplotlib import pyplot

FOLDER = Path(__file__).parent / "figures"
STYLES = {
    "light": {"ink": "#24292f", "grid": "#d0d7de"},
    "dark": {"ink": "#d6dbe0", "grid": "#3b424a"},
}
# Okabe and Ito's palette, which colour-blind readers can tell apart and both grounds carry.
FP32, MASTER, STOCHASTIC, NEAREST, OTHER = "#999999", "#0072b2", "#009e73", "#d55e00", "#cc79a7"
COLOURS = {
    "32-true": FP32,
    "bf16-fp32-master": MASTER,
    "bf16-stochastic": STOCHASTIC,
    "bf16-true": NEAREST,
}


def draws(shape: tuple[int, ...], step: int, seed: int = 0) -> torch.Tensor:
    """Sixteen random bits for each element, as a step of this package draws them for weights."""
    count = math.prod(shape)
    key = numerics.tensor_key("weight")
    bits = numerics.noise(
        seed=seed, step=step, key=key, stream=numerics.WEIGHT.stream, start=0, n=count
    )
    return numerics.draw16(bits, numerics.WEIGHT).view(shape)


def walk(start: float, update: float, steps: int, runs: int) -> dict[str, np.ndarray]:
    """A weight to which one update is added, step after step, stored in three ways.

    Args:
        start: the weight.
        update: what each step adds.
        steps: how many.
        runs: how many independent draws for stochastic rounding.

    Returns:
        `fp32` and `nearest`, of shape (steps + 1,), and `stochastic`, of shape (runs, steps + 1).
    """
    nearest = torch.tensor([start], dtype=torch.bfloat16)
    rounded = torch.full((runs,), start, dtype=torch.bfloat16)
    exact = [start]
    found: dict[str, list[Any]] = {"nearest": [nearest.item()], "stochastic": [rounded.tolist()]}
    for step in range(1, steps + 1):
        exact.append(float(np.float32(exact[-1]) + np.float32(update)))
        nearest = numerics.bf16_nearest(nearest.float() + update)
        rounded = numerics.bf16_stochastic(rounded.float() + update, draws((runs,), step))
        found["nearest"].append(nearest.item())
        found["stochastic"].append(rounded.tolist())
    return {
        "fp32": np.array(exact),
        "nearest": np.array(found["nearest"]),
        "stochastic": np.array(found["stochastic"]).T,
    }


def thousand_additions(axes: Any) -> None:
    """1.0 + 0.001, a thousand times."""
    found = walk(1.0, 0.001, steps=1000, runs=3)
    axes.plot(found["fp32"], color=FP32, label="fp32", linewidth=3, alpha=0.7)
    for number, run in enumerate(found["stochastic"]):
        label = "bf16, stochastic (three draws)" if number == 0 else None
        axes.plot(run, color=STOCHASTIC, label=label, linewidth=1)
    axes.plot(found["nearest"], color=NEAREST, label="bf16, to nearest", linewidth=2)
    axes.set(xlabel="additions of 0.001", ylabel="weight")


def noise_over_drift(spacings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How large rounding noise is beside what was learned, by how far a weight has come.

    Args:
        spacings: distances, in spacings of bf16 at the weight.

    Returns:
        The standard deviation of 4,096 weights over the distance, and the same by the formula
        sqrt((1 - f) / spacings), f being an update in spacings.
    """
    start, spacing, fraction = 1.0, 2.0**-7, 1 / 64
    weights = torch.full((4096,), start, dtype=torch.bfloat16)
    ratios, wanted = [], {round(each / fraction) for each in spacings}
    for step in range(1, max(wanted) + 1):
        moved = weights.float() + fraction * spacing
        weights = numerics.bf16_stochastic(moved, draws((4096,), step))
        if step in wanted:
            distance = weights.double() - start
            ratios.append((distance.std() / (step * fraction * spacing)).item())
    return np.array(ratios), np.sqrt((1 - fraction) / spacings)


def fading_noise(axes: Any) -> None:
    """Noise over drift, measured and by the formula."""
    spacings = np.array([1, 2, 4, 8, 16, 32, 50, 64, 100])
    measured, formula = noise_over_drift(spacings)
    axes.axvspan(50, 100, color=STOCHASTIC, alpha=0.2, linewidth=0, label="50 to 100 spacings")
    axes.plot(spacings, formula, color=MASTER, label=r"$1/\sqrt{spacings}$")
    axes.plot(spacings, measured, "o", color=STOCHASTIC, label="4,096 weights")
    axes.set_xscale("log")
    axes.set(xlabel="sum of updates, in spacings of bf16", ylabel="noise / drift")
    axes.set_ylim(0, 1.05)
    axes.set_xticks([1, 10, 50, 100], ["1", "10", "50", "100"])


def second_moments(steps: int = 4000) -> dict[str, list[float]]:
    """Adam's second moment while gradients fall from 1 to 0.1 after a quarter of the steps."""
    exact = torch.zeros(1)
    nearest = torch.zeros(1, dtype=torch.bfloat16)
    rounded = torch.zeros(1024, dtype=torch.bfloat16)
    found: dict[str, list[float]] = {"fp32": [], "to nearest": [], "stochastic, mean of 1,024": []}
    for step in range(1, steps + 1):
        square = (1.0 if step <= steps // 4 else 0.1) ** 2
        new = [0.999 * v.float() + 0.001 * square for v in (exact, nearest, rounded)]
        exact, nearest = new[0], numerics.bf16_nearest(new[1])
        rounded = numerics.bf16_stochastic(new[2], draws((1024,), step))
        means = (exact.item(), nearest.item(), rounded.float().mean().item())
        for series, value in zip(found.values(), means, strict=True):
            series.append(value)
    return found


def second_moment(axes: Any) -> None:
    """The second moment in three formats."""
    styles = ((FP32, 3), (NEAREST, 2), (STOCHASTIC, 1))
    for (name, series), (colour, width) in zip(second_moments().items(), styles, strict=True):
        axes.plot(series, color=colour, label=name, linewidth=width)
    axes.set(xlabel="step", ylabel=r"second moment, $\beta_2 = 0.999$")
    axes.axvline(1000, color=OTHER, linestyle=":", label="gradients fall from 1 to 0.1")


def stored_bytes(name: str, **changes: str) -> list[float]:
    """Bytes of a weight and its two moments in a recipe."""
    recipe = torch_bf16.get_recipe(name, **changes)
    roles = ("weights", "exp_avg", "exp_avg_sq")
    return [recipe.format_of(role, (64, 64)).bytes_per_element for role in roles]


def stacked_bytes(axes: Any) -> None:
    """Bytes of a parameter by role."""
    int8 = {"exp_avg": "int8", "exp_avg_sq": "int8"}
    rows = {
        "AdamW in fp32": (4, 4, 4, 4),
        "bf16-fp32-master": (*stored_bytes("bf16-fp32-master"), 2),
        "bf16-stochastic": (*stored_bytes("bf16-stochastic"), 2),
        "… with int8 moments": (*stored_bytes("bf16-stochastic", **int8), 2),
        "… and released gradients": (*stored_bytes("bf16-stochastic", **int8), 0),
    }
    roles = ("weight", "first moment", "second moment", "gradient")
    left = np.zeros(len(rows))
    for role, column, colour in zip(
        roles, zip(*rows.values(), strict=True), (MASTER, STOCHASTIC, OTHER, FP32), strict=True
    ):
        axes.barh(list(rows), column, left=left, color=colour, label=role, height=0.65)
        left += np.array(column)
    for number, total in enumerate(left):
        axes.text(total + 0.15, number, f"{math.ceil(10 * total) / 10:g}", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="bytes per parameter", xlim=(0, 17.5))
    axes.grid(visible=False, axis="y")


def loss_curves(axes: Any) -> None:
    """The demo's training losses, each minus those of fp32 on the same batches."""
    record = json.loads((RESULTS / "2026-11-22-demo" / "demo.json").read_text())
    window = 40
    smooth = {
        mode: np.convolve(run["train_losses"], np.ones(window) / window, "valid")
        for mode, run in record["runs"].items()
    }
    steps = np.arange(window, window + len(smooth["32-true"]))
    # Wide lines below narrow ones, because three of the four lie on each other.
    for (mode, losses), width in zip(smooth.items(), (6, 3, 1, 1.5), strict=True):
        axes.plot(steps, losses, color=COLOURS[mode], label=mode, linewidth=width)
    axes.set(xlabel="step", ylabel="training loss, nats per byte", ylim=(2.05, 3.0))


def learning_rates(axes: Any) -> None:
    """Which share of fp32's improvement is left at small learning rates."""
    path = RESULTS / "2026-11-21-cpu" / "learning_rate_sweep.json"
    colours = {"24-bit weights": OTHER, "bf16 nearest": NEAREST, **COLOURS}
    for name, shares in json.loads(path.read_text())["share_of_improvement"].items():
        rates = sorted(shares, key=float)
        points = [100 * shares[rate]["mean"] for rate in rates]
        axes.plot([float(rate) for rate in rates], points, "o-", color=colours[name], label=name)
    axes.set_xscale("log")
    axes.set(xlabel="learning rate, 500 steps", ylabel="% of what fp32 learns", ylim=(-3, 105))


def gpu_steps(axes: Any) -> None:
    """How long an AdamW step over a billion parameters takes on a GPU."""
    _, records = gpu_table.newest(RESULTS)["NVIDIA H200"]
    rows = gpu_table.rows_of(each for each in records if each["model"] == "llama-1b")
    times = {name: found["llama-1b"]["ms"]["median"] for name, found in rows.items()}
    names = sorted(times, key=times.__getitem__)
    ours = {name for record in records for name in record["ours"]} & {*names}
    of_torch = {name for name in names if name.startswith("torch fused")}
    groups = {
        "this package": (STOCHASTIC, ours),
        "torch": (FP32, of_torch),
        "other libraries": (OTHER, {*names} - ours - of_torch),
    }
    for label, (colour, members) in groups.items():
        places = [place for place, name in enumerate(names) if name in members]
        lengths = [times[names[place]] for place in places]
        axes.barh(places, lengths, color=colour, label=label, height=0.65)
    for place, name in enumerate(names):
        axes.text(times[name] + 0.7, place, output.number(times[name]), va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="ms per step, 1.2 billion parameters, NVIDIA H200")
    axes.margins(x=0.1)
    axes.grid(visible=False, axis="y")


FIGURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "thousand-additions": (thousand_additions, (6.4, 3.4)),
    "fading-noise": (fading_noise, (6.4, 3.4)),
    "second-moment": (second_moment, (6.4, 3.4)),
    "learning-rates": (learning_rates, (6.4, 3.4)),
    "bytes": (stacked_bytes, (6.8, 2.8)),
    "loss-curves": (loss_curves, (6.8, 3.4)),
    "gpu-steps": (gpu_steps, (6.8, 3.8)),
}


def draw(name: str, folder: Path) -> None:
    """Write a figure in both styles."""
    function, size = FIGURES[name]
    for style, colours in STYLES.items():
        inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
        options = dict.fromkeys(inked, colours["ink"])
        options |= dict.fromkeys(("axes.edgecolor", "grid.color"), colours["grid"])
        # Nothing of a date or a random number in the file, so that it changes with its content.
        options |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}
        options |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
        with matplotlib.rc_context(options):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            axes.set_axisbelow(True)
            function(axes)
            axes.legend(frameon=False)
            path = folder / f"{name}-{style}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(FIGURES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {names}")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(FIGURES):
        parser.error(f"no figure is called {', '.join(sorted(unknown))}; there are {names}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or FIGURES:
        draw(name, options.folder)


if __name__ == "__main__":
    main()
