"""PTX, which Triton hands to NVIDIA's assembler, run without a GPU."""
