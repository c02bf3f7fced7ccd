"""Hints with pynccl's names for what mpi4py, torch and CuPy call otherwise."""

from __future__ import annotations

_BY_NODE = "split(color), with one color for each node"

# Names of mpi4py, torch and CuPy that differ from pynccl's in more than case, underscores and "nccl".
_OTHER_NAMES = {
    "allgatherintotensor": "all_gather",
    "alltoallsingle": "all_to_all",
    "bcast": "broadcast",
    "close": "destroy",
    "create": "split",
    "deviceid": "device",
    "dup": "split(0)",
    "free": "destroy",
    "get": "window(...).peer(rank)",
    "getrank": "rank",
    "getsize": "size",
    "getworldsize": "size",
    "group": "pynccl.group()",
    "groupend": "pynccl.group()",
    "groupstart": "pynccl.group()",
    "newgroup": "split",
    "iscompleted": "done",
    "nranks": "size",
    "put": "put_signal",
    "rankid": "rank",
    "reducescattertensor": "reduce_scatter",
    "result": "wait",
    "splitbyhost": _BY_NODE,
    "splitbynode": _BY_NODE,
    "splittype": _BY_NODE,
    "stop": "destroy",
    "test": "done",
    "worldsize": "size",
}


# Calls of a communicator run in order, so a receive that waits also keeps a later send waiting.
_TOGETHER = ", or `with pynccl.group():` for sends and receives that wait for each other"


def meant(owner: type, name: str) -> str | None:
    """Return pynccl's name for what another library calls so, if the class has it."""
    plain = name.replace("_", "").lower().removeprefix("nccl")
    public = {ours for ours in dir(owner) if not ours.startswith("_")}
    known = {other: ours for other, ours in _OTHER_NAMES.items() if _first(ours) in public | {"pynccl"}}
    known |= {ours.replace("_", ""): ours for ours in public}
    if plain in known or not plain.startswith("i") or plain[1:] not in known:
        return known.get(plain)
    together = _TOGETHER if plain in ("isend", "irecv") else ""
    return f"{known[plain[1:]]}(..., wait=False){together}"


def _first(name: str) -> str:
    """Return "split" for "split(0)", and "pynccl" for "pynccl.group()"."""
    return name.partition("(")[0].partition(".")[0]


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for a name that a class does not have, with the name that it has instead."""
    ours = meant(type(owner), name)
    hint = f"; pynccl's name is {ours}" if ours else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}")
