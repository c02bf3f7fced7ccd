"""The shared secret, and the handshake that authenticates two connected processes.

The store, the control channel and the tools' connections use it.
Imported by `_run`, `_tools`, `_watch`, `bootstrap`.
"""
