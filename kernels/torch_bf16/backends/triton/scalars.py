"""The scalars of a step computed on the device, from hyperparameters that may live there.

One launch of ``prepare`` for all tensors of a rule evaluates the rule's ``scalars`` in fp64, counts
the step, and decides whether it is skipped. It reads a table of *values*, int64
``[3 + groups * (options + 1), 2]``: for each value its address on the device, or 0 and its fp64
bits. The first three are the clip coefficient, GradScaler's scale and found_inf; then come, for
each parameter group, the rule's options and the gradient's sign.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_bf16.backends.host_scalars import evaluate, naming_group, sign_of
from torch_bf16.backends.inputs import ScalarRows, StepInputs
from torch_bf16.backends.subnormals import subnormals_kept_here
from torch_bf16.rules import Rule
from torch_bf16.sharding import all_same

from .arithmetic import lift_scalars
from .launcher import launcher
from .tables import Table, on, upload

__all__ = ["OPTIONS", "DeviceScalars", "prepare", "prepare_constants"]

# The low two bits of an address give the dtype; an address of 0: not on the device.
_KINDS = {torch.float32: 1, torch.float64: 2}
_OF_STEP = 3
# A row of the table of values.
_VALUE = np.dtype([("address", np.int64), ("number", np.float64)])

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

    Reads: ``rows``, int64 ``[n]``, the row of the values where each counter's group begins, with
        all bits inverted if the counter is not part of the step; the values; ``steps``, fp32
        ``[n]``, the counters. A step is skipped if found_inf is not 0, or the scale is.
    Writes: ``table``, fp32 ``[n, N_SCALARS + 2]``: the scalars, the number of the step, and 1 if
        the step is skipped or the counter not part of it; ``steps``, unless that is 1.
    Numerics: fp64, nothing fused, the host's operations in their order; rounded once to fp32.
    Launch: one program per counter, one warp.
    """
    counter = tl.program_id(0).to(tl.int64)
    first = tl.load(rows_ptr + counter)
    absent = first < 0
    first = tl.where(absent, ~first, first)
    options = ()
    for i in tl.static_range(N_OPTIONS):
        options = options + (_value(values_ptr, first + i),)
    sign = _value(values_ptr, first + N_OPTIONS)
    scale = _value(values_ptr, 0)
    divisor = _value(values_ptr, 1)
    # Gradients that were multiplied by 0 cannot be divided by it.
    skipped = absent | (divisor == 0.0) | (_value(values_ptr, 2) != 0.0)
    done = tl.load(steps_ptr + counter)
    number = done.to(tl.int64) + 1
    scalars = SCALARS(options, number, sign * scale / divisor)
    row = table_ptr + counter * (N_SCALARS + 2)
    for i in tl.static_range(N_SCALARS):
        tl.store(row + i, scalars[i])
    tl.store(row + N_SCALARS, number.to(tl.float32))
    tl.store(row + N_SCALARS + 1, skipped.to(tl.float32))
    tl.store(steps_ptr + counter, tl.where(skipped, done, number.to(tl.float32)))


def prepare_constants(rule: Rule, n_options: int) -> dict[str, Any]:
    """The compile-time arguments of ``prepare``, those in capitals."""
    n_scalars = len(rule.scalars((0.5,) * n_options, 1, 1.0))
    return {"SCALARS": lift_scalars(rule), "N_OPTIONS": n_options, "N_SCALARS": n_scalars}


