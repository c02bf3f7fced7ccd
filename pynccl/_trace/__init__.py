"""The flight recorder: settings and dumps of a rank (`recorder`), and the analysis by `pynccl trace`.

Imported by every room above it.
"""
