"""Arrays of all kinds: the place of their memory, their count and datatype, and the creation of new ones.

Knows nothing of communicators. Imported by every room above it.
"""
