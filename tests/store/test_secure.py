"""The secret: Noise as published, what strangers get, who is refused and why, and what having one takes."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pynccl
from meeting import failure, free_port, together
from pynccl import BootstrapError, NcclError, RankFailedError, testing
from pynccl._secure import handshake, noise
from pynccl._secure.secret import RECIPE, check_secret, derive_key, read_secret
from pynccl._watch import channel
from pynccl.bootstrap import Store, StoreServer, encrypt_nccl
from pynccl.bootstrap import _frames as f
from pynccl.bootstrap._store import format_address
from relays import relay

pytestmark = pytest.mark.usefixtures("no_secret_of_the_environment")

SECRET = "only the job knows it"
# The package under test, also where another copy of it is installed.
HERE = {"PYTHONPATH": str(Path(pynccl.__file__).parents[1])}

# The vector of Noise_NNpsk0_25519_ChaChaPoly_BLAKE2b in
# https://github.com/haskell-cryptography/cacophony/blob/master/vectors/cacophony.txt, which other
# implementations are checked with, too.
VECTOR = json.loads("""{
  "prologue": "4a6f686e2047616c74",
  "psk": "54686973206973206d7920417573747269616e20706572737065637469766521",
  "initiator": "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
  "responder": "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
  "messages": [
    ["4c756477696720766f6e204d69736573",
     "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944ed63df2f5a12aee1185ee9c50305f2ecf12421dcb53c047a63b784cf7c54a105"],
    ["4d757272617920526f746862617264",
     "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088430e0fe7d5c0c9b92f7478716c8852f1b4f389edb75e3ebe546fafafd5b6f0f7"],
    ["462e20412e20486179656b", "0fe04b26dcfbb69f8a6a94c61f1a26ef88769218d32f5d17c068a6"],
    ["4361726c204d656e676572", "2239e0c540c01f09eb1f4cc5258fd5acfefff18a5a3773f21b7bfe"],
    ["4a65616e2d426170746973746520536179",
     "f216cb03d30fb8af1e561fe02a07552d09b416e27a75e62c77d193718b0bdaae9f"],
    ["457567656e2042f6686d20766f6e2042617765726b",
     "6e8baf98b944184dd7dc5ef14d8108cbeca626de118a5460f3308e294d61e17238bce29bd9"]
  ]
}""")


# --- Noise ---


def test_noise_is_what_is_published() -> None:
    unhex = bytes.fromhex
    messages = [(unhex(payload), unhex(sealed)) for payload, sealed in VECTOR["messages"]]
    start = noise.Start(unhex(VECTOR["psk"]), unhex(VECTOR["prologue"]))
    initiator = noise.Initiator(start, messages[0][0], unhex(VECTOR["initiator"]))
    assert initiator.message == messages[0][1]
    payload, answer, theirs = noise.respond(
        start, initiator.message, messages[1][0], unhex(VECTOR["responder"])
    )
    assert (payload, answer) == (messages[0][0], messages[1][1])
    payload, mine = initiator.finish(answer)
    assert payload == messages[1][0]
    for number, (payload, sealed) in enumerate(messages[2:]):
        here, there = (mine, theirs) if number % 2 == 0 else (theirs, mine)
        assert here.outgoing.seal(payload) == sealed
        assert there.incoming.open(sealed) == payload


def pair(secret: str = SECRET, other: str = SECRET) -> tuple[noise.Session, noise.Session]:
    one, two = (noise.Start(derive_key(text, b"test", b""), b"prologue") for text in (secret, other))
    initiator = noise.Initiator(one)
    _, answer, theirs = noise.respond(two, initiator.message)
    return initiator.finish(answer)[1], theirs


@pytest.mark.parametrize("size", [0, 1, 15, 16, 64, 1000, 1 << 20])
def test_frames_of_any_size(size: int) -> None:
    mine, theirs = pair()
    body = os.urandom(size)
    sealed = [mine.outgoing.seal(body) for _ in range(3)]
    assert len(set(sealed)) == 3 and all(len(each) == size + 16 for each in sealed)
    assert [theirs.incoming.open(each) for each in sealed] == [body] * 3
    assert mine.incoming.open(theirs.outgoing.seal(body)) == body


def test_what_was_not_sealed_as_the_next_frame_is_refused() -> None:
    """Changed, cut, longer, repeated, in another order, left out, sent back, and of another connection."""
    turns = random.Random(7)
    for turn in range(300):
        mine, theirs = pair()
        stranger, _ = pair()
        frames = [mine.outgoing.seal(os.urandom(turns.randrange(40))) for _ in range(3)]
        assert theirs.incoming.open(frames[0]) is not None
        good = frames[1]
        changed = bytearray(good)
        changed[turns.randrange(len(good))] ^= 1 << turns.randrange(8)
        bad = [
            bytes(changed),
            good[: turns.randrange(len(good))],
            good + b"\0",
            frames[0],
            frames[2],
            theirs.outgoing.seal(b"x"),
            stranger.outgoing.seal(b"x"),
            os.urandom(turns.randrange(60)),
        ][turn % 8]
        with pytest.raises(ValueError, match="not encrypted with this key"):
            theirs.incoming.open(bad)


def test_handshakes_fail_with_another_secret_prologue_or_message() -> None:
    with pytest.raises(ValueError, match="not encrypted"):
        pair(SECRET, SECRET + " ")
    key = derive_key(SECRET, b"test", b"")
    start = noise.Start(key, b"prologue")
    initiator = noise.Initiator(start)
    others = noise.Start(key, b"prologues"), noise.Start(derive_key(SECRET, b"tests", b""), b"prologue")
    for other in others:
        with pytest.raises(ValueError, match="not encrypted"):
            noise.respond(other, initiator.message)
    for message in (b"", initiator.message[:31], initiator.message[:47], bytes(48), os.urandom(48)):
        with pytest.raises(ValueError, match="not encrypted|has no public key"):
            noise.respond(start, message)
        with pytest.raises(ValueError, match="not encrypted|has no public key|gives no shared key"):
            noise.Initiator(start).finish(message)
    # Its own message back.
    with pytest.raises(ValueError, match="not encrypted"):
        initiator.finish(initiator.message)


def test_nobody_who_knows_the_secret_later_reads_what_was_recorded() -> None:
    """Two connections with the same secret share no key, and a recorded hello opens nothing new."""
    start = noise.Start(derive_key(SECRET, b"test", b""), b"")
    initiator = noise.Initiator(start)
    (_, first, one), (_, second, two) = (noise.respond(start, initiator.message) for _ in range(2))
    mine = initiator.finish(first)[1]
    proof = mine.outgoing.seal(b"")
    assert first != second and one.incoming.open(proof) == b""
    with pytest.raises(ValueError, match="not encrypted"):
        two.incoming.open(proof)


# --- what strangers get ---


def converse(port: int, *says: bytes) -> bytes:
    """Say something to a store until it ends the connection, and return all that it has answered."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock, suppress(ConnectionError):
        for text in says:
            sock.sendall(text)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(4096):
            heard += data
    return heard


