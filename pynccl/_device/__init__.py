"""Devices and streams of CUDA and of the CPU library, and how to wait for them so that Ctrl-C still works.

Imports `_trace`, `capi` and what is below them. Knows nothing of communicators.
"""
