"""The flight recorder: settings and dumps of a rank (`recorder`), and the analysis by `pynccl trace`.

Imports `_library` and the base modules. Every package above records through it.
"""
