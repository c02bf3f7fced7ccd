"""The analysis of the calls in the ranks' dumps, as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pynccl._base.colours import Line
from pynccl._library.results import result_name
from pynccl._trace.dumps import (
    GAVE_NO_DUMP,
    JOINT,
    NOT_GIVEN,
    PENDING,
    Dumps,
    Member,
    Process,
    Reason,
    World,
    worlds_of,
)
from pynccl._trace.recorder import TraceRecord
from pynccl._trace.records import Records, Test, nothing

# --- words --------------------------------------------------------------------------------------------------


def join(words: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def say_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-2 and 5"."""
    runs: list[range] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1].stop:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return say_runs(runs)


def say_runs(runs: Sequence[range]) -> str:
    """Return the text for ranks that are given as ranges."""
    parts = [str(r[0]) if len(r) == 1 else f"{r[0]}{'-' if len(r) > 2 else ' and '}{r[-1]}" for r in runs]
    if len(runs) > 1:
        parts = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    many = len(runs) > 1 or len(runs[0]) > 1
    return f"rank{'s' * many} {join(parts)}"


def say(record: TraceRecord, full: bool = False) -> str:
    """Return "all_reduce #641 (float32, 1,048,576)"; `full` names "sum" too."""
    text = record.call
    if record.seq:
        text += f" #{record.seq}"
    if record.peer_seq is not None:
        text += f" #{record.peer_seq}"
    if record.peer is not None:
        text += f" {'from' if record.call in ('recv', 'wait_signal') else 'to'} rank {record.peer}"
    parts = [] if record.dtype is None else [record.dtype, f"{record.count:,}"]
    if record.signal is not None:
        parts.append(f"signal {record.signal}{f' of context {record.context}' if record.context else ''}")
    if record.signals is not None:
        parts.append(f"{record.signals:,} expected")
    if record.op is not None and (full or record.op != "sum"):
        parts.append(record.op)
    if record.root is not None:
        parts.append(f"root {record.root}")
    return f"{text} ({', '.join(parts)})" if parts else text


def say_place(record: TraceRecord) -> str:
    """Return " at train.py:88", or "" if the line is unknown."""
    if record.at is None:
        return ""
    here = os.getcwd() + os.sep
    return f" at {record.at.removeprefix(here)}"


def _say_call(ranks: Sequence[int], record: TraceRecord, full: bool = False) -> str:
    """Return "ranks 0-2 wait in all_reduce #641 (float32, 1,048,576) at train.py:88"."""
    verb = "called" if record.state not in PENDING else "wait in" if len(ranks) > 1 else "waits in"
    text = f"{say_ranks(ranks)} {verb} {say(record, full)}{say_place(record)}"
    if record.state == "failed":
        text += f", which failed with {result_name(record.result)}" if record.result > 0 else ", which failed"
    return text


def _is_pending(record: TraceRecord) -> bool:
    return record.state in PENDING


def _first(member: Member, test: Test) -> TraceRecord | None:
    """Return the first record whose kind passes a test."""
    return next(iter(member.records.some(test)), None)


def _why(member: Member) -> str:
    """Return why a rank stopped, from its dump, as a text without a subject."""
    if member.process.reason("exception") is not None:
        # The report has the reasons of all dumps in full below its findings.
        error = next(reason for reason in _without_repeats(member.process) if reason.kind == "exception")
        return f"ended with {error.text}"
    waiting = _first(member, _is_pending)
    if waiting is not None:
        return f"waits in {say(waiting)}{say_place(waiting)}"
    for other in member.process.members:
        waiting = _first(other, _is_pending)
        if waiting is not None:
            return f"waits in {say(waiting)}{say_place(waiting)} of {other.comm}"
    how = {"abort": "aborted the communicator after ", "destroy": "destroyed the communicator after "}.get(
        member.ended, ""
    )
    if not how and member.process.reason("exit") is not None:
        how = "exited after "
    newest = member.newest()
    if newest is None or newest.call == "init":
        return f"{how or 'made '}no call" if not member.last else f"{how or 'made '}#{member.last}"
    end = f"{say(newest)}{say_place(newest)}"
    return f"{how}{end}" if how else f"made {end} last"


