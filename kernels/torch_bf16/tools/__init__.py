"""Tools that tell users about their training: monitor, description, benchmark, command line."""
