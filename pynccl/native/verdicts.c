#include "verdicts.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "names.h"
#include "recorder.h"

// The names in dumps of the flight recorder.
static const char* const pynccl_trouble_names[] = {
    [PYNCCL_RANKS_FAILED] = "ranks failed",
    [PYNCCL_TIMED_OUT] = "timeout",
    [PYNCCL_MISMATCHED] = "mismatch",
    [PYNCCL_LIBRARY_FAILED] = "library error",
};

static void* pynccl_respond(void* argument) {
  pynccl_watch* w = argument;
  pynccl_comm* comm = w->comm;
  pynccl_trace_save(pynccl_trouble_names[w->verdict.trouble], w->verdict.text);
  // By then threads that wait in slices have left, and no longer use the communicator.
  if (w->on_failure == PYNCCL_ON_FAILURE_ABORT) usleep(250000);
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const uintptr_t handle = w->handle;
  if (handle && w->on_failure == PYNCCL_ON_FAILURE_ABORT) {
    w->handle = 0;
    w->ended = 1;
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  if (handle && w->on_failure == PYNCCL_ON_FAILURE_REVOKE) ncclCommRevoke(handle, NCCL_REVOKE_DEFAULT);
  if (handle && w->on_failure == PYNCCL_ON_FAILURE_ABORT) ncclCommAbort(handle);
  pthread_mutex_lock(&pynccl_watchdog.lock);
  w->responding = 0;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  pynccl_comm_release(comm);
  return NULL;
}

int pynccl_start_thread(void* (*work)(void*), void* argument) {
  sigset_t all, before;
  pthread_t thread;
  pthread_attr_t attributes;
  sigfillset(&all);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // Only the program's own threads handle signals.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int r = pthread_create(&thread, &attributes, work, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return r;
}

void pynccl_add_rank(pynccl_verdict* v, int rank) {
  if (v->count < PYNCCL_MOST_RANKS) v->ranks[v->count++] = rank;
}

void pynccl_publish(pynccl_watch* w, int trouble) {
  pynccl_verdict* v = &w->verdict;
  __atomic_store_n(&v->trouble, trouble, __ATOMIC_RELEASE);
  // Refuse every later call; earlier calls pay nothing for this check.
  __atomic_store_n(&w->comm->handle, 0, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  pynccl_tell_news(w);
  for (int done = 0; done < v->count && trouble == PYNCCL_RANKS_FAILED;) {
    pynccl_frame failed = {.kind = FRAME_FAILED};
    while (done < v->count && failed.code < FRAME_RANKS)
      failed.ranks[failed.code++] = (uint16_t)v->ranks[done++];
    pynccl_tell_all(w, &failed);
  }
  // Which ranks have failed, each finds out itself.
  const char* text = trouble == PYNCCL_RANKS_FAILED ? "" : v->text;
  for (const char* rest = text; *rest; rest += strnlen(rest, PYNCCL_FRAME_TEXT - 1)) {
    pynccl_frame text = {.kind = FRAME_TEXT};
    memcpy(text.text, rest, strnlen(rest, PYNCCL_FRAME_TEXT - 1));
    pynccl_tell_all(w, &text);
  }
  pynccl_frame told = {.kind = FRAME_TROUBLE,
                       .code = (uint32_t)trouble,
                       .number = (uint64_t)v->result,
                       .words = {(uint64_t)v->reporter, (uint64_t)v->place, (uint64_t)v->relayed}};
  for (int i = 0; i < v->count; ++i)
    if (v->ranks[i] < TROUBLE_RANKS) told.text[v->ranks[i] / 8] |= (char)(1 << v->ranks[i] % 8);
  if (trouble != PYNCCL_RANKS_FAILED) pynccl_tell_all(w, &told);
  w->responding = 1;
  __atomic_add_fetch(&w->comm->references, 1, __ATOMIC_RELAXED);
  if (pynccl_start_thread(pynccl_respond, w)) {
    w->responding = 0;
    // The caller holds another reference.
    __atomic_sub_fetch(&w->comm->references, 1, __ATOMIC_ACQ_REL);
  }
}

void pynccl_conclude(pynccl_watch* w, const pynccl_verdict* found) {
  // All but `trouble`, which other threads read without the lock.
  const size_t rest = offsetof(pynccl_verdict, result);
  memcpy((char*)&w->verdict + rest, (const char*)found + rest, sizeof *found - rest);
  pynccl_publish(w, found->trouble);
}

// Whether a rank's departure says what happened to it. A rank that aborts too may have failed before, and one
// that goes on may do so without this rank.
static int pynccl_left(const pynccl_peer* p) {
  return p->departure && p->departure != PYNCCL_ABORTS_TOO && p->departure != PYNCCL_GOES_ON;
}

static int pynccl_apart(const pynccl_watch* w, int a, int b) {
  if (pynccl_left(&w->peers[a]) || pynccl_left(&w->peers[b])) return 0;
  return pynccl_has_lost(w, a, b) || pynccl_has_lost(w, b, a);
}

// For every rank a row of bits: the ranks from which it is apart, then those that have lost it.
typedef struct pynccl_rows {
  size_t words;
  uint64_t *apart, *lost_by;
} pynccl_rows;

static void pynccl_set(uint64_t* rows, size_t words, int rank, int other) {
  rows[(size_t)rank * words + (size_t)other / 64] |= 1ULL << (other % 64);
}

static int pynccl_find_apart(const pynccl_watch* w, pynccl_rows* rows) {
  const size_t size = (size_t)w->size * (rows->words = ((size_t)w->size + 63) / 64);
  rows->apart = calloc(2 * size, sizeof *rows->apart);
  if (!rows->apart) return 0;
  rows->lost_by = rows->apart + size;
  for (int r = 0; r < w->size; ++r)
    for (int other = 0, left = w->peers[r].losses; left; ++other) {
      if (!pynccl_has_lost(w, r, other)) continue;
      --left;
      if (!pynccl_apart(w, r, other)) continue;
      pynccl_set(rows->apart, rows->words, r, other);
      pynccl_set(rows->apart, rows->words, other, r);
      pynccl_set(rows->lost_by, rows->words, other, r);
    }
  return 1;
}

typedef struct pynccl_reasons {
  int lacks, missed, order;
} pynccl_reasons;

static int pynccl_is_worse(pynccl_reasons a, pynccl_reasons b) {
  if (a.lacks != b.lacks) return a.lacks > b.lacks;
  return a.missed != b.missed ? a.missed > b.missed : a.order >= b.order;
}

static int pynccl_is_set(const uint64_t* rows, size_t words, int rank, int other) {
  return rows[(size_t)rank * words + (size_t)other / 64] >> other % 64 & 1;
}

// `left` has the ranks that have not failed.
static pynccl_reasons pynccl_reasons_of(const pynccl_watch* w, const pynccl_rows* rows, const uint64_t* left,
                                        int rank) {
  pynccl_reasons found = {0, 0, w->peers[rank].order};
  for (size_t i = 0; i < rows->words; ++i) {
    found.lacks += __builtin_popcountll(rows->apart[(size_t)rank * rows->words + i] & left[i]);
    found.missed += __builtin_popcountll(rows->lost_by[(size_t)rank * rows->words + i] & left[i]);
  }
  return found;
}

// Of the ranks that cannot reach each other, choose the one that cannot reach most of the others; then the
// one that most ranks cannot reach; then the highest, by the order that is the same in all communicators: a
// connection that ends does so in each of them.
static int pynccl_worst(const pynccl_watch* w, const pynccl_reasons* reasons, const uint64_t* left) {
  int worst = -1;
  for (int r = 0; r < w->size; ++r) {
    if (!pynccl_is_set(left, 0, 0, r) || !reasons[r].lacks) continue;
    if (worst < 0 || pynccl_is_worse(reasons[r], reasons[worst])) worst = r;
  }
  return worst;
}

// `left` and `reasons` are zero.
static void pynccl_fail_worst(const pynccl_watch* w, const pynccl_rows* rows, uint64_t* left,
                              pynccl_reasons* reasons, char* failed) {
  for (int r = 0; r < w->size; ++r)
    if (!failed[r]) pynccl_set(left, 0, 0, r);
  for (int r = 0; r < w->size; ++r) reasons[r] = pynccl_reasons_of(w, rows, left, r);
  for (int worst; (worst = pynccl_worst(w, reasons, left)) >= 0;) {
    left[worst / 64] &= ~(1ULL << worst % 64);
    failed[worst] = 1;
    for (int r = 0; r < w->size; ++r) {
      reasons[r].lacks -= pynccl_is_set(rows->apart, rows->words, r, worst);
      reasons[r].missed -= pynccl_is_set(rows->lost_by, rows->words, r, worst);
    }
  }
}

// Of the ranks that can be reached, add those that cannot reach others of them.
static void pynccl_fail_apart(const pynccl_watch* w, char* failed) {
  pynccl_rows rows;
  if (!pynccl_find_apart(w, &rows)) return;
  uint64_t* left = calloc(rows.words, sizeof *left);
  pynccl_reasons* reasons = calloc((size_t)w->size, sizeof *reasons);
  if (left && reasons) pynccl_fail_worst(w, &rows, left, reasons, failed);
  free(reasons);
  free(left);
  free(rows.apart);
}

static void pynccl_say_lost(const pynccl_watch* w, int rank, pynccl_verdict* v) {
  const char* before = "cannot reach rank ";
  for (int other = 0; other < w->size; ++other) {
    if (other == rank || !pynccl_apart(w, rank, other)) continue;
    pynccl_say(v->text, sizeof v->text, "%s%d", before, other);
    before = ", ";
  }
}

// Only a rank whose heartbeats come here was certainly alive until it was last heard of.
static void pynccl_say_silent(const pynccl_watch* w, int rank, pynccl_verdict* v) {
  const pynccl_peer* p = &w->peers[rank];
  const int beats = pynccl_hears_beats(w, rank);
  pynccl_say(v->text, sizeof v->text, "is not responding: %s %.1f s ago", beats ? "last heard of" : "asked",
             (double)(pynccl_watchdog.awake - (beats ? pynccl_heard(p) : p->owes)) / 1e9);
}

static void pynccl_say_failed(const pynccl_watch* w, int rank, pynccl_verdict* v) {
  const pynccl_peer* p = &w->peers[rank];
  pynccl_say(v->text, sizeof v->text, "%srank %d ", v->count > 1 ? "; " : "", rank);
  if (p->departure == PYNCCL_ENDS) {
    pynccl_say(v->text, sizeof v->text,
               "left without closing its communicator: its program ended, or dropped it");
  } else if (pynccl_left(p)) {
    pynccl_say(v->text, sizeof v->text, "aborted its communicator");
  } else if (p->tampered) {
    pynccl_say(v->text, sizeof v->text,
               "is out of reach: a frame from it was changed on its way (it was not sealed with the job's "
               "secret)");
  } else if (p->late) {
    pynccl_say(v->text, sizeof v->text, "did not connect in time");
  } else if (p->gone && !p->departure && !pynccl_owes(w, rank, 2 * w->question)) {
    pynccl_say(v->text, sizeof v->text, "died, or exited without closing its communicator");
  } else if (pynccl_silent(w, rank, 2 * w->question) || pynccl_owes(w, rank, 2 * w->question)) {
    pynccl_say_silent(w, rank, v);
  } else if (rank != w->rank) {
    pynccl_say_lost(w, rank, v);
  } else {
    int lost = 0;
    for (int r = 0; r < w->size; ++r) lost += pynccl_has_lost(w, rank, r);
    pynccl_say(v->text, sizeof v->text, "(this one) ");
    if (lost)
      pynccl_say_lost(w, rank, v);
    else
      pynccl_say(v->text, sizeof v->text, "did not respond");
    pynccl_say(v->text, sizeof v->text, ", and the others go on without it");
  }
}

// Whether only this rank takes ranks for failed that still send frames: the others may know more.
static int pynccl_contested(const pynccl_watch* w, const char* failed) {
  if (pynccl_now() - w->dying > pynccl_silence(w)) return 0;
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (failed[r] && !p->departure && !p->gone && !p->named && !pynccl_silent(w, r, 2 * w->question))
      return 1;
  }
  return 0;
}

void pynccl_conclude_failed(pynccl_watch* w) {
  pynccl_verdict* v = &w->verdict;
  char* failed = calloc(1, (size_t)w->size);
  if (!failed) return;
  pynccl_reach(w, failed);
  pynccl_fail_apart(w, failed);
  if (pynccl_contested(w, failed)) {
    free(failed);
    return;
  }
  v->count = 0;
  v->text[0] = 0;
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (pynccl_left(p)) failed[r] = p->departure == PYNCCL_ABORTS_FIRST || p->departure == PYNCCL_ENDS;
    if (!failed[r]) continue;
    pynccl_add_rank(v, r);
    pynccl_say_failed(w, r, v);
  }
  free(failed);
  w->dying = 0;
  if (!v->count) return;
  pynccl_say(v->text, sizeof v->text, " (noticed by rank %d of %d)", w->rank, w->size);
  pynccl_publish(w, PYNCCL_RANKS_FAILED);
}

