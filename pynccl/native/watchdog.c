#include "watchdog.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "arrivals.h"
#include "checks.h"
#include "markers.h"
#include "names.h"
#include "signals.h"
#include "verdicts.h"

// --- the thread --------------------------------------------------------------------------------------------

// Ask the library for an asynchronous error, without the lock.
static int pynccl_ask(pynccl_watch* w) {
  const uintptr_t handle = w->handle;
  int state = 0;
  ++w->touching;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  const int r = ncclCommGetAsyncError(handle, &state);
  pthread_mutex_lock(&pynccl_watchdog.lock);
  --w->touching;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  return r || state == ncclInProgress ? 0 : state;
}

// Nobody tells of the death of a hidden rank but the CPU library, whose ranks are all connected.
static int pynccl_find_dead(pynccl_watch* w) {
  int found = 0;
  pynccl_find_ways(w);
  for (int r = 0; r < w->size && w->handle; ++r) {
    pynccl_peer* p = &w->peers[r];
    int gone = pyncclCpuNotGone;
    if (!p->hidden || pyncclCpuIsGone(w->handle, r, &gone) || gone != pyncclCpuDied) continue;
    w->stale = p->gone = found = 1;
    p->gone_at = pynccl_now();
    p->provable = p->gone_at >= pynccl_watchdog.blind_until;
    pynccl_report_loss(w, r);
  }
  return found;
}

// A rank that has ended without closing its communicator explains the library's error. The CPU library tells
// whether such a rank was awaited: one that was not may have ended long before.
static void pynccl_conclude_library(pynccl_watch* w) {
  int mismatch = pyncclCpuNoMismatch, function = 0, ended = pynccl_find_dead(w);
  const int awaits =
      !w->handle || pyncclCpuGetErrorKind(w->handle, &mismatch) || mismatch == pyncclCpuRankLeft;
  for (int r = 0; r < w->size && awaits; ++r) ended |= w->peers[r].departure == PYNCCL_ENDS;
  if (ended) {
    pynccl_conclude_failed(w);
    return;
  }
  const char* text = w->handle ? ncclGetLastError(w->handle) : NULL;
  w->verdict.result = w->library_error;
  w->verdict.text[0] = 0;
  pynccl_say(w->verdict.text, sizeof w->verdict.text, "%s", text ? text : "");
  if (w->handle && pyncclCpuGetErrorPrefix(w->handle, &function, &w->verdict.place)) w->verdict.place = 0;
  if (w->handle && pyncclCpuIsErrorReported(w->handle, &w->verdict.relayed)) w->verdict.relayed = 0;
  pynccl_publish(w, mismatch != pyncclCpuNoMismatch ? PYNCCL_MISMATCHED : PYNCCL_LIBRARY_FAILED);
}

// Report calls that have taken longer than the time-out, once the other ranks had time to answer or to report
// theirs.
static void pynccl_check_timeout(pynccl_watch* w, int64_t now) {
  uintptr_t before;
  const int inside_context = w->context && w->marker_count && cuCtxPushCurrent_v2(w->context) == 0;
  pynccl_marker oldest;
  const int issued = pynccl_oldest(w, &oldest);
  if (inside_context) cuCtxPopCurrent_v2(&before);
  const int64_t in_call = __atomic_load_n(&w->in_call, __ATOMIC_ACQUIRE);
  const int64_t in_call_for = in_call ? now - in_call : 0, issued_for = issued ? now - oldest.at[0] : 0;
  const int64_t waited = in_call_for > issued_for ? in_call_for : issued_for;
  const int inside = in_call_for > w->timeout;
  if (waited <= w->timeout) {
    w->late = 0;
    pynccl_ask_before(w, waited, w->timeout);
    return;
  }
  if (!w->late) pynccl_mark_awaited(w);
  if (!w->late) w->late = pynccl_watchdog.awake;
  pynccl_ask_all(w);
  if (pynccl_unsure(w, w->late) || pynccl_report_silence(w)) return;
  // Other ranks may report at their time-out.
  if (w->connected && pynccl_watchdog.awake - w->late < 2 * w->question) return;
  char what[1024] = "";
  const double seconds = (double)w->timeout / 1e9;
  if (inside)
    pynccl_say(what, sizeof what, "a call of %s did not return within %g s",
               pynccl_kind_name(pynccl_newest_kind(w)), seconds);
  else
    pynccl_say(what, sizeof what, "calls up to #%llu %s on stream %#lx did not complete within %g s",
               (unsigned long long)oldest.calls[0], pynccl_kind_name(oldest.kind[0]),
               (unsigned long)oldest.stream, seconds);
  pynccl_say_signals(w->comm, what, sizeof what);
  pynccl_verdict v;
  pynccl_explain(w, what, NULL, 0, 1, &v);
  pynccl_conclude(w, &v);
}

