"""Preparing and running one computation, or a chain of them."""
