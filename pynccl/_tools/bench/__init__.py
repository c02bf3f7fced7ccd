"""`pynccl bench`: the programs of nccl-tests, with their flags, their output and their JSON.

command reads the flags, ranks opens the communicators, measure times one size, report writes the lines.
Imported by no other room.
"""
