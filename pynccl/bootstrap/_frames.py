"""The protocol of a connection to the store.

    client     the text HELLO, a scheme (1 byte: SECURED or OPEN), hello
    server     the text HELLO, a scheme or REFUSES (1 byte); the end unless the schemes are equal; answer
    client     proof; REFUSES and the end if the answer is not from its own store
    then       frames: length (4 bytes) and content; encrypted if there is a secret
    client     operation (1 byte), length of the key (2 bytes), key, argument
    server     status (1 byte), value

`pynccl/_secure/handshake.py` makes hello, answer and proof. Nothing is pickled, and every length is checked
before memory is allocated for it.
"""

from __future__ import annotations

import struct

MAX_FRAME = 1 << 20
# With the authentication tag.
MAX_SEALED = MAX_FRAME + 16
HELLO = b"pynccl-store-3\n"
# Bytes before the client's hello or the server's answer.
BEGINNING = len(HELLO) + 1
OPEN, SECURED, REFUSES = b"\0", b"\1", b"\2"
# The purpose from which the key of a store is derived.
PURPOSE = b"pynccl store"
SET, GET, ADD, WAIT, BARRIER, DELETE, WILL = 1, 2, 3, 4, 5, 6, 7
OK, MISSING, REFUSED = 0, 1, 2
# The server ends. This status needs no request; the value says why.
ENDED = 3
LENGTH, REQUEST = struct.Struct("!I"), struct.Struct("!BH")
# Bytes of the identity of a client with a will; the identity stays the same when the client reconnects.
IDENTITY = 16
# Arguments: a number to add or milliseconds to wait; for a barrier, milliseconds and the number of clients.
INT64, BARRIER_ARGUMENT = struct.Struct("!q"), struct.Struct("!qI")
# The longest wait, 23 days in seconds: a socket accepts no longer time-out.
LONGEST_SECONDS = 2e6
