"""Scripts and notebooks are forked from a process that has imported the hosts."""

from forkserver import IMPORTS

IMPORTS += [
    "accelerate",
    "lightning",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]