int pynccl_unsure(pynccl_watch* w, int64_t late) {
  pynccl_find_ways(w);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (pynccl_takes_part(w, r) && !p->hidden && pynccl_heard(p) <= late &&
        !pynccl_silent(w, r, pynccl_silence(w)))
      return 1;
  }
  return 0;
}

int pynccl_report_silence(pynccl_watch* w) {
  int silent = 0;
  for (int r = 0; r < w->size; ++r) {
    if (!pynccl_silent(w, r, pynccl_silence(w))) continue;
    pynccl_report_loss(w, r);
    ++silent;
  }
  return silent;
}

void pynccl_hear_all(pynccl_watch* w) {
  const int64_t late = pynccl_watchdog.awake, until = pynccl_now() + 10 * pynccl_silence(w);
  for (;;) {
    pynccl_ask_all(w);
    const int silent = !pynccl_unsure(w, late) && pynccl_report_silence(w);
    const int early = w->connected && pynccl_watchdog.awake - late < 2 * w->question;
    if (w->verdict.trouble || pynccl_now() >= until) return;
    if (!silent && !early && !w->dying && !pynccl_unsure(w, late)) return;
    const int64_t soon = pynccl_now() + TICK_MS * MS;
    pynccl_await(soon < until ? soon : until);
  }
}

