"""Call every function of pynccl.capi on the null library given and print, as JSON, what came of it.

Each argument has a value of its own, wide enough to show a lost half.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import sys
from typing import Any

from pynccl import NcclError, capi, load

LISTS: dict[str, Any] = {
    "commIds": [bytes([1] * 128), bytes([2] * 128)],
    "devlist": [4, 5, 6],
    "excludeRanksList": [7, 8, 9],
    "lateRanks": [7, 8, 9],
    "why": "it is late",
    "signalDescs": [(1, 2, 3, 4), (5, 6, 7, 8)],
    "commId": bytes(range(128)),
    "uniqueId": bytes(range(128)),
    "config": None,
    "simInfo": None,
    "key": "NCCL_KEY",
    "collective": "ncclAllReduce",
    "nId": 2,
    "ndev": 3,
    "excludeRanksCount": 3,
    "lateRanksCount": 3,
    "nDesc": 2,
    "maxLen": 16,
    **dict.fromkeys(("team", "peers", "cftTeam"), capi.Team(5, 6, 7)),
    "reqs": None,
    "resources": (),
    "teams": (),
    "devComm": capi.DevComm(None),
}
INTS = frozenset(
    (
        *(
            "nranks",
            "rank",
            "myrank",
            "nRanks",
            "root",
            "peer",
            "color",
            "device",
            "stat",
            "residence",
            "result",
        ),
        *("revokeFlags", "shrinkFlags", "winFlags", "flags", "sigIdx", "ctx", "datatype", "op"),
        *(
            "index",
            "thread",
            "limited",
            "on",
            "purpose",
            "lsaRank",
            "mode",
            "peerCft",
            "peerWorld",
            "maxElts",
            "maxEltSize",
            "descriptor",
        ),
        *("nBarriers", "nBlocks", "nSlots", "size_log2"),
    )
)


def arguments(name: str) -> dict[str, Any]:
    """Return one argument for each parameter: pointers and sizes above 32 bits, the rank negative."""
    values: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(getattr(capi, name)).parameters):
        if parameter in LISTS and not (parameter == "key" and name == "ncclCommSplit"):
            values[parameter] = LISTS[parameter]
        elif parameter in INTS or parameter == "key":
            values[parameter] = 3 + index if parameter != "rank" else -3
        else:
            values[parameter] = 0x7ABC00000000 + index
    return values


def call(name: str) -> dict[str, Any]:
    """Call one function and say what it returned or raised."""
    given = arguments(name)
    try:
        value = getattr(capi, name)(**given)
    except NcclError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "result": error.result,
            "function": error.function,
            "detail": error.detail,
        }
    given = {n: v.ptr if isinstance(v, capi.DevComm) else v for n, v in given.items()}
    shown = value.hex() if isinstance(value, bytes) else value
    if isinstance(value, capi.DevComm):
        shown = ctypes.string_at(value.ptr).decode()
    elif isinstance(value, capi.Requirement):
        shown = [value.size, *value.handle.values()]
    return {"given": given, "value": shown if isinstance(shown, int | str | list | None) else repr(shown)}


def main(path: str, result: int) -> None:
    load(path)
    library = ctypes.CDLL(path)
    if hasattr(library, "null_log"):
        library.null_log.restype = ctypes.c_char_p
        library.null_result(result, b"the cause")
    answers = {}
    for name in (*capi.FUNCTIONS, *capi.CPU_FUNCTIONS):
        answers[name] = call(name)
        if hasattr(library, "null_log"):
            answers[name]["log"] = library.null_log().decode()
    print(json.dumps(answers, default=lambda data: data.hex()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
