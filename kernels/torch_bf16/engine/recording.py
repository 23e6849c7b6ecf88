"""A step as a CUDA graph whose tables the host can update between replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from torch_bf16.backends import CapturableSource, StepInputs, cuda_graphs

from .guard import StepGradients
from .launches import Active
from .statistics import Statistics

__all__ = ["Recording"]


class Recording:
    """The launches of a step, in one graph per device, with everything that they read.

    A graph holds only launches: before each replay, tables that have changed are copied to the
    device, so that hyperparameters are the current ones.

    Args:
        active: the work of the step, on capturable backends.
        gradients: the gradients of the step.
        groups: the optimizer's parameter groups; only hyperparameters are read.
        statistics: the sums that rules need before they update, over this rank only.

    Raises:
        RuntimeError: kernels cannot read a gradient in place.
        ValueError: a group's options are invalid.
    """

    def __init__(
        self,
        active: Active,
        gradients: StepGradients,
        groups: Sequence[Mapping[str, Any]],
        statistics: Statistics,
    ) -> None:
        readable = all(launch.reads_in_place for launch in active.launches)
        if gradients.addresses is None or not readable:
            raise RuntimeError(
                "a gradient lies in another order of memory than its parameter, is negated when "
                "it is read, or is not a plain tensor on this rank, so that each step must copy "
                "it. Give it the parameter's strides, or take ordinary steps"
            )
        self._statistics = statistics
        self._launches = {*active.launches}
        self._sources = [
            (launches, cast(CapturableSource, source), is_active)
            for launches, source, is_active in active.sources
        ]
        # Separate tensors over the same memory: if the user moves one by .data, the memory that
        # the graph reads must not be freed.
        self._gradients = [g if g is None else g.detach() for g in gradients.tensors]
        self._addresses: np.ndarray = gradients.addresses
        self._bring(groups, StepInputs())
        devices = {launch.batch.variant.device for launch in active.launches}
        self._graphs = [cuda_graphs.record(partial(self._launch, d), d) for d in devices]

    def reads(self, gradients: StepGradients) -> bool:
        """Whether these gradients are where the graph reads them."""
        return gradients.addresses is not None and np.array_equal(
            gradients.addresses, self._addresses
        )

    def replay(self, groups: Sequence[Mapping[str, Any]], inputs: StepInputs) -> None:
        """Take a step.

        Args:
            groups: the optimizer's parameter groups; only hyperparameters are read.
            inputs: inputs of this step.

        Raises:
            ValueError: a group's options are invalid; nothing has been updated.
        """
        self._bring(groups, inputs)
        for graph in self._graphs:
            graph()

    def _bring(self, groups: Sequence[Mapping[str, Any]], inputs: StepInputs) -> None:
        for launches, source, is_active in self._sources:
            rows = source.bring(groups, inputs, is_active)
            for launch, scalars in zip(launches, rows, strict=True):
                if launch in self._launches:
                    launch.batch.bring(self._gradients, scalars, launch.addresses(self._addresses))

    def _launch(self, device: torch.device) -> None:
        for launches, source, _ in self._sources:
            if launches[0].batch.variant.device == device:
                source.launch()
                active = [launch for launch in launches if launch in self._launches]
                if launches[0].has_statistic:
                    # The spans of a tensor have one rule, and so one source.
                    self._statistics.clear(device)
                    for launch in active:
                        launch.batch.launch_measure()
                for launch in active:
                    launch.batch.launch()
