"""`pynccl run`: start ranks, end them together, and request traces and stacks of ranks that hang.

Imported by `__main__`, `_tools`, `pynccl`, `testing`.
"""