static void pynccl_inspect(pynccl_watch* w, int64_t now) {
  // A burst of frames is read without looks in between: for those the lock is released, and many may want it.
  if (now - w->inspected < TICK_MS * MS) return;
  w->inspected = now;
  pynccl_find_gone(w);
  pynccl_check_processes(w, now);
  if (w->verdict.trouble || w->departure) return;
  if (w->dying && now - w->dying > pynccl_grace(w)) pynccl_conclude_failed(w);
  if (w->verdict.trouble) return;
  if (w->handle && !w->library_error && (w->library_error = pynccl_ask(w))) w->library_at = now;
  if (!w->listed || w->verdict.trouble) return;
  if (w->library_error) pynccl_find_dead(w);
  // A dead rank is the better explanation, and may be noticed later than the error.
  if (w->dying) return;
  if (w->library_error && now - w->library_at > pynccl_silence(w)) {
    // The library reports no error if the communicator was revoked since.
    w->library_error = w->handle ? pynccl_ask(w) : 0;
    if (w->library_error && w->listed && !w->verdict.trouble) pynccl_conclude_library(w);
    return;
  }
  if (w->timeout) pynccl_check_timeout(w, now);
}

static __thread int pynccl_is_watchdog;

static void pynccl_close_watchdog(void) {
  if (pynccl_lines.epoll >= 0) close(pynccl_lines.epoll);
  if (pynccl_watchdog.wake >= 0) close(pynccl_watchdog.wake);
  pynccl_lines.epoll = pynccl_watchdog.wake = -1;
}

static void* pynccl_watch_all(void* nothing) {
  (void)nothing;
  pynccl_is_watchdog = 1;
  // Otherwise querying an event would invalidate a capture that another thread has begun.
  int relaxed = 2;
  cuThreadExchangeStreamCaptureMode(&relaxed);
  struct epoll_event events[1024];
  int64_t last = pynccl_now();
  int wait_ms = TICK_MS;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  while (pynccl_watchdog.watches || pynccl_watchdog.reserved) {
    pthread_mutex_unlock(&pynccl_watchdog.lock);
    const int n = epoll_wait(pynccl_lines.epoll, events, sizeof events / sizeof *events, wait_ms);
    pthread_mutex_lock(&pynccl_watchdog.lock);
    int64_t now = pynccl_now();
    // What ended while this process did not run ended at an unknown time.
    if (now - last > ENDING_NS) pynccl_watchdog.blind_until = now + QUESTION_NS;
    pynccl_watchdog.awake += now - last < QUESTION_NS ? now - last : QUESTION_NS;
    last = now;
    wait_ms = TICK_MS;
    pynccl_cork();
    for (int i = 0; i < n; ++i) {
      if (!events[i].data.u64) {
        uint64_t count;
        (void)!read(pynccl_watchdog.wake, &count, sizeof count);
        continue;
      }
      pynccl_line* line = pynccl_line_with_id((uint32_t)events[i].data.u64);
      if (!line) continue;
      ++line->references;
      if (events[i].events & EPOLLOUT) pynccl_line_push(line);
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) pynccl_read(line);
      pynccl_line_release(line);
    }
    // Iterate by id: the list may change, since inspecting a watch releases the lock.
    for (uint32_t id = 0;;) {
      pynccl_watch* next = NULL;
      for (pynccl_watch* w = pynccl_watchdog.watches; w; w = w->next)
        if (w->id > id && (!next || w->id < next->id)) next = w;
      if (!next) break;
      id = next->id;
      if (!pynccl_hold(next)) continue;
      pynccl_catch_up(next);
      if (now - next->beat_at >= BEAT_NS) {
        next->beat_at = now;
        pynccl_beat(next);
      }
      if (next->mesh || now - next->news_at >= NEWS_NS) {
        next->news_at = now;
        pynccl_tell_news(next);
      }
      wait_ms = next->fresh || next->pair_count ? NEWS_NS / MS : wait_ms;
      pynccl_inspect(next, now);
      pynccl_let_go(next);
    }
    pynccl_uncork();
  }
  pynccl_close_watchdog();
  pynccl_watchdog.running = 0;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return NULL;
}

