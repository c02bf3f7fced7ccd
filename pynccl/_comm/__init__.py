"""The communicator: its core, operations, groups, prepared calls, derived communicators, and its end.

Imported by every room above it.
"""