static uint64_t pynccl_calls_of(const pynccl_watch* w, int rank) {
  return rank == w->rank ? pynccl_calls(w) : w->peers[rank].calls;
}

// The kind of its newest call; -1: none.
static int pynccl_kind_of(const pynccl_watch* w, int rank) {
  if (!pynccl_calls_of(w, rank)) return -1;
  return rank == w->rank ? pynccl_newest_kind(w) : w->peers[rank].last_kind;
}

// The age of the oldest news of the other ranks, in ns.
static int64_t pynccl_age_of_news(const pynccl_watch* w) {
  int64_t oldest = pynccl_watchdog.awake;
  for (int r = 0; r < w->size; ++r)
    if (pynccl_takes_part(w, r) && pynccl_heard(&w->peers[r]) < oldest) oldest = pynccl_heard(&w->peers[r]);
  return pynccl_watchdog.awake - oldest;
}

// Whether no rank owes an answer, and all have been heard of since their last heartbeat but one.
static int pynccl_all_respond(const pynccl_watch* w) {
  for (int r = 0; r < w->size; ++r)
    if (pynccl_takes_part(w, r) && pynccl_owes(w, r, w->question)) return 0;
  return pynccl_age_of_news(w) < 2 * BEAT_NS;
}

// Whether a rank may be late: another one that has not closed its communicator, and can be asked.
static int pynccl_can_be_late(const pynccl_watch* w, int rank) {
  return rank != w->rank && !w->peers[rank].departure && !w->peers[rank].hidden;
}

