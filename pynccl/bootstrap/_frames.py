"""What goes over a connection to the store.

    client     hello: a text, nonce
    server     the same text, whether there is a secret (1 byte), nonce, proof
    client     proof
    then       frames: length (4 bytes), and so many bytes; sealed where there is a secret
    client     operation (1 byte), length of the key (2 bytes), key, argument
    server     status (1 byte), value

Nothing is pickled, and every length is bounded before memory is given to it.
"""

from __future__ import annotations

import struct

from pynccl.bootstrap._auth import DIGEST, NONCE, TAG

MAX_FRAME = 1 << 20
MAX_SEALED = MAX_FRAME + TAG
HELLO = b"pynccl-store-2\n"
CLIENT_HELLO = len(HELLO) + NONCE
SERVER_HELLO = len(HELLO) + 1 + NONCE + DIGEST
SET, GET, ADD, WAIT, BARRIER, DELETE, WILL = 1, 2, 3, 4, 5, 6, 7
OK, MISSING, REFUSED = 0, 1, 2
LENGTH, REQUEST = struct.Struct("!I"), struct.Struct("!BH")
# What a client goes by that leaves a will: the same when it comes again.
IDENTITY = 16
# A number to add, or milliseconds to wait; these, and the number of clients.
INT64, BARRIER_ARGUMENT = struct.Struct("!q"), struct.Struct("!qI")
# Longer waits than 23 days are cut to that: a socket takes no more.
LONGEST_SECONDS = 2e6
