"""The scalars of a step computed on the device, from hyperparameters that may live there.

One launch of ``prepare`` for all tensors of a rule evaluates the rule's ``scalars`` in fp64, counts
the step, and decides whether it is skipped. It reads a table of *values*, int64
``[3 + groups * (options + 1), 2]``: for each its address on the device or 0, and its fp64 bits
where that is 0. The first three are the clip coefficient, GradScaler's scale and found_inf; then
come, for each parameter group, the rule's options and the gradient's sign.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_bf16.backends.host_scalars import evaluate, sign_of
from torch_bf16.backends.inputs import ScalarRows, StepInputs
from torch_bf16.rules import Rule

from .arithmetic import lift_scalars
from .tables import Table, on, upload

__all__ = ["OPTIONS", "DeviceScalars", "prepare", "prepare_constants"]

# The low two bits of an address say what is there; 0 is for a value that is not on the device.
_KINDS = {torch.float32: 1, torch.float64: 2}
_TOLD = 3

OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""How ``prepare`` is compiled, for every device."""


@triton.jit
def _value(values_ptr, i):
    address = tl.load(values_ptr + 2 * i)
    number = tl.load(values_ptr + 2 * i + 1).to(tl.float64, bitcast=True)
    kind = address & 3
    place = address - kind
    single = tl.load(place.to(tl.pointer_type(tl.float32)), mask=kind == 1, other=0.0)
    double = tl.load(place.to(tl.pointer_type(tl.float64)), mask=kind == 2, other=0.0)
    return tl.where(kind == 1, single.to(tl.float64), tl.where(kind == 2, double, number))


@triton.jit(do_not_specialize=["rows_ptr", "values_ptr", "steps_ptr", "table_ptr"])
def prepare(
    rows_ptr,
    values_ptr,
    steps_ptr,
    table_ptr,
    SCALARS: tl.constexpr,
    N_OPTIONS: tl.constexpr,
    N_SCALARS: tl.constexpr,
):
    """Compute a row of scalars for each step counter, and count the step.

    Reads: ``rows``, int32 ``[n]``, the row of the values where each counter's group begins; the
        values; ``steps``, fp32 ``[n]``, the counters.
    Writes: ``table``, fp32 ``[n, N_SCALARS + 2]``: the scalars, the number of the step, and 1 where
        it is skipped; ``steps``, unless it is.
    Numerics: fp64, nothing fused, the operations of the host in their order; rounded once to fp32.
    Launch: one program per counter, one warp.
    """
    counter = tl.program_id(0).to(tl.int64)
    first = tl.load(rows_ptr + counter)
    options = ()
    for i in tl.static_range(N_OPTIONS):
        options = options + (_value(values_ptr, first + i),)
    sign = _value(values_ptr, first + N_OPTIONS)
    scale = _value(values_ptr, 0)
    divisor = _value(values_ptr, 1)
    skipped = _value(values_ptr, 2) != 0.0
    done = tl.load(steps_ptr + counter)
    number = done.to(tl.int64) + 1
    scalars = SCALARS(options, number, sign * scale / divisor)
    row = table_ptr + counter * (N_SCALARS + 2)
    for i in tl.static_range(N_SCALARS):
        tl.store(row + i, scalars[i].to(tl.float32))
    tl.store(row + N_SCALARS, number.to(tl.float32))
    tl.store(row + N_SCALARS + 1, skipped.to(tl.float32))
    tl.store(steps_ptr + counter, tl.where(skipped, done, number.to(tl.float32)))


def prepare_constants(rule: Rule, n_options: int) -> dict[str, Any]:
    """What ``prepare`` is compiled for: its arguments in capitals."""
    n_scalars = len(rule.scalars((0.5,) * n_options, 1, 1.0))
    return {"SCALARS": lift_scalars(rule), "N_OPTIONS": n_options, "N_SCALARS": n_scalars}


