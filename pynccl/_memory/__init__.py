"""Memory from NCCL, its registration with communicators, windows, and memory pools of CuPy and torch.

A communicator is an `Owner` here. Imported by every room above it.
"""