def test_a_stranger_gets_nothing_that_follows_from_the_secret() -> None:
    """Nothing to guess with: whatever they say, the answer is the same for every secret."""
    says = {
        "nothing": b"",
        "http": b"GET / HTTP/1.1\r\n\r\n" * 9,
        "open": f.HELLO + f.OPEN + os.urandom(48),
        "guess": f.HELLO + f.SECURED + os.urandom(64),
        "zeros": f.HELLO + f.SECURED + bytes(64),
        "another secret": f.HELLO
        + f.SECURED
        + handshake.choose(SECRET + "?", f.PURPOSE, b"", f.HELLO).call().hello,
        "another job": f.HELLO + f.SECURED + handshake.choose(SECRET, f.PURPOSE, b"1", f.HELLO).call().hello,
    }
    answers = {}
    for secret in (SECRET, "another secret of a job"):
        with StoreServer(secret=secret) as server:
            answers[secret] = {name: converse(server.port, text) for name, text in says.items()}
    refused = f.HELLO + f.REFUSES
    assert answers[SECRET] == {
        "nothing": b"",
        "http": b"",
        "open": f.HELLO + f.SECURED,
        "guess": refused,
        "zeros": refused,
        "another secret": refused,
        "another job": refused,
    }
    assert answers[SECRET] == answers["another secret of a job"]