class DeviceScalars:
    """Scalars computed on the device; see :class:`torch_bf16.backends.ScalarSource`.

    Nothing is read from the device. Numbers are copied there when they have changed; tensors on the
    device are passed by address.

    Attributes:
        steps: views of one fp32 buffer on the device.
        skipped: False, because only the device knows.
    """

    skipped = False

    def __init__(
        self,
        rule: Rule,
        device: torch.device,
        sizes: Sequence[int],
        groups: Sequence[int],
        steps: Sequence[Tensor],
    ) -> None:
        self._rule, self._device = rule, device
        # Tensors that were one parameter share the tensor that counts.
        counters = {id(step): step for step in steps}
        rows = {key: row for row, key in enumerate(counters)}
        rows_of = np.array([rows[id(step)] for step in steps], np.int64)
        self._rows_of = np.split(rows_of, np.cumsum(sizes)[:-1])
        numbers = [float(step) for step in counters.values()]
        self._counter = upload(np.array(numbers, np.float32), device)
        views = self._counter.unbind()
        self.steps = [views[row] for row in rows_of.tolist()]
        group_of = dict(zip(rows_of.tolist(), groups, strict=True))
        used, self._place = np.unique(
            [group_of[row] for row in range(len(rows))], return_inverse=True
        )
        self._used: list[int] = used.tolist()
        self._values = Table(device)
        self._key: list[Any] = []
        self._encoded = np.empty((0, 2), np.int64)
        self._converted: list[Tensor] = []
        self._made: tuple[Tensor, Tensor, dict[str, Any], list[ScalarRows]] | None = None

    def set(self, groups: Sequence[Mapping[str, Any]], told: StepInputs) -> list[ScalarRows]:
        """The scalars of the next step, for each bucket; the launch also counts the step.

        Raises:
            ValueError: no step follows from a group's options; nothing has been updated.
        """
        self._converted = []
        values = (told.coefficient, told.grad_scale, told.found_inf)
        key = [self._seen(v, d) for v, d in zip(values, (1.0, 1.0, 0.0), strict=True)]
        n_options = 0
        for number in self._used:
            group = groups[number]
            try:
                options = self._rule.options(group)
                key += [self._seen(option) for option in options]
            except (LookupError, TypeError, ValueError):
                evaluate(self._rule, group, number, 1)
                raise
            key.append(sign_of(group))
            n_options = len(options)
        if key != self._key:
            self._check(key, groups, n_options)
            self._encoded = _encoded(key)
            self._key = key
        rows, table, constants, scalars = self._made or self._make(n_options)
        with on(self._device):
            prepare[(len(table),)](
                rows, self._values.of(self._encoded), self._counter, table, **constants, **OPTIONS
            )
        return scalars

    def count(self) -> None:
        """Do nothing: the device has counted."""

    def _seen(self, value: Any, default: float = 0.0) -> float | int:
        """A number as a float, a tensor on the device as its address and kind."""
        if value is None:
            return default
        if not isinstance(value, Tensor) or (value.is_cpu and self._device.type != "cpu"):
            return float(value)
        if value.numel() != 1:
            raise ValueError(f"{value.numel()} numbers where one is needed")
        if value.dtype not in _KINDS or value.device != self._device:
            value = value.to(self._device, torch.float64, non_blocking=True)
            self._converted.append(value)
        return value.data_ptr() | _KINDS[value.dtype]

    def _check(self, key: list[Any], groups: Sequence[Mapping[str, Any]], n_options: int) -> None:
        for position, number in enumerate(self._used):
            first = _TOLD + position * (n_options + 1)
            if all(isinstance(each, float) for each in key[first : first + n_options]):
                evaluate(self._rule, groups[number], number, 1)

    def _make(self, n_options: int) -> tuple[Tensor, Tensor, dict[str, Any], list[ScalarRows]]:
        constants = prepare_constants(self._rule, n_options)
        rows = upload((_TOLD + self._place * (n_options + 1)).astype(np.int32), self._device)
        shape = (len(self._place), constants["N_SCALARS"] + 2)
        table = torch.empty(shape, dtype=torch.float32, device=self._device)
        scalars = [ScalarRows(None, each, table) for each in self._rows_of]
        self._made = rows, table, constants, scalars
        return self._made


def _encoded(key: Sequence[float | int]) -> np.ndarray:
    table = np.zeros((len(key), 2), np.int64)
    for row, each in zip(table, key, strict=True):
        if isinstance(each, float):
            row[1:] = np.array([each]).view(np.int64)
        else:
            row[0] = each
    return table
