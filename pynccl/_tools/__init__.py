"""Tools that people run: the subcommands of `pynccl` beside `run` and `ras`.

They use pynccl's public interface; only `__main__` imports them, when the subcommand is called.
"""
