"""Data parallelism that survives, by torchft: a replica dies, the other trains on, and a new one joins it.

python examples/torch_torchft.py
"""

import multiprocessing
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupWrapper

import pynccl.torch

STEPS, DIES_AT = 8, 3


class ProcessGroupPynccl(ProcessGroupWrapper):
    """The group of the replicas, which torchft makes anew whenever replicas come or go."""

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return pynccl.torch.process_group(store, rank, world_size, self._timeout, f"quorum {self._quorum_id}")

    def getBackendName(self) -> str:
        return "torchft-pynccl"


def start_manager(store: dist.TCPStore, replica: int, **options: Any) -> Manager:
    """Join the other replicas; this one is one rank, with a store of its own."""
    place = {"store_addr": "localhost", "store_port": store.port, "hostname": "localhost"}
    return Manager(replica_id=f"replica_{replica}", rank=0, world_size=1, **place, **options)


def train(replica: int, lighthouse: str, dies: bool, alone: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adam.state_dict()}

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = start_manager(
        store,
        replica,
        pg=ProcessGroupPynccl(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        lighthouse_addr=lighthouse,
    )
    optimizer = Optimizer(manager, adam)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(replica))
    together = 0
    while together < STEPS:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        # By hand: torchft's DistributedDataParallel ends with an AttributeError where a replica has failed.
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if dies and together == DIES_AT:
            os._exit(1)
        # Where a replica has failed meanwhile, it changes nothing.
        optimizer.step()
        if manager.num_participants() == 2:
            together += 1
        else:
            together = 0
            alone.set()
            # As long as a step of a larger model.
            time.sleep(0.1)
    weights = [round(value, 4) for value in model.weight.flatten().tolist()]
    sys.stdout.write(f"replica {replica}: {STEPS} steps together, weights {weights}\n")
    sys.stdout.flush()
    manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    context = multiprocessing.get_context("spawn")
    alone = context.Event()

    def start(replica: int, dies: bool = False) -> Any:
        task = replica, lighthouse.address(), dies, alone
        process = context.Process(target=train, args=task, daemon=True)
        process.start()
        return process

    survivor, victim = start(0), start(1, dies=True)
    victim.join()
    alone.clear()
    if not alone.wait(60):
        sys.exit("replica 0 did not train on alone")
    again = start(1)
    survivor.join()
    again.join()
    lighthouse.shutdown()
    sys.exit(survivor.exitcode or again.exitcode)


if __name__ == "__main__":
    main()
