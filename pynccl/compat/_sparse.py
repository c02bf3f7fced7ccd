"""Sparse matrices between ranks: first the sizes, then the three arrays of each matrix.

A matrix is anything with the attributes of SciPy's and CuPy's csr, csc and coo classes. Where its arrays are
NumPy's, so are the received ones.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import pynccl
from pynccl import Communicator
from pynccl._base.values import shown
from pynccl._device.streams import handle_of

_PARTS = {
    "csr": ("data", "indices", "indptr"),
    "csc": ("data", "indices", "indptr"),
    "coo": ("data", "row", "col"),
}
_FORMATS = list(_PARTS)
_OPS = {"sum": operator.add, "prod": operator.mul}
# Rows, columns, format; then size and dtype of each of the three arrays.
_HEADER = 9


def is_sparse(value: Any) -> bool:
    """Tell whether this is a sparse matrix, or a list of them."""
    if isinstance(value, list | tuple):
        return bool(value) and is_sparse(value[0])
    return hasattr(value, "format") and hasattr(value, "nnz")


def _parts(matrix: Any, name: str) -> list[Any]:
    kind = getattr(matrix, "format", None)
    if kind not in _PARTS or len(matrix.shape) != 2:
        raise TypeError(
            f"{name} is {type(matrix).__name__} of format {kind!r}; expected a matrix in csr, csc or coo"
        )
    return [getattr(matrix, part) for part in _PARTS[kind]]


def _module(matrix: Any) -> Any:
    """Return the library of a matrix's arrays."""
    return sys.modules[type(matrix.data).__module__.partition(".")[0]]


def _header(matrix: Any, parts: Sequence[Any]) -> Any:
    of_parts = [number for part in parts for number in (part.size, ord(part.dtype.char))]
    return np.array([*matrix.shape, _FORMATS.index(matrix.format), *of_parts], np.int64)


def _host(array: Any) -> list[int]:
    return [int(number) for number in (array.get() if hasattr(array, "get") else array)]


@contextmanager
def _on(stream: Any, comm: Communicator, module: Any) -> Iterator[None]:
    """Allocate, call and add on this stream; the host must wait for the sizes in any case."""
    if module is np:
        # Calls with host arrays wait by themselves; only earlier work of the stream remains.
        if stream is not None:
            comm.synchronize(stream)
        yield
        return
    if stream is not None and not hasattr(stream, "__enter__"):
        stream = module.cuda.ExternalStream(handle_of(stream))
    with nullcontext() if stream is None else stream:
        yield


def _empty_parts(header: Sequence[int], module: Any) -> list[Any]:
    pairs = zip(header[3::2], header[4::2], strict=True)
    return [module.empty(size, np.dtype(chr(char))) for size, char in pairs]


def _assemble(like: Any, parts: Sequence[Any], header: Sequence[int]) -> Any:
    """Return the matrix of a header, converted to the format of `like`."""
    kind, (data, first, second) = _FORMATS[header[2]], parts
    inside = (data, (first, second)) if kind == "coo" else (data, first, second)
    cls = type(like if like.format == kind else type(like)((1, 1)).asformat(kind))
    return cls(inside, shape=tuple(header[:2])).asformat(like.format)


def _become(matrix: Any, other: Any) -> None:
    """Replace the content of a matrix by another's, including cached properties."""
    if matrix.format != other.format:
        other = other.asformat(matrix.format)
    matrix.__dict__.clear()
    matrix.__dict__.update(other.__dict__)


def exchange(
    comm: Communicator, outgoing: Mapping[int, Any], sources: Sequence[int], like: Any, stream: Any = None
) -> dict[int, Any]:
    """Send matrices to their ranks; return those of `sources`, in the type of `like`."""
    me, module = comm.rank, _module(like)
    parts = {peer: _parts(matrix, f"the matrix for rank {peer}") for peer, matrix in outgoing.items()}
    others = [peer for peer in outgoing if peer != me]
    away = [peer for peer in sources if peer != me]
    with _on(stream, comm, module):
        sent = {peer: module.asarray(_header(outgoing[peer], parts[peer])) for peer in others}
        received = {peer: module.empty(_HEADER, np.int64) for peer in away}
        with pynccl.group():
            for peer in others:
                comm.send(sent[peer], peer)
            for peer in away:
                comm.recv(received[peer], peer)
        headers = {peer: _host(header) for peer, header in received.items()}
        arrays = {peer: _empty_parts(header, module) for peer, header in headers.items()}
        with pynccl.group():
            for peer in others:
                for part in parts[peer]:
                    comm.send(part, peer)
            for peer in away:
                for part in arrays[peer]:
                    comm.recv(part, peer)
        found = {peer: _assemble(like, arrays[peer], headers[peer]) for peer in away}
        if me in sources:
            found[me] = outgoing[me].copy()
    return found