def _together(calls: dict[int, TraceRecord], full: bool = False) -> str:
    """Return which ranks made which call, the largest group of ranks first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, record in sorted(calls.items()):
        same = signature(record), record.state in PENDING, record.at, record.result
        groups.setdefault(same, []).append(rank)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return "; ".join(_say_call(ranks, calls[ranks[0]], full) for ranks in ordered)


# --- collectives --------------------------------------------------------------------------------------------


def signature(record: TraceRecord) -> tuple[Any, ...]:
    """Return the properties that must be equal on all ranks."""
    return record.call, record.count, record.dtype, record.op, record.root


_NAMES = ("function", "count", "dtype", "op", "root")


def _differing(calls: Iterable[TraceRecord]) -> list[str]:
    columns = list(zip(*map(signature, calls), strict=True))
    if len(set(columns[0])) > 1:
        return ["function"]
    return [name for name, values in zip(_NAMES, columns, strict=True) if len(set(values)) > 1]


def _say_differing(names: Sequence[str]) -> str:
    return f"the {join(names)} {'differ' if len(names) > 1 else 'differs'}"


def _first_difference(world: World) -> tuple[int, dict[int, TraceRecord]] | None:
    """Return the first collective call that differs between the ranks that made it."""
    labels: dict[tuple[Any, ...], int] = {}
    members = [member.records for member in world.members.values()]
    signatures = np.concatenate(
        [some.labels(lambda kind: labels.setdefault(signature(kind), len(labels))) for some in members]
    )
    seqs = np.concatenate([some.numbers("seq") for some in members])
    order = np.lexsort((signatures, seqs))
    seqs, signatures = seqs[order], signatures[order]
    differ = (seqs[1:] == seqs[:-1]) & (signatures[1:] != signatures[:-1]) & (seqs[1:] >= 0)
    for seq in np.unique(seqs[1:][differ]).tolist():
        calls = _callers(world, seq)
        # In a damaged dump a rank may have two calls of one number.
        if len(set(map(signature, calls.values()))) > 1:
            return seq, calls
    return None


def _shifted(world: World, seq: int, calls: dict[int, TraceRecord]) -> Iterator[str]:
    """Yield texts for an extra or a missing call, after which the other ranks' calls match shifted by one."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank, record in calls.items():
        kinds.setdefault(signature(record), []).append(rank)
    usual = max(kinds.values(), key=len)
    if len(usual) * 2 <= len(calls) and len(calls) > 2:
        return

    def line(rank: int) -> list[tuple[Any, ...]]:
        return [signature(r) for r in world.members[rank].records.since("seq", seq)]

    others = line(usual[0])
    for rank in sorted(set(calls) - set(usual)):
        mine = line(rank)
        more = sum(1 for a, b in zip(mine[1:], others, strict=False) if a == b)
        less = sum(1 for a, b in zip(mine, others[1:], strict=False) if a == b)
        if more and more == min(len(mine) - 1, len(others)):
            extra = f"{say(calls[rank])}{say_place(calls[rank])}"
            yield f"rank {rank} made one call more than the others: {extra}"
        elif less and less == min(len(mine), len(others) - 1):
            yield f"rank {rank} left out one call of the others: {say(calls[usual[0]])}"


def _complete(world: World) -> int | None:
    """Return the newest completed call that needs every rank."""
    done = [m.records.some(lambda r: r.state == "done" and r.call in JOINT) for m in world.members.values()]
    newest = max((int(records.numbers("seq").max()) for records in done if records), default=-1)
    return newest if newest >= 0 else None


def _dead(world: World) -> str:
    runs, complete = world.absent, _complete(world)
    ranks, one = say_runs(runs), len(runs) == 1 and len(runs[0]) == 1
    done = f"; all ranks have completed #{complete}" if complete else ""
    if world.absence == GAVE_NO_DUMP:
        return f"{ranks} {GAVE_NO_DUMP}{done}"
    if world.absence == NOT_GIVEN:
        return f"{ranks}: no file here, because it was not given or the rank died{done}"
    it = "it left no file" if one else "they left no files"
    when = "" if complete is None else " after init" if not complete else f" after #{complete}"
    if complete is None and any(r.call == "init" for m in world.members.values() for r in m.records.kinds):
        return f"{ranks} never reached init: {it}"
    # A stopped process writes nothing either, and a launcher that ends the job kills it.
    return f"{ranks} died or {'was' if one else 'were'} stopped{when}: {it}"


