"""What tells users about their training: monitor, description, benchmark, command line."""