def test_an_echo_is_no_store() -> None:
    """Every byte comes back; the client neither believes it nor goes on in the clear."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            sock, _ = listener.accept()
            with sock, suppress(OSError):
                while data := sock.recv(4096):
                    sock.sendall(data)

        thread = threading.Thread(target=echo)
        thread.start()
        address = format_address("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(BootstrapError, match="the secret .* differs from the store's"):
            Store(address, SECRET, timeout=10)
        thread.join()


def test_changed_recorded_and_mixed_up_bytes_reach_nothing() -> None:
    """Fuzz the whole conversation of a client: whatever becomes of the connection, no value changes."""
    turns = random.Random(11)
    scheme = handshake.choose(SECRET, f.PURPOSE, b"", f.HELLO)
    with StoreServer(secret=SECRET) as server, Store(server.address, SECRET, timeout=5) as store:
        store.set("key", b"right")
        for turn in range(150):
            caller = scheme.call()
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock, suppress(OSError):
                sock.sendall(f.HELLO + f.SECURED + caller.hello)
                answer = b""
                while len(answer) < f.BEGINNING + scheme.answer_size and (data := sock.recv(4096)):
                    answer += data
                proof, session = caller.finish(answer[f.BEGINNING :])
                assert session is not None
                frames = [proof]
                for value in (b"wrong", b"worse"):
                    body = session.outgoing.seal(f.REQUEST.pack(f.SET, 3) + b"key" + value)
                    frames.append(f.LENGTH.pack(len(body)) + body)
                # The proof is right in half of them, so that the frames are looked at.
                at = 1 + turn % 2 if turn % 4 else 0
                spoiled = bytearray(frames[at])
                spoiled[turns.randrange(0 if at == 0 else 4, len(spoiled))] ^= 1 << turns.randrange(8)
                # A single byte that is missing could be the next frame's first, by chance.
                frames[at] = [bytes(spoiled), frames[at][:-4], b""][turn % 3]
                if at == 2:
                    frames[1] = b""
                sock.sendall(b"".join(frames))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
        assert store.get("key") == b"right"


# --- secrets that will not do ---


def test_a_bad_secret_of_a_single_rank_is_no_error_of_the_library(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    missing = str(tmp_path / "secret")
    done = run_python(
        "import pynccl; pynccl.init()", fails=True, PYNCCL_LIBRARY="cpu", PYNCCL_SECRET_FILE=missing
    )
    text = f"BootstrapError: PYNCCL_SECRET_FILE: cannot read '{missing}': No such file or directory"
    assert done.stderr.rstrip().endswith(text)


@pytest.mark.parametrize("secret", ["s", "fifteen letters", "öööö"])
def test_short_secrets_are_refused_with_the_command_for_a_good_one(
    secret: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    size = len(secret.encode())
    monkeypatch.setenv("PYNCCL_SECRET", secret)
    for use in (
        lambda: read_secret({"PYNCCL_SECRET": secret}),
        lambda: read_secret({"PYNCCL_SECRET_FILE": str(file)}),
        lambda: StoreServer(secret=secret),
        lambda: Store("127.0.0.1:1", secret, timeout=1),
        lambda: encrypt_nccl(secret),
        StoreServer,
        lambda: Store("127.0.0.1:1", timeout=1),
        lambda: pynccl.init("tcp://127.0.0.1:1", rank=0, world_size=2, timeout=1),
        lambda: testing.run(1, print, backend="cpu"),
    ):
        with pytest.raises(BootstrapError) as caught:
            use()
        assert f"has {size} bytes; expected at least 16" in str(caught.value)
        assert RECIPE in str(caught.value)


def test_the_command_makes_a_good_one(run_python: Callable[..., Any]) -> None:
    made = run_python(RECIPE.removeprefix('python -c "').removesuffix('"')).stdout.strip()
    assert len(check_secret(made)) >= 32


# --- without PyNaCl ---

WITHOUT = "import sys; sys.modules['nacl'] = sys.modules['nacl._sodium'] = None\n"
REFUSED = (
    WITHOUT
    + """
