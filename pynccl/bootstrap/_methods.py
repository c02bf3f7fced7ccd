"""The methods of `pynccl.init`: the choice of one, and the exchange that each opens."""

from __future__ import annotations

import atexit
import errno
import importlib
import importlib.util
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from pynccl._base.values import shown
from pynccl._device.blocking import bounded
from pynccl._errors import BootstrapError, NcclTimeoutError
from pynccl._watch.ended import exit_key
from pynccl.bootstrap import _environment, _mpi
from pynccl.bootstrap._environment import Launcher
from pynccl.bootstrap._exchange import Exchange, Round
from pynccl.bootstrap._keys import FolderKeys, Keys, ObjectKeys, StoreKeys
from pynccl.bootstrap._preflight import absent
from pynccl.bootstrap._rounds import meet
from pynccl.bootstrap._server import StoreServer
from pynccl.bootstrap._store import KnownStore, Store, StoreLost, format_address, parse_address
from pynccl.bootstrap._tcp import Host, Place, ask, connect, left, visit

Open = Callable[[float], AbstractContextManager[Exchange]]
_EXPECTED = (
    "expected None, 'env', 'mpi', 'tcp://host:port', 'file:///path', an mpi4py communicator, or an object "
    "with get and set"
)


class Method(NamedTuple):
    """The chosen method: this rank, the reason of the choice, and the way to the other ranks."""

    rank: int
    size: int
    why: str
    # True if the rank comes from the launcher, so that the launcher's local rank applies.
    follows: bool
    open: Open
    # True if these are only some of the processes of an MPI job: the ranks then keep their devices.
    part: bool = False
    # The host of the rendezvous, if the method names one.
    host: str = ""


def choose(
    method: Any,
    rank: int | None,
    world_size: int | None,
    launcher: Launcher,
    on_listen: Callable[[str], object] | None,
) -> Method:
    """Choose the method from the arguments and the environment."""
    if on_listen is not None and not (isinstance(method, str) and method.startswith("tcp://")):
        raise ValueError("on_listen is given; expected None unless method is 'tcp://host:port'")
    if on_listen is not None and not callable(on_listen):
        raise TypeError(f"on_listen is {shown(on_listen)}; expected a function of one argument, or None")
    if method is None and rank is None and world_size is None:
        if launcher is _environment.NOBODY or (launcher.names.mpi and launcher.size == 1):
            return _alone(launcher)
        if launcher.names.mpi and importlib.util.find_spec("mpi4py") is not None:
            return _by_mpi("mpi", launcher, f"init with {launcher}")
    if (isinstance(method, str) and method == "mpi") or _mpi.is_communicator(method):
        if rank is not None or world_size is not None:
            raise ValueError("rank or world_size is given; expected None, since MPI numbers the ranks")
        return _by_mpi(method, launcher, "method='mpi'")
    where, opener = _place(method, on_listen)
    rank, size = _numbers(rank, world_size, launcher)
    host = _host(method)
    if opener is None:
        where, opener, host = _by_environment(rank, size, launcher)
    follows = rank == launcher.rank
    given = "the arguments" if launcher is _environment.NOBODY or not follows else str(launcher)
    why = f"{given}{where if size > 1 else ''}"
    return Method(rank, size, why, follows, opener(rank, size), host=host)


def _host(method: Any) -> str:
    address = method.address if isinstance(method, Store) else str(method)
    if isinstance(method, Store) or address.startswith("tcp://"):
        return parse_address(address.removeprefix("tcp://"))[0]
    return ""


def _alone(launcher: Launcher) -> Method:
    names = _environment.TORCHRUN
    size = _environment.variables().get(names.size, "1") if launcher is _environment.NOBODY else "1"
    if size != "1":
        raise BootstrapError(
            f"{names.size} is {shown(size)}, but {names.rank} is not set; expected both (`pynccl run` and "
            "torchrun set them), rank= and world_size=, or neither for a program of one rank"
        )
    _require_srun(launcher)
    why = "itself: no launcher's variables" if launcher is _environment.NOBODY else str(launcher)
    return Method(0, 1, why, True, _nowhere)


