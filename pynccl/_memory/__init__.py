"""Memory from NCCL and its registration with communicators.

Imports `_arrays`, `_device` and what is below them. A communicator is an `Owner` here.
"""