import pynccl
from pynccl.bootstrap import Store, StoreServer
def use(what):
    try:
        what()
    except pynccl.BootstrapError as error:
        print(error)
    else:
        raise SystemExit("accepted")
use(StoreServer)
use(lambda: StoreServer(secret="a secret of the job"))
use(lambda: Store(sys.argv[1], "a secret of the job", timeout=5))
import os
os.environ["PYNCCL_SECRET"] = "a secret of the job"
use(lambda: pynccl.init("tcp://127.0.0.1:1", rank=0, world_size=2, timeout=5))
use(lambda: pynccl.init("tcp://" + sys.argv[1], rank=1, world_size=2, timeout=5))
"""
)


def test_a_secret_takes_pynacl(run_python: Callable[..., Any]) -> None:
    """Never in the clear instead: nothing is sent at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = format_address("127.0.0.1", listener.getsockname()[1])
        done = run_python(args=["-c", REFUSED, address], **HERE)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert done.stdout.count("pip install pynacl") == 5
    assert done.stdout.count("a secret is set (PYNCCL_SECRET, PYNCCL_SECRET_FILE or secret=)") == 4
    made = done.stdout.splitlines()[0]
    assert made.startswith("StoreServer makes a secret, because none is set, but PyNaCl, ")
    assert made.endswith("""pip install pynacl, or pass secret="" for a store without one""")


USES = """
import sys
import numpy, pynccl
with pynccl.init(timeout=20) as comm:
    comm.barrier()
    assert comm.all_reduce(numpy.ones(2)).tolist() == [2, 2]
print(sys.modules.get("nacl"))
"""


@pytest.mark.slow
def test_without_a_secret_pynacl_is_neither_needed_nor_imported(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    for name, text in {"with.py": USES, "without.py": WITHOUT + USES}.items():
        program = tmp_path / name
        program.write_text(text)
        done = run_python(args=["-m", "pynccl", "run", "-n", "2", "--cpu", str(program)], **HERE)
        assert sorted(done.stdout.split()) == ["None", "None", "[0]", "[1]"]


# --- who is warned ---


def warnings_of_init(rank: int, nranks: int, method: str, port: int) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pynccl").addHandler(handler)
    together(nranks)
    if method == "tcp":
        host = "127.0.0.1" if rank else "0.0.0.0"
        comm = pynccl.init(f"tcp://{host}:{port}", rank=rank, world_size=nranks, timeout=20)
    else:
        comm = pynccl.init(timeout=20)
    comm.barrier()
    comm.destroy()
    return heard


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["secret", "open"])
@pytest.mark.parametrize("method", ["tcp", "launcher"])
def test_one_warning_where_others_can_take_part(method: str, secret: str) -> None:
    heard = testing.run(
        2, warnings_of_init, method, free_port(), backend="cpu", env={"PYNCCL_SECRET": secret}, timeout=50
    )
    assert [len(each) for each in heard] == [int(method == "tcp" and not secret), 0], heard
    assert all("has no secret: every process can take part; set PYNCCL_SECRET" in text for text in heard[0])


