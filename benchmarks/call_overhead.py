"""Measure what a call costs in pynccl and in other bindings, over a libnccl that does nothing.

The library is compiled from nccl_api.h: every function counts its call and returns success; it reports 2
ranks, so that no binding takes a shortcut, and its counts are compared with the calls that were made. All
bindings run in one process on the same CuPy arrays over host memory. A repetition measures each case once,
and each begins with another binding, so that other work of the machine slows all alike. A second process has
a fake CUDA driver, with which pynccl checks devices and asks for the current stream as it does on a GPU.

Run `python benchmarks/call_overhead.py --help`. Exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _machine import Meter, describe
from _overhead_cases import CASES, DRIVER_CASES, Case, Samples, Target, targets
from _overhead_library import build, build_driver
from _report import number, table

HERE = Path(__file__).parent
NEEDS = {"cupy": "cupy", "cupyx": "cupy", "nccl4py": "nccl.core", "ctypes": "cupy"}
_IMPORT = """
import numpy, cffi, sys, time
start = time.perf_counter()
import pynccl
pynccl.Communicator
print((time.perf_counter() - start) * 1000, *sorted({"cupy", "torch"} & set(sys.modules)))
"""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    setups = list(dict.fromkeys(case.setup for case in CASES))
    parser = argparse.ArgumentParser(description="The cost of a call in pynccl and other bindings.")
    add = parser.add_argument
    add("--only", default=",".join(setups), help="bindings, comma-separated (default: %(default)s)")
    add("--reps", type=int, help="repetitions, whose median counts (default: 41; 5 with --quick)")
    add("--quick", action="store_true", help="short; writes to files of its own")
    add("--out", type=Path, default=HERE / "results", help="folder of the .md and .json")
    options = parser.parse_args()
    options.reps = options.reps or (5 if options.quick else 41)
    options.seconds = 0.0005 if options.quick else 0.005
    options.setups = options.only.split(",")
    unknown = [name for name in options.setups if name not in setups]
    if unknown:
        parser.error(f"--only: unknown: {', '.join(unknown)} (known: {', '.join(setups)})")
    return options


def require(setups: Sequence[str]) -> None:
    """Refuse to run with a binding missing, rather than print a table without it."""
    missing = [f"{name} needs {NEEDS[name]}" for name in setups if name in NEEDS and not find(NEEDS[name])]
    if missing:
        advice = "Install the bench extra, or name the others with --only."
        sys.exit(f"not installed: {'; '.join(missing)}. {advice}")


def find(module: str) -> bool:
    """Say whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def environment(library: Path) -> dict[str, str]:
    """Return the environment of a process in which every binding finds this library and nothing else."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("NCCL_", "PYNCCL_"))}
    path = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH")]))
    return kept | {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": path}


def measure(options: argparse.Namespace, cases: Sequence[Case], driver: bool) -> dict[str, Any]:
    """Build the library, and measure the chosen cases in one process."""
    names = [case.name for case in cases if case.setup in options.setups]
    with tempfile.TemporaryDirectory(prefix="pynccl-overhead-") as folder:
        library = build(Path(folder))
        if driver:
            build_driver(Path(folder))
        task = {"library": str(library), "cases": names, "driver": driver}
        task |= {"reps": options.reps, "seconds": options.seconds}
        command = [sys.executable, str(HERE / "_overhead_worker.py"), json.dumps(task)]
        done = subprocess.run(command, env=environment(library), stdout=subprocess.PIPE, timeout=600)
    if done.returncode:
        sys.exit(f"the measuring process ended with {done.returncode}")
    return dict(json.loads(done.stdout))


def import_time(reps: int) -> list[float]:
    """Return how many ms `import pynccl` and its communicators take after numpy and cffi.

    It may bring neither CuPy nor torch.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    # Compiled once, as installing does, whatever the environment says of sources.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    found = []
    with tempfile.TemporaryDirectory(prefix="pynccl-overhead-") as folder:
        for _ in range(1 + reps):
            command = [sys.executable, "-X", f"pycache_prefix={folder}", "-c", _IMPORT]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            milliseconds, *brought = done.stdout.split()
            if brought:
                sys.exit(f"import pynccl imported {', '.join(brought)}")
            found.append(float(milliseconds))
    return found[1:]


