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

void pynccl_publish(pynccl_watch* w, int trouble) {
  pynccl_verdict* v = &w->verdict;
  __atomic_store_n(&v->trouble, trouble, __ATOMIC_RELEASE);
  // Refuse every later call; earlier calls pay nothing for this check.
  __atomic_store_n(&w->comm->handle, 0, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  for (int i = 0; i < v->count; ++i) {
    const pynccl_frame failed = {.kind = FRAME_FAILED, .number = (uint64_t)v->ranks[i]};
    pynccl_tell_all(w, &failed);
  }
  for (const char* rest = v->text; *rest; rest += strnlen(rest, PYNCCL_FRAME_TEXT - 1)) {
    pynccl_frame text = {.kind = FRAME_TEXT};
    memcpy(text.text, rest, strnlen(rest, PYNCCL_FRAME_TEXT - 1));
    pynccl_tell_all(w, &text);
  }
  const pynccl_frame told = {.kind = FRAME_TROUBLE,
                             .code = (uint32_t)trouble,
                             .number = (uint64_t)v->result,
                             .words = {(uint64_t)v->reporter}};
  pynccl_tell_all(w, &told);
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

static void pynccl_add_rank(pynccl_verdict* v, int rank) {
  if (v->count < PYNCCL_MOST_RANKS) v->ranks[v->count++] = rank;
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

// Clear `failed` for the ranks that this rank reaches, directly or through others.
static void pynccl_reach(const pynccl_watch* w, char* failed) {
  int* queue = malloc((size_t)w->size * sizeof *queue);
  if (!queue) return;
  memset(failed, 1, (size_t)w->size);
  int first = 0, last = 0;
  failed[queue[last++] = w->rank] = 0;
  for (; first < last; ++first)
    for (int r = w->peers[queue[first]].departure ? w->size : 0; r < w->size; ++r)
      if (failed[r] && !pynccl_has_lost(w, queue[first], r)) failed[queue[last++] = r] = 0;
  free(queue);
}

// Of the ranks that cannot reach each other, choose the one that cannot reach most of the others; then the
// one that most ranks cannot reach; then the highest.
static int pynccl_worst(const pynccl_watch* w, const char* failed) {
  int worst = -1, most = 0, most_missed = 0;
  for (int r = 0; r < w->size; ++r) {
    int lacks = 0, missed = 0;
    for (int other = 0; other < w->size && !failed[r]; ++other) {
      if (failed[other] || !pynccl_apart(w, r, other)) continue;
      ++lacks;
      missed += pynccl_has_lost(w, other, r);
    }
    if (!lacks || lacks < most || (lacks == most && missed < most_missed)) continue;
    worst = r;
    most = lacks;
    most_missed = missed;
  }
  return worst;
}

static void pynccl_say_lost(const pynccl_watch* w, int rank, pynccl_verdict* v) {
  const char* before = "cannot reach rank ";
  for (int other = 0; other < w->size; ++other) {
    if (other == rank || !pynccl_apart(w, rank, other)) continue;
    pynccl_say(v->text, sizeof v->text, "%s%d", before, other);
    before = ", ";
  }
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
  } else if (p->gone && !p->departure) {
    pynccl_say(v->text, sizeof v->text, "died, or exited without closing its communicator");
  } else if (rank != w->rank && pynccl_silent(p, 2 * w->beat)) {
    pynccl_say(v->text, sizeof v->text, "is not responding: last heard of %.1f s ago",
               (double)(pynccl_watchdog.awake - p->heard) / 1e9);
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
    if (failed[r] && !p->departure && !p->gone && !p->named && !pynccl_silent(p, 2 * w->beat)) return 1;
  }
  return 0;
}

void pynccl_conclude_failed(pynccl_watch* w) {
  pynccl_verdict* v = &w->verdict;
  char* failed = calloc(1, (size_t)w->size);
  if (!failed) return;
  pynccl_reach(w, failed);
  for (int worst; (worst = pynccl_worst(w, failed)) >= 0;) failed[worst] = 1;
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

int pynccl_unsure(const pynccl_watch* w, int64_t late) {
  for (int r = 0; r < w->size; ++r)
    if (pynccl_silent(&w->peers[r], -1) && w->peers[r].heard <= late &&
        !pynccl_silent(&w->peers[r], pynccl_silence(w)))
      return 1;
  return 0;
}

int pynccl_report_silence(pynccl_watch* w) {
  int silent = 0;
  for (int r = 0; r < w->size; ++r) {
    if (r == w->rank || !pynccl_silent(&w->peers[r], pynccl_silence(w))) continue;
    pynccl_report_loss(w, r);
    ++silent;
  }
  return silent;
}

void pynccl_hear_all(pynccl_watch* w) {
  const int64_t late = pynccl_watchdog.awake, until = pynccl_now() + 10 * pynccl_silence(w);
  for (;;) {
    const int silent = !pynccl_unsure(w, late) && pynccl_report_silence(w);
    const int early = w->connected && pynccl_watchdog.awake - late < 2 * w->beat;
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
    if (w->peers[r].socket >= 0 && w->peers[r].heard < oldest) oldest = w->peers[r].heard;
  return pynccl_watchdog.awake - oldest;
}

void pynccl_explain(const pynccl_watch* w, const char* what, int heard, pynccl_verdict* v) {
  *v = (pynccl_verdict){0};
  pynccl_say(v->text, sizeof v->text, "%s", what);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int ended = p->departure == PYNCCL_ENDS;
    if (r == w->rank || !(ended || pynccl_silent(p, pynccl_silence(w)))) continue;
    pynccl_add_rank(v, r);
    if (ended)
      pynccl_say(v->text, sizeof v->text, "; rank %d has left without closing its communicator", r);
    else
      pynccl_say(v->text, sizeof v->text, "; rank %d is not responding: last heard of %.1f s ago", r,
                 (double)(pynccl_watchdog.awake - p->heard) / 1e9);
  }
  v->trouble = v->count ? PYNCCL_RANKS_FAILED : PYNCCL_TIMED_OUT;
  int connected = 0;
  for (int r = 0; r < w->size; ++r) connected += w->peers[r].socket >= 0 || w->peers[r].departure;
  if (v->count || !connected) return;
  pynccl_say(v->text, sizeof v->text, "; all ranks respond, and ");
  if (!heard)
    pynccl_say(v->text, sizeof v->text, "up to %.1f s ago had called:", (double)pynccl_age_of_news(w) / 1e9);
  else
    pynccl_say(v->text, sizeof v->text, "have called:");
  for (int r = 0, end; r < w->size; r = end) {
    const uint64_t calls = pynccl_calls_of(w, r);
    const int kind = pynccl_kind_of(w, r);
    for (end = r + 1; end < w->size && pynccl_calls_of(w, end) == calls; ++end)
      if (pynccl_kind_of(w, end) != kind || w->peers[end].departure != w->peers[r].departure) break;
    pynccl_say(v->text, sizeof v->text, end == r + 1 ? "%s rank %d" : "%s ranks %d", r ? "," : "", r);
    if (end > r + 1) pynccl_say(v->text, sizeof v->text, "-%d", end - 1);
    if (!calls) pynccl_say(v->text, sizeof v->text, ": nothing");
    if (calls)
      pynccl_say(v->text, sizeof v->text, ": #%llu %s", (unsigned long long)calls, pynccl_kind_name(kind));
    if (w->peers[r].departure) pynccl_say(v->text, sizeof v->text, ", then closed its communicator");
  }
}
