"""The communicator: its core, operations, groups and prepared calls, what is derived from it, and its end.

Imports every room below; `bootstrap`, `_run`, `mpi`, `compat` and `torch` import it.
"""
