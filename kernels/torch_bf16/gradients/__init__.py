"""What happens to gradients before the step: sums, norms, release, reduction."""