def _fold(matrices: Mapping[int, Any], op: str) -> Any:
    return functools.reduce(_OPS[op], (matrices[rank] for rank in sorted(matrices)))


def _require_op(op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"op is {shown(op)}; expected 'sum' or 'prod' for sparse matrices")


def _require_list(matrices: Any, size: int) -> None:
    if not isinstance(matrices, list | tuple) or len(matrices) != size:
        raise ValueError(
            f"in_array is {_described(matrices)}; expected a list of {size} matrices, one for each rank"
        )


def _described(value: Any) -> str:
    return f"{len(value)} matrices" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def all_reduce(comm: Communicator, in_array: Any, out_array: Any, op: str, stream: Any) -> None:
    """Reduce the matrices of all ranks in rank order; every rank gets the result."""
    _require_op(op)
    ranks = range(comm.size)
    found = exchange(comm, dict.fromkeys(ranks, in_array), ranks, in_array, stream)
    with _on(stream, comm, _module(in_array)):
        _become(out_array, _fold(found, op))


def reduce(comm: Communicator, in_array: Any, out_array: Any, root: int, op: str, stream: Any) -> None:
    """Reduce the matrices of all ranks to the root, in rank order."""
    _require_op(op)
    sources = range(comm.size) if comm.rank == root else ()
    found = exchange(comm, {root: in_array}, sources, in_array, stream)
    if found:
        with _on(stream, comm, _module(in_array)):
            _become(out_array, _fold(found, op))


def broadcast(comm: Communicator, in_out_array: Any, root: int, stream: Any) -> None:
    """Replace every rank's matrix by the root's."""
    like, module = in_out_array, _module(in_out_array)
    parts = _parts(like, "in_out_array")
    with _on(stream, comm, module):
        header = module.asarray(_header(like, parts))
        comm.broadcast(header, root=root)
        numbers = _host(header)
        if comm.rank != root:
            parts = _empty_parts(numbers, module)
        with pynccl.group():
            for part in parts:
                comm.broadcast(part, root=root)
        if comm.rank != root:
            _become(in_out_array, _assemble(like, parts, numbers))


def reduce_scatter(comm: Communicator, in_array: Any, out_array: Any, op: str, stream: Any) -> None:
    """Reduce matrix number i of all ranks on rank i."""
    _require_op(op)
    _require_list(in_array, comm.size)
    found = exchange(comm, dict(enumerate(in_array)), range(comm.size), in_array[0], stream)
    with _on(stream, comm, _module(in_array[0])):
        _become(out_array, _fold(found, op))


def all_gather(comm: Communicator, in_array: Any, out_array: list[Any], stream: Any) -> None:
    """Append the matrices of all ranks to the list."""
    ranks = range(comm.size)
    found = exchange(comm, dict.fromkeys(ranks, in_array), ranks, in_array, stream)
    out_array.extend(found[rank] for rank in ranks)


def gather(comm: Communicator, in_array: Any, out_array: list[Any], root: int, stream: Any) -> None:
    """Append the matrices of all ranks to the root's list."""
    sources = range(comm.size) if comm.rank == root else ()
    found = exchange(comm, {root: in_array}, sources, in_array, stream)
    if found:
        out_array.extend(found[rank] for rank in sources)


def scatter(comm: Communicator, in_array: Any, out_array: Any, root: int, stream: Any) -> None:
    """Send the root's matrix number i to rank i."""
    outgoing = {}
    if comm.rank == root:
        _require_list(in_array, comm.size)
        outgoing = dict(enumerate(in_array))
    _become(out_array, exchange(comm, outgoing, [root], out_array, stream)[root])


def all_to_all(comm: Communicator, in_array: Any, out_array: list[Any], stream: Any) -> None:
    """Append matrix number i of all ranks to the list of rank i."""
    _require_list(in_array, comm.size)
    ranks = range(comm.size)
    found = exchange(comm, dict(enumerate(in_array)), ranks, in_array[0], stream)
    out_array.extend(found[rank] for rank in ranks)


def send(comm: Communicator, array: Any, peer: int, stream: Any) -> None:
    """Send a matrix to a rank."""
    exchange(comm, {peer: array}, [], array, stream)


def recv(comm: Communicator, out_array: Any, peer: int, stream: Any) -> None:
    """Receive a matrix from a rank."""
    _become(out_array, exchange(comm, {}, [peer], out_array, stream)[peer])


def send_recv(comm: Communicator, in_array: Any, out_array: Any, peer: int, stream: Any) -> None:
    """Send a matrix to a rank and receive one from it."""
    _become(out_array, exchange(comm, {peer: in_array}, [peer], out_array, stream)[peer])
