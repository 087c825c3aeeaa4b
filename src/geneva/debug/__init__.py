"""Finding out what went wrong."""
