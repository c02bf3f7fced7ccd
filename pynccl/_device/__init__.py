"""Devices and streams of CUDA and of the CPU library, and waits for them that Ctrl-C can interrupt.

Knows nothing of communicators. Imported by every room above it.
"""