// Add the ranks for which this rank waits, itself or through others, and that wait for nobody: with messages
// the number of calls tells nothing.
static void pynccl_add_ends_of_waits(const pynccl_watch* w, pynccl_verdict* v) {
  char* late = calloc(1, (size_t)w->size);
  for (int r = 0; r < w->size && late; ++r) {
    const int end = w->peers[r].awaited ? pynccl_end_of_waits(w, r, 1) : -1;
    if (end >= 0) late[end] = 1;
  }
  for (int r = 0; r < w->size && late; ++r)
    if (late[r] && pynccl_can_be_late(w, r)) pynccl_add_rank(v, r);
  free(late);
}

// Add the ranks that are late. They have made fewer calls than others; if this rank waits for some of them,
// only these are late. This rank may wait in a call that is not counted, such as ncclCommSplit: if it has
// made fewer calls itself, or nobody has, the ranks are late for which it waits and which have made no more.
// Returns whether it waits in such a call.
static int pynccl_add_ranks_behind(const pynccl_watch* w, pynccl_verdict* v) {
  const uint64_t mine = pynccl_calls_of(w, w->rank);
  uint64_t most = 0;
  int behind = 0, both = 0;
  for (int r = 0; r < w->size; ++r)
    if (pynccl_calls_of(w, r) > most) most = pynccl_calls_of(w, r);
  for (int r = 0; r < w->size; ++r) {
    if (!pynccl_can_be_late(w, r) || pynccl_calls_of(w, r) == most) continue;
    behind = 1;
    both |= w->peers[r].awaited;
  }
  const int uncounted = mine < most || !behind;
  pynccl_add_ends_of_waits(w, v);
  if (v->count) return uncounted;
  for (int r = 0; r < w->size; ++r) {
    if (!pynccl_can_be_late(w, r)) continue;
    const uint64_t calls = pynccl_calls_of(w, r);
    if (uncounted ? calls <= mine && w->peers[r].awaited : calls < most && (!both || w->peers[r].awaited))
      pynccl_add_rank(v, r);
  }
  return uncounted;
}