def _first_unmet(world: World) -> int:
    """Return the first collective call that some ranks have not made."""
    # Earlier calls may be outstanding too.
    made = [member.last for member in world.members.values()]
    return max(made) if min(made) == max(made) else min(made) + 1


def _behind(world: World, seq: int) -> list[int]:
    return sorted(rank for rank, member in world.members.items() if member.last < seq)


def _callers(world: World, seq: int) -> dict[int, TraceRecord]:
    return {rank: r for rank, m in world.members.items() if (r := m.collective(seq)) is not None}


def never_made(world: World) -> tuple[list[int], dict[int, TraceRecord]]:
    """Return the ranks that never reached the call that the findings name, and the others' records of it."""
    different = _first_difference(world)
    seq = _first_unmet(world) if different is None else different[0]
    return _behind(world, seq), _callers(world, seq)


def _collectives(world: World, different: tuple[int, dict[int, TraceRecord]] | None) -> Iterator[str]:
    if different is not None:
        seq, calls = different
        late = _behind(world, seq)
        text = f"{_together(calls, full=True)}: {_say_differing(_differing(calls.values()))}"
        yield "; ".join([text, *_late(world, late, seq)])
        yield from _shifted(world, seq, calls)
        return
    furthest, seq = max(member.last for member in world.members.values()), _first_unmet(world)
    calls = _callers(world, seq)
    late = _behind(world, seq)
    waiting = {rank: record for rank, record in calls.items() if record.state in PENDING}
    failed = {rank: record for rank, record in calls.items() if record.state == "failed"}
    grouped = list(_grouping(world, waiting))
    concerned = waiting or failed or (calls if late else {})
    if late and not calls:
        yield "; ".join([f"the others got to #{furthest}", *_late(world, late, seq)])
    if world.absent and not concerned and not world.over:
        yield _dead(world)
    elif concerned and (late or world.absent or not grouped):
        dead = [_dead(world)] if world.absent else []
        dead += [f"{say_ranks(world.gone)} had closed the communicator"] if world.gone else []
        yield "; ".join([_together(concerned), *_late(world, late, seq), *dead])
        if not late and not world.absent and waiting and len(calls) == world.size:
            yield f"all ranks made the same calls, up to {say(next(iter(calls.values())))}"
    yield from grouped


def _late(world: World, late: Iterable[int], seq: int) -> Iterator[str]:
    whys: dict[str, list[int]] = {}
    for rank in late:
        whys.setdefault(_why(world.members[rank]), []).append(rank)
    for why, ranks in whys.items():
        which = "each " if len(ranks) > 1 else "it "
        yield f"{say_ranks(ranks)} never reached #{seq}: {which}{why}"


def _grouping(world: World, waiting: dict[int, TraceRecord]) -> Iterator[str]:
    """Yield texts if the ranks put an outstanding call into different groups."""
    seen: set[int] = set()
    for rank, record in sorted(waiting.items()):
        for seq in _group_of(world.members[rank], record) if record.group else ():
            if seq in seen:
                continue
            seen.add(seq)
            shapes: dict[tuple[int, ...], list[int]] = {}
            for other, member in sorted(world.members.items()):
                shape = _group_of(member, member.collective(seq))
                if shape:
                    shapes.setdefault(shape, []).append(other)
            if len(shapes) > 1:
                parts = [
                    f"{say_ranks(ranks)} issued {_say_group(shape)}"
                    for shape, ranks in sorted(shapes.items(), key=lambda item: -len(item[0]))
                ]
                yield f"{'; '.join(parts)}: groups differ, and a group starts only as a whole"
                return