static void pynccl_make_changed(void) {
  // Deadlines use the monotonic clock.
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  memset(&pynccl_watchdog.changed, 0, sizeof pynccl_watchdog.changed);
  pthread_cond_init(&pynccl_watchdog.changed, &clock);
  pthread_condattr_destroy(&clock);
}

static void pynccl_before_fork(void) { pthread_mutex_lock(&pynccl_watchdog.lock); }
static void pynccl_in_parent(void) { pthread_mutex_unlock(&pynccl_watchdog.lock); }

// Open copies of the parent's connections would hide its death from the other ranks.
static void pynccl_in_child(void) {
  for (pynccl_watch* w = pynccl_watchdog.watches; w; w = w->next) {
    w->listed = w->responding = w->touching = 0;
    w->handle = 0;
    w->marker_count = 0;
    for (int r = 0; r < w->size; ++r) w->peers[r].line = NULL;
    pynccl_drop_early(w->early);
    w->early = NULL;
  }
  pynccl_lines_of_the_parent();
  pynccl_close_watchdog();
  pynccl_watchdog.watches = NULL;
  pynccl_watchdog.running = pynccl_watchdog.reserved = 0;
  // Create the condition again: a broadcast would block on the parent's waiting threads.
  pynccl_make_changed();
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

static int pynccl_run_watchdog(void) {
  if (!pynccl_watchdog.prepared) {
    pynccl_make_changed();
    if (pthread_atfork(pynccl_before_fork, pynccl_in_parent, pynccl_in_child)) return ENOMEM;
    pynccl_watchdog.prepared = 1;
  }
  if (pynccl_watchdog.running) return 0;
  if (getrandom(&pynccl_watchdog.process, sizeof pynccl_watchdog.process, 0) < 0) return errno;
  pynccl_close_watchdog();
  pynccl_lines.epoll = epoll_create1(EPOLL_CLOEXEC);
  pynccl_watchdog.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0};
  if (pynccl_lines.epoll >= 0 && pynccl_watchdog.wake >= 0 &&
      !epoll_ctl(pynccl_lines.epoll, EPOLL_CTL_ADD, pynccl_watchdog.wake, &e))
    return 0;
  const int error = errno;
  pynccl_close_watchdog();
  return error;
}

static int pynccl_start_watchdog(void) {
  const int r = pynccl_watchdog.running ? 0 : pynccl_start_thread(pynccl_watch_all, NULL);
  pynccl_watchdog.running = !r;
  return r;
}

static void pynccl_wake(void) {
  const uint64_t one = 1;
  if (pynccl_watchdog.wake >= 0) (void)!write(pynccl_watchdog.wake, &one, sizeof one);
}

