"""The supervision of a communicator: control channel, watchdog, check mode, and agreement.

Knows a communicator only as its C struct. Imported by `_comm`, `_run`, `_tools`, `bootstrap`, `pynccl`,
`torch`.
"""
