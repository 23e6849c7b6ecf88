"""What a rank holds of a parameter: the only room that knows how others shard."""