// --- a communicator's watch --------------------------------------------------------------------------------

// With the last reference to the communicator.
static void pynccl_watch_free(pynccl_comm* comm) {
  pynccl_watch* w = comm->watch;
  // Garbage-collected without an end: for the others this rank has gone.
  pynccl_watch_stop(comm, PYNCCL_STAYS);
  for (int r = 0; r < w->size; ++r) {
    free(w->peers[r].inbox);
    free(w->peers[r].report);
  }
  pynccl_drop_early(w->early);
  free(w->markers);
  free(w->said);
  free(w->told);
  free(w->lost);
  free(w->pairs);
  free(w->ways);
  free(w->steps);
  free(w);
}

int pynccl_watch_reserve(void) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  int r = pynccl_run_watchdog();
  ++pynccl_watchdog.reserved;
  if (!r) r = pynccl_start_watchdog();
  if (r) --pynccl_watchdog.reserved;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return r;
}

void pynccl_watch_unreserve(void) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  if (pynccl_watchdog.reserved) --pynccl_watchdog.reserved;
  pynccl_wake();
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

static pynccl_watch* pynccl_watch_new(pynccl_comm* comm) {
  pynccl_watch* w = calloc(1, sizeof *w + (size_t)comm->size * sizeof(pynccl_peer));
  if (w) w->steps = calloc((size_t)comm->size, sizeof *w->steps);
  if (w && w->steps) w->ways = calloc(2 * (size_t)comm->size, sizeof *w->ways);
  if (w && w->ways) return w;
  if (w) free(w->steps);
  free(w);
  return NULL;
}

// Take over the connections: 0 or ENOMEM.
static int pynccl_take_lines(pynccl_watch* w, const pynccl_connection* made, const pynccl_sealing* sealing) {
  int error = 0;
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    p->heard = pynccl_watchdog.awake;
    p->awaits = p->before = AWAITS_UNKNOWN;
    if (made) p->order = made[r].order;
    // Whether a rank is alive that cannot be reached, only its neighbours can tell.
    p->provable = made && r != w->rank && made[r].socket != PYNCCL_NO_LINE;
    if (!p->provable) continue;
    if (made[r].socket == PYNCCL_SHARED) p->line = pynccl_line_named(made[r].line);
    if (made[r].socket < 0 || (p->line = pynccl_line_new(&made[r], sealing, r))) continue;
    close(made[r].socket);
    error = ENOMEM;
  }
  return error;
}

// Neighbours that have gone before.
static void pynccl_note_absent(pynccl_watch* w, const pynccl_connection* made) {
  for (int r = 0; made && r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (r == w->rank || p->line || made[r].socket == PYNCCL_NO_LINE) continue;
    p->gone = 1;
    p->late = made[r].socket == PYNCCL_LINE_LATE;
    p->gone_at = pynccl_now();
    pynccl_report_loss(w, r);
  }
}

int pynccl_watch_start(pynccl_comm* comm, const pynccl_connection* made, uint64_t channel, int mesh,
                       int64_t timeout_ms, int on_failure, uintptr_t context, const pynccl_sealing* sealing) {
  pynccl_watch* w = pynccl_watch_new(comm);
  if (!w) {
    if (made) pynccl_channel_give_up(channel, comm->rank, made, comm->size);
    return ENOMEM;
  }
  w->comm = comm;
  w->size = comm->size;
  w->rank = comm->rank;
  w->connected = made != NULL;
  w->channel = channel;
  w->is_cpu = comm->waits;
  w->context = context;
  w->on_failure = on_failure;
  w->timeout = timeout_ms * MS;
  w->question = QUESTION_NS * ((w->size + PYNCCL_FAST_RANKS - 1) / PYNCCL_FAST_RANKS);
  w->mesh = w->size <= mesh;
  w->step_count = pynccl_watch_neighbours(w->size, mesh, w->steps);
  w->handle = comm->handle;
  w->last_kind = -1;
  w->stale = 1;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  w->id = ++pynccl_watchdog.last_id;
  w->asked = pynccl_watchdog.awake - w->question;
  const int error = pynccl_take_lines(w, made, sealing);
  pynccl_note_absent(w, made);
  w->early = pynccl_take_early(channel, w->rank);
  w->listed = 1;
  w->next = pynccl_watchdog.watches;
  pynccl_watchdog.watches = w;
  comm->watch = w;
  comm->unwatch = pynccl_watch_free;
  pynccl_wake();
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return error;
}

