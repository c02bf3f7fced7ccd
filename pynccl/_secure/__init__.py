"""The shared secret, and the handshake by which two connected processes trust each other.

Imports only the base modules. The store and the control channel use it.
"""
