"""Calling a function on a batch and checking what it returned."""
