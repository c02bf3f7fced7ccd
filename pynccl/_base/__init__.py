"""What needs no other part of pynccl: checks of arguments, time-outs, hints, this host, forks, installation.

Also the command line's options and colours, and the version. Imports nothing of the package and no NumPy, for
`pynccl run` starts with it. Imported by every room above it.
"""
