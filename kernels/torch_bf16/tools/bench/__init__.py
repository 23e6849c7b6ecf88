"""``python -m torch_bf16 bench``: optimizer steps beside those of torch and other libraries."""
