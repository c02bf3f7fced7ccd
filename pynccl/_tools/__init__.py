"""Tools that people run: the subcommands of `pynccl` beside `run` and `ras`.

They use pynccl's public interface. Imported by `__main__` alone, which finds them by name.
"""