def _require_srun(launcher: Launcher) -> None:
    """Raise if a batch script started this process by itself, and the job has several tasks."""
    wrong = _environment.without_srun(_environment.variables())
    if wrong and launcher is _environment.NOBODY:
        raise BootstrapError(wrong)


def _nowhere(_: float) -> AbstractContextManager[Exchange]:
    raise AssertionError("a single rank makes no exchange")


def _numbers(rank: int | None, world_size: int | None, launcher: Launcher) -> tuple[int, int]:
    names = _environment.TORCHRUN if launcher is _environment.NOBODY else launcher.names
    rank = launcher.rank if rank is None else int(rank)
    size = launcher.size if world_size is None else int(world_size)
    setters = "`pynccl run` and torchrun set" if names is _environment.TORCHRUN else f"{names.launcher} sets"
    for name, argument, value in ((names.rank, "rank", rank), (names.size, "world_size", size)):
        if value is None:
            _require_srun(launcher)
            raise BootstrapError(f"{name} is not set; expected a number ({setters} it), or {argument}=")
    assert rank is not None and size is not None
    if not 0 <= rank < size:
        raise BootstrapError(
            f"{names.rank} is {rank} and {names.size} {size}; expected 0 <= {names.rank} < {names.size}"
        )
    return rank, size


# --- rendezvous places --------------------------------------------------------------------------------------

Opener = Callable[[int, int], Open]
# Objects by id(), kept alive so that no other object gets the same id.
_objects: dict[int, Any] = {}


class _Rounds:
    """The numbers of the rounds at one place, which every rank counts equally.

    Several calls of init may use one place, and threads of one process may be its ranks. A rank that is new
    in this process begins behind the rounds that are over. A failed one is not over while its keys remain:
    a late rank learns there why it failed.
    """

    def __init__(self) -> None:
        self._last, self._over = dict[int, int](), -1

    def of(self, rank: int) -> Iterator[int]:
        """Yield the numbers of a rank's next rounds."""
        while True:
            number = self._last[rank] = max(self._last.get(rank, -1), self._over) + 1
            yield number

    @contextmanager
    def during(self, number: int, keys: Keys) -> Iterator[None]:
        """Count a round as over at the end of the block, unless it fails and its keys remain."""
        over = keys.clears
        try:
            yield
            over = True
        finally:
            if over:
                self._over = max(self._over, number)


_rounds: defaultdict[str, _Rounds] = defaultdict(_Rounds)


def _place(method: Any, on_listen: Callable[[str], object] | None) -> tuple[str, Opener | None]:
    """Return the place of a method in words, and its opener; "" and None if the environment decides."""
    if method is None or (isinstance(method, str) and method == "env"):
        return "", None
    if isinstance(method, str) and method.startswith("tcp://"):
        try:
            host, port = parse_address(method.removeprefix("tcp://"))
        except ValueError as error:
            raise ValueError(f"method is {shown(method)}: {error}") from None
        if not host:
            raise ValueError(f"method is {shown(method)}; expected a host before the port")
        if port == 0 and on_listen is None:
            raise ValueError(
                f"method is {shown(method)}; with port 0, rank 0 needs on_listen= to tell the others its port"
            )
        return f", at {method}", _opener(_at_address, host, port, on_listen)
    if isinstance(method, str) and method.startswith("file:///"):
        path = method.removeprefix("file://")
        if not path.strip("/"):
            raise ValueError(f"method is {shown(method)}; expected a folder below the root, 'file:///path'")
        if "\0" in path:
            raise ValueError(f"method is {shown(method)}; expected a path without a null character")
        return f", in {method}", _opener(_through, lambda _: FolderKeys(path), method, True)
    if isinstance(method, Store):
        return f", through the store at {method.address}", _opener(
            _through, lambda _: StoreKeys(method), _identity(method), False
        )
    if not isinstance(method, str) and ObjectKeys.fits(method):
        keys = ObjectKeys(method)
        return f", through {keys.where}", _opener(_through, lambda _: keys, _identity(method), False)
    named = isinstance(method, str) and method == "env://"
    meant = "pynccl's name is 'env', the default; " if named else ""
    raise ValueError(f"method is {shown(method)}; {meant}{_EXPECTED}")