def _group_of(member: Member, record: TraceRecord | None) -> tuple[int, ...]:
    """Return the numbers of the collectives that were issued together with a call."""
    if record is None:
        return ()
    return tuple(r.seq for r in member.issued_with(record) if r.seq is not None)


def _say_group(shape: tuple[int, ...]) -> str:
    numbers = join([f"#{seq}" for seq in shape])
    return f"{numbers} alone" if len(shape) == 1 else f"{numbers} as one group"


# --- other calls --------------------------------------------------------------------------------------------


_MESSAGES = ("send", "recv")


def _pairs(world: World) -> Iterator[str]:
    """Yield texts for sends and recvs that do not match."""
    pairs: set[tuple[int, int]] = set()
    for rank, member in world.members.items():
        for call, peer in member.peers:
            pairs.add((rank, peer) if call == "send" else (peer, rank))
    for sender, receiver in sorted(pairs):
        if sender in world.members:
            yield from _between(world, world.members[sender], sender, receiver)
    for receiver, member in sorted(world.members.items()):
        record = _first(member, lambda r: r.call == "recv" and _is_pending(r) and world.is_absent(r.peer))
        if record is not None:
            yield f"{_say_call([receiver], record)}, which {world.absence}"


def _between(world: World, member: Member, sender: int, receiver: int) -> Iterator[str]:
    sends = member.peers.get(("send", receiver), nothing())
    other = world.members.get(receiver)
    if other is None:
        waiting = next(iter(sends.some(_is_pending)), None)
        if waiting is not None:
            yield f"{_say_call([sender], waiting)}, which {world.absence}"
        return
    recvs = other.peers.get(("recv", sender), nothing())
    different = _first_unequal(sends, recvs)
    if different is not None:
        out, into = different
        names = [n for n in ("count", "dtype") if getattr(out, n) != getattr(into, n)]
        yield (
            f"rank {sender} called {say(out)}{say_place(out)}, but rank {receiver} called "
            f"{say(into)}{say_place(into)}: {_say_differing(names)}"
        )
        return
    lone = _unmet(sends, recvs)
    if lone is not None:
        instead = _instead(other, "recv", sender)
        yield f"{_say_call([sender], lone)}; rank {receiver} never received it: {instead}"
    lone = _unmet(recvs, sends)
    if lone is not None:
        instead = _instead(member, "send", receiver)
        yield f"{_say_call([receiver], lone)}; rank {sender} never sent it: {instead}"
    yield from _left(member, sends, other, recvs)


def _left(sender: Member, sends: Records, receiver: Member, recvs: Records) -> Iterator[str]:
    """Yield a text if a message that was sent was not received before a later call of both ranks.

    A small message is sent before its receiver comes.
    """
    # Without the oldest records, or with a plan, whose calls have none, it may have been received.
    known = recvs or any(kind.call == "init" for kind in receiver.records.kinds)
    if not known or any(kind.plan for kind in receiver.records.kinds):
        return
    done = _beyond(sends, recvs).some(lambda r: r.state == "done")
    if not done:
        return
    seqs, times = sender.records.numbers("seq"), sender.records.numbers("time_ns")
    later = seqs[(times > done[0].time_ns) & (seqs > 0)]
    if len(later) and receiver.last >= (seq := int(later.min())):
        call = receiver.collective(seq)
        since = f"#{seq}" if call is None else say(call)
        text = f"rank {receiver.rank} has not received it, and has called {since} since"
        yield f"{_say_call([sender.rank], done[0])}; {text}"


def _first_unequal(sends: Records, recvs: Records) -> tuple[TraceRecord, TraceRecord] | None:
    """Return the first send and recv of one number that have different data."""
    shapes: dict[tuple[Any, ...], int] = {}

    def shape(kind: TraceRecord) -> int:
        return shapes.setdefault((kind.count, kind.dtype), len(shapes))

    _, out, into = np.intersect1d(
        sends.numbers("peer_seq"), recvs.numbers("peer_seq"), assume_unique=True, return_indices=True
    )
    differ = np.flatnonzero(sends.labels(shape)[out] != recvs.labels(shape)[into])
    return (sends[out[differ[0]]], recvs[into[differ[0]]]) if len(differ) else None