# --- one side without ---


def test_neither_side_does_without_the_secret_it_has() -> None:
    with (
        StoreServer(secret=SECRET) as server,
        pytest.raises(
            BootstrapError, match="it requires a secret, but this process has none; set PYNCCL_SECRET"
        ),
    ):
        Store(server.address, "", timeout=5)
    with (
        StoreServer(secret="") as server,
        pytest.raises(BootstrapError, match=r"it has no secret, but this process has one \(PYNCCL_SECRET\)"),
    ):
        Store(server.address, SECRET, timeout=5)


def channel_secrets(rank: int, nranks: int, secrets: list[str]) -> str:
    """Open the control channel with this rank's secret; the CPU library has none, and does not care."""
    channel.read_secret = lambda: secrets[rank]  # type: ignore[attr-defined]
    uid = pynccl.get_unique_id() if rank == 0 else b""
    with Store(os.environ["PYNCCL_STORE"], timeout=20) as store:
        if rank == 0:
            store.set("id", bytes(uid))
        uid = store.get("id")
        try:
            comm = pynccl.Communicator(nranks, pynccl.UniqueId(uid), rank, timeout=6)
        except NcclError as error:
            return f"{type(error).__name__}: {error}"
        with comm:
            return str(comm.all_reduce(np.ones(1)).sum())


@pytest.mark.parametrize("secrets", [[SECRET, SECRET, ""], ["", SECRET, SECRET]], ids=["2", "0"])
def test_ranks_without_the_secret_are_named(secrets: list[str]) -> None:
    texts = testing.run(3, channel_secrets, secrets, backend="cpu")
    named = f"ranks {secrets.index('')} have no secret, but the others have one"
    assert all(text.startswith("BootstrapError") and named in text for text in texts), texts


def test_a_rank_with_another_secret_is_refused() -> None:
    texts = testing.run(2, channel_secrets, [SECRET, SECRET + "?"], backend="cpu")
    assert "rank 1 of 2 cannot open the control channel to rank 0: that rank has another secret" in texts[1]
    assert "2.0" not in texts[0], texts


def meets_with(rank: int, nranks: int, secrets: list[str], port: int) -> str:
    together(nranks)
    del os.environ["PYNCCL_STORE"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYNCCL_SECRET=secrets[rank])
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=2)
    return str(caught.value)


@pytest.mark.slow
def test_rank_0_says_whom_it_turned_away() -> None:
    texts = testing.run(3, meets_with, [SECRET, "", SECRET + "?"], free_port(), backend="cpu")
    assert "never arrived: 1, 2 (2 of 3); refused: 1 with another secret, 1 without a secret" in texts[0]
    texts = testing.run(2, meets_with, ["", SECRET], free_port(), backend="cpu")
    assert "never arrived: 1 (1 of 2); refused: 1 with a secret, unlike here" in texts[0]


# --- the control channel ---


