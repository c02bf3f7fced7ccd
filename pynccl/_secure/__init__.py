"""The shared secret, and the handshake that authenticates two connected processes.

Imports only the base modules. The store and the control channel use it.
"""