static void pynccl_watch_unlist(pynccl_watch* w) {
  pynccl_watch** at = &pynccl_watchdog.watches;
  while (*at && *at != w) at = &(*at)->next;
  if (*at) *at = w->next;
  w->listed = 0;
}

void pynccl_watch_stop(pynccl_comm* comm, int departure) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  w->handle = 0;
  for (const int64_t until = pynccl_now() + 1000 * MS; w->touching && pynccl_await(until);) continue;
  if (w->listed && !w->departure) {
    // With its last calls.
    if (departure) pynccl_depart(w, departure);
    const int passes_on = w->checking && !w->mesh && !w->verdict.trouble && !pynccl_is_watchdog;
    if (passes_on && (departure == PYNCCL_CLOSES || departure == PYNCCL_ENDS)) pynccl_pass_last(w);
    pynccl_watch_unlist(w);
    for (int r = 0; r < w->size; ++r) {
      pynccl_hang_up(w, r);
      w->peers[r].gone |= r != w->rank;
    }
    // Leak the events if a thread is still recording one.
    for (int i = 0; i < w->marker_count && !w->touching; ++i) {
      pynccl_event_free(w, w->markers[i].events[0]);
      pynccl_event_free(w, w->markers[i].events[1]);
    }
    w->marker_count = 0;
    pynccl_wake();
    // The thread ends with the last watch.
    for (const int64_t until = pynccl_now() + 1000 * MS;
         !pynccl_is_watchdog && !pynccl_watchdog.watches && pynccl_watchdog.running && pynccl_await(until);)
      continue;
  }
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

static int pynccl_settled(pynccl_watch* w, int64_t wait_ms) {
  const int64_t until = pynccl_now() + wait_ms * MS;
  while ((w->responding || w->touching) && pynccl_await(until)) continue;
  return !w->ended;
}

int pynccl_watch_settle(pynccl_comm* comm, int64_t wait_ms) {
  if (!comm->watch) return 1;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int there = pynccl_settled(comm->watch, wait_ms);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return there;
}

int pynccl_watch_claim(pynccl_comm* comm, int64_t wait_ms) {
  if (!comm->watch) return 1;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int mine = pynccl_settled(comm->watch, wait_ms);
  comm->watch->handle = 0;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return mine;
}

int pynccl_watch_verdict(pynccl_comm* comm, pynccl_verdict* out, int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  if (!w) return PYNCCL_FINE;
  if (!wait_ms && !__atomic_load_n(&w->verdict.trouble, __ATOMIC_ACQUIRE)) return PYNCCL_FINE;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  // Count the time for which the thread has listened: a busy machine may delay it.
  const int64_t until = pynccl_watchdog.awake + wait_ms * MS, at_last = pynccl_now() + 4 * wait_ms * MS;
  while (w->listed && !w->verdict.trouble && pynccl_now() < at_last &&
         (pynccl_watchdog.awake < until || w->dying))
    pynccl_await(pynccl_now() + TICK_MS * MS);
  if (w->verdict.trouble && out) *out = w->verdict;
  const int trouble = w->verdict.trouble;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return trouble;
}

int pynccl_watch_decides(pynccl_comm* comm) {
  const pynccl_watch* w = comm->watch;
  if (!w) return 0;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int decides = w->listed && !w->verdict.trouble && w->dying;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return decides;
}