def _beyond(calls: Records, others: Records) -> Records:
    """Return the calls without a counterpart on the other rank."""
    last = int(others.numbers("peer_seq").max()) if others else 0
    return calls.since("peer_seq", last + 1)


def _unmet(calls: Records, others: Records) -> TraceRecord | None:
    """Return the first incomplete call without a counterpart on the other rank."""
    return next(iter(_beyond(calls, others).some(lambda r: r.state != "done")), None)


def _instead(member: Member, call: str, peer: int) -> str:
    """Return what a rank does in place of a recv or send."""
    record = _first(
        member, lambda r: r.call in _MESSAGES and (r.call, r.peer) != (call, peer) and r.state != "done"
    )
    if record is None:
        return f"it {_why(member)}"
    verb = "waits in" if record.state in PENDING else "called"
    return f"it {verb} {say(record)}{say_place(record)} instead"


def _signals(world: World) -> Iterator[str]:
    """Yield texts for waits for signals that have not come."""
    for rank, member in sorted(world.members.items()):
        record = _first(member, lambda r: r.call == "wait_signal" and _is_pending(r))
        if record is None or record.peer is None:
            continue
        text, other = _say_call([rank], record), world.members.get(record.peer)
        if other is None:
            how = "had closed the communicator" if record.peer in world.gone else world.absence
            yield f"{text}, which {how}"
        else:
            yield f"{text}; {_sent(member, record, other)}"


def _sent(member: Member, wait: TraceRecord, other: Member) -> str:
    """Return what another rank has done about the signals that a rank waits for."""

    def is_same(record: TraceRecord, peer: int) -> bool:
        return (record.peer, record.signal, record.context) == (peer, wait.signal, wait.context)

    if not all(m.records and m.records[0].call == "init" for m in (member, other)):
        return f"rank {other.rank} {_why(other)}"
    waits = member.records.some(
        lambda r: r.call == "wait_signal" and r.state == "done" and is_same(r, other.rank)
    )
    before = sum(r.signals or 0 for r in waits)
    calls = other.records.some(lambda r: r.call in ("put_signal", "signal") and is_same(r, member.rank))
    return f"rank {other.rank} has signalled {len(calls) - before:,} of them, and {_why(other)}"


def _endings(world: World) -> Iterator[str]:
    """Yield texts for outstanding calls without a number, such as finalize."""
    for call in ("finalize", "destroy", "shrink", "suspend", "resume"):
        inside = [r for r, m in world.members.items() if any(map(_stuck_in(call), m.records.kinds))]
        if inside:
            others = [rank for rank in world.members if rank not in inside]
            verb = "wait in" if len(inside) > 1 else "waits in"
            parts = [f"{say_ranks(inside)} {verb} {call}"]
            for rank in others:
                parts.append(f"rank {rank} {_why(world.members[rank])}")
            parts += [_dead(world)] if world.absent else []
            yield "; ".join(parts)


def _stuck_in(call: str) -> Any:
    return lambda record: record.call == call and record.state == "called"


def _stuck(member: Member) -> TraceRecord | None:
    return next(iter(member.records.some(_is_pending).since("seq", 1)), None)


def crossings(worlds: Sequence[World]) -> Iterator[str]:
    """Yield texts for ranks that use two communicators in different orders and wait for each other."""
    stuck = [world for world in worlds if any(map(_stuck, world.members.values()))]
    for i, one in enumerate(stuck):
        for two in stuck[i + 1 :]:
            yield from _crossing(one, two)


def _crossing(one: World, two: World) -> Iterator[str]:
    first = {m.process.path: m for m in one.members.values()}
    second = {m.process.path: m for m in two.members.values()}
    both = [path for path in first if path in second]
    ahead = {path: r for path in both if (r := _stuck(first[path])) is not None}
    behind = {path: r for path in both if (r := _stuck(second[path])) is not None}
    for p, on_one in ahead.items():
        for q, on_two in behind.items():
            if p == q or on_one.seq is None or on_two.seq is None:
                continue
            mine, yours = second[p].collective(on_two.seq), first[q].collective(on_one.seq)
            before = mine is None and second[p].last < on_two.seq
            after = yours is None and first[q].last < on_one.seq
            crossed = before and after
            if mine is not None and yours is not None:
                crossed = on_one.time_ns < mine.time_ns and on_two.time_ns < yours.time_ns
            if crossed:
                a, b = first[p].process_rank, second[q].process_rank
                yield (
                    f"rank {a} calls {say(on_one)}{say_place(on_one)} of {one.identity} before "
                    f"{say(on_two)} of {two.identity}, rank {b} the other way round"
                    f"{say_place(on_two)}: the order on two communicators differs"
                )
                return


