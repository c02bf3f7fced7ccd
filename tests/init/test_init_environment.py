"""Which launcher counts: the documented order, nested launchers, Slurm's variables, and the log."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import pynccl
from conftest import clean_environment
from launchers import forget_the_launcher, logged
from meeting import free_port, together
from processes import completed
from pynccl import BootstrapError, testing
from pynccl.bootstrap import _environment
from ranks import on_ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}
# Of sbatch's script itself; srun in it sets SLURM_STEP_ID, too.
BATCH = {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NUM_NODES": "1"}
HYDRA = {"PMI_RANK": "4", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4"}
PALS = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"} | PMI


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size", "local", "ignored"),
    [
        ({}, "no launcher", None, None, None, ()),
        (TORCHRUN, "torchrun", 1, 2, 1, ()),
        (SLURM, "Slurm", 2, 4, 0, ()),
        (OPEN_MPI, "Open MPI", 3, 5, 2, ()),
        (HYDRA, "MPICH", 4, 6, 1, ()),
        (PMI, "PMI", 2, 4, None, ()),
        (PALS, "PALS", 5, 4, 1, ()),
        # torchrun under mpirun, and under srun.
        (TORCHRUN | OPEN_MPI, "torchrun", 1, 2, 1, ("Open MPI",)),
        (TORCHRUN | SLURM | HYDRA, "torchrun", 1, 2, 1, ("MPICH", "Slurm")),
        # mpirun inside of a Slurm job, and srun --mpi=pmi2.
        (SLURM | OPEN_MPI, "Open MPI", 3, 5, 2, ("Slurm",)),
        (SLURM | HYDRA, "MPICH", 4, 6, 1, ("Slurm",)),
        (SLURM | PMI, "Slurm", 2, 4, 0, ()),
        # Not started by srun: mpirun in a batch script, and a shell of salloc on a node of the job.
        (BATCH | OPEN_MPI, "Open MPI", 3, 5, 2, ()),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, "no launcher", None, None, None, ()),
    ],
)
def test_which_launcher_counts(
    environ: dict[str, str],
    launcher: str,
    rank: int | None,
    size: int | None,
    local: int | None,
    ignored: tuple[str, ...],
) -> None:
    found = _environment.detect(environ)
    assert found.names.launcher == launcher
    assert (found.rank, found.size, found.local_rank, found.ignored) == (rank, size, local, ignored)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("node[01-03,7],other", "node01"),
        ("n[7,9-11]", "n7"),
        ("gpu-[2-3]-rack[5,6]", "gpu-2-rack5"),
        ("tux[3].example.org,b", "tux3.example.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert _environment.first_host(nodes) == host


def test_jobs_of_slurm_have_ports_of_their_own() -> None:
    slurm = SLURM | {"SLURM_JOB_NODELIST": "a[1-2]"}
    places = [
        _environment.master(environ := slurm | {"SLURM_JOB_ID": str(job)}, _environment.detect(environ))
        for job in range(900_000, 900_050)
    ]
    assert {place[0] for place in places if place} == {"a1"}
    assert len({place[1] for place in places if place}) == 50
    assert all(1024 < place[1] < 32768 for place in places if place)
    given = slurm | {"MASTER_ADDR": "b", "MASTER_PORT": "77", "SLURM_JOB_ID": "1"}
    assert _environment.master(given, _environment.detect(given)) == ("b", 77)
    bracketed = given | {"MASTER_ADDR": "[::1]"}
    assert _environment.master(bracketed, _environment.detect(given)) == ("::1", 77)


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5", "9" * 30, "²"])
def test_variables_that_are_no_numbers(value: str) -> None:
    with pytest.raises(BootstrapError, match=r"SLURM_NTASKS is '.*'; expected a number"):
        _environment.detect(SLURM | {"SLURM_NTASKS": value})


# --- through init -------------------------------------------------------------------------------------------


def by_slurm(rank: int, nranks: int, more: dict[str, str]) -> list[str]:
    lines = logged()
    forget_the_launcher()
    os.environ.update(SLURM_PROCID=str(rank), SLURM_NTASKS=str(nranks), SLURM_LOCALID=str(rank), **more)
    for _ in range(2):
        with pynccl.init(timeout=20) as comm:
            assert (comm.rank, comm.size, comm.device) == (rank, nranks, rank)
            assert (comm.all_reduce(np.ones(3)) == nranks).all()
    return lines


@pytest.mark.parametrize("nranks", [1, 2, 4])
def test_slurm(nranks: int) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost,other[1-3]"}
    for rank, lines in enumerate(testing.run(nranks, by_slurm, job, backend="cpu")):
        assert len(lines) == 2
        assert lines[0].startswith(
            f"INFO pynccl.init: rank {rank} of {nranks} by Slurm's variables (SLURM_PROCID={rank}, "
            f"SLURM_NTASKS={nranks})"
        )
        assert nranks == 1 or ", at localhost:" in lines[0]


def in_a_batch_script(rank: int, nranks: int, more: dict[str, str]) -> int | str:
    forget_the_launcher()
    os.environ.update(BATCH | more)
    try:
        with pynccl.init(timeout=20) as comm:
            return comm.size
    except BootstrapError as error:
        return str(error)


@pytest.mark.parametrize(
    ("more", "tasks"),
    [
        # sbatch sets SLURM_NTASKS only if it was asked for so many.
        ({}, 1),
        ({"SLURM_NTASKS": "1"}, 1),
        ({"SLURM_NTASKS": "4"}, 4),
        ({"SLURM_JOB_NUM_NODES": "3"}, 3),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "2"}, 6),
    ],
)
def test_a_batch_script_without_srun(more: dict[str, str], tasks: int) -> None:
    (said,) = testing.run(1, in_a_batch_script, more, backend="cpu")
    if tasks == 1:
        assert said == 1
    else:
        assert f"the job has {tasks} tasks; expected `srun python ...` or mpirun" in str(said)


def elsewhere(rank: int, nranks: int) -> str:
    forget_the_launcher()
    os.environ.update(SLURM_PROCID="0", SLURM_NTASKS="2", SLURM_JOB_ID="7", SLURM_STEP_NODELIST="192.0.2.9,b")
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=5)
    return str(caught.value)


def test_rank_0_is_not_on_the_first_host() -> None:
    """As with srun --distribution=arbitrary."""
    (text,) = testing.run(1, elsewhere, backend="cpu")
    assert "the first host of Slurm's node list is '192.0.2.9', not rank 0's; expected MASTER_ADDR" in text


def test_slurm_where_the_port_is_given() -> None:
    port = free_port()
    for lines in testing.run(2, by_slurm, {"MASTER_ADDR": "::1", "MASTER_PORT": str(port)}, backend="cpu"):
        assert lines[0].endswith(f", at [::1]:{port}")


def other_job(rank: int, nranks: int, port: int) -> str:
    together(nranks)
    forget_the_launcher()
    os.environ.update(
        SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID="0", SLURM_JOB_ID=str(100 + rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    with pytest.raises(BootstrapError) as caught:
        pynccl.init(timeout=2)
    return str(caught.value)


def test_two_jobs_do_not_meet() -> None:
    port = free_port()
    texts = testing.run(2, other_job, port, backend="cpu")
    assert f"found another job at 127.0.0.1:{port}: 'Slurm 100.'; expected 'Slurm 101.'" in texts[1]
    assert "ranks that never arrived: 1 (1 of 2)" in texts[0]


@on_ranks(1)
def test_a_single_process_and_another_mpi(rank: int, nranks: int) -> None:
    lines = logged()
    forget_the_launcher()
    pynccl.init().destroy()
    os.environ.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1")
    pynccl.init().destroy()
    assert "rank 0 of 1 by itself: no launcher's variables" in lines[0]
    assert "rank 0 of 1 by Open MPI's variables" in lines[1]
    # mpirun of one MPI, mpi4py of another: each rank would be alone.
    os.environ.update(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4")
    with pytest.raises(BootstrapError, match=r"started 4 ranks, but mpi4py sees 1: it uses another MPI"):
        pynccl.init()


@on_ranks(2)
def test_ranks_that_mpi_did_not_start(rank: int, nranks: int) -> None:
    from mpi4py import MPI

    for method in ("mpi", MPI.COMM_WORLD):
        with pytest.raises(BootstrapError, match="variables .* started 2 ranks, but MPI.COMM_WORLD"):
            pynccl.init(method, timeout=20)
    with pynccl.init(MPI.COMM_SELF, timeout=20) as comm:
        assert comm.size == 1


def nested(rank: int, nranks: int) -> list[str]:
    lines = logged()
    if not rank:
        os.environ["TORCHELASTIC_RUN_ID"] = "7"
    os.environ.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="7", SLURM_PROCID="5", SLURM_NTASKS="9")
    with pynccl.init(timeout=20) as comm:
        assert (comm.rank, comm.size) == (rank, nranks)
    return lines


def test_torchruns_variables_go_first() -> None:
    launchers = "torchrun's", "`pynccl run`'s"
    for lines, launcher in zip(testing.run(2, nested, backend="cpu"), launchers, strict=True):
        assert f"by {launcher} variables" in lines[0]
        assert "not Open MPI or Slurm's" in lines[0]


@on_ranks(2)
def test_mpirun_without_mpi4py(rank: int, nranks: int, port: int) -> None:
    forget_the_launcher()
    os.environ.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(nranks))
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    with pytest.raises(BootstrapError, match=f"rank {rank} has no store.*not installed: pip install mpi4py"):
        pynccl.init()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with pynccl.init(timeout=20) as comm:
        assert (comm.rank, comm.size, comm.device) == (rank, nranks, rank)


@on_ranks(1)
def test_a_world_size_without_a_rank(rank: int, nranks: int) -> None:
    forget_the_launcher()
    for size in ("4", "many", ""):
        os.environ["WORLD_SIZE"] = size
        for method in (None, "env"):
            with pytest.raises(BootstrapError, match="RANK is not set; expected"):
                pynccl.init(method)
    # Interactive shells of Slurm know the job's size, and some clusters say that a job is of one.
    os.environ.update(WORLD_SIZE="1", SLURM_NTASKS="4")
    pynccl.init().destroy()


def on_a_second_node(rank: int, nranks: int) -> tuple[int, int]:
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    with pynccl.init(timeout=20) as comm:
        assert (comm.all_reduce(np.ones(3)) == nranks).all()
        return comm.rank, comm.device


def test_two_nodes_on_one_machine() -> None:
    """Local ranks repeat there, and so do virtual devices; they collide only where their number is set."""
    for env in ({}, {"PYNCCL_CPU_DEVICES": ""}):
        found = testing.run(4, on_a_second_node, backend="cpu", env=env)
        assert found == [(0, 0), (1, 1), (2, 0), (3, 1)]
    with pytest.raises(testing.RankError, match="ranks 0 and 2 are both on virtual device 0"):
        testing.run(4, on_a_second_node, backend="cpu", env={"PYNCCL_CPU_DEVICES": "2"})


def test_the_log_is_quiet_unless_asked() -> None:
    done = completed(
        [sys.executable, "-W", "error", "-c", "import pynccl; pynccl.init().destroy()"],
        env=clean_environment() | {"PYNCCL_LIBRARY": "cpu"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
