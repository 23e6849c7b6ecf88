"""Running compiled Triton kernels without a GPU: their PTX, instruction by instruction, in NumPy.

All threads of some programs run in step, each a lane of NumPy's arrays. Where lanes part, those
that are behind run first, so that they meet again. An error is what a GPU would not tell, or not so
early: an access that is not aligned or outside of what was passed, a barrier that not all threads
of a program reach, a word of shared memory that two warps use without a barrier in between, a
register that was never written.
"""

import functools
import gc
import re

import numpy as np
import torch

from torch_bf16.memory import without_gaps

from .arithmetic import TYPES, U32, U64, compute, rcp, rsqrt
from .memory import Global, Shared
from .program import Program
from .registers import Registers

# Programs that run at once: their lanes' registers fit a processor's cache.
_AT_ONCE = 48


def install(architecture):
    """Let this process's Triton backend run its kernels on CPU tensors, as compiled for a GPU.

    Args:
        architecture: 90 for sm_90.
    """
    from launchless import Driver
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    from torch_bf16.backends.triton import TritonBackend

    def init_handles(kernel):
        own(kernel)
        kernel._run = functools.partial(_launch, kernel)

    own, CompiledKernel._init_handles = CompiledKernel._init_handles, init_handles
    driver._active = Driver(notes=False, architecture=architecture)
    TritonBackend.unavailable = lambda backend, device: None
    # Each launch looks for tensors through all objects that are not frozen.
    gc.collect()
    gc.freeze()


def _launch(kernel, grid, _y, _z, _stream, _function, _packed, _metadata, _enter, _exit, *given):
    """What Triton calls to launch a kernel, with the arguments that it hands to a driver."""
    program = _program(kernel.asm["ptx"])
    addresses = [each.data_ptr() for each in given if isinstance(each, torch.Tensor)]
    known = dict(zip(program.parameters, map(U64, addresses), strict=False))
    threads, n_bytes = 32 * kernel.metadata.num_warps, kernel.metadata.shared
    # Kernels find addresses in tables, too.
    alive = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    memory = Global(
        [each for each in alive if each.device.type == "cpu" and without_gaps(each)], threads
    )
    for first in range(0, grid, _AT_ONCE):
        programs = range(first, min(grid, first + _AT_ONCE))
        Lanes(program, programs, threads, known, memory, n_bytes).run()


_program = functools.cache(Program.of_kernel)


class Lanes:
    """The threads of some programs.

    Args:
        program: what they run.
        programs: their numbers.
        threads: of one program.
        known: values of symbols.
        memory: that all see.
        n_bytes: of shared memory for one program.
    """

    def __init__(self, program, programs, threads, known, memory, n_bytes):
        self._instructions, self._memory = program.instructions, memory
        self._n, self._threads = len(programs) * threads, threads
        self._shared = Shared(programs, n_bytes, threads)
        # Of the lanes, in the launch.
        self._numbers = np.arange(self._n) + programs[0] * threads
        self._known = {
            "global_smem": U32(0),
            "%tid.x": (self._numbers % threads).astype(U32),
            "%ctaid.x": (self._numbers // threads).astype(U32),
            **known,
        }
        approximations = {"rcp": rcp, "rsqrt": rsqrt}
        self._registers = Registers(self._n, self._known, approximations)

    def run(self):
        """Until all have returned."""
        waiting = {0: np.ones(self._n, bool)}
        with np.errstate(all="ignore"):
            while waiting:
                at = min(waiting)
                self._go(at, waiting.pop(at), waiting)

    def _go(self, at, active, waiting):
        """Run some lanes until they part, return, or meet lanes that wait for them."""
        while True:
            if at in waiting:
                active = active | waiting.pop(at)
            each = self._instructions[at]
            taking = active
            if each.guard:
                taking = active & (self._registers.value(each.guard, bool) ^ each.negated)
            if each.name.startswith("bra"):
                for place, lanes in ((each.target, taking), (at + 1, active & ~taking)):
                    if lanes.any():
                        waiting[place] = waiting.get(place, False) | lanes
                return
            if each.name == "ret":
                if (active & ~taking).any():
                    waiting[at + 1] = active & ~taking
                return
            if taking.any():
                self._execute(each, taking)
            at += 1

    def _execute(self, each, lanes):
        operation, *rest = each.name.split(".")
        if operation in ("ld", "st", "atom", "red"):
            self._access(operation, rest, each.operands, lanes)
        elif operation == "bar":
            assert (each.name, each.operands) == ("bar.sync", ("0",)), each
            reached = lanes.reshape(-1, self._threads)
            assert (reached.all(1) == reached.any(1)).all(), "a barrier that some threads miss"
            self._shared.barrier(reached.any(1))
        elif operation in ("shfl", "redux"):
            self._between_lanes(each, lanes)
        else:
            self._registers.compute(each, lanes)

    def _value(self, text, kind):
        """An operand of every lane."""
        return np.broadcast_to(self._registers.value(text, kind), self._n)

    def _access(self, operation, rest, operands, lanes):
        """Load, store, or add atomically."""
        size = np.dtype(TYPES[rest[-1]]).itemsize
        (place,) = [each for each in operands if each.startswith("[")]
        base, _, offset = place.strip("[] ").replace(" ", "").partition("+")
        if "param" in rest:
            self._registers.write(operands[0], self._known[base], lanes)
            return
        shared = "shared" in rest
        memory, address = (self._shared, U32) if shared else (self._memory, U64)
        who, where = self._numbers[lanes], self._value(base, address)[lanes]
        where = where + address(int(offset or 0))
        if operation in ("atom", "red"):
            assert "add" in rest, rest
            assert rest[-1] in ("u32", "s32", "u64"), rest
            # Nothing asks what was there before, so the register stays unwritten.
            memory.add(who, where, self._value(operands[-1], f"u{size}")[lanes])
            return
        names = re.findall(r"[^{},\s]+", next(each for each in operands if each != place))
        if operation == "st":
            values = [self._value(name, f"u{size}")[lanes] for name in names]
            memory.store(who, where, values)
            return
        loaded = memory.load(who, where, size, len(names))
        for name, each in zip(names, loaded, strict=True):
            found = np.zeros(self._n, f"u{size}")
            found[lanes] = each
            self._registers.write(name, found, lanes)

    def _between_lanes(self, each, lanes):
        warps = lanes.reshape(-1, 32)
        assert (warps.all(1) == warps.any(1)).all(), f"{each.name} in a part of a warp"
        to, source, *more, mask = each.operands
        assert (self._value(mask, np.int32)[lanes] == -1).all(), "lanes are left out"
        if each.name == "shfl.sync.bfly.b32":
            distance, limits = more
            assert limits == "31", each
            numbers = self._value(source, U32)
            self._registers.write(to, numbers[np.arange(self._n) ^ int(distance)], lanes)
            return
        # Triton 3.9 adds with it, too.
        assert re.fullmatch(r"redux\.sync\.(max\.[suf]32|add\.[su]32)", each.name), each
        name = each.name.removeprefix("redux.sync.")
        numbers = self._value(source, TYPES[name.rpartition(".")[2]]).reshape(-1, 32).T
        total = functools.reduce(lambda a, b: compute(name, [a, b], {}), numbers)
        self._registers.write(to, np.repeat(total, 32), lanes)
