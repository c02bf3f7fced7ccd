"""Who may join a communicator of the CPU library, as Python programs meet it; tests/cpp has the attacks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

import pynccl
from meeting import free_port, store
from pynccl import NcclError, NcclInvalidUsage, NcclTimeoutError, capi, testing
from pynccl._secure.secret import read_secret
from ranks import on_ranks


def use_secret(secret: str) -> None:
    os.environ.pop("PYNCCL_SECRET_FILE", None)
    os.environ["PYNCCL_SECRET"] = secret


def meet(rank: int, nranks: int) -> float:
    """Return the sum that the ranks of NCCL_COMM_ID's communicator find."""
    with pynccl.Communicator(nranks, pynccl.get_unique_id(), rank) as comm:
        return float(comm.all_reduce(np.full(5, rank + 1.0)).sum())


@pytest.mark.parametrize("secret", ["", "open sesame, please", "x" * 300])
@on_ranks(3)
def test_public_id(rank: int, nranks: int, port: int, secret: str) -> None:
    use_secret(secret)
    os.environ["NCCL_COMM_ID"] = f"127.0.0.1:{port}"
    assert meet(rank, nranks) == 30.0


def intruder(rank: int, nranks: int, port: int, secrets: list[str]) -> str:
    """Rank 2 comes first and wants rank 1's seat; the others have the secret."""
    os.environ.update(NCCL_COMM_ID=f"127.0.0.1:{port}", PYNCCL_CPU_INIT_TIMEOUT="20")
    with store() as talk:
        use_secret(secrets[rank])
        if rank == 1:
            talk.wait("the intruder has tried")
        if rank < 2:
            return str(meet(rank, 2))
        with pytest.raises(NcclInvalidUsage) as caught:
            meet(1, 2)
        talk.set("the intruder has tried", b"1")
        return str(caught.value)


@pytest.mark.parametrize("guess", ["", "a guess of the same length"])
def test_intruder(guess: str) -> None:
    results = testing.run(
        3, intruder, free_port(), ["known to both ranks", "known to both ranks", guess], backend="cpu"
    )
    assert results[:2] == ["15.0", "15.0"]
    assert "PYNCCL_SECRET" in results[2]
    assert "rank 1" in results[2]


def only_refused(rank: int, nranks: int, port: int) -> str:
    """Rank 1 has another secret by mistake: it is told at once, and rank 0 at the end of its wait."""
    os.environ.update(NCCL_COMM_ID=f"127.0.0.1:{port}", PYNCCL_CPU_INIT_TIMEOUT="2")
    use_secret("a secret of rank 0" if rank == 0 else "a secret of rank 1")
    start = time.monotonic()
    with pytest.raises(NcclError) as caught:
        meet(rank, nranks)
    assert isinstance(caught.value, NcclInvalidUsage if rank else NcclTimeoutError)
    assert rank == 0 or time.monotonic() - start < 10
    return str(caught.value)


def test_refused_rank_is_named() -> None:
    texts = testing.run(2, only_refused, free_port(), backend="cpu")
    assert "missing rank 1" in texts[0]
    assert "1 connections were refused, the last: rank 1 (at 127.0.0.1:" in texts[0]
    assert "the root's secret" in texts[0]
    assert "another secret (PYNCCL_SECRET) than this one" in texts[1]


def through_files(rank: int, nranks: int, path: str, secret: str) -> str:
    with store() as talk:
        use_secret(secret)
        if rank == 0:
            del os.environ["PYNCCL_SECRET"]
            os.environ["PYNCCL_SECRET_FILE"] = path
            talk.set("id", bytes(pynccl.get_unique_id()))
        uid = talk.get("id")
    with pynccl.Communicator(nranks, pynccl.UniqueId(uid), rank) as comm:
        return str(comm.all_reduce(np.ones(1)).sum())


@pytest.mark.parametrize(
    "text",
    [
        "without space around",
        " with space around\t\n",
        "\x1f in control characters\x1c\r\n",
        "dürre Ähre, dürre Ähre",
        "several\nlines, each short\n",
    ],
)
def test_files_mean_the_same_to_the_store_and_the_library(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(text, encoding="utf-8", newline="")
    file.chmod(0o600)
    secret = read_secret({"PYNCCL_SECRET_FILE": str(file)})
    assert testing.run(2, through_files, str(file), secret, backend="cpu") == ["2.0", "2.0"]


@on_ranks(1)
def test_files_are_refused_by_both(rank: int, nranks: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    file = Path(folder, "secret")
    file.write_text("text that is long enough")
    os.environ.pop("PYNCCL_SECRET", None)
    os.environ["PYNCCL_SECRET_FILE"] = str(file)
    for mode in (0o604, 0o620, 0o602, 0o601, 0o640, 0o400):
        file.chmod(mode)
        refusals = []
        for read in (read_secret, capi.ncclGetUniqueId):
            try:
                read()
            except NcclError as error:
                refusals.append(str(error))
        assert len(refusals) in (0, 2), (oct(mode), refusals)
        assert bool(refusals) == bool(mode & 0o007)
        assert all(f"is open to every user (mode {mode:04o}); expected 0600" in text for text in refusals)
