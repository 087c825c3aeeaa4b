"""Functions of the user: declaring them, calling them, their inputs, types and policy."""
