"""Connections of the control channel that end between ranks that live."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import numpy as np

import pynccl
from meeting import together
from pynccl import Communicator
from pynccl._watch import channel


class Cutter:
    """Knows the connections of this process's communicators, and can end them."""

    def __init__(self) -> None:
        self.sockets: list[list[int]] = []
        connect = channel.connect

        def noted(*args: Any) -> channel.Channel:
            channel = connect(*args)
            self.sockets.append([each.socket for each in channel.lines.connections])
            return channel

        setattr(channel, "connect", noted)  # noqa: B010

    def cut(self, rank: int, others: Iterable[int]) -> None:
        """End the connections with the others, if there are any; the one with the lower number does."""
        for other in others:
            if rank < other and self.sockets[0][other] >= 0:
                with socket.socket(fileno=os.dup(self.sockets[0][other])) as end:
                    end.shutdown(socket.SHUT_RDWR)


def who(comm: Communicator, rank: int) -> list[int]:
    """Return the numbers that the ranks had in the beginning."""
    return [int(r) for r in comm.all_gather(np.array([rank])).ravel()]


def meet(timeout: float, nranks: int) -> tuple[Communicator, Cutter]:
    cutter = Cutter()
    comm = pynccl.init(timeout=timeout)
    comm.barrier()
    together(nranks)
    return comm, cutter
