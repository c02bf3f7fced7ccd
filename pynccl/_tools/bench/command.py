"""The command line of `pynccl bench`: nccl-tests' flags, and `-n N` to start N ranks."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import click
from click.shell_completion import CompletionItem

from pynccl._base.options import Integer, Number
from pynccl._errors import NcclRemoteError, NcclTimeoutError, NotSupportedError
from pynccl._library import loader
from pynccl._run.command import ranks
from pynccl._run.launch import MOST_RANKS, Job, choose_backend, launch, ranks_here
from pynccl._tools.bench import alltoallv, graphs, memory, pairs, plot, progress
from pynccl._tools.bench.against import LEAST_CYCLES, Document, Earlier
from pynccl._tools.bench.compare import Comparison
from pynccl._tools.bench.data import OPS, TYPES, numpy_dtype
from pynccl._tools.bench.files import require_writable
from pynccl._tools.bench.measure import Bench
from pynccl._tools.bench.operations import OPERATIONS, Operation
from pynccl._tools.bench.peers import PEERS, WITHOUT_PEERS
from pynccl._tools.bench.progress import Progress
from pynccl._tools.bench.ranks import World, color
from pynccl._tools.bench.report import Report
from pynccl._tools.bench.settings import LONGEST_WAIT, Settings
from pynccl.bootstrap import _environment

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmg]?)\s*", re.IGNORECASE | re.ASCII)
_MOST_DIGITS, _MOST_BYTES = 40, 1 << 50
_MOST_PERCENT = 1e6


# NumPy's and torch's names of nccl-tests' datatypes and reductions.
_OTHER_NAMES = {"float16": "half", "float32": "float", "float64": "double", "bf16": "bfloat16", "mean": "avg"}
_OTHER_NAMES |= {"fp16": "half", "fp32": "float", "fp64": "double"}


class _Size(click.ParamType[Any]):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value))
        if match is None or len(match[1]) > _MOST_DIGITS:
            self.fail(f"expected a number of bytes, or with K, M or G behind it, not {value!r}", param, ctx)
        # A float would round sizes from 2**53 bytes on.
        size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
        if size > _MOST_BYTES:
            self.fail(f"expected at most {_MOST_BYTES >> 30}G, not {value!r}", param, ctx)
        return size


class _NameOrAll(click.ParamType[Any]):
    """One of some names, or "all"."""

    def __init__(self, name: str, names: tuple[str, ...]) -> None:
        self.name, self._names = name, names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin so."""
        return [CompletionItem(name) for name in (*self._names, "all") if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in (*self._names, "all"):
            ours = _OTHER_NAMES.get(value)
            hint = f"; it is {ours} here" if ours else ""
            self.fail(f"expected one of {', '.join(self._names)}, or all, not {value!r}{hint}", param, ctx)
        return str(value)


class _Root(click.ParamType[Any]):
    name = "ROOT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value in ("all", "-1"):
            return -1
        if not (str(value).isascii() and str(value).isdecimal() and len(str(value)) < 10):
            self.fail(f"expected a rank, or -1 or all for all ranks, not {value!r}", param, ctx)
        return int(value)


class _Peers(click.ParamType[Any]):
    name = "PEER,..."

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that the last one may become."""
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(before + comma + name) for name in PEERS if name.startswith(last)]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(value.split(",")))
        for name in names:
            if name not in PEERS:
                self.fail(f"expected some of {','.join(PEERS)}, not {name!r}", param, ctx)
        return names


_ZERO, _ONE = Integer(0), Integer(1)


def _choice(most: int) -> Integer:
    return Integer(0, most)


# -n behind the program. A larger one that would start ranks is rather meant as iterations.
_OR_RANKS = "; -n, where no launcher, -t or -g gives the number of ranks, is that number"
_MOST_STARTED = 16
_N = f"{__name__}.n"
_GIVE_RANKS = ("-t", "-g", "--nthreads", "--ngpus")

# Name, letter, type and help; the default is that of Settings.
_FLAGS: tuple[tuple[str, str, click.ParamType[Any], str], ...] = (
    ("nthreads", "t", Integer(1, MOST_RANKS), "Threads of each process."),
    ("ngpus", "g", Integer(1, MOST_RANKS), "Devices of each thread; on the CPU library virtual ones."),
    ("minbytes", "b", _Size(), "Smallest size."),
    ("maxbytes", "e", _Size(), "Largest size."),
    ("stepbytes", "i", _Size(), "Difference between sizes, without -f."),
    ("stepfactor", "f", _ONE, "Factor between sizes."),
    ("iters", "n", _ONE, f"Iterations of a measurement{_OR_RANKS}."),
    ("agg_iters", "m", _ONE, "Calls of an iteration, as one group."),
    ("warmup_iters", "w", _ZERO, "Iterations before the first measurement, of every power of two."),
    ("run_cycles", "N", _ZERO, "Times that all sizes are measured; 0: without end."),
    ("parallel_init", "p", _choice(1), "1: each thread creates its communicators; 0: one thread all."),
    ("check", "c", _ZERO, "Calls whose results are checked, for each line."),
    ("op", "o", _NameOrAll("OP", OPS), f"Reduction: {', '.join(OPS)}, or all."),
    ("datatype", "d", _NameOrAll("TYPE", tuple(TYPES)), f"Datatype: {', '.join(TYPES)}, or all."),
    ("root", "r", _Root(), "Root; -1 or all: each rank in turn."),
    ("blocking", "z", _choice(3), "1: wait and meet after each call; 2: wait; 3: wait and meet, untimed."),
    ("stream_null", "y", _choice(1), "1: use the NULL stream."),
    ("timeout", "T", _ZERO, f"Seconds after which a wait ends the run; 0: {LONGEST_WAIT}."),
    ("report_cputime", "C", _choice(1), "1: report the time of the calls on the host."),
    ("report_timestamps", "S", _choice(1), "1: end each line with the time of day."),
    ("output_file", "J", click.Path(dir_okay=False), "Also write a new .json file."),
    ("average", "a", _choice(3), "Time of the processes: 0 the first's, 1 mean, 2 least, 3 most."),
    ("local_register", "R", _choice(2), "1: register the buffers; 2: as symmetric windows."),
    ("cta_policy", "x", _choice(2), "Config.CTAPolicy of the communicators."),
    ("memory", "M", _choice(1), "1: report memory usage."),
    ("unalign", "u", _choice(1 << 20), "Elements by which the buffers are shifted."),
    ("per_iter_timing", "I", _choice(1), "1: wait for each iteration and report its time."),
    ("per_iter_skip", "K", _ZERO, "Leading iterations that the summary of -I leaves out."),
    ("cudagraph", "G", _ZERO, "Launches of a CUDA graph of the iterations, on GPUs; 0: no graph."),
)
_NOT_OF_PAIRS = {"agg_iters", "warmup_iters", "run_cycles", "op", "root", "blocking", "report_cputime"}
_NOT_OF_PAIRS |= {"report_timestamps", "average", "unalign", "per_iter_timing", "cudagraph"}
# Flags beyond nccl-tests'.
_OWN: tuple[tuple[str, click.ParamType[Any], str], ...] = (
    ("csv", click.Path(), "Write the lines to FILE as comma-separated values."),
    ("save", click.Path(), "Write -J's document to FILE, in place of an older one."),
    ("against", click.Path(), "Compare with the document in FILE: exit code 3 if a size is slower."),
    ("tolerance", Number(0, _MOST_PERCENT), "Percent by which --against lets a size be slower."),
    ("plot", click.Path(), "Draw bandwidth and time over size to FILE, .png or .svg."),
    ("compare", _Peers(), f"Measure some of {', '.join(PEERS)} in turn with NCCL, on the same ranks."),
)
_METAVARS = {"tolerance": "PERCENT", "compare": "PEER,..."}
_P2P = "Measure the bandwidth (-e) and the latency (-b) from each rank to each other one, in turn."
_BESIDE = "Draw the run of a document of --save or -J in --plot, too; may be repeated."
_PERCENTILES = "Also time each iteration, and report p50 and p99."
# Flags of nccl-tests that cannot apply, their defaults there, and why.
_REFUSED = (
    ("device_implementation", "D", "0", "pynccl runs no kernels of its own; nccl-tests does"),
    ("device_cta_count", "V", "16", "it counts the CTAs of -D, and pynccl runs no kernels of its own"),
)


def _refuse(default: str, why: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value != default:
            raise click.BadParameter(f"expected {default}, the default, not {value!r}: {why}", ctx, param)

    return callback


class _Program(click.Command):
    """A program that keeps in `ctx.obj` its name and arguments, for the ranks that it starts.

    -n starts the ranks, and is no argument of theirs, if nothing else gives their number: nccl-tests would
    run one rank, whose bandwidth is that of no link.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--cpu" in args:
            raise click.UsageError(
                "--cpu behind the program; expected `pynccl bench -n N --cpu PROGRAM ...`", ctx
            )
        assert ctx.parent is not None
        given = ctx.parent.params["nranks"] is not None or any(arg.startswith(_GIVE_RANKS) for arg in args)
        if not given and _environment.detect(os.environ).rank is None:
            ctx.meta[_N], args = _without_n(args)
        ctx.obj = [str(self.name), *args]
        return super().parse_args(ctx, args)


def _without_n(args: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of -n, None without one, and the other arguments."""
    value, others, rest = None, [], iter(args)
    for arg in rest:
        if arg.startswith("-n"):
            value = arg[2:] or next(rest, "")
        else:
            others.append(arg)
    return value, others


def _ranks_to_start(ctx: click.Context) -> int | None:
    """Return the number of ranks that -n before or behind the program starts; None without it."""
    assert ctx.parent is not None
    nranks: int | None = ctx.parent.params["nranks"]
    if (behind := ctx.meta.get(_N)) is not None:
        nranks = _ranks_behind(ctx, behind)
    if nranks == 0:
        return ranks_here(_environment_of_ranks(ctx.parent.params["cpu"]))
    return nranks


def _environment_of_ranks(cpu: bool) -> dict[str, str]:
    return choose_backend(os.environ, "cpu" if cpu else "auto")


def _ranks_behind(ctx: click.Context, value: str) -> int:
    try:
        nranks = ranks(ctx, ctx.command.params[0], value) or 0
    except click.BadParameter as error:
        raise click.UsageError(f"Invalid value for '-n': {error.message}", ctx) from None
    if nranks > _MOST_STARTED:
        raise click.UsageError(
            f"-n {value} behind the program: ranks or iterations? Expected `pynccl bench -n {value} "
            f"{ctx.command.name}` for ranks, or --iters {value} for iterations",
            ctx,
        )
    click.echo(
        f"pynccl bench: -n {value} is the number of ranks, since no launcher, -t or -g gives it; iterations "
        "are --iters or, with -g 1, -n",
        err=True,
    )
    return nranks


def _launch(arguments: list[str], nranks: int, cpu: bool) -> int:
    """Start the ranks; rank 0 writes to this terminal itself, to keep lines and progress in order."""
    argv = [sys.executable, "-u", "-m", "pynccl", "bench", *arguments]
    terminal = progress.terminal_of_errors()
    if terminal is None:
        return launch(Job(argv, nranks, cpu=cpu, tag=False))
    argv += ["--terminal", terminal, *(["--onto-terminal"] if sys.stdout.isatty() else [])]
    try:
        return launch(Job(argv, nranks, cpu=cpu, tag=False))
    finally:
        progress.clean(terminal)


def _choose_library() -> None:
    """Choose this process's library as that of ranks that -n starts."""
    chosen = choose_backend(os.environ, "auto").get("PYNCCL_LIBRARY", "")
    if chosen != os.environ.get("PYNCCL_LIBRARY", ""):
        os.environ["PYNCCL_LIBRARY"] = chosen
        if not _environment.detect(os.environ).rank:
            print("pynccl bench: no NVIDIA driver found, so PYNCCL_LIBRARY=cpu", file=sys.stderr, flush=True)


def _program(operation: Operation) -> click.Command:
    @click.pass_context
    def run(ctx: click.Context, /, **given: Any) -> int:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        assert ctx.parent is not None
        _require_sense(settings, operation)
        nranks, cpu = _ranks_to_start(ctx), ctx.parent.params["cpu"]
        if settings.p2p and nranks == 1:
            raise click.UsageError("--p2p with -n 1; expected 2 or more ranks")
        _require_peers(settings, operation, nranks)
        if nranks is None:
            _choose_library()
            return bench_ranks(operation, settings)
        _require_start(settings, operation, nranks, _environment_of_ranks(cpu).get("PYNCCL_LIBRARY"))
        return _launch(ctx.obj, nranks, cpu)

    defaults = Settings()
    options: list[click.Parameter] = [
        click.Option(
            [f"--{name}", f"-{letter}", name],
            type=kind,
            default=getattr(defaults, name),
            show_default=True,
            help=text,
        )
        for name, letter, kind, text in _FLAGS
    ]
    options += [
        click.Option(
            [f"--{name}"],
            type=kind,
            default=getattr(defaults, name),
            show_default=name == "tolerance",
            metavar=_METAVARS.get(name, "FILE"),
            help=text,
        )
        for name, kind, text in _OWN
    ]
    options.append(click.Option(["--beside"], multiple=True, metavar="FILE", help=_BESIDE))
    options.append(click.Option(["--p2p"], is_flag=True, help=_P2P))
    options.append(click.Option(["--terminal"], hidden=True))
    options.append(click.Option(["--onto-terminal"], is_flag=True, hidden=True))
    options.append(click.Option(["--percentiles"], is_flag=True, help=_PERCENTILES))
    options += [
        click.Option(
            [f"--{name}", f"-{letter}", name],
            default=default,
            show_default=True,
            callback=_refuse(default, why),
            expose_value=False,
            help=f"Only the default is accepted: {why}.",
        )
        for name, letter, default, why in _REFUSED
    ]
    return _Program(
        operation.name,
        callback=run,
        params=options,
        short_help=f"Measure {operation.title}.",
        help=f"Measure {operation.title}. The flags are those of nccl-tests' {operation.name}_perf.",
    )


def _require_sense(settings: Settings, operation: Operation) -> None:
    if settings.minbytes > settings.maxbytes:
        least = f"-b {settings.minbytes}{', its default,' if settings.minbytes == Settings.minbytes else ''}"
        most = f"-e {settings.maxbytes}{', its default' if settings.maxbytes == Settings.maxbytes else ''}"
        raise click.UsageError(f"{least} is more than {most}; expected at most as much")
    if settings.stepfactor < 2 and settings.stepbytes < 1:
        raise click.UsageError("-i 0 without -f; expected a difference of 1 byte or more, or a factor")
    if settings.stepfactor > 1 and settings.minbytes == 0:
        raise click.UsageError("-b 0 with -f; expected a size that grows when it is multiplied")
    if settings.per_iter_skip and not settings.per_iter_timing:
        raise click.UsageError("-K without -I 1; expected both")
    if settings.per_iter_skip >= settings.iters:
        raise click.UsageError(
            f"-K {settings.per_iter_skip} with -n {settings.iters}; expected fewer than the iterations of -n"
        )
    document = settings.output_file
    if document is not None and not document.lower().endswith(".json"):
        raise click.UsageError(f"-J {document or repr(document)}: expected a name that ends in .json")
    if settings.against and settings.run_cycles < LEAST_CYCLES:
        raise click.UsageError(
            f"--against with -N {settings.run_cycles}; expected {LEAST_CYCLES} or more cycles, whose spread "
            "is the noise"
        )
    files = {"-J": document, **settings.replaced}
    for flag, name in files.items():
        twin = next((other for other, path in files.items() if path == name and other != flag), None)
        if name is not None and twin is not None:
            raise click.UsageError(f"{flag} and {twin} are both {name}; expected different files")
    if settings.beside and (settings.plot is None or settings.p2p):
        raise click.UsageError("--beside without a --plot of lines; expected --plot, and no --p2p")
    why = settings.plot and plot.refusal(settings.plot)
    if why:
        raise click.UsageError(f"--plot: {why}")
    if settings.p2p:
        _require_pairs(settings, operation)
    if settings.cudagraph and (why := graphs.refusal(settings, operation.windows)):
        raise click.UsageError(why)
    if operation.windows and settings.local_register == 1:
        raise click.UsageError(f"-R 1: {operation.name} has its buffers in windows; expected 0 or 2")


def _require_pairs(settings: Settings, operation: Operation) -> None:
    if operation.name not in pairs.PROGRAMS:
        raise click.UsageError(
            f"--p2p: {operation.name} has no pairs of ranks; expected {' or '.join(pairs.PROGRAMS)}"
        )
    if settings.ranks_each > 1:
        raise click.UsageError(
            f"--p2p with -t {settings.nthreads} -g {settings.ngpus}; expected one rank in a process"
        )
    if settings.datatype == "all":
        raise click.UsageError("--p2p with -d all; expected one datatype")
    for name, letter, _, _ in _FLAGS:
        value = getattr(settings, name)
        if name in _NOT_OF_PAIRS and value != getattr(Settings, name):
            raise click.UsageError(
                f"--p2p with -{letter} {value}; expected no -{letter}: it has no effect there"
            )
    for flag, given in (
        ("--compare", settings.compare),
        ("--against", settings.against),
        ("--percentiles", settings.percentiles),
    ):
        if given:
            raise click.UsageError(f"--p2p with {flag}; expected one of them")


def _require_peers(settings: Settings, operation: Operation, nranks: int | None) -> None:
    """Refuse peers that cannot be measured; `nranks` is the number of ranks that this command starts."""
    for name in settings.compare:
        if operation.name in WITHOUT_PEERS:
            others = ", ".join(name for name in OPERATIONS if name not in WITHOUT_PEERS)
            raise click.UsageError(f"--compare: no peer has {operation.name}; expected one of {others}")
        if settings.ranks_each > 1:
            raise click.UsageError(
                f"--compare with -t {settings.nthreads} -g {settings.ngpus}; expected one rank in a process"
            )
        if "NCCL_TESTS_SPLIT" in os.environ or "NCCL_TESTS_SPLIT_MASK" in os.environ:
            raise click.UsageError("--compare with NCCL_TESTS_SPLIT; expected one group of ranks")
        if name == "mpi" and nranks is not None:
            raise click.UsageError(
                f"--compare mpi with -n {nranks}, which starts ranks without MPI; expected "
                f"mpirun -n {nranks} pynccl bench {operation.name}, or srun"
            )
        absent = PEERS[name].absent()
        if absent is not None:
            raise click.UsageError(f"--compare {name}: {absent}")


def _require_ranks(settings: Settings, operation: Operation, nranks: int) -> None:
    if operation.name == "hypercube" and nranks & (nranks - 1):
        raise ValueError(f"{nranks} ranks; expected a power of two")
    if settings.root >= nranks and operation.rooted:
        raise ValueError(f"-r {settings.root}; expected a rank, 0 to {nranks - 1}")
    if operation.name == "alltoallv":
        alltoallv.require_sizes(nranks, settings.minbytes, settings.maxbytes)


def _require_library(settings: Settings, on_cpu: bool) -> None:
    if settings.cudagraph and on_cpu:
        raise ValueError(f"-G {settings.cudagraph} on the CPU library; {graphs.WITHOUT_GPU}")


def _require_start(settings: Settings, operation: Operation, processes: int, library: str | None) -> None:
    """Refuse what the ranks would refuse, which this command starts."""
    try:
        _require_library(settings, library == "cpu")
        groups = [color(process) for process in range(processes)]
        nranks = groups.count(groups[0]) * settings.ranks_each
        _require_ranks(settings, operation, nranks)
        Earlier.of(settings, operation.name, nranks)
        for path in settings.beside:
            Document(path, "--beside")
        require_writable(settings.output_file, settings.replaced)
    except ValueError as error:
        raise click.UsageError(f"{operation.name}: {error}") from None


class _Programs(click.Group):
    """The programs, in nccl-tests' order."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(commands=[_program(operation) for operation in OPERATIONS.values()], **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, unsorted."""
        return list(OPERATIONS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a program, also by the name of nccl-tests' executable."""
        return super().get_command(ctx, cmd_name.removesuffix("_perf"))


@click.group("bench", cls=_Programs)
@click.option(
    "-n", "-np", "--nranks", callback=ranks, metavar="N", help="Start this number of ranks on this machine."
)
@click.option("--cpu", is_flag=True, help="With -n: use the CPU library (PYNCCL_LIBRARY=cpu).")
def bench(nranks: int | None, cpu: bool) -> None:
    """Measure NCCL's operations: the programs of nccl-tests, with their flags and output.

    Under a launcher (pynccl run -m pynccl bench, mpirun, torchrun, srun) each process is a rank; with -n this
    command starts them. -n behind the program is nccl-tests' number of iterations, unless nothing else gives
    the number of ranks.
    """
    if cpu and nranks is None:
        raise click.UsageError("--cpu without -n N; expected both, or PYNCCL_LIBRARY=cpu")
    launcher = _environment.detect(os.environ)
    if nranks is not None and (launcher.size or 1) > 1:
        raise click.UsageError(
            f"-n {nranks} in a rank that a launcher has started, by {launcher}; expected no -n, since this "
            "process is a rank already"
        )


# --- a run ---


def bench_ranks(operation: Operation, settings: Settings) -> int:
    """Run a program on this process's ranks; return the exit code."""
    try:
        _require_library(settings, loader.backend() == "cpu")
        world = World(settings, operation.windows)
        try:
            return _run(world, operation, settings)
        except BaseException as error:
            world.abort()
            if isinstance(error, NcclRemoteError):
                # Ctrl-C may have ended another rank first. This rank's signal then comes a moment later.
                time.sleep(0.2)
            raise
    except (ValueError, MemoryError, OSError) as error:
        raise click.ClickException(f"{operation.name}: {error or 'out of memory'}") from error


def _run(world: World, operation: Operation, settings: Settings) -> int:
    _require_ranks(settings, operation, world.nranks)
    lines = world.texts("\n".join(world.device_line(i) for i in range(settings.ranks_each)))
    if settings.p2p and world.nranks == 1:
        raise ValueError("--p2p with 1 rank; expected 2 or more")
    if world.nranks == 1:
        click.echo(f"pynccl bench: 1 rank: `pynccl bench -n 2 {operation.name}` starts two", err=True)
    report = None
    if world.process == 0:
        line = Progress(_terminal(settings), _total(settings, operation, world.nranks))
        report = Report(settings, operation.name, world.nranks, line)
        report.header([line for text in lines for line in text.splitlines()])

    def on_thread(thread: int) -> None:
        if settings.p2p:
            _measure_pairs(world, operation, report)
            return
        _measure(Bench(world, thread, operation), report if thread == 0 else None)

    try:
        _on_threads(settings.nthreads, on_thread, world.abort)
    except BaseException as error:
        if report:
            report.fail(f"{type(error).__name__}: {error}")
        _leave_mpi()
        raise
    used = _memory(world) if settings.memory else None
    world.close()
    return 0 if report is None else report.footer(used)


def _memory(world: World) -> str:
    world.usage.read()
    amounts = world.process_rows(world.usage.amounts()).max(axis=0)
    return memory.line(world.usage.title, [int(amount) for amount in amounts])


def _leave_mpi() -> None:
    """End MPI's ranks at this one's exit: MPI_Finalize would wait for those that hang."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        atexit.register(mpi.COMM_WORLD.Abort, 1)


def _terminal(settings: Settings) -> str | None:
    """Return the terminal for the progress; first turn the output there if the launcher's goes there."""
    if settings.terminal is None:
        return progress.terminal_of_errors()
    if settings.onto_terminal:
        with suppress(OSError):
            sys.stdout = open(settings.terminal, "w")  # noqa: SIM115
    return settings.terminal


def _total(settings: Settings, operation: Operation, nranks: int) -> int | None:
    """Return the number of lines; None: unknown."""
    if settings.p2p:
        return nranks * (nranks - 1)
    if settings.datatype == "all" or not settings.run_cycles:
        return None
    ops = len(OPS) if settings.op == "all" and operation.redop is None else 1
    roots = nranks if settings.root < 0 and operation.rooted else 1
    return ops * roots * settings.run_cycles * len(settings.sizes())


def _measure_pairs(world: World, operation: Operation, report: Report | None) -> None:
    links = pairs.Pairs(world, operation.name, world.settings.datatype).measure(
        report.link if report else lambda done, total: None
    )
    if report:
        report.links(links)


def _measure(bench: Bench, report: Report | None) -> None:
    comparison = None
    if bench.settings.compare:
        comparison = Comparison(bench, report.fail if report else lambda _: None)
        if report:
            report.compared = comparison.title()
    _measure_all(bench, report, comparison)
    if comparison:
        comparison.close()


def _measure_all(bench: Bench, report: Report | None, comparison: Comparison | None) -> None:
    settings, operation = bench.settings, bench.operation
    for type_name in _types(settings.datatype, report):
        for op in (OPS if settings.op == "all" else [settings.op]) if operation.redop is None else ["none"]:
            for root in _roots(bench):
                bench.warm_up(type_name, op, root)
                for _ in range(settings.run_cycles) if settings.run_cycles else count():
                    _cycle(bench, report, comparison, type_name, op, root)


def _cycle(
    bench: Bench, report: Report | None, comparison: Comparison | None, type_name: str, op: str, root: int
) -> None:
    for case in bench.cases(type_name, op, root):
        if report:
            report.begin(case)
        for in_place in (False, True):
            half = bench.measure(case, in_place)
            if report:
                report.half(half, in_place)
        compared = comparison.measure(case) if comparison else None
        if report:
            report.end(compared)


def _roots(bench: Bench) -> list[int]:
    if bench.operation.rooted and bench.settings.root < 0:
        return list(range(bench.world.nranks))
    return [max(0, bench.settings.root)]


def _types(name: str, report: Report | None) -> Iterator[str]:
    for type_name in TYPES if name == "all" else [name]:
        try:
            numpy_dtype(type_name)
        except ImportError:
            if name != "all":
                raise NotSupportedError(
                    f"-d {name} needs the package ml_dtypes, whose dtypes check the results"
                ) from None
            if report:
                print(
                    f"# {type_name} is left out: its results are checked by the package ml_dtypes", flush=True
                )
        else:
            yield type_name


def _on_threads(nthreads: int, body: Callable[[int], None], on_error: Callable[[], None]) -> None:
    """Run a function on threads; raise the first error. This thread runs it alone, or waits for the others.

    Python raises KeyboardInterrupt in the main thread, between any two instructions. Inside a barrier it
    could leave the barrier's lock held, and the other threads would wait forever.
    """
    try:
        if nthreads == 1:
            body(0)
        else:
            _on_other_threads(nthreads, body, on_error)
    except NcclTimeoutError as error:
        print(f"\n# Test timeout: {error}", flush=True)
        raise


def _on_other_threads(nthreads: int, body: Callable[[int], None], on_error: Callable[[], None]) -> None:
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def guarded(thread: int) -> None:
        try:
            body(thread)
        except BaseException as error:
            ended.put(error)
            # The other threads wait for this one.
            on_error()
        else:
            ended.put(None)

    threads = [threading.Thread(target=guarded, args=(t,)) for t in range(nthreads)]
    try:
        for thread in threads:
            thread.start()
        results = [_next(ended) for _ in threads]
    except KeyboardInterrupt:
        on_error()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for error in results:
        if error is not None:
            raise error


def _next(results: SimpleQueue[BaseException | None]) -> BaseException | None:
    """Return the next result, once there is one."""
    # The kernel may give SIGINT to another thread. Only a wait with a time-out then sees it.
    while True:
        with suppress(Empty):
            return results.get(timeout=0.2)
