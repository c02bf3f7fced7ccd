"""`pynccl run`: start ranks, end them together, and ask for their traces and stacks when they hang.

Imports `bootstrap` and what is below it.
"""
