"""Send a model's weights from a trainer to an inference process that joins by a 128-byte id.

python examples/weight_transfer.py trainer      # in one shell
python examples/weight_transfer.py inference    # in another one

The trainer publishes the id in a file, by TCP or by HTTP: --meet file:///tmp/id, tcp://host:port or
http://host:port, the same for both. After each training step it sends all weights, and the inference process
checks what it got. Kill either side and start it again: the other one notices, and they meet by a new id. The
trainer does the last transfer again and again, and compares its bandwidth with a copy through shared memory.
"""

from __future__ import annotations

import argparse
import http.server
import os
import socket
import socketserver
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from survive import has_gpus

import pynccl
from pynccl import transfer

TRAINER, INFERENCE = 0, 1
Model = dict[str, Any]

# --- how the two meet ---------------------------------------------------------------------------------------


class Meeting:
    """A place where the trainer publishes the id of the next communicator: a secret, which is used once."""

    def __init__(self, url: str) -> None:
        self.url = urllib.parse.urlsplit(url)
        self.current = b""
        if self.url.scheme not in ("file", "tcp", "http"):
            raise SystemExit(f"--meet is {url}; expected file:///path, tcp://host:port or http://host:port")

    def publish(self, uid: bytes) -> None:
        if self.url.scheme == "file":
            # Created by mkstemp: nobody else can read it. Renamed: nobody reads half of it.
            descriptor, draft = tempfile.mkstemp(dir=Path(self.url.path).parent)
            with open(descriptor, "wb") as file:
                file.write(uid)
            os.rename(draft, self.url.path)
        elif not self.current:
            threading.Thread(target=self._server().serve_forever, daemon=True).start()
        self.current = uid

    def _server(self) -> socketserver.BaseServer:
        meeting = self

        class Tcp(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(meeting.current)

        class Http(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(meeting.current)))
                self.end_headers()
                self.wfile.write(meeting.current)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        socketserver.ThreadingTCPServer.allow_reuse_address = True
        place = self.url.hostname or "", self.url.port or 0
        if self.url.scheme == "http":
            return http.server.ThreadingHTTPServer(place, Http)
        return socketserver.ThreadingTCPServer(place, Tcp)

    def fetch(self) -> bytes:
        """Return the id that is published now; nothing without a trainer."""
        try:
            if self.url.scheme == "file":
                return Path(self.url.path).read_bytes()
            if self.url.scheme == "http":
                with urllib.request.urlopen(self.url.geturl(), timeout=5) as answer:
                    return bytes(answer.read())
            place = self.url.hostname or "", self.url.port or 0
            with socket.create_connection(place, timeout=5) as peer, peer.makefile("rb") as file:
                return file.read()
        except OSError:
            return b""


