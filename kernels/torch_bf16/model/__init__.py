"""A module becomes bf16, and what that took from its weights is remembered."""
