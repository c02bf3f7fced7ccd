"""Devices and streams of CUDA and of the CPU library, and waits for them that Ctrl-C can interrupt.

Imports `_trace`, `capi` and what is below them. Knows nothing of communicators.
"""
