"""The communicator: its core, operations, groups, prepared calls, derived communicators, and its end.

Imports every package below; `bootstrap`, `_run`, `mpi`, `compat` and `torch` import it.
"""
