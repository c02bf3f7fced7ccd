"""What goes over a connection to the store.

    client     a text, whether there is a secret (1 byte), hello
    server     the same text, a verdict (1 byte); where that is not the same, or REFUSES, the end; answer
    client     proof
    then       frames: length (4 bytes), and so many bytes; sealed where there is a secret
    client     operation (1 byte), length of the key (2 bytes), key, argument
    server     status (1 byte), value

`pynccl/_secure/handshake.py` makes hello, answer and proof. Nothing is pickled, and every length is bounded
before memory is given to it.
"""

from __future__ import annotations

import struct

MAX_FRAME = 1 << 20
# With a tag.
MAX_SEALED = MAX_FRAME + 16
HELLO = b"pynccl-store-3\n"
# Up to the client's hello, or the server's answer.
BEGINNING = len(HELLO) + 1
OPEN, SECURED, REFUSES = b"\0", b"\1", b"\2"
# What the key of a store's secret is for.
PURPOSE = b"pynccl store"
SET, GET, ADD, WAIT, BARRIER, DELETE, WILL = 1, 2, 3, 4, 5, 6, 7
OK, MISSING, REFUSED = 0, 1, 2
LENGTH, REQUEST = struct.Struct("!I"), struct.Struct("!BH")
# What a client goes by that leaves a will: the same when it comes again.
IDENTITY = 16
# A number to add, or milliseconds to wait; these, and the number of clients.
INT64, BARRIER_ARGUMENT = struct.Struct("!q"), struct.Struct("!qI")
# Longer waits than 23 days are cut to that: a socket takes no more.
LONGEST_SECONDS = 2e6