class DeviceScalars:
    """Scalars computed on the device; see :class:`torch_bf16.backends.ScalarSource`.

    Nothing is read from the device. Numbers are copied there when they have changed; tensors on the
    device are passed by address.

    Attributes:
        steps: views of one fp32 buffer on the device.
        skipped: always False, because only the device knows.
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
        # Tensors that belong to one parameter share its step counter.
        counters = {id(step): step for step in steps}
        rows = {key: row for row, key in enumerate(counters)}
        rows_of = np.array([rows[id(step)] for step in steps], np.int64)
        self._counter_of_tensor = rows_of
        self._counters_of_bucket = np.split(rows_of, np.cumsum(sizes)[:-1])
        numbers = [float(step) for step in counters.values()]
        self._counters = upload(np.array(numbers, np.float32), device)
        views = self._counters.unbind()
        self.steps = [views[row] for row in rows_of.tolist()]
        group_of = dict(zip(rows_of.tolist(), groups, strict=True))
        used, self._group_of_counter = np.unique(
            [group_of[row] for row in range(len(rows))], return_inverse=True
        )
        self._groups: list[int] = used.tolist()
        self._active_groups = self._groups
        self._values_on_device, self._first_values_on_device = Table(device), Table(device)
        self._inputs: list[Any] = []
        self._encoded: list[tuple[int, float]] = []
        self._values = np.empty((0, 2), np.int64)
        self._converted: list[Tensor] = []
        self._made: tuple[Tensor, Callable[..., None], list[ScalarRows]] | None = None
        self._tables: tuple[Tensor, ...] = ()
        self._is_active: np.ndarray | None = None
        self._counted = np.ones(len(rows), bool)
        self._first_values: np.ndarray | None = None

    def set(
        self,
        groups: Sequence[Mapping[str, Any]],
        inputs: StepInputs,
        is_active: np.ndarray | None = None,
    ) -> list[ScalarRows]:
        """Compute the scalars of the next step for each bucket; the launch also counts the step.

        Raises:
            ValueError: no step can be computed from a group's options; nothing has been updated.
        """
        scalars = self.bring(groups, inputs, is_active)
        self.launch()
        return scalars

    def bring(
        self,
        groups: Sequence[Mapping[str, Any]],
        inputs: StepInputs,
        is_active: np.ndarray | None = None,
    ) -> list[ScalarRows]:
        """Upload the inputs of the next :meth:`launch`; otherwise as :meth:`set`.

        A CUDA graph that holds only the launch uses, at each replay, the inputs uploaded last.
        """
        self._select(is_active)
        values: list[Any] = [inputs.coefficient, inputs.grad_scale, inputs.found_inf]
        for number in self._active_groups:
            group = groups[number]
            with naming_group(self._rule, group, number):
                values += (*self._rule.options(group), sign_of(group))
        width = (len(values) - _OF_STEP) // len(self._active_groups)
        # The same Python numbers have the same values; tensors and arrays may have been written to.
        if not all_same(values, self._inputs):
            self._encode(groups, values, width)
            constant = all(isinstance(each, float | int | None) for each in values)
            self._inputs = values if constant else []
        table, _, scalars = self._made or self._make(width - 1)
        if self._first_values is None:
            first = _OF_STEP + self._group_of_counter * width
            self._first_values = np.where(self._counted, first, ~first).astype(np.int64)
        first_values = self._first_values_on_device.of(self._first_values)
        values_table = self._values_on_device.of(self._values)
        self._tables = first_values, values_table, self._counters, table
        return scalars

    def launch(self) -> None:
        """Compute the scalars from the uploaded inputs, and count the step."""
        if self._made is not None:
            with on(self._device):
                self._made[1](*self._tables)

    def count(self, updated: np.ndarray | None = None) -> None:
        """Take back the steps of tensors that were not updated: the device has counted all steps.

        See :class:`torch_bf16.backends.ScalarSource`.
        """
        if updated is None or self._made is None:
            return
        undone = np.ones(len(self._counted), np.float32)
        undone[self._counter_of_tensor[updated]] = 0.0
        # The last column is 1 if a counter was not raised.
        raised = 1.0 - self._made[0][:, -1]
        self._counters.sub_(raised * upload(undone, self._device))

    def _select(self, is_active: np.ndarray | None) -> None:
        """Choose the tensors whose counters are part of the next steps."""
        if is_active is not self._is_active:
            self._is_active = is_active
            of_tensor = self._counter_of_tensor
            counted = of_tensor if is_active is None else of_tensor[is_active]
            self._counted = np.zeros(len(self._counted), bool)
            self._counted[counted] = True
            places = np.unique(self._group_of_counter[self._counted])
            groups = [self._groups[place] for place in places]
            self._first_values = None
            if groups != self._active_groups:
                # The same options may be those of another group, whose values are not in the table.
                self._active_groups, self._inputs = groups, []

    @subnormals_kept_here
    def _encode(
        self, groups: Sequence[Mapping[str, Any]], values: Sequence[Any], width: int
    ) -> None:
        """Build the table of values from the inputs of the step and the options of each group.

        Args:
            groups: the optimizer's parameter groups.
            values: the inputs of the step, then the options of each group that is part of it.
            width: number of options per group, with the sign.

        Raises:
            ValueError: no step can be computed from a group's options.
        """
        self._converted = []
        of_step = zip(values[:_OF_STEP], (1.0, 1.0, 0.0), strict=True)
        encoded = [self._encode_value(value, default) for value, default in of_step]
        options: dict[int, list[tuple[int, float]]] = {}
        for place, number in enumerate(self._active_groups):
            first = _OF_STEP + place * width
            with naming_group(self._rule, groups[number], number):
                options[number] = [*map(self._encode_value, values[first : first + width])]
        for number in self._groups:
            encoded += options.get(number) or [(0, 0.0)] * width
        if encoded == self._encoded:
            return
        if encoded[_OF_STEP:] != self._encoded[_OF_STEP:]:
            for number, rows in options.items():
                if not any(address for address, _ in rows):
                    evaluate(self._rule, groups[number], number, 1)
        self._values, self._encoded = np.array(encoded, _VALUE).view((np.int64, 2)), encoded

    def _encode_value(self, value: Any, default: float = 0.0) -> tuple[int, float]:
        """A row of the values: address and kind of a tensor on the device, or else the number."""
        if value is None:
            return 0, default
        if not isinstance(value, Tensor) or (value.is_cpu and self._device.type != "cpu"):
            return 0, float(value)
        if value.numel() != 1:
            raise ValueError(f"a tensor of {value.numel()} numbers where one number is needed")
        if value.dtype not in _KINDS or value.device != self._device:
            value = value.to(self._device, torch.float64, non_blocking=True)
            self._converted.append(value)
        return value.data_ptr() | _KINDS[value.dtype], 0.0

    def _make(self, n_options: int) -> tuple[Tensor, Callable[..., None], list[ScalarRows]]:
        constants = prepare_constants(self._rule, n_options)
        shape = (len(self._group_of_counter), constants["N_SCALARS"] + 2)
        table = torch.empty(shape, dtype=torch.float32, device=self._device)
        rows = [ScalarRows(None, each, table) for each in self._counters_of_bucket]
        tables = torch.int64, torch.int64, torch.float32, torch.float32
        launch = launcher(prepare, tables, len(table), constants, OPTIONS, self._device)
        self._made = table, launch, rows
        return self._made
