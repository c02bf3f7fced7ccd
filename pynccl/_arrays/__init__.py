"""Arrays of all kinds: the place of their memory, their count and datatype, and the creation of new ones.

Imports `_library` and `_types`. Knows nothing of communicators.
"""
