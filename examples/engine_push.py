"""Push weights from a trainer into two inference workers through the communicator class of vLLM or of SGLang.

PYNCCL_LIBRARY=cpu python examples/engine_push.py vllm       # or sglang; on GPUs without PYNCCL_LIBRARY

An engine's program changes one import. The workers join by 128 bytes, which go through a pipe here.
"""

import importlib
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import pynccl

SHAPES = {"embedding": (1000, 64), "attention": (64, 192), "bias": (64,)}
SIZE, STEPS = 3, 3


def join(engine: str, uid: bytes, rank: int) -> Any:
    module: Any = importlib.import_module(f"pynccl.compat.{engine}")
    return module.PyNcclCommunicator.from_unique_id_bytes(uid, rank, SIZE, device=rank, timeout=60)


def push(comm: Any, value: float) -> list[float]:
    """Send the trainer's weights to all; return their sums."""
    xp = pynccl.array_module()
    weights = {name: xp.full(shape, value, xp.float32) for name, shape in SHAPES.items()}
    # SGLang's class does nothing outside of change_state; vLLM's has it, too.
    with comm.change_state(enable=True):
        for tensor in weights.values():
            comm.broadcast(tensor, src=0)
    return [float(tensor.sum()) for tensor in weights.values()]


def work(engine: str, rank: int, trainer: Connection) -> None:
    """Take the weights of each step, as an inference worker, and tell what has come."""
    comm = join(engine, trainer.recv_bytes(), rank)
    for _ in range(STEPS):
        trainer.send(push(comm, 0))
    comm.destroy()


def main(engine: str) -> None:
    context, uid = multiprocessing.get_context("spawn"), bytes(pynccl.get_unique_id())
    pipes = [context.Pipe() for _ in range(SIZE - 1)]
    for rank, (mine, theirs) in enumerate(pipes, 1):
        context.Process(target=work, args=(engine, rank, theirs), daemon=True).start()
        theirs.close()
        mine.send_bytes(uid)
    comm = join(engine, uid, 0)
    for step in range(1, STEPS + 1):
        sums = push(comm, step)
        if any(mine.recv() != sums for mine, _ in pipes):
            sys.exit(f"step {step}: a worker got other weights")
        print(f"step {step}: {len(pipes)} workers have the weights", flush=True)
    comm.destroy()


if __name__ == "__main__":
    main(sys.argv[1])