# A dump that pynccl wrote has no more.
_MOST_REASONS = 16
# Reasons of dumps that a user or the launcher asked for.
_ASKED = ("signal", "launcher")
# The beginning of what is said of a communicator without findings.
QUIET = "nothing is outstanding: "


# --- all of it ---------------------------------------------------------------------------------------------


def findings(world: World) -> list[str]:
    """Return the problems of one communicator's calls as texts."""
    different = _first_difference(world)
    found, pairs = list(_collectives(world, different)), list(_pairs(world))
    # Where all live and agree, a send or recv that is not met is why a rank has not reached a collective.
    ordered = [*found, *pairs] if different or world.absent else [*pairs, *found]
    return [*ordered, *_signals(world), *_endings(world)]


def _quiet(world: World) -> str:
    if any(member.last for member in world.members.values()):
        last = {member.last for member in world.members.values()}
        newest = [record for m in world.members.values() if (record := m.newest()) is not None]
        text = (
            f"the last call is {say(newest[0])}"
            if len(last) == 1 and newest
            else "the ranks' last calls differ"
        )
        return f"{QUIET}{text}"
    # Calls that have no number, such as suspend.
    calls = {rank: member.records[-1] for rank, member in world.members.items() if member.records}
    if not calls:
        return "no calls"
    same = len(calls) == len(world.members) and len(set(map(signature, calls.values()))) == 1
    text = f"the last call is {say(next(iter(calls.values())))}" if same else _together(calls)
    return f"{QUIET}{text}"


def explain(dumps: Dumps) -> list[Line]:
    """Return the report of all communicators."""
    worlds = worlds_of(dumps.members)
    lines: list[Line] = [("error", text) for text in crossings(worlds)]
    for world in worlds:
        world.absence = dumps.absence
        lines.append(("", str(world)))
        found = findings(world)
        lines += [("error", f"  {text}") for text in found] or [("ok", f"  {_quiet(world)}")]
    lines += _reasons({m.process.path: m.process for m in dumps.members}.values())
    lines += [("warning", f"left out: {text}") for text in dumps.damage]
    return lines or [("", "no communicators")]


def _reasons(processes: Iterable[Process]) -> Iterator[Line]:
    """Yield the reasons of the dumps, processes with the same reason together, and exceptions last."""
    same: dict[Reason, list[Process]] = {}
    for process in processes:
        for reason in _without_repeats(process):
            same.setdefault(reason, []).append(process)
    for reason, those in sorted(same.items(), key=lambda item: item[0].kind == "exception"):
        ranks = {process.rank for process in those if process.rank is not None}
        who = [f"process {process.pid}" for process in those if process.rank is None]
        level = "" if reason.kind in _ASKED else "error"
        yield level, f"{join([*([say_ranks(ranks)] if ranks else []), *who])} ({reason.kind}): {reason.text}"


def _without_repeats(process: Process) -> Iterator[Reason]:
    """Yield a dump's reasons; in an exception, "..." stands for the text of another reason."""
    # Omit an abort that follows an exception.
    omitted = {"exit", "abort"} if process.reason("exception") else {"exit"}
    others = [reason for reason in process.reasons if reason.kind not in omitted | {"exception"}]
    yield from others
    for reason in process.reasons:
        if reason.kind == "exception":
            yield reason._replace(text=_shortened(reason.text, others[:_MOST_REASONS]))


def _shortened(text: str, others: Iterable[Reason]) -> str:
    for other in others:
        if len(other.text) > len("..."):
            text = text.replace(other.text, "...")
    return text
