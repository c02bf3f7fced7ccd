"""The supervision of a communicator: control channel, watchdog, check mode, and agreement.

Imports `_device`, `_secure`, `_trace` and what is below them. Knows a communicator only as its C struct.
"""