void pynccl_watch_hear(pynccl_comm* comm) {
  if (!comm->watch) return;
  pynccl_watch* w = comm->watch;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_mark_awaited(w);
  pynccl_hear_all(w);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

int pynccl_watch_expire(pynccl_comm* comm, const char* what, const int* awaited, int count, int publish,
                        pynccl_verdict* out) {
  pynccl_watch* w = comm->watch;
  if (!w) return PYNCCL_FINE;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  if (w->verdict.trouble) {
    *out = w->verdict;
  } else {
    pynccl_explain(w, what, awaited, count, publish, out);
    if (publish && w->listed) pynccl_conclude(w, out);
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return out->trouble;
}

void pynccl_watch_library_failed(pynccl_comm* comm) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  if (w->listed && w->handle && !w->verdict.trouble && (w->library_error = pynccl_ask(w)) &&
      !w->verdict.trouble && w->listed)
    pynccl_conclude_library(w);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

int pynccl_watched(void) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  int count = 0;
  for (pynccl_watch* w = pynccl_watchdog.watches; w; w = w->next) ++count;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return count;
}

int pynccl_watchdog_runs(void) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int running = pynccl_watchdog.running;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return running;
}

// --- around a call -----------------------------------------------------------------------------------------

// The legacy default stream's answer while a stream that synchronizes with it is captured.
#define CAPTURE_IMPLICIT 906

static int pynccl_is_captured(const pynccl_watch* w, uintptr_t stream) {
  int status = 0;
  uintptr_t before;
  const int inside_context = w->context && cuCtxPushCurrent_v2(w->context) == 0;
  const int r = cuStreamIsCapturing(stream, &status);
  if (inside_context) cuCtxPopCurrent_v2(&before);
  return r == CAPTURE_IMPLICIT || (r == 0 && status);
}

int pynccl_watch_announce(pynccl_comm* comm, const pynccl_call* calls, int count) {
  const pynccl_watch* w = comm->watch;
  if (!w->checking) return 0;
  for (int i = 0; i < count && !w->is_cpu; ++i)
    if (calls[i].comm == comm && pynccl_is_captured(w, calls[i].stream)) return PYNCCL_CAPTURED;
  return pynccl_check_say(comm->watch, calls, count);
}

int pynccl_watch_compare(pynccl_comm* comm) {
  // Inside ncclGroupStart the counterparts may come later.
  return comm->watch->checking && !pynccl_depth ? pynccl_check_wait(comm->watch) : 0;
}

int pynccl_watch_resumes(const pynccl_comm* comm) { return comm->watch && comm->watch->resumed; }

void pynccl_watch_begin(pynccl_comm* comm, const pynccl_call* calls, int count) {
  pynccl_watch* w = comm->watch;
  w->announced = 0;
  for (int i = 0; i < count; ++i)
    if (calls[i].comm == comm) {
      // A thread that reads the new number also reads the kind.
      __atomic_store_n(&w->last_kind, calls[i].kind, __ATOMIC_RELAXED);
      __atomic_fetch_add(&w->calls, 1, __ATOMIC_RELEASE);
    }
  const int64_t now = pynccl_now();
  __atomic_store_n(&w->called_at, now, __ATOMIC_RELAXED);
  __atomic_store_n(&w->in_call, now, __ATOMIC_RELEASE);
}

void pynccl_watch_end(pynccl_comm* comm) { __atomic_store_n(&comm->watch->in_call, 0, __ATOMIC_RELEASE); }

void pynccl_watch_issued(pynccl_comm* comm, uintptr_t stream) {
  pynccl_watch* w = comm->watch;
  // Inside ncclGroupStart the stream has no work yet.
  if (!w || !w->timeout || pynccl_depth) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  if (w->listed && w->handle) pynccl_mark(w, stream);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}