class Middle:
    """Sits between this rank and those that it calls: records what passes, and may change what is sent."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self.seen, self.change = b"", change
        self.active = threading.Event()
        channel._Links._connect = self.connect  # type: ignore[method-assign, assignment]

    def connect(self, place: tuple[str, int], timeout: float) -> socket.socket:
        there = socket.create_connection(place, timeout=timeout)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = socket.create_connection(listener.getsockname(), timeout=timeout)
            mine, _ = listener.accept()
        for sends, ends in ((True, (mine, there)), (False, (there, mine))):
            threading.Thread(target=self.pump, args=(*ends, sends), daemon=True).start()
        return here

    def pump(self, source: socket.socket, target: socket.socket, sends: bool) -> None:
        def changed(data: bytes) -> bytes:
            self.seen += data
            return self.change(data) if sends and self.active.is_set() else data

        relay(source, target, changed)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


held: list[bytes] = []


def exchanged(data: bytes) -> bytes:
    """Let two frames change places."""
    held.append(data)
    return b"" if len(held) < 2 else b"".join(reversed(held))


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "changed": lambda data: data[:-1] + bytes((data[-1] ^ 1,)),
    "repeated": lambda data: data + data,
    "cut": lambda data: data[1:],
    "exchanged": exchanged,
    "made up": lambda data: os.urandom(len(data)),
    "left alone": lambda data: data,
}


def in_the_middle(rank: int, nranks: int, change: str) -> tuple[str, list[int], bool]:
    """Answer what is raised once rank 1's frames are changed, and whether they could be read."""
    middle = Middle(CHANGES[change]) if rank == 1 else None
    comm = pynccl.init(timeout=10)
    comm.barrier()
    together(nranks)
    if middle is not None:
        middle.active.set()
    text, ranks = "", []
    try:
        for _ in range(15 if change == "left alone" else 200):
            time.sleep(0.1)
            comm.barrier()
    except RankFailedError as error:
        text, ranks = str(error), error.ranks
    together(nranks, "done")
    comm.abort()
    # A frame's text is mostly zeros.
    return text, ranks, middle is not None and bytes(64) in middle.seen


@pytest.mark.parametrize("change", ["changed", "repeated", "exchanged", "cut", "made up"])
def test_frames_that_were_changed_on_their_way_end_the_connection(change: str) -> None:
    results = testing.run(2, in_the_middle, change, backend="cpu", env={"PYNCCL_SECRET": SECRET}, timeout=50)
    assert "rank 1 is out of reach: a frame from it was changed on its way" in results[0][0], results
    assert results[0][1] == [1] and results[1][0]
    assert not results[1][2]


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["secret", "open"])
def test_frames_can_be_read_without_a_secret_only(secret: str) -> None:
    env = {"PYNCCL_SECRET": secret}
    results = testing.run(2, in_the_middle, "left alone", backend="cpu", env=env, timeout=50)
    assert [result[:2] for result in results] == [("", [])] * 2
    assert results[1][2] == (not secret)


def among_strangers(rank: int, nranks: int) -> list[bytes]:
    """Rank 1 has strangers call rank 0 before it does so itself; answer what they were told."""
    strangers = []

    def connect(links: channel._Links, place: tuple[str, int], timeout: float) -> socket.socket:
        known = channel._HELLO.pack(channel._MAGIC, 1, 0)
        for text in (b"x", os.urandom(200), known + os.urandom(48), known + bytes(48)):
            strangers.append(socket.create_connection(place, timeout=timeout))
            strangers[-1].sendall(text)
        return socket.create_connection(place, timeout=timeout)

    if rank == 1:
        channel._Links._connect = connect  # type: ignore[method-assign]
    comm = pynccl.init(timeout=20)
    comm.barrier()
    told = []
    for stranger in strangers:
        heard = b""
        with stranger, suppress(ConnectionError):
            while data := stranger.recv(1000):
                heard += data
        told.append(heard)
    comm.destroy()
    return told


def test_strangers_at_the_control_channel_are_told_nothing_and_hold_nobody_up() -> None:
    results = testing.run(2, among_strangers, backend="cpu", env={"PYNCCL_SECRET": SECRET}, timeout=50)
    assert results == [[], [b"", b"", bytes(48), bytes(48)]]


def dies(rank: int, nranks: int) -> list[int]:
    comm = pynccl.init(timeout=10)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    smaller = comm.shrink(exclude=failure(comm.barrier).ranks, abort=True)
    found = smaller.all_gather(np.array([rank])).ravel().tolist()
    smaller.destroy()
    return [int(each) for each in found]


def test_a_death_is_noticed_and_survived_with_a_secret() -> None:
    results = testing.run(3, dies, backend="cpu", env={"PYNCCL_SECRET": SECRET}, check=False, timeout=50)
    assert [results[0], results[2]] == [[0, 2]] * 2
