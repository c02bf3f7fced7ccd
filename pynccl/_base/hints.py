"""Hints with pynccl's names for what mpi4py, torch and CuPy call otherwise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_BY_NODE = "split(color), with one color for each node"
_CALL = "__call__: write op()"
_PUT = "pynccl.Communicator.put_signal"
_RECORD = "pynccl.Event().record(stream)"

# Names of mpi4py, torch and CuPy that differ from pynccl's in more than case, underscores and "nccl". Of
# several names for one, the hint tells the first that the class has.
_OTHER_NAMES = {
    "allgatherintotensor": ("all_gather",),
    "alltoallsingle": ("all_to_all",),
    "bcast": ("broadcast",),
    "close": ("destroy",),
    "create": ("split",),
    "cudaevent": ("handle",),
    "cudastream": ("handle",),
    "destroy": ("close",),
    "deviceid": ("device",),
    "done": ("query",),
    "dup": ("split(0)",),
    "execute": (_CALL,),
    "free": ("destroy", "close"),
    "get": ("window(...).peer(rank)", "peer(rank)", "wait"),
    "getfuture": ("__await__: write await work",),
    "getrank": ("rank",),
    "getsize": ("size",),
    "getworldsize": ("size",),
    "group": ("pynccl.group()",),
    "groupend": ("pynccl.group()",),
    "groupstart": ("pynccl.group()",),
    "iscompleted": ("done", "query"),
    "isdone": ("done", "query"),
    "issuccess": ("exception",),
    "launch": (_CALL,),
    "metrics": ("pynccl.metrics()",),
    "newgroup": ("split",),
    "nranks": ("size",),
    "ptr": ("array", "handle"),
    "put": ("put_signal", _PUT),
    "putsignal": (_PUT,),
    "rankid": ("rank",),
    "record": (_RECORD,),
    "recordevent": (_RECORD,),
    "reducescattertensor": ("reduce_scatter",),
    "replay": (_CALL,),
    "result": ("wait",),
    "run": (_CALL,),
    "size": ("sizes",),
    "splitbyhost": (_BY_NODE,),
    "splitbynode": (_BY_NODE,),
    "splittype": (_BY_NODE,),
    "start": (_CALL,),
    "stop": ("destroy",),
    "synchronize": ("wait",),
    "test": ("done", "query"),
    "timeout": ("pynccl.init(timeout=...)",),
    "tomemory": ("array",),
    "wait": ("wait_event", "synchronize, or wait_event of a stream", "__call__: write op(wait=False).wait()"),
    "waitstream": ("wait_event(event), after event.record(stream)",),
    "worldsize": ("size",),
}

# Their names of keywords, likewise.
_OTHER_KEYWORDS = {
    "asyncop": ("wait: async_op=True is wait=False",),
    "comm": ("method",),
    "dest": ("peer", "root"),
    "dst": ("peer", "root"),
    "func": ("fn",),
    "gatherlist": ("recv, one array for the parts of all ranks",),
    "deviceid": ("device",),
    "initmethod": ("method",),
    "input": ("send",),
    "inputlist": ("send, one array for the parts of all ranks",),
    "inputtensorlist": ("send, one array for the parts of all ranks",),
    "inputtensor": ("send",),
    "localrank": ("device",),
    "ndev": ("devices",),
    "nprocs": ("nranks", "world_size"),
    "nranks": ("world_size",),
    "out": ("recv",),
    "output": ("recv",),
    "outputlist": ("recv, one array for the parts of all ranks",),
    "outputtensorlist": ("recv, one array for the parts of all ranks",),
    "outputtensor": ("recv",),
    "ranks": ("exclude, the ranks to leave out", "color: ranks with the same color form a communicator"),
    "recvbuf": ("recv", "buf"),
    "reduceop": ("op",),
    "scatterlist": ("send, one array for the parts of all ranks",),
    "sendbuf": ("send", "buf"),
    "size": ("nranks", "world_size"),
    "source": ("peer", "root"),
    "src": ("peer", "root"),
    "target": ("fn",),
    "tensor": ("send", "buf"),
    "tensorlist": ("recv, one array for the parts of all ranks",),
    "timeout": ("pynccl.init(timeout=...)",),
    "url": ("method",),
    "worldsize": ("nranks",),
}
# What there is instead of keywords that no method has.
_INSTEAD = {
    "backend": "PYNCCL_LIBRARY selects NCCL or the CPU library",
    "group": "each group of ranks has a communicator of its own: Communicator.split",
    "tag": "NCCL has no tags: messages between two ranks arrive in the order of their sends",
}
_UNEXPECTED = re.compile(r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'( .*)?")

# Calls of a communicator run in order, so a receive that waits also keeps a later send waiting.
_TOGETHER = ", or `with pynccl.group():` for sends and receives that wait for each other"


def meant(owner: type, name: str) -> str | None:
    """Return pynccl's name for what another library calls so, if the class has it."""
    # Libraries ask every object for protocols such as __cuda_array_interface__.
    if name.startswith("__"):
        return None
    plain = name.replace("_", "").lower().removeprefix("nccl")
    has = {*dir(owner), "pynccl"}
    ours = _ours(plain, has, _OTHER_NAMES)
    if ours or not plain.startswith("i"):
        return ours
    ours = _ours(plain[1:], has, _OTHER_NAMES)
    together = _TOGETHER if plain in ("isend", "irecv") else ""
    return f"{ours}(..., wait=False){together}" if ours else None


def _ours(plain: str, has: set[str], known: Mapping[str, Sequence[str]]) -> str | None:
    """Return the one of a class's names that a name in lower case and without underscores means."""
    same = (ours for ours in has if not ours.startswith("_") and ours.replace("_", "") == plain)
    others = (ours for ours in known.get(plain, ()) if _first(ours) in has)
    return next(chain(same, others), None)


def _first(name: str) -> str:
    """Return "split" for "split(0)", and "pynccl" for "pynccl.group()"."""
    return re.split(r"\W", name, maxsplit=1)[0]


def add_hint(error: BaseException | None, owner: type) -> str:
    """Add a hint to Python's error for a keyword that a method of a class does not have; return it."""
    found = _UNEXPECTED.fullmatch(str(error))
    if error is None or found is None or found[1] != owner.__name__:
        return ""
    hint = _about_keyword(found[3], inspect.signature(getattr(owner, found[2])).parameters)
    if not hint:
        return ""
    error.args = (f"{error}; {hint}",)
    return f"{found[2]}({found[3]}=...): {hint}"


def _about_keyword(name: str, has: Iterable[str]) -> str:
    """Return the hint for a keyword that a function with these parameters does not have, or ""."""
    plain = name.replace("_", "").lower()
    ours = _ours(plain, {*has, "pynccl"}, _OTHER_KEYWORDS)
    return f"pynccl's name is {ours}" if ours else _INSTEAD.get(plain, "")


def hints_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise an error with a hint for a keyword that it does not have."""
    has = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - has.keys():
            hint = _about_keyword(name, has)
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint and f'; {hint}'}"
            )
        return function(*args, **kwargs)

    return call
