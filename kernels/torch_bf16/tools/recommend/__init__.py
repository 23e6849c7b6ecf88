"""``python -m torch_bf16 recommend``: which recipe loses nothing of a user's own training."""
