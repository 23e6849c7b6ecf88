"""Running the straight PTX of ``backends/triton/ieee.py`` for many numbers at once."""

import numpy as np

from .arithmetic import F32
from .program import Program
from .registers import Registers


def run(text, inputs, approximations):
    """(each output, whether the branch past the exact instructions is taken).

    Args:
        text: the instructions; of the eight numbers all are computed.
        inputs: eight fp32 arrays for each argument.
        approximations: a function for ``rcp`` and one for ``rsqrt``.
    """
    everywhere = np.ones(len(inputs[0]), bool)
    registers = Registers(len(everywhere), {}, approximations)
    for number, each in enumerate(inputs, 8):
        registers.write(f"${number}", each, everywhere)
    with np.errstate(all="ignore"):
        for each in Program.of_inline(text).instructions:
            if each.name == "bra":
                outputs = [registers.value(f"${number}", F32) for number in range(8)]
                return outputs, registers.value(each.guard, bool)
            registers.compute(each, everywhere)
    raise AssertionError("there is no branch")
