"""Lose a rank in the middle of a training, go on with the others, and take a new one in.

python examples/survive.py                  # four ranks; one of them is killed at a random time
python examples/survive.py -n 3 --seed 5

The program starts its ranks itself, without GPUs on the CPU library. The survivors learn who died, shrink the
communicator, agree on the newest weights among them, and grow it again by a rank that has just been started;
that one receives the weights and the training goes on where it was. In the end the weights are those of a
training that nothing disturbed.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from data_parallel import BATCH, GOAL, MOMENTUM, RATE, TRAIN, Array, Network, load_data

import pynccl

STEPS = TRAIN // BATCH
TIMEOUT = 30.0


class Training:
    """One rank's part, which can be interrupted between any two steps."""

    def __init__(self, xp: Any, world: int, folder: Path) -> None:
        self.xp, self.world, self.folder = xp, world, folder
        self.network = Network(xp)
        self.velocity = xp.zeros_like(self.network.weights)
        self.total = xp.zeros(self.network.weights.size, xp.float32)
        self.step = xp.zeros(1, xp.int64)
        self.order: tuple[int, Array] = (-1, None)

    def samples(self, step: int) -> Array:
        """Return the samples of a step, which depend on nothing else."""
        import numpy

        epoch, position = divmod(step, STEPS)
        if self.order[0] != epoch:
            permutation = numpy.random.default_rng((2, epoch)).permutation(TRAIN)
            self.order = epoch, self.xp.asarray(permutation)
        return self.order[1][position * BATCH : (position + 1) * BATCH]

    def advance(self, comm: pynccl.Communicator | None, data: tuple[Array, Array]) -> None:
        """Make one step; when it raises, weights and velocity are as they were."""
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        mine = self.samples(int(self.step[0]))[rank::size]
        self.network.gradient(data[0][mine], data[1][mine], self.total)
        self.total *= size / BATCH
        if comm:
            comm.all_reduce(self.total, op="avg")
        self.velocity *= MOMENTUM
        self.velocity -= RATE * (1 - MOMENTUM) * self.total
        self.network.weights += self.velocity
        self.step += 1

    def share(self, comm: pynccl.Communicator) -> None:
        """Take over the state of the rank that got furthest."""
        steps = comm.all_gather(self.step)
        source = int(steps.argmax())
        for array in (self.step, self.network.weights, self.velocity):
            comm.broadcast(array, root=source)

    def replace(self, comm: pynccl.Communicator, dead: list[int]) -> pynccl.Communicator:
        """Return a communicator of the survivors and as many new ranks as have died."""
        small = comm.shrink(exclude=dead, abort=True)
        self.share(small)
        print(f"survived the death of {dead}: rank {small.rank} of {small.size}", flush=True)
        uid = small.get_unique_id() if small.rank == 0 else None
        if uid is not None:
            draft = self.folder / "draft"
            draft.write_bytes(bytes(uid))
            draft.rename(self.folder / f"join-{small.size}")
        whole = small.grow(self.world, uid)
        small.destroy()
        return whole

    def run(self, comm: pynccl.Communicator, epochs: int) -> pynccl.Communicator:
        data = load_data(self.xp, comm)
        self.share(comm)
        while int(self.step[0]) < epochs * STEPS:
            try:
                self.advance(comm, data)
            except pynccl.RankFailedError as error:
                comm = self.replace(comm, error.ranks)
                load_data(self.xp, comm)
                self.share(comm)
            if int(self.step[0]) % STEPS == 0:
                print(f"epoch {int(self.step[0]) // STEPS}", flush=True)
        score = self.network.accuracy(data[0][TRAIN:], data[1][TRAIN:])
        if comm.rank == 0:
            alone = Training(self.xp, 1, self.folder)
            while int(alone.step[0]) < epochs * STEPS:
                alone.advance(None, data)
            same = alone.network.accuracy(data[0][TRAIN:], data[1][TRAIN:])
            difference = float(self.xp.abs(alone.network.weights - self.network.weights).max())
            print(f"accuracy {score:.4f}, undisturbed {same:.4f}, difference {difference:.1e}", flush=True)
            if score < GOAL or not difference < 1e-3:
                raise SystemExit("the training was disturbed")
        comm.barrier()
        return comm


def worker(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    if options.join is None:
        comm = pynccl.init(timeout=TIMEOUT)
    else:
        uid = (folder / f"join-{options.join}").read_bytes()
        comm = pynccl.Communicator.join(options.ranks, uid, options.join, timeout=TIMEOUT)
    training = Training(pynccl.array_module(), options.ranks, folder)
    training.run(comm, options.epochs).destroy()


class Ranks:
    """The processes, and what they print."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options, self.folder = options, folder
        self.lines: queue.Queue[tuple[str, str | None]] = queue.Queue()
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *arguments: str, **env: str) -> None:
        command = [sys.executable, __file__, "--folder", self.folder, "-n", str(self.options.ranks)]
        command += ["--epochs", str(self.options.epochs), *arguments]
        process = subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)
        self.processes[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put((name, line.strip()))
        self.lines.put((name, None))

    def wait(self, wanted: str, name: str | None = None) -> None:
        """Show what they print, until one of them prints this."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            who, line = self.lines.get(timeout=max(0.1, deadline - time.monotonic()))
            if line is None:
                code = self.processes[who].wait()
                if code > 0:
                    raise SystemExit(f"process {who} ended with exit code {code}: its error stands above")
                continue
            print(f"[{who}] {line}", flush=True)
            if line.startswith(wanted) and name in (None, who):
                return

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def has_gpus() -> bool:
    try:
        return pynccl.device_count() > 0
    except pynccl.NcclError:
        return False


def main(options: argparse.Namespace) -> None:
    if "PYNCCL_LIBRARY" not in os.environ and not has_gpus():
        os.environ["PYNCCL_LIBRARY"] = "cpu"
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
        free.close()
        ranks = Ranks(options, folder)
        try:
            for rank in range(options.ranks):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.ranks)}
                ranks.start(str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place)
            victim = str(chance.randrange(options.ranks))
            ranks.wait(f"epoch {chance.randint(1, max(1, options.epochs // 2))}", victim)
            time.sleep(chance.uniform(0, 0.02))
            print(f"killing rank {victim}", flush=True)
            ranks.processes[victim].send_signal(signal.SIGKILL)
            ranks.wait("survived")
            join = Path(folder, f"join-{options.ranks - 1}")
            while not join.exists():
                time.sleep(0.01)
            ranks.start("new", "--join", str(options.ranks - 1))
            ranks.wait("accuracy")
            codes = {name: p.wait(TIMEOUT) for name, p in ranks.processes.items() if name != victim}
            if any(codes.values()):
                raise SystemExit(f"ranks failed: {codes}")
        finally:
            ranks.close()
    print("all survivors and the new rank have finished", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--join", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ and not given.folder:
        parser.error("this program starts its ranks itself; run it with python, without a launcher")
    if given.folder:
        worker(given)
    else:
        main(given)
