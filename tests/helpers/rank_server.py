"""The process that forks the ranks of `pynccl.testing.run`, and has imported what they need."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection


def serve(connection: Connection, modules: list[str]) -> tuple[str, list[str]] | None:
    """Answer until the connection is closed: None. In a fork return at once, with its code and arguments."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # What is imported is not collected again in each fork, which would copy all of it.
    gc.collect()
    gc.freeze()
    while True:
        try:
            what, *args = connection.recv()
        except EOFError:
            return None
        if what == "fork":
            code, arguments, env, folder = args
            if os.fork() == 0:
                os.setsid()
                connection.send(os.getpid())
                connection.close()
                os.chdir(folder)
                os.environ.clear()
                os.environ.update(env)
                # The ranks' parent is this server.
                return code, [str(os.getppid()), *arguments[1:]]
        else:
            connection.send(_exit_code(*args))


def _exit_code(pid: int, reap: bool) -> int | None:
    """Return that of a fork; without `reap` it stays a zombie, so that its process group keeps its number."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | (0 if reap else os.WNOWAIT | os.WNOHANG))
    except ChildProcessError:
        # A fork of an earlier server, which a failing test has closed; its forks are killed.
        return -signal.SIGKILL
    if state is None:
        return None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def main() -> None:
    """Be the server; or, as one of its forks, run a program as `python -c` does."""
    program = serve(Connection(int(sys.argv[1])), sys.argv[2:])
    if program is not None:
        code, arguments = program
        sys.argv = ["-c", *arguments]
        status = 0
        try:
            exec(code, {"__name__": "__main__"})
        except SystemExit as end:
            status = int(end.code or 0)
        _leave(status)


def _leave(status: int) -> None:
    """End as the interpreter does, but leave the modules as they are: clearing them copies their memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    # Calls the exit functions and destructors of C and C++, and keeps the GIL.
    ctypes.PyDLL(None).exit(status)
