"""Hints with pynccl's names for what mpi4py, torch and CuPy call otherwise."""

from __future__ import annotations

# Names of mpi4py, torch and CuPy that differ from pynccl's in more than case and underscores.
_OTHER_NAMES = {
    "allgatherintotensor": "all_gather",
    "alltoallsingle": "all_to_all",
    "bcast": "broadcast",
    "close": "destroy",
    "create": "split",
    "deviceid": "device",
    "dup": "split(0)",
    "free": "destroy",
    "getrank": "rank",
    "getsize": "size",
    "getworldsize": "size",
    "newgroup": "split",
    "nranks": "size",
    "rankid": "rank",
    "reducescattertensor": "reduce_scatter",
    "worldsize": "size",
}


def no_attribute(owner: object, name: str) -> AttributeError:
    """Return the error for a name that a class does not have, with the name that it has instead."""
    plain = name.replace("_", "").lower()
    public = {ours for ours in dir(type(owner)) if not ours.startswith("_")}
    known = {other: ours for other, ours in _OTHER_NAMES.items() if ours.partition("(")[0] in public}
    known |= {ours.replace("_", ""): ours for ours in public}
    meant = known.get(plain)
    if meant is None and plain.startswith("i") and plain[1:] in known:
        meant = f"{known[plain[1:]]}(..., wait=False)"
    hint = f"; pynccl's name is {meant}" if meant else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{hint}")
