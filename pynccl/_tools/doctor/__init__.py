"""`pynccl doctor`: checks of a machine and of a job, each a function that yields findings.

Themes: libraries, devices, network, limits, environment, transports; job has what ranks compare. command runs
them and report prints. Imported by no other room.
"""