def times(samples: Samples) -> str:
    """Tabulate the cases."""
    statements = {case.name: case for case in (*CASES, *DRIVER_CASES)}

    def line(name: str) -> list[str]:
        values = samples[name]
        parts = [number(statistics.median(values)), f"{number(min(values))}–{number(max(values))}"]
        calls = statements[name].functions.get("ncclAllReduce", 0)
        return [name, *parts, str(calls)]

    return table(["case", "ns per call", "least–most", "calls counted per run"], map(line, samples))


def verdicts(found: Sequence[Target]) -> str:
    """Tabulate the targets."""
    header = ["ours", "against", "unit", "needed", "reached", "verdict"]
    lines = (
        [
            t.ours,
            t.theirs,
            t.unit,
            f"<= {t.needed:g}",
            "–" if t.reached is None else f"{t.reached:.3g}",
            t.verdict,
        ]
        for t in found
    )
    return table(header, lines)


def document(
    samples: Samples, with_driver: Samples, found: Sequence[Target], about: Mapping[str, Mapping[str, str]]
) -> str:
    """Write the whole report."""
    parts = ["# Call overhead: what a call costs before NCCL begins"]
    for title, facts in about.items():
        parts += [f"## {title}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    count = sum(target.verdict == "met" for target in found)
    parts += [f"## Targets: {count} of {len(found)} met", verdicts(found)]
    parts.append("Ratios and differences are medians over repetitions, each of which compares its own times.")
    parts += ["## Times", times(samples), "## Times with a fake driver", times(with_driver)]
    statements = [
        f"- {c.name}: `{c.statement}`" for c in CASES if c.name in samples and "\n" not in c.statement
    ]
    parts += ["## What was run", "\n".join(statements)]
    return "\n\n".join(parts) + "\n"


def method(options: argparse.Namespace, imports: Sequence[float]) -> dict[str, str]:
    """Say how it was measured."""
    return {
        "library": "compiled from nccl_api.h: each function counts its call and returns; it reports 2 ranks",
        "arrays": "CuPy arrays of 1024 float32 over host memory (UnownedMemory, device 0)",
        "driver": "none; a fake one in the process of the second table, which takes Stream.null for current",
        "streams": "CuPy cannot name its current stream without a driver: peers that need one are given "
        "Stream.null; None means stream 0 to pynccl and nccl4py here",
        "cupyx": "NCCLBackend on a communicator, without the store that its constructor starts",
        "nccl4py": "its Communicator, with the device, for which it asks the driver once, set to 0",
        "ctypes": "written as vLLM's is: argtypes, a checked result, pointers wrapped for each call",
        "recorder": "off (PYNCCL_TRACE_SIZE=0), but in the cases with 'recorder on' as it is by default",
        "repetitions": f"{options.reps} of {options.seconds * 1000:g} ms a case, interleaved, in one process",
        "import pynccl": f"median of {len(imports)} processes: {number(statistics.median(imports))} ms "
        f"({number(min(imports))}–{number(max(imports))})",
    }


def main() -> None:
    """Run the benchmark; exit with 1 where a target is missed."""
    options = arguments()
    require(options.setups)
    machine, meter = describe(), Meter()
    imports = import_time(5 if options.quick else 21)
    result = measure(options, CASES, driver=False)
    with_driver = measure(options, DRIVER_CASES, driver=True)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    machine["during the run"] = meter.text(children.ru_utime + children.ru_stime)
    samples = {case["name"]: case["ns"] for case in result["cases"]}
    found = targets(samples, statistics.median(imports))
    about = {"Machine": machine, "Versions": result["versions"], "Method": method(options, imports)}
    text = document(samples, {case["name"]: case["ns"] for case in with_driver["cases"]}, found, about)
    data = {
        "about": about,
        "cases": result["cases"],
        "cases_with_driver": with_driver["cases"],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in found],
        "import_ms": imports,
    }
    name = "call_overhead-quick" if options.quick else "call_overhead"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.md").write_text(text)
    (options.out / f"{name}.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(text)
    print(f"written: {name}.md and {name}.json in {options.out}", file=sys.stderr)
    sys.exit(any(target.verdict != "met" for target in found))


if __name__ == "__main__":
    main()
