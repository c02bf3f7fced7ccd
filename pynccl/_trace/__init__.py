"""The flight recorder: settings and dumps of a rank (`recorder`), and what `pynccl trace` finds in all dumps.

Imports `_library` and the base modules. Every room above records through it.
"""
