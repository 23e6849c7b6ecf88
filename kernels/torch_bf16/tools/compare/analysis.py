"""Compute figures from runs: curves, paired differences, bytes, times, and kept updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .intervals import Interval, band_of, smooth
from .rows import FP32, MIXED
from .training import Run
from .verdict import LOWER

__all__ = ["Series", "analyse"]

_POINTS = 200
_WARM_UP = 5
# fp32 weights keep all updates: if less was measured, the twin is wrong.
_TWIN_ERROR = 0.02
_PERCENTILES = {"p10": 10, "p50": 50, "p90": 90}


class Series:
    """Losses of all runs over the steps that they share.

    Args:
        runs: the runs of all rows.

    Attributes:
        steps: the steps that all runs have; a broken run need not have those after it broke.
        window: how many steps curves are averaged over.
        tail: how many steps at the end are averaged for a run's final loss.
        shortened: names of rows whose runs have more steps than those shared.

    Raises:
        ValueError: the runs have no step in common.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        whole = [run for run in runs if run.broken_at is None] or list(runs)
        shared = set(whole[0].steps).intersection(*(run.steps for run in whole))
        if not shared:
            described = [f"{run.row} has {_some(run.steps)}" for run in whole]
            raise ValueError(
                f"the runs have no step in common: {'; '.join(dict.fromkeys(described))}. Log them "
                "at the same steps"
            )
        self.steps = sorted(shared)
        self.window = max(1, len(self.steps) // 20)
        self.tail = max(1, len(self.steps) // 10)
        self.shortened = sorted({r.row for r in whole if len(r.steps) > len(shared)})
        self._losses = {id(run): self._of(run) for run in runs}

    def _of(self, run: Run) -> np.ndarray:
        known = dict(zip(run.steps, run.losses, strict=True))
        broken = math.inf if run.broken_at is None else run.broken_at
        return np.array([known[s] for s in self.steps if s < broken and s in known])

    def curve(self, run: Run) -> np.ndarray:
        """Smoothed losses at :attr:`steps`, up to where the run broke."""
        return smooth(self._losses[id(run)], self.window)

    def whole(self, run: Run) -> bool:
        """Whether a run has all steps."""
        return len(self._losses[id(run)]) == len(self.steps)

    def first(self, run: Run) -> float:
        """The loss at the first of the steps; NaN for a run that broke before it."""
        losses = self._losses[id(run)]
        return float(losses[0]) if len(losses) else math.nan

    def final(self, run: Run) -> float:
        """The mean loss at the end; NaN for a run that did not get there."""
        return float(self._losses[id(run)][-self.tail :].mean()) if self.whole(run) else math.nan

    @property
    def points(self) -> list[int]:
        """Indices of the steps to draw; the last step is among them."""
        n = len(self.steps)
        return sorted({round(i) for i in np.linspace(0, n - 1, min(n, _POINTS))})


def analyse(
    by_row: Mapping[str, Sequence[Run]], reference: str, better: str = LOWER
) -> dict[str, Any]:
    """Figures of all rows, ready for JSON.

    Args:
        by_row: runs by the row's name; the n-th runs of two rows are a pair.
        reference: the row that others are compared with.
        better: ``"lower"`` if what was measured is better where it is lower, or ``"higher"``.
    """
    series = Series([run for runs in by_row.values() for run in runs])
    base = by_row[reference]
    fall = float(np.mean([series.first(run) - series.final(run) for run in base]))
    improvement = fall if better == LOWER else -fall
    # Of a reference that learned nothing there are no shares.
    learned = fall if improvement > 0 else 0.0
    rows = [_row(name, runs, base, series, learned) for name, runs in by_row.items()]
    _check_twins(rows)
    return {
        "reference": reference,
        "better": better,
        "steps": [series.steps[i] for i in series.points],
        "first_step": series.steps[0],
        "last_step": series.steps[-1],
        "smoothed_over": series.window,
        "final_over": series.tail,
        "shortened": series.shortened,
        "improvement": _number(improvement),
        "rows": rows,
    }


def _row(
    name: str, runs: Sequence[Run], base: Sequence[Run], series: Series, fall: float
) -> dict[str, Any]:
    pairs = [(a, b) for a, b in zip(runs, base, strict=False) if a is not b]
    whole = [(a, b) for a, b in pairs if series.whole(a) and series.whole(b)]
    curves = [series.curve(run) for run in runs]
    shared = min(map(len, curves))
    points = [i for i in series.points if i < shared]
    mean = np.mean([curve[:shared] for curve in curves], axis=0) if shared else np.zeros(0)
    finals = [series.final(run) for run in runs]
    against = Interval.of([series.final(a) - series.final(b) for a, b in whole]) if whole else None
    return {
        "name": name,
        "options": runs[0].options,
        "seeds": [run.seed for run in runs],
        "curve": [_number(mean[i]) for i in points],
        "difference": _band(whole, series),
        "final": _number(float(np.mean(finals))),
        "finals": [_number(each) for each in finals],
        "pairs": len(whole),
        "against": against and {name: _number(each) for name, each in asdict(against).items()},
        "learned": _number(1 - against.mean / fall) if against and fall else None,
        "broken": {str(run.seed): run.broken_at for run in runs if run.broken_at is not None},
        "parameters": runs[0].parameters or None,
        "bytes": next(filter(None, map(_bytes, runs)), None),
        "ms": _times([run.seconds for run in runs]),
        "optimizer_ms": _times([run.optimizer_seconds for run in runs]),
        **_updates(runs),
    }


def _band(whole: Sequence[tuple[Run, Run]], series: Series) -> dict[str, Any] | None:
    if not whole:
        return None
    mean, half = band_of([series.curve(a) - series.curve(b) for a, b in whole])
    return {
        "mean": [_number(mean[i]) for i in series.points],
        "half": [_number(half[i]) for i in series.points] if len(whole) > 1 else None,
    }


def _bytes(run: Run) -> dict[str, float] | None:
    if not run.bytes or not run.parameters:
        return None
    return {role: round(size / run.parameters, 4) for role, size in run.bytes.items()}


def _times(seconds: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Percentiles in milliseconds, without the first steps, which compile and allocate."""
    kept = [s for each in seconds for s in each[min(_WARM_UP, len(each) // 2) :]]
    if not kept:
        return None
    return {k: float(f"{1e3 * np.percentile(kept, q):.4g}") for k, q in _PERCENTILES.items()}


def _updates(runs: Sequence[Run]) -> dict[str, Any]:
    """The shares of updates that were kept, by layer and window, over all seeds.

    A run that broke has few windows, so it counts only if all did.
    """
    looked = [run for run in runs if run.ends]
    looked = [run for run in looked if run.broken_at is None] or looked
    known = [run for run in looked if run.survived]
    windows = min((len(run.ends) for run in known), default=0)
    layers: dict[str, Any] = {}
    intended = stored = 0.0
    for layer in known[0].survived if windows else ():
        sums = np.array([run.survived[layer][:windows] for run in known])
        kept, whole = sums[:, :, 0], sums[:, :, 1]
        shares, total = _ratio(kept, whole), whole.sum()
        each = shares[np.isfinite(shares)]
        layers[layer] = {
            "windows": [_number(v) for v in _ratio(kept.sum(axis=0), whole.sum(axis=0))],
            "survived": _number(kept.sum() / total) if total else None,
            # The most that chance allows: under stochastic rounding, windows scatter.
            "survived_at_most": _number(Interval.of(list(each)).high) if len(each) > 1 else None,
        }
        stored, intended = stored + float(kept.sum()), intended + float(total)
    counts: dict[str, np.ndarray] = {}
    for run in looked:
        for layer, pair in run.unmoved.items():
            counts[layer] = counts.get(layer, np.zeros(2)) + np.array(pair)
    for layer, (stood, numel) in counts.items():
        layers.setdefault(layer, {"windows": [], "survived": None, "survived_at_most": None})
        layers[layer] |= {"unmoved": _number(stood / numel), "numel": int(numel) // len(looked)}
    stood, numel = sum(counts.values(), np.zeros(2))
    return {
        "ends": known[0].ends[:windows] if windows else [],
        "layers": layers,
        "survived": _number(stored / intended) if intended else None,
        "unmoved": _number(stood / numel) if numel else None,
        "unmeasured": next((run.unmeasured for run in looked), None),
        "undecoded": any(run.undecoded for run in looked),
    }


def _check_twins(rows: list[dict[str, Any]]) -> None:
    """Discard the shares of optimizers whose twin, over samples, does not step as they do."""
    wrong = {
        _kind(row)
        for row in rows
        if row["name"] in (FP32, MIXED)
        for each in row["layers"].values()
        if each["survived"] is not None and abs(1 - each["survived"]) >= _TWIN_ERROR
    }
    for row in rows:
        if (kind := _kind(row)) in wrong:
            row["unmeasured"] = f"{kind} does not update elements one by one"
            row["survived"], row["ends"] = None, []
            for layer in row["layers"].values():
                layer.update(windows=[], survived=None, survived_at_most=None)


def _kind(row: Mapping[str, Any]) -> str:
    return row["options"].partition("(")[0]


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.full_like(a, np.nan), where=b > 0)


def _number(value: float) -> float | None:
    """A number for JSON: six digits, and None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _some(steps: Sequence[int]) -> str:
    return f"steps {', '.join(map(str, steps[:3]))} ... {steps[-1]}" if steps else "none"