def _opener(function: Callable[..., AbstractContextManager[Exchange]], *args: Any) -> Opener:
    return lambda rank, size: lambda deadline: function(*args, rank, size, deadline)


def _identity(target: Any) -> str:
    _objects[id(target)] = target
    return f"object {id(target)}"


def _by_environment(rank: int, size: int, launcher: Launcher) -> tuple[str, Opener, str]:
    """Return the place that the environment names: in words, its opener, and its host."""
    environ = _environment.variables()
    at = _environment.master(environ, launcher)
    if _environment.uses_agent_store(environ) and at is not None:
        where = f"torchrun's store at {format_address(*at)}"
        # The import may take longer than the time-out, on each rank another time.
        return f", through {where}", _opener(_by_agent, _torch_distributed(where), *at, where), at[0]
    if address := environ.get("PYNCCL_STORE"):
        try:
            host, port = parse_address(address)
            if not port:
                raise ValueError(f"the address is {shown(address)}; expected a port of 1 to 65535")
        except ValueError as error:
            raise ValueError(f"PYNCCL_STORE: {error}") from None
        return f", through the store at {address}", _opener(_at_store, address, address), host
    if size == 1:
        return "", _opener(_nowhere), ""
    if at is None:
        raise BootstrapError(
            f"rank {rank} has no store: expected PYNCCL_STORE=host:port, or MASTER_ADDR and MASTER_PORT "
            f"(MASTER_ADDR={environ.get('MASTER_ADDR')!r}, MASTER_PORT={environ.get('MASTER_PORT')!r})"
            f"{_mpi_note(launcher)}"
        )
    where = format_address(*at)
    if (where, rank) not in _kept and (store := _torch_store(rank, size)) is not None:
        # torch already listens at MASTER_PORT.
        keys = ObjectKeys(store, "torch.distributed's store", "pynccl/")
        return f", through {keys.where}", _opener(_through, lambda _: keys, _identity(store), True), at[0]
    source, job = _environment.host_source(environ), _environment.job_name(environ, launcher)
    return f", at {where}", _opener(_at_master, *at, source, job), at[0]


def _mpi_note(launcher: Launcher) -> str:
    if not launcher.names.mpi:
        return ""
    if importlib.util.find_spec("mpi4py") is None:
        return (
            f". Ranks started by mpirun ({launcher}) need mpi4py, which is not installed: pip install mpi4py"
        )
    return f". Ranks started by mpirun ({launcher}) can use pynccl.init() or pynccl.init('mpi')"


@contextmanager
def _through(
    keys: Callable[[float], Keys], name: str, lingers: bool, rank: int, size: int, deadline: float
) -> Iterator[Exchange]:
    """Open an exchange through an existing folder or object."""
    found, rounds = keys(deadline), _rounds[name]
    numbers = rounds.of(rank)
    number = next(numbers)
    # A rank that comes late, or was started again, joins the others where they are.
    newest = found.newest() if isinstance(found, FolderKeys) else -1
    while number < newest:
        number = next(numbers)
    try:
        with rounds.during(number, found):
            yield Round(found, str(number), rank, size, deadline, lingers=lingers)
    finally:
        found.withdraw()


