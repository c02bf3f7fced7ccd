"""What watches a communicator: the ranks' control channel, the watchdog, check mode, and agreement.

Imports `_device`, `_secure`, `_trace` and what is below them. Knows a communicator only as its C struct.
"""
