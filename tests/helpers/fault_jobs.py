"""Runs fault schedules, several at a time, judges what came out, and counts it in a table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _tables import table as laid_out
from fault_schedules import FITS, LARGE, LATER, MOST_HOSTS, PAIRS, RECOVERY, Schedule, draw, expected
from pynccl._trace.dumps import read_all
from pynccl._trace.findings import explain
from pynccl.bootstrap._store import StoreServer

# Jobs at a time: most of their time they wait for a time-out.
LANES = 4
# Deaths so close to each other are one event to whoever notices them.
TOGETHER = 0.05
# After these, whoever is left waits for the victim, and a trace shows for whom.
WAITED_FOR = ("killed", "killed in a call", "exit", "stopped", "too slow")


class Zygote:
    """The process that forks the ranks of one job at a time."""

    def __init__(self) -> None:
        foreign = ("NCCL_", "PYNCCL_", "LD_PRELOAD")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env[name] = "1"
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, str(Path(__file__).with_name("fault_ranks.py"))]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=LIMIT)
        self.process.stdout.close()


# The zygote ends what has not ended by itself before that.
LIMIT = 60.0


@dataclass
class Verdict:
    """What came of a schedule: whether its fault fired, what is wrong, and how the survivors ended."""

    schedule: Schedule
    fired: bool = True
    problems: list[str] = field(default_factory=list)
    outcome: str = ""
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)
    traced: bool = False

    def __str__(self) -> str:
        head = f"{self.schedule}: {'' if self.fired else 'NOT FIRED, '}{self.outcome} ({self.seconds:.1f} s)"
        return "\n".join([head, *self.lines, *(f"  WRONG: {text}" for text in self.problems)])


class Runner:
    """A pool of zygotes."""

    def __init__(self, lanes: int = LANES, tell: Callable[[Verdict], object] = lambda verdict: None) -> None:
        self.lanes, self.tell = lanes, tell
        self.zygotes: queue.Queue[Zygote] = queue.Queue()
        self.all = [Zygote() for _ in range(lanes)]
        for zygote in self.all:
            self.zygotes.put(zygote)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for zygote in self.all:
            zygote.close()

    def run(self, seed: int) -> Verdict:
        """Run one schedule and judge it."""
        zygote = self.zygotes.get()
        try:
            with (
                tempfile.TemporaryDirectory(prefix="pynccl-faults-") as name,
                StoreServer(secret="") as server,
            ):
                folder = Path(name)
                for part in ("tmp", "trace"):
                    (folder / part).mkdir()
                start = time.monotonic()
                job = {"seed": seed, "folder": name, "address": server.address, "secret": server.secret}
                answer = zygote.run(job)
                verdict = Judge(draw(seed), folder, answer).judge()
                verdict.seconds = time.monotonic() - start
                self.tell(verdict)
                return verdict
        finally:
            self.zygotes.put(zygote)

    def run_fired(self, seeds: Iterable[int], spare: Iterator[int]) -> list[Verdict]:
        """Run schedules; where a fault did not come, one of a spare seed follows, while there is."""
        lock = threading.Lock()

        def one(seed: int) -> list[Verdict]:
            done = [self.run(seed)]
            while not done[-1].fired and not done[-1].problems:
                with lock:
                    another = next(spare, None)
                if another is None:
                    break
                done.append(self.run(another))
            return done

        with ThreadPoolExecutor(self.lanes) as pool:
            return [verdict for verdicts in pool.map(one, seeds) for verdict in verdicts]


class Judge:
    """Compares what the ranks of a job left behind with what the schedule says."""

    def __init__(self, schedule: Schedule, folder: Path, answer: dict[str, Any]) -> None:
        self.s, self.folder, self.answer = schedule, folder, answer
        self.verdict = Verdict(schedule)
        self.codes = {int(rank): code for rank, code in answer["codes"].items()}
        self.results = {rank: self._result(rank) for rank in range(schedule.nranks)}
        self.notes = {rank: self._note(rank) for rank in schedule.victims}

    def judge(self) -> Verdict:
        s, v = self.s, self.verdict
        v.fired = self._fired()
        for rank in range(s.nranks):
            self._say(rank)
            if v.fired or rank in self.answer["running"]:
                self._judge_rank(rank)
            v.problems += [f"rank {rank} left {thing}" for thing in self.results[rank]["left"]]
        v.problems += [f"left in the temporary folder: {name}" for name in self.answer["files"]]
        v.problems += ["processes were left"] * self.answer["orphans"]
        survivors = [r for r in range(s.nranks) if r not in (*s.victims, s.before)]
        v.outcome = " or ".join(sorted({self.results[r]["kind"] for r in survivors}))
        if s.traced and s.fault in WAITED_FOR and s.stage in LATER and v.fired and v.outcome != "returned":
            self._judge_trace()
        return v

    def _result(self, rank: int) -> dict[str, Any]:
        path, code = self.folder / f"result{rank}", self.codes.get(rank)
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text())
            return result
        kind = (
            "running"
            if code is None
            else "killed"
            if code == -9
            else "exited"
            if code == 0
            else f"code {code}"
        )
        return {"kind": kind, "ranks": [], "text": "", "at": None, "starved": 0, "left": []}

    def _note(self, rank: int) -> float | None:
        path = self.folder / f"note{rank}"
        return float(path.read_text()) if path.exists() else None

    def _fired(self) -> bool:
        """Tell whether the victims did what they were to do, by what they left."""
        if None in self.notes.values():
            return False
        for rank in self.s.victims:
            if self.s.fault in ("killed", "two killed", "killed in a call") and self.codes.get(rank) != -9:
                return False
            if self.s.fault == "call fails" and "made to fail" not in self.results[rank]["text"]:
                return False
        return True

    def _say(self, rank: int) -> None:
        result, note = (
            self.results[rank],
            max((n for n in self.notes.values() if n is not None), default=None),
        )
        when = f" after {result['at'] - note:.2f} s" if result["at"] is not None and note is not None else ""
        ranks = f" {result['ranks']}" if result["ranks"] else ""
        text = f": {result['text']}" if result["text"] else ""
        self.verdict.lines.append(f"  rank {rank}: {result['kind']}{ranks}{when}{text}")

    def _judge_rank(self, rank: int) -> None:
        result, wanted, problems = self.results[rank], expected(self.s, rank), self.verdict.problems
        if rank in self.answer["running"]:
            problems.append(f"rank {rank} hung:\n{(self.folder / f'stacks{rank}').read_text()}")
            return
        if result["kind"] not in wanted.kinds:
            noise = (self.folder / f"output{rank}").read_text()
            problems.append(f"rank {rank}: {result['kind']}; expected {' or '.join(wanted.kinds)}\n{noise}")
            return
        if result["kind"] == "RankFailedError" and not self._names_victims(rank, result["ranks"]):
            problems.append(f"rank {rank} names {result['ranks']}; expected {sorted(wanted.ranks)}")
        if result["text"] and wanted.words and not re.search(wanted.words, result["text"], re.S):
            problems.append(f"rank {rank} does not say {wanted.words!r}")
        start = self._start(rank)
        if result["at"] is not None and start is not None:
            took = result["at"] - start
            if took > wanted.within + self._slack():
                problems.append(f"rank {rank} took {took:.2f} s; expected {wanted.within:g} s")

    def _slack(self) -> float:
        """Return how long the machine let somebody wait: promises are for one that lets the ranks run."""
        starved: float = max(result["starved"] for result in self.results.values())
        lag: float = self.answer["lag"]
        return starved + lag

    def _start(self, rank: int) -> float | None:
        if rank in self.s.victims and self.s.fault == "stopped":
            continued: float | None = self.answer["continued"]
            return continued
        return max(note for note in self.notes.values() if note is not None)

    def _names_victims(self, rank: int, named: list[int]) -> bool:
        victims = sorted(self.s.victims)
        if rank in victims or self.s.stage == RECOVERY:
            return bool(named) and (
                rank in victims or self.s.fault != "stopped" or set(victims) <= set(named)
            )
        notes = sorted(note for note in self.notes.values() if note is not None)
        apart = notes[-1] - notes[0] + self._slack() > TOGETHER
        return named == victims or (apart and bool(named) and set(named) < set(victims))

    def _judge_trace(self) -> None:
        text = "\n".join(line for _, line in explain(read_all([self.folder / "trace"])))
        self.verdict.traced = True
        who = rf"\brank {self.s.victims[0]}\b"
        # Where the victim was inside the call as well, only what the watchdog said tells it from the others.
        if not re.search(rf"^  .*{who}|{who} (died|is not responding|did not come)", text, re.M):
            self.verdict.problems.append(f"pynccl trace does not name the victim:\n{text}")


# --- the table ----------------------------------------------------------------------------------------------


def table(verdicts: Iterable[Verdict]) -> str:
    """Return how often each outcome came, for each fault and stage."""
    counts = Counter((v.schedule.fault, v.schedule.stage, v.outcome) for v in verdicts if v.fired)
    place = {pair: number for number, pair in enumerate(PAIRS)}
    rows = []
    for (fault, stage, outcome), count in sorted(counts.items(), key=lambda i: (place[i[0][:2]], i[0][2])):
        shown = " or ".join(f"`{kind}`" if kind[0].isupper() else kind for kind in outcome.split(" or "))
        rows.append((fault, stage, shown, f"{count}"))
    return laid_out(("fault", "stage", "the other ranks", "schedules"), rows, "left")


def report(verdicts: list[Verdict]) -> str:
    """Return the table with what it is of."""
    large = [v.schedule.seed for v in verdicts if v.schedule.seed >= LARGE]
    small = [v.schedule.seed for v in verdicts if v.schedule.seed < LARGE]
    runs = [f"{min(seeds)} to {max(seeds)}" for seeds in (small, large) if seeds]
    fired = [v for v in verdicts if v.fired]
    wrong = sum(bool(v.problems) for v in verdicts)
    pairs = len({(v.schedule.fault, v.schedule.stage) for v in fired})
    sizes = Counter(v.schedule.nranks for v in fired)
    return "\n".join(
        [
            "# Random fault schedules",
            "",
            f"`python tests/helpers/fault_schedules.py` on "
            f"{datetime.datetime.now(datetime.timezone.utc).date()}: seeds {' and '.join(runs)}, "
            f"{len(verdicts)} schedules run,",
            f"{len(fired)} whose fault fired (the others are not counted), {wrong} with anything wrong; "
            f"{pairs} of {len(PAIRS)} pairs of fault and stage;",
            f"{len(large)} schedules are of large jobs, on up to {MOST_HOSTS} hosts;",
            f"`pynccl trace` was asked about {sum(v.traced for v in fired)} of them. Ranks: "
            + ", ".join(f"{n} in {sizes[n]}" for n in sorted(sizes))
            + ". What they are: [hangs](../../docs/hangs.md).",
            "",
            table(verdicts),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run random fault schedules.")
    parser.add_argument("--seed", type=int, action="append", help="run this one and print it")
    parser.add_argument("--fault", choices=FITS, help="only schedules with this fault")
    parser.add_argument("--stage", help="only schedules of this stage")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--large", type=int, default=0, help="how many of large jobs over hosts, besides")
    parser.add_argument("--lanes", type=int, default=LANES, help="how many at a time; half for large jobs")
    parser.add_argument("--table", type=Path, help="write the table here")
    args = parser.parse_args()
    seeds = args.seed or list(range(args.first, args.first + args.count))
    if args.fault or args.stage:
        every = range(args.first, args.first + 100 * len(PAIRS))
        fits = [n for n in every if draw(n).fault == (args.fault or draw(n).fault)]
        seeds = [n for n in fits if draw(n).stage == (args.stage or draw(n).stage)][: args.count]
    large = [] if args.seed else list(range(LARGE + args.first, LARGE + args.first + args.large))
    start = time.monotonic()

    verdicts: list[Verdict] = []

    def tell(verdict: Verdict) -> None:
        verdicts.append(verdict)
        # What a long run has so far.
        if args.table and len(verdicts) % 50 == 0:
            args.table.write_text(report(list(verdicts)))
        if args.seed or verdict.problems or not verdict.fired:
            print(verdict, flush=True)

    for some, lanes in ((seeds, args.lanes), (large, max(1, args.lanes // 2))):
        if some:
            with Runner(lanes, tell) as runner:
                runner.run_fired(some, iter(range(max(some) + 1, 1 << 30)))
    text = report(verdicts)
    print(text if not args.seed else "", f"{time.monotonic() - start:.0f} s")
    if args.table:
        args.table.write_text(text)
    sys.exit(any(verdict.problems for verdict in verdicts))
