"""Groups that get new members with torch 2.15's reconfigure."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pynccl import testing

pytestmark = [
    pytest.mark.usefixtures("torch_backend"),
    pytest.mark.timeout(240),
    pytest.mark.full,
    pytest.mark.newest_torch,
]


class Member:
    """A process that tells the others its handle; the processes share a folder, and no store."""

    def __init__(self, number: int, folder: str, seconds: float = 30) -> None:
        import pynccl.torch  # noqa: F401

        self.number, self.folder = number, Path(folder)
        init: Any = dist.init_process_group
        init(
            "pynccl",
            init_method=f"file://{folder}/store-{number}",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=seconds),
            enable_reconfigure=True,
        )
        self.group: Any = dist.group.WORLD
        self.backend: Any = self.group._get_backend(torch.device("cpu"))
        self.handle = handle()
        self.tell("handle", self.handle)

    def tell(self, what: str, value: str = "told") -> None:
        part = self.folder / f"part-{self.number}"
        part.write_text(value)
        part.rename(self.folder / f"{what}-{self.number}")

    def hear(self, what: str, number: int) -> str:
        path = self.folder / f"{what}-{number}"
        for _ in range(6000):
            if path.exists():
                return path.read_text()
            time.sleep(0.01)
        raise TimeoutError(f"member {number} did not tell its {what}")

    def handles(self, numbers: Iterable[int]) -> list[str]:
        return [self.hear("handle", number) for number in numbers]

    def join(self, uuid: int, numbers: list[int]) -> None:
        """Make a group of these members, and check it."""
        reconfigure(uuid, self.handles(numbers))
        assert (dist.get_rank(), dist.get_world_size()) == (numbers.index(self.number), len(numbers))
        check_group(self.number, numbers)


def handle() -> str:
    return str(dist._get_reconfigure_handle())  # type: ignore[attr-defined, unused-ignore]


def reconfigure(uuid: int, handles: Any, seconds: float | None = None, **options: Any) -> None:
    limit = None if seconds is None else timedelta(seconds=seconds)
    call: Any = dist._reconfigure  # type: ignore[attr-defined, unused-ignore]
    work = call(uuid, handles, timeout=limit, **options)
    assert work.wait() and work.is_completed()


def check_group(number: int, numbers: list[int]) -> None:
    """Compare collectives and messages of the members with NumPy."""
    rank, size = numbers.index(number), len(numbers)
    values = [np.random.default_rng(each).standard_normal(1000) for each in numbers]
    x = torch.from_numpy(values[rank].copy())
    dist.all_reduce(x)
    np.testing.assert_allclose(x.numpy(), np.sum(values, axis=0))
    gathered = torch.empty(size, 1000, dtype=torch.float64)
    dist.all_gather_into_tensor(gathered.view(-1), torch.from_numpy(values[rank]))
    np.testing.assert_array_equal(gathered.numpy(), np.stack(values))
    heard = torch.empty(1000, dtype=torch.float64)
    sent = dist.isend(torch.from_numpy(values[rank]), (rank + 1) % size, tag=7)
    dist.recv(heard, (rank - 1) % size, tag=7)
    assert sent is not None
    sent.wait()
    np.testing.assert_array_equal(heard.numpy(), values[rank - 1])
    dist.barrier()


def run(
    members: int, program: Callable[..., None], tmp_path: Path, *args: Any, dies: int | None = None
) -> None:
    results = testing.run(
        members, program, str(tmp_path), *args, backend="cpu", timeout=200, check=dies is None
    )
    assert [result for number, result in enumerate(results) if number != dies and result is not None] == []


# --- members come and go ---


def members_without_a_common_store(number: int, size: int, folder: str) -> None:
    member = Member(number, folder)
    assert dist._supports_reconfigure()  # type: ignore[attr-defined, unused-ignore]
    assert handle() == member.handle
    every = list(range(size))
    member.join(100, every[::-1])
    # A set has no order; every member chooses the same.
    reconfigure(101, set(member.handles(every)))
    by_handle = sorted(every, key=lambda each: member.hear("handle", each))
    assert dist.get_rank() == by_handle.index(number)
    check_group(number, by_handle)
    member.join(-1, [number])
    member.join(103, every)
    pair = [0, 1] if number < 2 else every[2:]
    member.join(200 + pair[0], pair)
    member.join(104, every)
    dist.destroy_process_group()


def test_members_without_a_common_store(tmp_path: Path) -> None:
    run(4, members_without_a_common_store, tmp_path)


def one_dies(number: int, size: int, folder: str, dies: int) -> None:
    """The last member joins after the death."""
    member = Member(number, folder)
    every, new = list(range(size - 1)), size - 1
    left = [each for each in every if each != dies]
    if number != new:
        member.join(1, every)
        if number == dies:
            os._exit(0)
        with pytest.raises(dist.DistBackendError, match=f"rank {dies}"):
            dist.all_gather_into_tensor(torch.empty(3000), torch.ones(1000))
        member.join(2, left)
    member.join(3, [*left, new])
    dist.destroy_process_group()


@pytest.mark.parametrize("dies", [0, 1])
def test_a_member_dies_and_another_comes(dies: int, tmp_path: Path) -> None:
    run(4, one_dies, tmp_path, dies, dies=dies)


def in_flight(number: int, size: int, folder: str) -> None:
    """Operations that cannot complete end with the group; rank 1 waits for its own in a thread."""
    member = Member(number, folder)
    member.join(1, [0, 1])
    x = torch.ones(100_000)

    errors: list[BaseException] = []

    def wait() -> None:
        try:
            dist.all_reduce(x) if number == 0 else dist.recv(x, 0, tag=3)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    started = time.monotonic()
    member.join(2, [1, 0])
    assert time.monotonic() - started < 20
    thread.join()
    # By this member's end, or by the other's, which may come first.
    assert [type(error) for error in errors] == [dist.DistBackendError]
    # An abort ends the operations, and the group can be made anew.
    member.backend.abort()
    with pytest.raises(dist.DistBackendError, match="shut down or aborted"):
        dist.all_reduce(x)
    member.join(3, [0, 1])
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="shut down"):
        member.group.reconfigure(options(4, [member.handle]))


def options(uuid: int, handles: Any) -> Any:
    from torch._C._distributed_c10d import ReconfigureOptions

    made = ReconfigureOptions()
    made.uuid, made.handles = uuid, handles
    return made


def test_operations_in_flight_end(tmp_path: Path) -> None:
    run(2, in_flight, tmp_path)


def group_with_a_store(number: int, size: int, folder: str) -> None:
    """A group that was made in the usual way, and gives up a split and a window of before."""
    import torch_ranks

    torch_ranks.start(number, size, f"file://{folder}/store")
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(3))
    window = group.new_window(torch.zeros(4))
    handles: list[Any] = [None] * size
    dist.all_gather_object(handles, handle())
    reconfigure(1, handles[::-1])
    assert (group.rank(), group.size()) == (size - 1 - number, size)
    check_group(number, list(range(size))[::-1])
    with pytest.raises(RuntimeError, match="the window ended when the group was reconfigured"):
        window.put(torch.ones(1), 0, 0, False)
    window = group.new_window(torch.zeros(4))
    window.put(torch.ones(2), 1 - group.rank(), 2, False)
    window.wait_signal(1 - group.rank(), False)
    assert window.map_remote_tensor(group.rank()).tolist() == [0, 0, 1, 1]
    part = group.split_group([1, 0], group_name="swapped")
    x = torch.tensor([float(group.rank())])
    part.broadcast(x, 0).wait()
    assert x.item() == 1
    assert group._get_sequence_number_for_group() > 0
    part.shutdown()
    dist.destroy_process_group()


def test_a_group_with_a_store(tmp_path: Path) -> None:
    run(2, group_with_a_store, tmp_path)


# --- what is refused ---


def refused(number: int, size: int, folder: str) -> None:
    member = Member(number, folder)
    own, other = member.handle, member.hear("handle", 1 - number)
    for call in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.recv(torch.ones(1)), dist.barrier):
        with pytest.raises(
            dist.DistBackendError, match="enable_reconfigure=True; expected reconfigure first"
        ):
            call()
    with pytest.raises(dist.DistBackendError, match="expected reconfigure first"):
        member.backend.monitored_barrier()
    for wrong, error in {
        (): "handles is empty; expected one handle of each member",
        (own, own): r"handles\[1\] is handles\[0\], too: pynccl:",
        (other,): "handles has 1 handles and not this rank's; expected 'pynccl:",
        (own, "gloo:0:-1:host:1"): r"handles\[1\] is 'gloo:0:-1:host:1'; expected a get_reconfigure_handle",
        (own, own[:-1] + "x"): r"handles\[1\] is 'pynccl:.*x'; expected a get_reconfigure_handle",
    }.items():
        with pytest.raises(ValueError, match=error):
            reconfigure(1, list(wrong))
    with pytest.raises(ValueError, match="handles is empty"):
        reconfigure(1, set())
    with pytest.raises(ValueError, match="timeout is 0ms, expected more than 0"):
        reconfigure(1, [own], seconds=0)
    with pytest.raises(ValueError, match="hints has 1 entries, expected none"):
        reconfigure(1, [own], hints={"a": "b"})
    # No call above used the uuid.
    member.join(1, [0, 1])
    with pytest.raises(ValueError, match="uuid is 1, which was already used for this group; expected a new"):
        reconfigure(1, [own, other])
    # A member that does not come; and the previous group still works.
    if number == 0:
        with pytest.raises(dist.DistBackendError) as caught:
            reconfigure(2, [own, other], seconds=1)
        assert f"(uuid 2): after 1 s rank 0 still waits for rank 1 ({other})" in str(caught.value)
    else:
        with pytest.raises(dist.DistBackendError) as caught:
            reconfigure(3, [other, own], seconds=1)
        assert f"(uuid 3): after 1 s rank 1 still waits for rank 0 ({other})" in str(caught.value)
    check_group(number, [0, 1])
    dist.barrier()
    # The members do not agree: the second one learns it at once.
    if number == 0:
        with pytest.raises(dist.DistBackendError, match="still waits for rank 1"):
            reconfigure(4, [own, other], seconds=4)
    else:
        time.sleep(1)
        with pytest.raises(
            ValueError, match="another member passed .* with the same uuid 4; expected the same"
        ):
            reconfigure(4, [other, own, f"pynccl:{'0' * 32}:127.0.0.1:1"])
    check_group(number, [0, 1])
    dist.destroy_process_group()


def test_what_is_refused(tmp_path: Path) -> None:
    run(2, refused, tmp_path)


def first_is_gone(number: int, size: int, folder: str) -> None:
    member = Member(number, folder)
    member.join(1, [0, 1])
    gone = member.hear("handle", 0)
    if number == 0:
        os._exit(0)
    for _ in range(1000):
        try:
            dist.all_reduce(torch.ones(10))
        except dist.DistBackendError:
            break
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        reconfigure(2, [gone, member.handle])
    assert f"rank 0 ({gone}), where the members meet, is lost" in str(caught.value)
    assert time.monotonic() - started < 15  # of 30: its process does not listen
    member.join(3, [1])
    dist.destroy_process_group()


def test_a_first_member_that_is_gone(tmp_path: Path) -> None:
    run(2, first_is_gone, tmp_path, dies=0)
