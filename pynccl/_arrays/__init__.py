"""Arrays of all kinds: where their memory is, how many elements of which datatype, and how to make a new one.

Imports `_library` and `_types`. Knows nothing of communicators.
"""
