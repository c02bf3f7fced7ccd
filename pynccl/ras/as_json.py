"""The JSON answer of NCCL 2.28.7 and later."""

from __future__ import annotations

import json
import re
from typing import Any

from pynccl.ras.report import Communicator, Damaged, MissingRank, Rank, Status, judge, lags

# NCCL 2.28.7 and 2.28.9 write no comma before the status of a missing rank.
_NO_COMMA = re.compile(r'("nvml_dev"\s*:\s*-?\d+)(\s*"status")')
_MOST_TEXT = 4096


def read(text: str, address: str) -> Status:
    """Return the state; Damaged if the text is no such answer."""
    try:
        try:
            root = json.loads(text)
        except ValueError:
            root = json.loads(_NO_COMMA.sub(r"\1,\2", text))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"it is not JSON: {error}") from None
    answer = _object(root, "the answer")
    ras = _object(answer.get("ras", {}), "ras")
    communicators = tuple(_communicator(one) for one in _list(answer.get("communicators"), "communicators"))
    seconds = ras.get("collection_time_sec")
    return Status(
        address=address,
        format="json",
        nccl_version=_text(answer, "nccl_version"),
        communicators=communicators,
        communicator_count=len(communicators),
        cuda_runtime_version=_number(answer, "cuda_runtime_version", least=1),
        cuda_driver_version=_number(answer, "cuda_driver_version", least=1),
        timestamp=_text(answer, "timestamp"),
        collection_seconds=float(seconds) if isinstance(seconds, int | float) else None,
        timeouts=_number(ras, "timeouts_count"),
        raw=text,
    )


def _communicator(value: Any) -> Communicator:
    fields = _object(value, "a communicator")
    ranks = tuple(_rank(one) for one in _list(fields.get("ranks"), "ranks"))
    missing = tuple(_missing(one) for one in _list(fields.get("missing_ranks", []), "missing_ranks"))
    status, errors = judge(ranks, missing)
    return Communicator(
        hash=_text(fields, "hash") or "",
        secondary_hash=_text(fields, "secondary_hash"),
        size=_number(fields, "size"),
        status=status,
        errors=errors,
        ranks=ranks,
        missing=missing,
        lagging=lags(ranks),
    )


def _place(fields: dict[str, Any]) -> dict[str, Any]:
    rank, host = _number(fields, "rank"), _text(fields, "host")
    if rank is None:
        raise Damaged("a rank has no number")
    return {
        "rank": rank,
        "host": None if host == "unknown" else host,
        "pid": _number(fields, "pid"),
        "device": _number(fields, "cuda_dev"),
        "nvml_device": _number(fields, "nvml_dev"),
    }


def _rank(value: Any) -> Rank:
    fields = _object(value, "a rank")
    status = _object(fields.get("status", {}), "status")
    counts = _object(fields.get("collective_counts", {}), "collective_counts")
    init_state = _number(status, "init_state")
    return Rank(
        **_place(fields),
        state=_state(status, init_state),
        init_state=init_state,
        async_error=_number(status, "async_error"),
        counts={name: _number(counts, name) or 0 for name in counts},
    )


def _state(status: dict[str, Any], init_state: int | None) -> str | None:
    if status.get("abort_flag") is True:
        return "ABORT"
    if status.get("finalize_called") is True or status.get("destroy_flag") is True:
        return "FINALIZE"
    if init_state is None:
        return None
    return "RUNNING" if init_state == 0 else "INIT"


def _missing(value: Any) -> MissingRank:
    fields = _object(value, "a missing rank")
    status = _object(fields.get("status", {}), "status")
    flags = [status.get(name) for name in ("unresponsive", "considered_dead")]
    unresponsive, dead = (flag if isinstance(flag, bool) else None for flag in flags)
    return MissingRank(**_place(fields), unresponsive=unresponsive, dead=dead)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Damaged(f"{name} is not an object")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Damaged(f"{name} is not a list")
    return value


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return value[:_MOST_TEXT] if isinstance(value, str) else None


def _number(fields: dict[str, Any], name: str, least: int = 0) -> int | None:
    """Return a number; NCCL writes -1 where it knows none."""
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None
