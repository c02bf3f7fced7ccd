"""The survivors of a communicator: their agreements over the control channel."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from typing import Any

from pynccl import capi
from pynccl._errors import CollectiveMismatchError, NcclError, NcclRemoteError, RankFailedError
from pynccl._library.binding import ffi, lib
from pynccl._types import UniqueId
from pynccl._watch import agreement
from pynccl._watch.agreement import HEARD, MADE, WELL, Message, State, View, ranks_in, set_of
from pynccl._watch.ended import EndedRecord, is_told
from pynccl._watch.watchdog import Handle, Watch

# Seconds of an agreement if the communicator has no time-out.
SECONDS = 60.0
_SLICE_MS = lib.PYNCCL_SLICE_MS
# Seconds to wait for the report of a death after an error of the library, and for the proof of a death.
_LATE, _PROOF = 1.0, 2.5
# Seconds within which a rank that can be reached gives a sign of life, for each 64 ranks; between two looks.
_RESPONSE, _RESPONSE_STEP = 1.2, 0.01
# Seconds to wait for the message of a late rank: it is on its way, or came while this rank was stopped.
_JUST_NOW = 0.2
# Seconds that the ranks have for the next message of one that came just before the time-out.
_STEP = 1.0
# Seconds that a rank with the last decision waits for the other ranks to have it.
_LINGER = 1.0
# Kinds of agreements: a shrink with abort=True, another shrink, and grow. With _BEGUN: a rank has begun one,
# with _GAVE_UP: it waited in vain for others.
SHRINKING, LEAVING_OUT, GROWING = 1, 2, 3
_BEGUN, _GAVE_UP = 128, 64
_TEXT: Any = lib.PYNCCL_FRAME_TEXT
_GONE: Any = lib.PYNCCL_GONE
_SILENT: Any = lib.PYNCCL_SILENT
_ENDED: Any = lib.PYNCCL_ENDED
_ABORTS_TOO: Any = lib.PYNCCL_ABORTS_TOO
_GOES_ON: Any = lib.PYNCCL_GOES_ON
_ENDS: Any = lib.PYNCCL_ENDS
_DEPARTURE: Any = lib.PYNCCL_DEPARTURE
_DEPARTED = {
    lib.PYNCCL_CLOSES: "closed it",
    _ENDS: "left without closing it",
    lib.PYNCCL_ABORTS_FIRST: "aborted it",
}


class Survivors:
    """This rank's part in the agreements of a communicator's survivors, over the control channel.

    They agree several times: first on the survivors, then on whether all of them have succeeded.

    Without a failure (not `final`) a rank may miss a call that others make, or give up earlier. So ranks
    number their attempts by themselves, and tell each other the number. A message has the numbers of both
    ranks: one of an earlier attempt is not taken for one of this.
    """

    def __init__(
        self,
        watch: Watch,
        not_aborted: Callable[[], None],
        excluded: Iterable[int],
        quorum: bool,
        kind: int,
        attempt: int,
        final: bool,
        doing: str = "shrinking",
    ) -> None:
        self.watch, self.not_aborted = watch, not_aborted
        self.quorum, self.final, self.doing = quorum, final, doing
        self.me, self.size = watch.rank, watch.size
        self.kind, self.attempt = kind, attempt
        # By rank: the number of its attempt, 0 if unknown, and the tags of messages from it.
        self.theirs = [attempt if final else 0] * self.size
        self.tags = ffi.new("uint64_t[]", [self._tag(theirs, attempt) for theirs in self.theirs])
        # The ranks of which this attempt has a message, and when the last of them came.
        self.heard_of, self.came_at = 0, 0.0
        # The ranks for which another one has waited in vain.
        self.given_up = 0
        # After a failure excluded ranks count as unreachable, and so do those that do not respond or that a
        # failed shrink has named; else they are only left out.
        named = set_of(excluded)
        self.blamed = self.lost = named if watch.verdict() is not None else self._unreachable(named)
        self.excluded = named & ~self.lost
        self.ended = 0
        self.states: list[State] = []
        # The number of agreements whose result was returned.
        self.finished = 0
        # Messages of agreements that this rank has not begun.
        self.early: list[tuple[int, int, Message]] = []
        self.parts: dict[int, bytearray] = {}
        # Messages to send, by agreement.
        self.out: dict[int, agreement.Output] = {}
        self.decided = 0
        self.well = False
        self.began = time.monotonic()
        self.ended_record = EndedRecord()
        # The ranks that this one does not exclude, and the tags of their beginnings.
        self.members = (1 << self.size) - 1 & ~(named | 1 << self.me)
        begins = (kind | _BEGUN if self.members >> rank & 1 else 0 for rank in range(self.size))
        self.begins = ffi.new("uint64_t[]", list(begins))
        self.gives_up = ffi.new("uint64_t[]", [kind | _GAVE_UP] * self.size)
        if not final:
            self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._tell_attempt(self.attempt)
        for rank in ranks_in(self.members):
            if (begun := self.watch.begun.get((self.kind, rank), 0)) > 0:
                self._match(rank, begun)

    def _tell_attempt(self, attempt: int) -> None:
        """Tell the others which attempt this rank has begun, or, with a minus, given up."""
        self.watch.send(self.members, self.kind | _BEGUN, attempt.to_bytes(4, "big", signed=True))

    def _match(self, rank: int, attempt: int) -> None:
        """From now on talk to this attempt of a rank; tell it the newest of what it has missed."""
        self.theirs[rank] = attempt
        self.tags[rank] = self._tag(attempt, self.attempt)
        self.parts.pop(rank, None)
        for number, state in enumerate(self.states):
            if state.others >> rank & 1:
                self._send(number, ((rank, agreement.newest_of(state)),))

    def _hear_beginnings(self) -> None:
        rank, number = ffi.new("int*"), ffi.new("char[]", 4)
        while not lib.pynccl_watch_take(self.watch.c, rank, self.begins, number, 4, 0):
            other, begun = int(rank[0]), int.from_bytes(ffi.buffer(number), "big", signed=True)
            # What it has sent before belongs to its earlier attempt.
            self._hear_messages(0)
            self.watch.begun[self.kind, other] = begun
            if not self.heard_of >> other & 1:
                self._match(other, max(0, begun))

    def _tell_given_up(self, late: int) -> None:
        """Tell the others of this attempt for which ranks this one has waited in vain."""
        # Little-endian: what does not fit are the highest ranks.
        data = late.to_bytes((self.size + 7) // 8, "little")[: _TEXT - 4]
        self.watch.send(self.members, self.kind | _GAVE_UP, self.attempt.to_bytes(4, "big") + data)

    def _hear_given_up(self) -> None:
        rank, data = ffi.new("int*"), ffi.new("char[]", _TEXT)
        while not lib.pynccl_watch_take(self.watch.c, rank, self.gives_up, data, _TEXT, 0):
            told = bytes(ffi.buffer(data, _TEXT))
            if int.from_bytes(told[:4], "big") == self.attempt:
                self.given_up |= int.from_bytes(told[4 : 4 + (self.size + 7) // 8], "little")

    def _must_not_be_given_up(self) -> None:
        if gone := self._given_up():
            raise self._failure(
                f"{self.doing} the communicator: {_ranks(gone)} gave up, and began again",
                gone,
            )

    def _given_up(self) -> int:
        """Return the ranks of which this attempt has heard, and which have begun another one since."""
        if self.final:
            return 0
        self._hear_beginnings()
        if len(self.states) > self.finished and self.states[-1].decision is not None:
            # They may have gone on after this decision, which is still to be returned here.
            return 0
        newest = {r: self.watch.begun.get((self.kind, r), 0) for r in ranks_in(self.heard_of)}
        return set_of(r for r, begun in newest.items() if begun > 0 and begun != self.theirs[r])

    def _tag(self, sender: int, receiver: int, number: int = 0) -> int:
        return sender << 40 | receiver << 16 | number << 8 | self.kind

    def _unreachable(self, named: int) -> int:
        """Return the ranks that do not respond, or that a failed shrink has named.

        Their failure may be known to another communicator only, for example to one that was split from this.
        """
        return named & ~self._responding(named & ~self.watch.suspects)

    def _responding(self, unsure: int) -> int:
        """Return those of these ranks that give a sign of life now."""
        deadline = time.monotonic() + _RESPONSE * -(-self.size // lib.PYNCCL_FAST_RANKS)
        heard = {rank: self._heard(rank) for rank in ranks_in(unsure)}
        respond = 0
        while unsure and time.monotonic() < deadline:
            time.sleep(_RESPONSE_STEP)
            fates = self._fates()
            silent = set_of(r for r in ranks_in(unsure) if fates[r] & (_GONE | _SILENT | _DEPARTURE))
            respond |= set_of(r for r in ranks_in(unsure & ~silent) if self._heard(r) != heard[r])
            unsure &= ~(silent | respond)
        return respond

    def _heard(self, rank: int) -> int:
        return lib.pynccl_watch_heard(self.watch.c, rank)

    # --- agreement ---

    def agree(self, flags: int) -> View:
        """Return the view that all survivors share, with the flags that all set; set `decided`.

        With WELL, raise NcclRemoteError as soon as a rank has refused to take part.
        """
        self.well = bool(flags & WELL)
        self._begin(flags)
        try:
            self._wait_for_decision()
        except NcclError:
            if not self.final:
                # A rank that comes later is not to wait for this attempt.
                self._tell_attempt(-self.attempt)
            raise
        # An abort in another thread looks like the loss of all other ranks.
        self.not_aborted()
        decision = self.states[-1].decision
        assert decision is not None
        self._must_be_well(decision)
        self.decided = agreement.members(decision, self.me)
        self._must_be_in(decision)
        # The next agreement begins with the result of this one.
        self.excluded |= decision.excluded
        self.ended |= decision.ended
        self.lost |= agreement.rest(decision) & ~self.decided
        self.finished += 1
        return decision

    def refuse(self) -> None:
        """Tell the other ranks, without waiting for them, that this one does not take part."""
        if not self.states:
            self._begin(0)
            self.pump()

    def _must_be_well(self, view: View) -> None:
        if self.well and not view.flags & WELL:
            raise self.other_failure()

    def _begin(self, flags: int) -> None:
        number = len(self.states)
        state, out = agreement.start(
            self.me,
            self.size,
            excluded=self.excluded,
            ended=self.ended,
            lost=self.lost,
            flags=flags | (0 if self._can_mislead() else HEARD),
            quorum=self.quorum,
            tell_excluded=self.final or self.kind == GROWING,
        )
        self.states.append(state)
        self.out[number] = out
        early, self.early = self.early, []
        for sender, which, message in early:
            self._take(sender, which, message)
        self._flush()

    def _wait_for_decision(self) -> None:
        limit, began = self.watch.timeout or SECONDS, time.monotonic()
        deadline = began + limit
        too_few: float | None = None
        all_heard = False
        while self.states[-1].decision is None:
            self.pump(_SLICE_MS)
            if self.kind == LEAVING_OUT:
                self.watch.waits(time.monotonic() - began, limit)
            state, now = self.states[-1], time.monotonic()
            self._must_be_well(state.view)
            if self.well and self.watch.verdict() is not None:
                # A rank that knew of the failure before takes no part.
                raise self.other_failure()
            if self.kind == GROWING and state.decision is None:
                # No rank grows after a failure, and a rank that comes later takes no part.
                self.watch.raise_verdict()
            if state.view.excluded >> self.me & 1:
                self._must_be_in(state.view)
            if state.decision is not None or agreement.may_go_on(state):
                too_few = None
            else:
                # The proof of a death arrives a little after the end of the connection.
                too_few = too_few or now
                self._ask_for_ends(deadline)
                if now > min(too_few + _PROOF, deadline):
                    raise self._partition(state.view)
            if state.decision is None:
                self._must_not_be_given_up()
            late = agreement.awaited(state)
            # The message of one rank changes what all others are to send.
            late = late & ~self.heard_of or late
            if self.given_up:
                # A rank that has the decision may tell it yet.
                deadline = min(deadline, now + _JUST_NOW)
                late = self.given_up
            elif not late & ~self.heard_of:
                deadline = max(deadline, self.came_at + _STEP)
            if state.decision is None and now >= deadline:
                if self.final:
                    self._tell_given_up(late)
                if all_heard or self.kind != LEAVING_OUT or late & ~self._responding(late):
                    raise self._late(late)
                # They may wait for a rank that does not respond.
                self.watch.hear()
                self.watch.raise_verdict()
                all_heard = True

    def _ask_for_ends(self, deadline: float) -> None:
        """Ask the launcher which of the lost ranks have ended."""
        processes = self.watch.processes
        asked = {r: processes[r] for r in ranks_in(self.lost & ~self.ended) if processes[r].start}
        for rank, at in self.ended_record.ends(asked, deadline):
            lib.pynccl_watch_told_end(self.watch.c, rank, at)

    def _failure(self, text: str, ranks: int) -> RankFailedError:
        return RankFailedError(text, ranks=list(ranks_in(ranks)), rank=self.me, size=self.size)

    def _must_be_in(self, view: View) -> None:
        if view.excluded >> self.me & 1 or not agreement.members(view, self.me) >> self.me & 1:
            raise self._out("did not wait for" if self.kind == GROWING else "excluded")

    def _out(self, did: str) -> RankFailedError:
        return self._failure(f"the other ranks {did} this one, {self.me} of {self.size}", 1 << self.me)

    def _overruled(self) -> RankFailedError:
        return self._failure(
            f"{self.doing} the communicator: the other ranks left this one out, {self.me} of {self.size}, "
            "although it had agreed with them; exclude may differ between the survivors",
            1 << self.me,
        )

    def _partition(self, view: View) -> RankFailedError:
        if left := self.watch.left_behind():
            return left
        chosen, rest = agreement.members(view, self.me), agreement.rest(view)
        return self._failure(
            f"partition: {_ranks(chosen)} cannot reach {_ranks(rest & ~chosen)}, which may be alive and go "
            f"on by themselves. Of the {rest.bit_count()} ranks that may be alive, a majority must be "
            "connected (of two halves the one with the lowest rank). "
            "shrink(..., quorum=None) goes on without a majority. Expected the same exclude on every rank",
            self._failed() | (rest & ~chosen),
        )

    def _late(self, awaited: int) -> RankFailedError:
        if self.final and awaited >> self.me & 1:
            return self._out("did not wait for")
        newest = [self.watch.begun.get((self.kind, r), 0) for r in ranks_in(awaited)]
        # A rank that gave up an earlier attempt is only late in this one.
        if self.kind == GROWING and newest and all(begun <= -self.attempt for begun in newest):
            return self._out("did not wait for")
        return self._absent(awaited)

    def _absent(self, awaited: int) -> RankFailedError:
        fates = self._fates()
        silent = set_of(r for r in ranks_in(awaited) if fates[r] & _SILENT)
        who = silent or awaited
        why = "did not respond" if silent else "did not take part"
        # A rank that only other ranks exclude hears nothing from them.
        differs = self.kind == LEAVING_OUT and self.excluded and not silent
        hint = "; exclude may differ between the ranks" if differs else ""
        return self._failure(
            f"{self.doing} the communicator: {_ranks(who)} {why} within "
            f"{self.watch.timeout or SECONDS:g} s{hint}",
            self._failed() | who,
        )

    def _failed(self) -> int:
        """Return the ranks to name as failed, without ranks that left because of the failure.

        While the ranks grow, nobody fails by leaving: it may have given up a moment before this rank.
        """
        reasons = [fate & _DEPARTURE for fate in self._fates()]
        growing = self.kind == GROWING
        left = set_of(r for r, reason in enumerate(reasons) if reason == _ABORTS_TOO or (growing and reason))
        return self.blamed | (self.lost | self.ended) & ~left & ~(1 << self.me)

    # --- messages ---

    def pump(self, wait_ms: int = 0) -> None:
        """Handle the received messages, and send the resulting ones; raise if this rank has aborted."""
        self.not_aborted()
        # Read the fates before the messages, since a rank's messages precede its end.
        fates = self._fates()
        if self.final:
            self._hear_given_up()
        else:
            self._hear_beginnings()
        self._hear_messages(wait_ms)
        self._note(fates)
        self._flush()
        if any(state.overruled for state in self.states):
            raise self._overruled()

    def _pump_while(self, waits: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while waits() and time.monotonic() < deadline:
            self.pump(_SLICE_MS)

    def _hear_messages(self, wait_ms: int) -> None:
        rank, data = ffi.new("int*"), ffi.new("char[]", _TEXT)
        while not lib.pynccl_watch_take(self.watch.c, rank, self.tags, data, _TEXT, wait_ms):
            self._piece(int(rank[0]), bytes(ffi.buffer(data, _TEXT)))
            wait_ms = 0

    def _fates(self) -> bytes:
        fates = ffi.new("unsigned char[]", self.size)
        lib.pynccl_watch_fates(self.watch.c, fates)
        return bytes(ffi.buffer(fates))

    def _note(self, fates: bytes) -> None:
        """Record ranks that have left or are proven to have ended, and lost ranks that may be alive."""
        for rank, fate in enumerate(fates):
            reason = fate & _DEPARTURE
            if rank == self.me or self.ended >> rank & 1:
                continue
            if reason and reason != _GOES_ON:
                self.ended |= 1 << rank
            elif fate & _GONE or reason:
                self.lost |= 1 << rank
            if fate & _ENDED:
                self.ended |= 1 << rank
        if self.states:
            state = self.states[-1]
            if self.lost & ~(state.view.lost[self.me] | state.view.ended) or self.ended & ~state.view.ended:
                self._advance(len(self.states) - 1, agreement.lose(state, self.lost, self.ended))

    def _piece(self, rank: int, text: bytes) -> None:
        part = self.parts.setdefault(rank, bytearray())
        part += text[1:]
        if text[0]:
            return
        del self.parts[rank]
        if not self.heard_of >> rank & 1:
            self.came_at = time.monotonic()
        self.heard_of |= 1 << rank
        number = int.from_bytes(part[:4], "big")
        self._take(rank, number, agreement.unpack(bytes(part[4:]), self.size))

    def _take(self, sender: int, number: int, message: Message) -> None:
        if number >= len(self.states):
            self.early.append((sender, number, message))
            return
        self._advance(number, agreement.hear(self.states[number], sender, message))

    def _advance(self, number: int, step: agreement.Step) -> None:
        self.states[number] = step[0]
        self.out[number] = self.out.get(number, ()) + step[1]

    def _flush(self) -> None:
        out, self.out = self.out, {}
        for number, messages in out.items():
            self._send(number, agreement.newest(messages))

    def _send(self, number: int, out: agreement.Output) -> None:
        # With one tag, a message to many ranks is sent once.
        to: dict[tuple[Message, int], int] = {}
        for rank, message in out:
            if self.theirs[rank]:
                one = message, self._tag(self.attempt, self.theirs[rank])
                to[one] = to.get(one, 0) | 1 << rank
        for (message, tag), ranks in to.items():
            data = number.to_bytes(4, "big") + agreement.pack(message)
            for at in range(0, len(data), _TEXT - 1):
                more = at + _TEXT - 1 < len(data)
                self.watch.send(ranks, tag, bytes([more]) + data[at : at + _TEXT - 1])

    # --- between agreements ---

    def ranks(self) -> list[int]:
        """Return the survivors in order."""
        return list(ranks_in(self.decided))

    def look(self) -> None:
        """Raise if a survivor failed meanwhile."""
        self.pump()
        self._must_not_be_given_up()
        if self.given_up:
            raise self._late(self.given_up)
        gone = self.decided & (self.lost | self.ended)
        if gone:
            raise self._failure(
                f"{self.doing} the communicator: {_ranks(gone)} failed meanwhile",
                self._failed() | gone,
            )
        if any(which == len(self.states) and not said.view.flags & MADE for _, which, said in self.early):
            raise self.other_failure()

    def lack(self, wanted: int) -> bool:
        """Tell whether some of these ranks were lost."""
        return bool(wanted & ~self.decided & (self.lost | ~self.excluded))

    def missing(self, wanted: int) -> NcclError:
        """Return the error of ranks that were lost meanwhile, or that only other ranks exclude."""
        gone, left = wanted & ~self.decided, self.decided
        if excluded := gone & self.excluded & ~self.lost:
            if self.kind == GROWING:
                # They may have heard of this meanwhile, and given up.
                return self._absent(excluded)
            return CollectiveMismatchError(
                f"{self.doing} the communicator: this rank does not exclude {_ranks(excluded)}, "
                "another rank does; expected the same exclude on all ranks",
                rank=self.me,
                size=self.size,
            )
        fates = self._fates()
        departures = {fates[r] & _DEPARTURE for r in ranks_in(gone)}
        every = "all of " if left & (left - 1) else ""
        why = _DEPARTED.get(departures.pop()) if len(departures) == 1 else None
        why = why or f"cannot be reached by {every}{_ranks(left)}"
        return self._failure(
            f"{self.doing} the communicator: {_ranks(gone)} {why}",
            gone,
        )

    def other_failure(self) -> NcclError:
        """Return the error of a failure on another rank."""
        text = f"{self.doing} the communicator: another rank could not"
        return NcclRemoteError(text, rank=self.me, size=self.size)

    def unique_id(self) -> UniqueId:
        """Return the unique id that the first survivor made."""
        first, *others = self.ranks()
        # Messages of agreements have no number in their tag.
        number = len(self.states)
        deadline = time.monotonic() + (self.watch.timeout or SECONDS)
        if self.me == first:
            # Another rank may have told the decision before all have told their attempts.
            while not self.final and (silent := set_of(others) & ~self.heard_of):
                self.look()
                if time.monotonic() >= deadline:
                    raise self._late(silent)
                self.pump(_SLICE_MS)
            made = UniqueId(capi.ncclGetUniqueId())
            for rank in others:
                tag = self._tag(self.attempt, self.theirs[rank], number)
                self.watch.send(1 << rank, tag, bytes(made))
            return made
        data = ffi.new("char[]", 128)
        while code := lib.pynccl_watch_receive(
            self.watch.c, first, self._tag(self.theirs[first], self.attempt, number), data, 128, _SLICE_MS
        ):
            # It may tell of the first survivor's attempt.
            self.look()
            if code != errno.ETIMEDOUT or time.monotonic() >= deadline:
                raise self._late(1 << first)
        return UniqueId(bytes(ffi.buffer(data)))

    def wait_for_losses(self) -> None:
        """Wait for the report of a death that may have caused an error; silent survivors are lost, too."""
        self._pump_while(
            lambda: (
                not self.decided & (self.lost | self.ended)
                and all(which != len(self.states) for _, which, _ in self.early)
            ),
            _LATE,
        )
        self.lose_silent()

    def lose_silent(self) -> None:
        """Count survivors that have sent no heartbeat for a while as lost."""
        fates = self._fates()
        self.lost |= set_of(r for r in ranks_in(self.decided) if fates[r] & _SILENT)

    def leave_out(self, late: Iterable[int]) -> None:
        """Exclude late ranks that do not begin the next agreement within a moment; they are told."""
        behind = set_of(late) & self.decided & ~(1 << self.me)

        def absent() -> int:
            return behind & ~set_of(sender for sender, which, _ in self.early if which == len(self.states))

        self._pump_while(lambda: absent() & ~(self.lost | self.ended), _JUST_NOW)
        self.excluded |= absent()

    def tell_all(self) -> None:
        """Stay until every rank that can be reached has begun: it then gets this rank's newest message."""

        def some_have_not_begun() -> bool:
            return any(not self.theirs[r] for r in ranks_in(self.members & ~(self.lost | self.ended)))

        self._pump_while(some_have_not_begun, _LINGER)

    def linger(self) -> None:
        """Stay until all survivors have the last decision, so that none waits for an interrupted message.

        If an excluded rank can take the end of any survivor for a death, all stay until it no longer can.
        """
        others = self.decided & ~(1 << self.me)
        self._pump_while(
            lambda: others & ~(self.states[-1].deciders | self.lost | self.ended),
            _LINGER,
        )
        for rank, number in enumerate(self.theirs):
            # It will not begin this attempt again.
            if self.watch.begun.get((self.kind, rank)) == number:
                del self.watch.begun[self.kind, rank]
        decision = self.states[-1].decision
        told = decision is not None and not decision.flags & HEARD
        if self._can_mislead() or (told and self._outside()):
            time.sleep(max(0.0, self.began + _PROOF - time.monotonic()))

    def _outside(self) -> int:
        return self.lost & ~(self.ended | self.decided)

    def _can_mislead(self) -> bool:
        """Tell whether a rank without a connection, but maybe alive, can go on after this process's end."""
        if self.kind == GROWING:
            # No rank grows without the others.
            return False
        fates = self._fates()
        lost = (r for r in ranks_in(self._outside()) if fates[r] & _GONE)
        return any(is_told() or self.watch.visible[r] for r in lost)


def _ranks(bits: int) -> str:
    ranks = list(ranks_in(bits))
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"


def share_id(watch: Watch, handle: Handle, unique_id: bytes | None) -> UniqueId:
    """Return the unique id of one rank to all ranks of a healthy communicator, through this communicator."""
    deadline = None if watch.timeout is None else time.monotonic() + watch.timeout
    mine = bytes([unique_id is not None]) + (unique_id or bytes(128))
    given = [one[1:] for one in watch.gather(handle, mine, deadline) if one[0]]
    if len(given) != 1:
        raise ValueError(
            f"{len(given)} ranks gave a unique_id to grow with; expected one: the rank that calls "
            "comm.get_unique_id() passes the id to grow, and to the new ranks for Communicator.join"
        )
    return UniqueId(given[0])