@contextmanager
def _at_store(address: str, name: str, rank: int, size: int, deadline: float) -> Iterator[Exchange]:
    """Open an exchange through an existing pynccl store."""
    with connect(Place(address), deadline, rank, size, "cannot take part") as store:
        numbers = _rounds[name].of(rank)
        number = next(numbers)
        keys = StoreKeys(store)
        meeting = Round(keys, str(number), rank, size, deadline, later=numbers)
        launcher = _environment.detect(_environment.variables())
        if (rank, size) == (launcher.rank, launcher.size):
            meeting.how_ended = lambda other: _value(store, exit_key(other))
        with _rounds[name].during(number, keys):
            yield meeting


def _value(store: Store, key: str) -> str:
    try:
        return store.get(key, 0.0).decode()
    except TimeoutError:
        return ""


@contextmanager
def _at_address(
    host: str, port: int, on_listen: Callable[[str], object] | None, rank: int, size: int, deadline: float
) -> Iterator[Exchange]:
    """Open an exchange through a store that rank 0 serves for this call only."""
    if rank != 0:
        if port == 0:
            raise ValueError("method is 'tcp://...:0'; expected rank 0's port on the other ranks")
        place = ask(host, port, "", deadline, rank, size)
        with visit(connect(place, deadline, rank, size), place, rank) as store:
            keys = StoreKeys(store, format_address(host, port), of_rank_0=True)
            yield Round(keys, "0", rank, size, deadline)
        return
    home = Host(host, port, "", deadline)
    try:
        if on_listen is not None:
            on_listen(f"tcp://{home.entry.address}")
        with connect(home.place, deadline, rank, size) as store:
            meeting = Round(StoreKeys(store, home.where), "0", rank, size, deadline, lingers=True)
            meeting.when_failed = home.server.end_with
            meeting.when_joined, meeting.refused = home.entry.close, home.refused
            yield meeting
        home.wait_until_left()
    finally:
        home.close()


# The stores that were found through MASTER_PORT, by its address and this rank, with the server on rank 0.
# Later calls do not connect to MASTER_PORT, which torch may use by then.
_kept: dict[tuple[str, int], tuple[Place, StoreServer | None]] = {}


def _forget() -> None:
    """Close the servers of this process; a forked child leaves them to its parent."""
    while _kept:
        _, (_, server) = _kept.popitem()
        if server is not None:
            server.close()


atexit.register(_forget)
os.register_at_fork(after_in_child=_kept.clear)


@contextmanager
def _naming(host: str, source: str, rank: int, size: int) -> Iterator[None]:
    """Add the source of a host to the error if its name cannot be resolved, or if it is not rank 0's."""
    try:
        yield
    except BootstrapError as error:
        causes = error.__cause__, getattr(error.__cause__, "__cause__", None)
        if any(isinstance(cause, socket.gaierror) for cause in causes):
            what = "a name that cannot be resolved"
        elif any(isinstance(cause, OSError) and cause.errno == errno.EADDRNOTAVAIL for cause in causes):
            what = "not rank 0's; expected MASTER_ADDR with the name of rank 0's host on every rank"
        else:
            raise
        raise BootstrapError(f"rank {rank} of {size}: {source} is {shown(host)}, {what}: {error}") from error