class Partner:
    """The process on the other side, whoever runs it at the moment."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.options, self.rank, self.meeting, self.used = options, rank, Meeting(options.meet), b""
        self.since = time.monotonic()

    def join(self) -> pynccl.Communicator:
        if self.rank == TRAINER:
            uid = bytes(pynccl.get_unique_id())
            self.meeting.publish(uid)
        else:
            while (uid := self.meeting.fetch()) in (b"", self.used):
                self.give_up_later()
                time.sleep(0.02)
            # It is the id of a trainer that has ended, or of the next communicator.
            self.used = uid
        options = self.options
        return pynccl.Communicator(2, uid, self.rank, device=options.device, timeout=options.timeout)

    def give_up_later(self) -> None:
        if time.monotonic() - self.since > self.options.patience:
            other = "an inference process" if self.rank == TRAINER else "a trainer"
            raise SystemExit(f"{self.options.patience:g} s without {other} at {self.options.meet}")

    def work_with(self, work: Callable[[pynccl.Communicator], None], done: Callable[[], bool]) -> None:
        """Do the work with one partner after another, until it is done."""
        while not done():
            joined = False
            try:
                with self.join() as comm:
                    joined = True
                    print("joined", flush=True)
                    work(comm)
            except pynccl.NcclInvalidUsage as error:
                # The two differ, as in --width or --steps: another try would fail in the same way.
                raise SystemExit(f"{type(error).__name__}: {error}") from None
            except pynccl.NcclError as error:
                if joined:
                    print(f"lost the other process: {type(error).__name__}: {error}", flush=True)
                    self.since = time.monotonic()
                self.give_up_later()


# --- the model ----------------------------------------------------------------------------------------------


def make_model(options: argparse.Namespace) -> Model:
    """Return the weights of a transformer: float32 arrays, or torch tensors of bfloat16."""
    width = options.width
    shapes = {"attention": (4 * width, width), "mlp.up": (width, 4 * width), "mlp.down": (4 * width, width)}
    shapes |= {"norm": (width,), "unused": (0, width)}
    names = {f"layer.{i}.{name}": shape for i in range(options.layers) for name, shape in shapes.items()}
    if options.torch:
        import torch

        device = "cpu" if pynccl.library_info().backend == "cpu" else f"cuda:{options.device or 0}"
        return {n: torch.zeros(shape, dtype=torch.bfloat16, device=device) for n, shape in names.items()}
    xp = pynccl.array_module()
    return {name: xp.zeros(shape, "float32") for name, shape in names.items()}


def train(model: Model, step: int) -> None:
    """Make one step; here, numbers that can be checked."""
    for number, array in enumerate(model.values()):
        array[...] = (step + number) % 127


def check(model: Model, step: int) -> None:
    for number, (name, array) in enumerate(model.items()):
        if not bool((array == (step + number) % 127).all()):
            raise SystemExit(f"step {step}: {name} is wrong")


def trainer(options: argparse.Namespace) -> None:
    partner, model = Partner(options, TRAINER), make_model(options)
    counter = pynccl.array_module().ones(1, "int64")
    step = 1
    train(model, step)

    def push(comm: pynccl.Communicator) -> None:
        nonlocal step
        while True:
            counter[0] = step
            transfer.send_tensors(comm, model | {"step": counter}, bucket_bytes=options.bucket)
            print(f"step {step} sent", flush=True)
            if step == options.steps:
                break
            time.sleep(options.pause)
            step += 1
            train(model, step)
        compare(comm, model, options)
        step += 1

    partner.work_with(push, lambda: step > options.steps)


def inference(options: argparse.Namespace) -> None:
    partner, model = Partner(options, INFERENCE), make_model(options)
    counter = pynccl.array_module().zeros(1, "int64")
    ended = False

    def pull(comm: pynccl.Communicator) -> None:
        nonlocal ended
        while True:
            # Until it returns, the model is partly of the last step, partly of this one.
            transfer.recv_tensors(comm, model | {"step": counter}, root=TRAINER)
            step = int(counter[0])
            check(model, step)
            print(f"step {step}: {len(model)} tensors, {nbytes_of(model)} bytes, checked", flush=True)
            if step == options.steps:
                break
        compare(comm, model, options)
        ended = True

    partner.work_with(pull, lambda: ended)


# --- its bandwidth, beside a copy through shared memory -----------------------------------------------------


def nbytes_of(model: Model) -> int:
    return sum(int(array.nbytes) for array in model.values())


def compare(comm: pynccl.Communicator, model: Model, options: argparse.Namespace) -> None:
    """Move the model several times in either way; the trainer prints the best of each."""
    sends, nbytes = comm.rank == TRAINER, nbytes_of(model)

    def by_pynccl() -> None:
        if sends:
            transfer.send_tensors(comm, model, bucket_bytes=options.bucket)
        else:
            transfer.recv_tensors(comm, model, root=TRAINER)
        comm.synchronize()

    def by_shared_memory() -> None:
        if sends:
            copy(model, memory, out=True)
        comm.barrier()
        if not sends:
            copy(model, memory, out=False)

    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        name = np.frombuffer(f"{file.name:<255}".encode(), np.uint8)
        names = {"name": pynccl.array_module().asarray(name)}
        found = names if sends else transfer.recv_tensors(comm, root=TRAINER)
        if sends:
            os.truncate(file.name, nbytes)
            transfer.send_tensors(comm, names)
        path = bytes(found["name"].tolist()).decode().strip()
        memory = np.memmap(path, np.uint8, "r+")
        seconds = [best(comm, move, options.repeats) for move in (by_pynccl, by_shared_memory)]
    if sends:
        speeds = [nbytes / taken / 1e9 for taken in seconds]
        print(
            f"{len(model)} tensors, {nbytes} bytes: {speeds[0]:.2f} GB/s by pynccl, "
            f"{speeds[1]:.2f} GB/s by a copy into shared memory and out of it",
            flush=True,
        )


def best(comm: pynccl.Communicator, move: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        comm.barrier()
        start = time.perf_counter()
        move()
        comm.barrier()
        times.append(time.perf_counter() - start)
    return min(times)


def copy(model: Model, memory: Any, *, out: bool) -> None:
    """Copy the model out of its arrays, or into them."""
    place = 0
    for array in model.values():
        part, flat = memory[place : place + array.nbytes], array.reshape(-1)
        place += part.size
        if hasattr(array, "is_cpu"):
            import torch

            flat = flat.view(torch.uint8)
            if array.is_cpu:
                flat = flat.numpy()
            elif not out:
                flat.copy_(torch.from_numpy(part))
        else:
            flat = flat.view("uint8")
        if isinstance(flat, np.ndarray):
            np.copyto(*((part, flat) if out else (flat, part)))
        elif out:
            part[:] = flat.get() if hasattr(flat, "get") else flat.cpu().numpy()
        elif hasattr(flat, "set"):
            flat.set(part)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=["trainer", "inference"])
    parser.add_argument("--meet", default="tcp://127.0.0.1:29600", help="where the trainer publishes the id")
    parser.add_argument("--torch", action="store_true", help="tensors of torch, in bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--bucket", type=int, default=transfer.BUCKET_BYTES, help="bytes that move at once")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a training step takes")
    parser.add_argument("--repeats", type=int, default=20, help="transfers of the comparison")
    parser.add_argument("--device", type=int, help="the ordinal of the GPU")
    parser.add_argument("--timeout", type=float, default=20, help="seconds of the longest wait")
    parser.add_argument("--patience", type=float, default=60, help="seconds without the other process")
    options = parser.parse_args()
    if "PYNCCL_LIBRARY" not in os.environ and not has_gpus():
        os.environ["PYNCCL_LIBRARY"] = "cpu"
    pynccl.load()
    (trainer if options.role == "trainer" else inference)(options)


if __name__ == "__main__":
    main()