// Whether other ranks have made more calls.
static int pynccl_is_behind(const pynccl_watch* w) {
  for (int r = 0; r < w->size; ++r)
    if (pynccl_calls_of(w, r) > pynccl_calls_of(w, w->rank)) return 1;
  return 0;
}

// Add the ranks of the verdict to its text.
static void pynccl_say_awaited(pynccl_verdict* v) {
  pynccl_say(v->text, sizeof v->text, "; it waits for rank%s ", v->count == 1 ? "" : "s");
  for (int i = 0, end; i < v->count; i = end) {
    for (end = i + 1; end < v->count && v->ranks[end] == v->ranks[end - 1] + 1; ++end) {
    }
    if (i) pynccl_say(v->text, sizeof v->text, ", ");
    pynccl_say_ranks(v->text, sizeof v->text, v->ranks[i], v->ranks[end - 1] + 1);
  }
}

void pynccl_explain(pynccl_watch* w, const char* what, const int* awaited, int count, int heard,
                    pynccl_verdict* v) {
  *v = (pynccl_verdict){0};
  if (!heard) pynccl_mark_awaited(w);
  pynccl_say(v->text, sizeof v->text, "%s", what);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int ended = p->departure == PYNCCL_ENDS;
    if (r == w->rank || !(ended || pynccl_silent(w, r, pynccl_silence(w)))) continue;
    pynccl_add_rank(v, r);
    pynccl_say(v->text, sizeof v->text, "; rank %d ", r);
    if (ended)
      pynccl_say(v->text, sizeof v->text, "has left without closing its communicator");
    else
      pynccl_say_silent(w, r, v);
  }
  v->trouble = v->count ? PYNCCL_RANKS_FAILED : PYNCCL_TIMED_OUT;
  int connected = 0;
  for (int r = 0; r < w->size; ++r) connected += pynccl_takes_part(w, r) || w->peers[r].departure;
  if (v->count || !connected) return;
  for (int i = 0; i < count; ++i) pynccl_add_rank(v, awaited[i]);
  // The counts that follow do not show for which ranks such a call waits. Counts that may be old prove less.
  const int uncounted = count || pynccl_add_ranks_behind(w, v);
  if ((uncounted || !heard) && v->count) pynccl_say_awaited(v);
  int hidden = 0;
  for (int r = 0; r < w->size; ++r) hidden |= w->peers[r].hidden;
  if (heard || pynccl_all_respond(w))
    pynccl_say(v->text, sizeof v->text, "; all ranks%s respond, and", hidden ? " that can be asked" : "");
  else
    pynccl_say(v->text, sizeof v->text, "; the ranks");
  if (!heard)
    pynccl_say(v->text, sizeof v->text, " up to %.1f s ago had called:", (double)pynccl_age_of_news(w) / 1e9);
  else
    pynccl_say(v->text, sizeof v->text, " have called:");
  for (int r = 0, end; r < w->size; r = end) {
    const uint64_t calls = pynccl_calls_of(w, r);
    const int kind = pynccl_kind_of(w, r);
    for (end = r + 1; end < w->size && pynccl_calls_of(w, end) == calls; ++end)
      if (pynccl_kind_of(w, end) != kind || w->peers[end].departure != w->peers[r].departure ||
          w->peers[end].hidden != w->peers[r].hidden)
        break;
    pynccl_say(v->text, sizeof v->text, end == r + 1 ? "%s rank " : "%s ranks ", r ? "," : "");
    pynccl_say_ranks(v->text, sizeof v->text, r, end);
    if (w->peers[r].hidden) pynccl_say(v->text, sizeof v->text, ", when last heard of");
    if (!calls) pynccl_say(v->text, sizeof v->text, ": nothing");
    if (calls)
      pynccl_say(v->text, sizeof v->text, ": #%llu %s", (unsigned long long)calls, pynccl_kind_name(kind));
    if (w->peers[r].departure) pynccl_say(v->text, sizeof v->text, ", then closed its communicator");
  }
  if (uncounted && !v->count && pynccl_is_behind(w))
    pynccl_say(
        v->text, sizeof v->text,
        "; the call of rank %d is not counted: perhaps the others made another call instead, which check "
        "mode tells (PYNCCL_CHECK=1)",
        w->rank);
}