@contextmanager
def _at_master(
    host: str, port: int, source: str, job: str, rank: int, size: int, deadline: float
) -> Iterator[Exchange]:
    """Open an exchange: the first through MASTER_PORT, later ones through the store that was found there."""
    where = format_address(host, port)
    place, server = _kept.get((where, rank), (None, None))
    home, store, at = None, None, where
    try:
        if place is not None:
            at = f"{place.address}, the store of an earlier init"
            # If nobody listens there, rank 0 has died, or an init has failed there.
            with suppress(StoreLost):
                store = connect(place, deadline, rank, size, kind=KnownStore)
        if place is None or store is None:
            at = where
            with _naming(host, source, rank, size):
                home = Host(host, port, job, deadline) if rank == 0 else None
                place = ask(host, port, job, deadline, rank, size) if home is None else home.place
            server = None if home is None else home.server
            store = connect(place, deadline, rank, size)
        elif server is not None:
            # A rank that was started again knows MASTER_PORT alone. torch may listen there by now.
            with suppress(BootstrapError):
                home = Host(host, port, job, deadline, server)
        with visit(store, place, rank):
            rounds = _rounds[f"{place.address} {place.job}"]
            numbers = rounds.of(rank)
            number = next(numbers)
            keys = StoreKeys(store, at if home is None else home.where, of_rank_0=True)
            lingers = server is not None
            meeting = Round(keys, str(number), rank, size, deadline, lingers=lingers, later=numbers)
            if server is not None:
                meeting.when_failed = server.end_with
            if home is not None:
                meeting.when_joined, meeting.refused = home.entry.close, home.refused
            with rounds.during(number, keys):
                yield meeting
    except BaseException:
        # The ranks meet at MASTER_PORT again: a rank that was started anew knows no other place.
        _kept.pop((where, rank), None)
        if home is not None:
            home.close()
        elif server is not None and rank == 0:
            server.close()
        raise
    _kept[where, rank] = place, server


# --- torch's stores: only torch implements their protocol ---------------------------------------------------


def _torch_distributed(where: str) -> Any:
    try:
        return importlib.import_module("torch.distributed")
    except ImportError as error:
        raise BootstrapError(f"{where} needs torch, which cannot be imported: {error}") from error


@contextmanager
def _by_agent(
    dist: Any, host: str, port: int, where: str, rank: int, size: int, deadline: float
) -> Iterator[Exchange]:
    """Open an exchange through the store of torchrun's agent, which listens at MASTER_PORT."""

    def open_store() -> Any:
        while True:
            # torch may take twice its time-out and a second. A constructor that returns while the interpreter
            # ends aborts the process.
            seconds = max(0.05, (left(deadline) - 1) / 2)
            try:
                return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
            except RuntimeError:
                if left(deadline) <= 1:
                    raise

    try:
        store = bounded(open_store, left(deadline) + 1, f"connecting to {where}")
        store.set_timeout(timedelta(seconds=left(deadline)))
    except NcclTimeoutError:
        raise BootstrapError(f"rank {rank} of {size}: {where} is silent") from None
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        raise BootstrapError(f"rank {rank} of {size} cannot connect to {where}: {text}") from error
    rounds = dist.PrefixStore("pynccl/init", store)
    number = meet(rounds, rank, size, left(deadline), lambda missing: absent(rank, size, missing, where))
    keys = ObjectKeys(store, where, f"pynccl/init/{number}/")
    try:
        yield Round(keys, "0", rank, size, deadline)
    finally:
        keys.withdraw()


def _torch_store(rank: int, size: int) -> Any:
    """Return torch.distributed's store if this process has initialized it with these ranks, else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        return None
    return dist.distributed_c10d._get_default_store()


# --- MPI ----------------------------------------------------------------------------------------------------


def _by_mpi(method: Any, launcher: Launcher, user: str) -> Method:
    comm = _mpi.communicator(method, user)
    rank, size = int(comm.Get_rank()), int(comm.Get_size())
    if size == 1:
        _require_srun(launcher)
    _mpi.require_same_world(comm, launcher)
    part = _mpi.is_part(comm)
    text = f", not {launcher}" if not launcher.names.mpi and launcher is not _environment.NOBODY else ""

    @contextmanager
    def opened(deadline: float) -> Iterator[Exchange]:
        yield _mpi.MpiExchange(comm, deadline)

    why = f"MPI ({'MPI.COMM_WORLD' if method == 'mpi' else 'the given communicator'}){text}"
    # Open MPI's local ranks differ from the order of MPI.COMM_TYPE_SHARED.
    return Method(rank, size, why, part, opened, part)
