"""-G: calls that are captured into CUDA graphs and launched from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from pynccl._device.streams import handle_of
from pynccl._errors import NcclError
from pynccl._library import cuda
from pynccl._tools.bench.ranks import Seat
from pynccl._tools.bench.settings import Settings

WITHOUT_GPU = "expected a GPU: CUDA graphs need CUDA's streams, and the CPU library has none"


def refusal(settings: Settings, windows: bool) -> str | None:
    """Return why a program cannot run with -G and its other flags; None if it can."""
    timed = "the iterations of a graph cannot be timed one by one"
    for flag, given, why in (
        ("put_signal", windows, "with NCCL 2.29 a wait of a graph that is launched again waits for nothing"),
        ("-y 1", settings.stream_null, "CUDA cannot capture the NULL stream"),
        (f"-z {settings.blocking}", settings.blocking, "the host cannot wait for a call that is captured"),
        ("-I 1", settings.per_iter_timing, timed),
        ("--percentiles", settings.percentiles, timed),
        ("--compare", settings.compare, "calls are compared one by one, each waited for"),
    ):
        if given:
            return f"-G {settings.cudagraph} with {flag}; expected one of them: {why}"
    return None


@contextmanager
def captured(seats: Sequence[Seat], calls: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Capture calls on the seats' streams into graphs; yield what launches all of them once."""
    graphs: dict[int, int] = {}
    with ExitStack() as made:
        # A thread of -t has no current device by itself.
        made.enter_context(cuda.using_device(seats[0].comm.device))
        with ExitStack() as captures:
            for seat in seats:
                captures.enter_context(_capture(handle_of(seat.stream), graphs, made))
            calls()
        launches = []
        for stream, graph in graphs.items():
            executable = cuda.graph_instantiate(graph)
            made.callback(cuda.graph_executable_destroy, executable)
            launches.append((executable, stream))

        def launch() -> None:
            for executable, stream in launches:
                cuda.graph_launch(executable, stream)

        yield launch


@contextmanager
def _capture(stream: int, graphs: dict[int, int], made: ExitStack) -> Iterator[None]:
    """Keep the graph of what a block does on a stream; the capture ends in any case."""
    cuda.stream_begin_capture(stream)
    try:
        yield
    except BaseException:
        # The error of the block is the cause of this one.
        with suppress(NcclError):
            cuda.graph_destroy(cuda.stream_end_capture(stream))
        raise
    graphs[stream] = cuda.stream_end_capture(stream)
    made.callback(cuda.graph_destroy, graphs[stream])
