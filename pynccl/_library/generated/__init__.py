"""What tools/generate_api.py derives: constants, tables, and a Python function for each C function.

Its sources are api/*.h and native/kinds.h. Imported by the rest of `_library` and by every room above it.
"""
