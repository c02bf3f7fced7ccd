"""`pynccl run`: start ranks, end them together, and request traces and stacks of ranks that hang.

Imports `bootstrap` and what is below it.
"""
