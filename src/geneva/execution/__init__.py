"""Carrying a plan out: the driver, the runners, and the one function that is shipped."""
