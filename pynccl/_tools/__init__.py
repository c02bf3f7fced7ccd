"""Tools that people run: the subcommands of `pynccl` beside `run` and `ras`.

They use pynccl's public interface. Imported by no other room: `__main__` finds a subcommand's module by name.
"""
