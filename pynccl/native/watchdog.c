// Included by the generated binding, behind watchdog.h and the wrappers of NCCL's functions.
//
// Everything here is under one lock. The library is called without it, except for questions that it answers
// at once; whatever may take long (revoke, abort) has a thread of its own.

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000LL
#define TICK_MS 50
#define BEAT_NS (250 * MS)
// Deaths within so long of each other are one event: the survivors are to name the same ranks.
#define GRACE_NS (150 * MS)
// Who has not been heard for so long when a wait ends in vain is named as not responding.
#define SILENCE_NS (1000 * MS)
// From here on a peer that does not read gets no more frames.
#define MOST_OUTPUT (1 << 20)

enum { FRAME_BEAT = 1, FRAME_GOODBYE, FRAME_FAILED, FRAME_TEXT, FRAME_TROUBLE, FRAME_MESSAGE, FRAME_CALL };

typedef struct pynccl_peer {
  int socket;
  int goodbye;
  int gone;     // the connection has ended
  int suspect;  // another rank says that it failed
  int64_t heard;
  uint64_t calls;
  int last_kind;  // of the newest call, -1 before the first
  size_t input_bytes;
  pynccl_frame input;
  int wants_output;
  char* output;
  size_t output_bytes, output_capacity;
  char* report;  // the text of a verdict, as far as it has come
  pynccl_frame* inbox;
  int inbox_count, inbox_capacity;
} pynccl_peer;

// Two events behind the calls of a stream: the older one is waited for, the newer one follows every call.
typedef struct pynccl_marker {
  uintptr_t stream, events[2];
  int64_t at[2];
  int pending;
} pynccl_marker;

struct pynccl_watch {
  pynccl_comm* comm;
  pynccl_watch* next;
  uint32_t id;
  int listed, connected, checking, size, rank, is_cpu, cure;
  struct pynccl_said* said;  // to a peer, and not answered yet
  int said_count, said_capacity;
  int64_t timeout;
  uintptr_t handle;   // 0: no longer the watchdog's to touch
  uintptr_t context;  // of the events
  int touching, curing, ended;
  int64_t dying;       // when the first death was noticed
  int64_t library_at;  // when the library's error was
  int library_error;
  pynccl_verdict verdict;
  uint64_t calls;
  int last_kind;
  int64_t in_call;  // since when a thread is inside the library
  pynccl_marker* markers;
  int marker_count, marker_capacity;
  pynccl_peer peers[];
};

static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pynccl_watch* watches;
  int running, epoll, wake;
  uint32_t last_id;
  int64_t beat_at;
  int prepared;
} dog = {.lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .wake = -1};

// The flight recorder's, where there is one.
void pynccl_dump_on_trouble(pynccl_comm* comm, const char* why) __attribute__((weak));

static int64_t pynccl_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 * MS + t.tv_nsec;
}

static void pynccl_say(char* text, size_t size, const char* format, ...) {
  const size_t used = strlen(text);
  va_list args;
  va_start(args, format);
  vsnprintf(text + used, size - used, format, args);
  va_end(args);
}

// Wait for a change until a time; 0 when that has passed.
static int pynccl_await(int64_t until) {
  if (pynccl_now() >= until) return 0;
  const struct timespec t = {until / (1000 * MS), until % (1000 * MS)};
  pthread_cond_timedwait(&dog.changed, &dog.lock, &t);
  return 1;
}

// --- frames ------------------------------------------------------------------------------------------------

static void pynccl_watch_epoll(pynccl_watch* w, int rank, int how) {
  pynccl_peer* p = &w->peers[rank];
  p->wants_output = p->output_bytes != 0;
  struct epoll_event e = {.events = EPOLLIN | (p->wants_output ? EPOLLOUT : 0)};
  e.data.u64 = (uint64_t)w->id << 32 | (uint32_t)rank;
  epoll_ctl(dog.epoll, how, p->socket, &e);
}

static void pynccl_hang_up(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  if (p->socket < 0) return;
  // Closed with something unread in it, the connection would be reset, and the goodbye might be lost.
  char unread[4096];
  while (recv(p->socket, unread, sizeof unread, MSG_DONTWAIT) > 0) continue;
  shutdown(p->socket, SHUT_WR);
  close(p->socket);
  p->socket = -1;
  p->gone = 1;
  p->output_bytes = 0;
  if (w->listed && !p->goodbye && !w->dying) w->dying = pynccl_now();
  pthread_cond_broadcast(&dog.changed);
}

static void pynccl_flush(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  while (p->output_bytes) {
    const ssize_t n = send(p->socket, p->output, p->output_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    // The end of the connection is noticed by reading: what the peer sent before it comes first.
    if (n < 0) break;
    p->output_bytes -= (size_t)n;
    memmove(p->output, p->output + n, p->output_bytes);
  }
  if (p->wants_output != (p->output_bytes != 0)) pynccl_watch_epoll(w, rank, EPOLL_CTL_MOD);
}

static int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame) {
  pynccl_peer* p = &w->peers[rank];
  if (p->socket < 0) return ECONNRESET;
  // Who does not read needs no second heartbeat.
  if (p->output_bytes > (frame->kind == FRAME_BEAT ? 0 : MOST_OUTPUT)) return ENOBUFS;
  if (p->output_bytes + sizeof *frame > p->output_capacity) {
    const size_t capacity = 2 * p->output_capacity + 4 * sizeof *frame;
    char* more = realloc(p->output, capacity);
    if (!more) return ENOMEM;
    p->output = more;
    p->output_capacity = capacity;
  }
  memcpy(p->output + p->output_bytes, frame, sizeof *frame);
  p->output_bytes += sizeof *frame;
  pynccl_flush(w, rank);
  return 0;
}

static void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame) {
  for (int r = 0; r < w->size; ++r) pynccl_send_frame(w, r, frame);
}

static void pynccl_beat(pynccl_watch* w) {
  const pynccl_frame beat = {.kind = FRAME_BEAT, .code = (uint32_t)w->last_kind, .number = w->calls};
  pynccl_tell_all(w, &beat);
}

// --- verdicts ----------------------------------------------------------------------------------------------

static void* pynccl_cure_it(void* argument) {
  pynccl_watch* w = argument;
  pynccl_comm* comm = w->comm;
  if (pynccl_dump_on_trouble) pynccl_dump_on_trouble(comm, w->verdict.text);
  // Who waits in slices has left by then, and no longer asks the library about it.
  if (w->cure == PYNCCL_ABORT) usleep(250000);
  pthread_mutex_lock(&dog.lock);
  const uintptr_t handle = w->handle;
  if (handle && w->cure == PYNCCL_ABORT) {
    w->handle = 0;
    w->ended = 1;
  }
  pthread_mutex_unlock(&dog.lock);
  if (handle && w->cure == PYNCCL_REVOKE) ncclCommRevoke(handle, NCCL_REVOKE_DEFAULT);
  if (handle && w->cure == PYNCCL_ABORT) ncclCommAbort(handle);
  pthread_mutex_lock(&dog.lock);
  w->curing = 0;
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
  pynccl_comm_release(comm);
  return NULL;
}

static int pynccl_start_thread(void* (*work)(void*), void* argument) {
  sigset_t all, before;
  pthread_t thread;
  pthread_attr_t attributes;
  sigfillset(&all);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // Signals are for the program's own threads.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int r = pthread_create(&thread, &attributes, work, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return r;
}

// The verdict is written: publish it, tell the other ranks, and end what is outstanding.
static void pynccl_publish(pynccl_watch* w, int trouble) {
  pynccl_verdict* v = &w->verdict;
  __atomic_store_n(&v->trouble, trouble, __ATOMIC_RELEASE);
  // Every later call is refused, at no cost to those before.
  __atomic_store_n(&w->comm->handle, 0, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&dog.changed);
  for (int i = 0; i < v->count; ++i) {
    const pynccl_frame failed = {.kind = FRAME_FAILED, .number = (uint64_t)v->ranks[i]};
    pynccl_tell_all(w, &failed);
  }
  for (const char* rest = v->text; *rest; rest += strnlen(rest, PYNCCL_FRAME_TEXT - 1)) {
    pynccl_frame text = {.kind = FRAME_TEXT};
    memcpy(text.text, rest, strnlen(rest, PYNCCL_FRAME_TEXT - 1));
    pynccl_tell_all(w, &text);
  }
  const pynccl_frame told = {.kind = FRAME_TROUBLE, .code = (uint32_t)trouble, .number = (uint64_t)v->result};
  pynccl_tell_all(w, &told);
  w->curing = 1;
  __atomic_add_fetch(&w->comm->references, 1, __ATOMIC_RELAXED);
  if (pynccl_start_thread(pynccl_cure_it, w)) {
    w->curing = 0;
    // The caller holds another reference.
    __atomic_sub_fetch(&w->comm->references, 1, __ATOMIC_ACQ_REL);
  }
}

static void pynccl_add_rank(pynccl_verdict* v, int rank) {
  if (v->count < PYNCCL_MOST_RANKS) v->ranks[v->count++] = rank;
}

static void pynccl_condemn_failed(pynccl_watch* w) {
  pynccl_verdict* v = &w->verdict;
  v->count = 0;
  v->text[0] = 0;
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int aborted = p->goodbye == PYNCCL_ABORTS_FIRST, died = p->gone && !p->goodbye;
    if (!aborted && !died && !p->suspect) continue;
    pynccl_add_rank(v, r);
    pynccl_say(v->text, sizeof v->text, "%srank %d ", v->count > 1 ? "; " : "", r);
    if (died || aborted)
      pynccl_say(v->text, sizeof v->text, "%s",
                 aborted ? "aborted its communicator" : "died, or exited without closing its communicator");
    else if (r == w->rank)
      pynccl_say(v->text, sizeof v->text, "(this one) did not respond, and the others go on without it");
    else
      pynccl_say(v->text, sizeof v->text, "is not responding: last heard of %.1f s ago",
                 (double)(pynccl_now() - p->heard) / 1e9);
  }
  if (v->count) {
    pynccl_say(v->text, sizeof v->text, " (noticed by rank %d of %d)", w->rank, w->size);
    pynccl_publish(w, PYNCCL_RANKS_FAILED);
  }
  w->dying = 0;
}

static const char* const pynccl_kind_names[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                                                "reduce_scatter", "all_to_all", "gather",    "scatter",
                                                "send",           "recv"};

static int pynccl_silent(const pynccl_peer* p, int64_t now, int64_t limit) {
  return !p->gone && !p->goodbye && p->socket >= 0 && now - p->heard > limit;
}

// Say why something took too long: silent ranks, or what every rank has called.
static int pynccl_explain(pynccl_watch* w, const char* what, pynccl_verdict* v) {
  const int64_t now = pynccl_now();
  *v = (pynccl_verdict){0};
  pynccl_say(v->text, sizeof v->text, "%s", what);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (r == w->rank || !pynccl_silent(p, now, SILENCE_NS)) continue;
    pynccl_add_rank(v, r);
    pynccl_say(v->text, sizeof v->text, "; rank %d is not responding: last heard of %.1f s ago", r,
               (double)(now - p->heard) / 1e9);
  }
  if (v->count) return v->trouble = PYNCCL_RANKS_FAILED;
  int connected = 0;
  for (int r = 0; r < w->size; ++r) connected += w->peers[r].socket >= 0 || w->peers[r].goodbye;
  if (!connected) return v->trouble = PYNCCL_TIMED_OUT;
  pynccl_say(v->text, sizeof v->text, "; all ranks respond, and have called:");
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const uint64_t calls = r == w->rank ? w->calls : p->calls;
    const int kind = r == w->rank ? w->last_kind : p->last_kind;
    pynccl_say(v->text, sizeof v->text, "%s rank %d: ", r ? "," : "", r);
    if (!calls) pynccl_say(v->text, sizeof v->text, "nothing");
    if (calls)
      pynccl_say(v->text, sizeof v->text, "#%llu %s", (unsigned long long)calls, pynccl_kind_names[kind]);
    if (p->goodbye) pynccl_say(v->text, sizeof v->text, ", then closed its communicator");
  }
  return v->trouble = PYNCCL_TIMED_OUT;
}

// --- what arrives ------------------------------------------------------------------------------------------

static void pynccl_keep_frame(pynccl_peer* p, const pynccl_frame* frame) {
  if (p->inbox_count == p->inbox_capacity) {
    const int capacity = 2 * p->inbox_capacity + 8;
    pynccl_frame* more = realloc(p->inbox, (size_t)capacity * sizeof *more);
    if (!more) return;
    p->inbox = more;
    p->inbox_capacity = capacity;
  }
  p->inbox[p->inbox_count++] = *frame;
  pthread_cond_broadcast(&dog.changed);
}

static void pynccl_arrived(pynccl_watch* w, int from, pynccl_frame* f) {
  pynccl_peer* p = &w->peers[from];
  f->text[sizeof f->text - 1] = f->kind == FRAME_MESSAGE ? f->text[sizeof f->text - 1] : 0;
  switch (f->kind) {
    case FRAME_BEAT:
      p->calls = f->number;
      p->last_kind = f->code <= PYNCCL_RECV ? (int)f->code : 0;
      break;
    case FRAME_GOODBYE:
      p->goodbye = f->code ? (int)f->code : PYNCCL_CLOSES;
      if (p->goodbye == PYNCCL_ABORTS_FIRST && !w->dying) w->dying = pynccl_now();
      break;
    case FRAME_FAILED:
      if (f->number < (uint64_t)w->size) w->peers[f->number].suspect = 1;
      if (!w->dying) w->dying = pynccl_now();
      break;
    case FRAME_TEXT:
      if (!p->report && !(p->report = calloc(1, PYNCCL_MOST_TEXT))) break;
      pynccl_say(p->report, PYNCCL_MOST_TEXT, "%s", f->text);
      break;
    case FRAME_TROUBLE:
      if (w->verdict.trouble || f->code == PYNCCL_RANKS_FAILED) break;
      w->verdict.result = (int)f->number;
      w->verdict.text[0] = 0;
      // A report that is passed on names its first author.
      if (!p->report || strncmp(p->report, "rank ", 5) || !strstr(p->report, " reports: "))
        pynccl_say(w->verdict.text, sizeof w->verdict.text, "rank %d reports: ", from);
      pynccl_say(w->verdict.text, sizeof w->verdict.text, "%s", p->report ? p->report : "");
      pynccl_publish(w, f->code == PYNCCL_MISMATCHED ? PYNCCL_MISMATCHED : PYNCCL_TIMED_OUT);
      break;
    case FRAME_MESSAGE:
    case FRAME_CALL:
      pynccl_keep_frame(p, f);
      break;
    default:
      break;
  }
}

static void pynccl_read(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  while (p->socket >= 0) {
    char* at = (char*)&p->input + p->input_bytes;
    const ssize_t n = recv(p->socket, at, sizeof p->input - p->input_bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      pynccl_hang_up(w, rank);
      return;
    }
    p->heard = pynccl_now();
    p->input_bytes += (size_t)n;
    if (p->input_bytes < sizeof p->input) continue;
    p->input_bytes = 0;
    pynccl_arrived(w, rank, &p->input);
  }
}

// --- streams -----------------------------------------------------------------------------------------------

static int pynccl_event_done(const pynccl_watch* w, uintptr_t event) {
  return (w->is_cpu ? pyncclCpuEventQuery(event) : cuEventQuery(event)) == 0;
}

static int pynccl_event_new(const pynccl_watch* w, uintptr_t* event) {
  const unsigned no_timing = 2;
  return w->is_cpu ? pyncclCpuEventCreate(event) : cuEventCreate(event, no_timing);
}

static void pynccl_event_free(const pynccl_watch* w, uintptr_t event) {
  if (!event) return;
  if (w->is_cpu)
    pyncclCpuEventDestroy(event);
  else
    cuEventDestroy_v2(event);
}

static pynccl_marker* pynccl_marker_of(pynccl_watch* w, uintptr_t stream) {
  for (int i = 0; i < w->marker_count; ++i)
    if (w->markers[i].stream == stream) return &w->markers[i];
  // One whose calls are done is free for another stream.
  for (int i = 0; i < w->marker_count; ++i)
    if (!w->markers[i].pending) {
      w->markers[i].stream = stream;
      return &w->markers[i];
    }
  if (w->marker_count == w->marker_capacity) {
    const int capacity = 2 * w->marker_capacity + 4;
    pynccl_marker* more = realloc(w->markers, (size_t)capacity * sizeof *more);
    if (!more) return NULL;
    w->markers = more;
    w->marker_capacity = capacity;
  }
  pynccl_marker fresh = {.stream = stream};
  if (pynccl_event_new(w, &fresh.events[0])) return NULL;
  if (pynccl_event_new(w, &fresh.events[1])) {
    pynccl_event_free(w, fresh.events[0]);
    return NULL;
  }
  w->markers[w->marker_count] = fresh;
  return &w->markers[w->marker_count++];
}

// By the thread that has just issued on the stream: nobody else may touch a stream, which may be captured.
static void pynccl_mark(pynccl_watch* w, uintptr_t stream) {
  int capturing = 0;
  uintptr_t before;
  if (!w->is_cpu && (!w->context || cuCtxPushCurrent_v2(w->context))) return;
  if (w->is_cpu || (cuStreamIsCapturing(stream, &capturing) == 0 && !capturing)) {
    pynccl_marker* m = pynccl_marker_of(w, stream);
    const int which = m && m->pending;
    if (m && (w->is_cpu ? pyncclCpuEventRecord(w->handle, m->events[which], stream)
                        : cuEventRecord(m->events[which], stream)) == 0) {
      m->at[which] = pynccl_now();
      m->pending |= 1 << which;
    }
  }
  if (!w->is_cpu) cuCtxPopCurrent_v2(&before);
}

// Answers since when calls of the communicator have been outstanding on a stream; 0 when none has.
static int64_t pynccl_oldest(pynccl_watch* w, uintptr_t* stream) {
  int64_t oldest = 0;
  for (int i = 0; i < w->marker_count; ++i) {
    pynccl_marker* m = &w->markers[i];
    if (m->pending && pynccl_event_done(w, m->events[0])) {
      const uintptr_t event = m->events[0];
      m->events[0] = m->events[1];
      m->events[1] = event;
      m->at[0] = m->at[1];
      m->pending >>= 1;
    }
    if (m->pending && (!oldest || m->at[0] < oldest)) {
      oldest = m->at[0];
      *stream = m->stream;
    }
  }
  return oldest;
}

// --- the thread --------------------------------------------------------------------------------------------

// Ask the library for an error in the background, without the lock.
static int pynccl_ask(pynccl_watch* w) {
  const uintptr_t handle = w->handle;
  int state = 0;
  w->touching = 1;
  pthread_mutex_unlock(&dog.lock);
  const int r = ncclCommGetAsyncError(handle, &state);
  pthread_mutex_lock(&dog.lock);
  w->touching = 0;
  pthread_cond_broadcast(&dog.changed);
  return r || state == ncclInProgress ? 0 : state;
}

static void pynccl_look_after(pynccl_watch* w, int64_t now) {
  if (w->verdict.trouble) return;
  if (w->dying && now - w->dying > GRACE_NS) pynccl_condemn_failed(w);
  if (w->verdict.trouble) return;
  if (w->handle && !w->library_error && (w->library_error = pynccl_ask(w))) w->library_at = now;
  if (!w->listed || w->verdict.trouble) return;
  // A dead rank is the better explanation, and may be noticed a little later.
  if (w->library_error && now - w->library_at > SILENCE_NS) {
    const char* text = w->handle ? ncclGetLastError(w->handle) : NULL;
    w->verdict.result = w->library_error;
    w->verdict.text[0] = 0;
    pynccl_say(w->verdict.text, sizeof w->verdict.text, "the library reports: %s", text ? text : "");
    pynccl_publish(w, PYNCCL_LIBRARY_FAILED);
    return;
  }
  if (!w->timeout) return;
  uintptr_t stream = 0;
  uintptr_t before;
  const int inside_context = w->context && w->marker_count && cuCtxPushCurrent_v2(w->context) == 0;
  const int64_t issued = pynccl_oldest(w, &stream);
  if (inside_context) cuCtxPopCurrent_v2(&before);
  const int64_t in_call = __atomic_load_n(&w->in_call, __ATOMIC_ACQUIRE);
  const int inside = in_call && now - in_call > w->timeout;
  if (!inside && !(issued && now - issued > w->timeout)) return;
  // Whether a silent rank is stopped is known only after a while.
  for (int r = 0; r < w->size; ++r)
    if (pynccl_silent(&w->peers[r], now, 2 * BEAT_NS) && !pynccl_silent(&w->peers[r], now, SILENCE_NS))
      return;
  char what[160] = "";
  const double seconds = (double)w->timeout / 1e9;
  if (inside)
    pynccl_say(what, sizeof what, "a call of %s did not return within %g s", pynccl_kind_names[w->last_kind],
               seconds);
  else
    pynccl_say(what, sizeof what, "calls on stream %#lx did not complete within %g s", (unsigned long)stream,
               seconds);
  pynccl_verdict v;
  const int trouble = pynccl_explain(w, what, &v);
  v.trouble = PYNCCL_FINE;
  w->verdict = v;
  pynccl_publish(w, trouble);
}

static __thread int pynccl_is_watchdog;

static pynccl_watch* pynccl_find_watch(uint32_t id) {
  pynccl_watch* w = dog.watches;
  while (w && w->id != id) w = w->next;
  return w;
}

static void* pynccl_watch_all(void* nothing) {
  (void)nothing;
  pynccl_is_watchdog = 1;
  // Asking for an event would otherwise spoil a capture that another thread has begun.
  int relaxed = 2;
  cuThreadExchangeStreamCaptureMode(&relaxed);
  struct epoll_event events[64];
  int64_t last = pynccl_now();
  pthread_mutex_lock(&dog.lock);
  while (dog.watches) {
    pthread_mutex_unlock(&dog.lock);
    const int n = epoll_wait(dog.epoll, events, 64, TICK_MS);
    pthread_mutex_lock(&dog.lock);
    int64_t now = pynccl_now();
    // This process itself was stopped, or starved: it cannot say of the others that they were silent.
    if (now - last > SILENCE_NS / 2)
      for (pynccl_watch* w = dog.watches; w; w = w->next)
        for (int r = 0; r < w->size; ++r) w->peers[r].heard = now;
    last = now;
    for (int i = 0; i < n; ++i) {
      if (!events[i].data.u64) {
        uint64_t count;
        (void)!read(dog.wake, &count, sizeof count);
        continue;
      }
      pynccl_watch* w = pynccl_find_watch((uint32_t)(events[i].data.u64 >> 32));
      const int rank = (int)(uint32_t)events[i].data.u64;
      if (w && events[i].events & EPOLLOUT && w->peers[rank].socket >= 0) pynccl_flush(w, rank);
      if (w && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) pynccl_read(w, rank);
    }
    const int beat = now - dog.beat_at >= BEAT_NS;
    if (beat) dog.beat_at = now;
    // Looking after one lets go of the lock: go by numbers, since the list may change.
    for (uint32_t id = 0;;) {
      pynccl_watch* next = NULL;
      for (pynccl_watch* w = dog.watches; w; w = w->next)
        if (w->id > id && (!next || w->id < next->id)) next = w;
      if (!next) break;
      id = next->id;
      if (beat) pynccl_beat(next);
      __atomic_add_fetch(&next->comm->references, 1, __ATOMIC_RELAXED);
      pynccl_look_after(next, now);
      pthread_mutex_unlock(&dog.lock);
      pynccl_comm_release(next->comm);
      pthread_mutex_lock(&dog.lock);
    }
  }
  close(dog.epoll);
  close(dog.wake);
  dog.epoll = dog.wake = -1;
  dog.running = 0;
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
  return NULL;
}

static void pynccl_before_fork(void) { pthread_mutex_lock(&dog.lock); }
static void pynccl_in_parent(void) { pthread_mutex_unlock(&dog.lock); }

// An open copy of the parent's connections would hide its death from the other ranks.
static void pynccl_in_child(void) {
  for (pynccl_watch* w = dog.watches; w; w = w->next) {
    w->listed = w->curing = w->touching = 0;
    w->handle = 0;
    w->marker_count = 0;
    for (int r = 0; r < w->size; ++r) {
      if (w->peers[r].socket >= 0) close(w->peers[r].socket);
      w->peers[r].socket = -1;
    }
  }
  if (dog.epoll >= 0) close(dog.epoll);
  if (dog.wake >= 0) close(dog.wake);
  dog.epoll = dog.wake = -1;
  dog.watches = NULL;
  dog.running = 0;
  pthread_mutex_unlock(&dog.lock);
}

static int pynccl_run_watchdog(void) {
  if (!dog.prepared) {
    // Deadlines are the monotonic clock's.
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&dog.changed, &clock);
    pthread_condattr_destroy(&clock);
    if (pthread_atfork(pynccl_before_fork, pynccl_in_parent, pynccl_in_child)) return ENOMEM;
    dog.prepared = 1;
  }
  if (dog.running) return 0;
  dog.epoll = epoll_create1(EPOLL_CLOEXEC);
  dog.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0};
  if (dog.epoll < 0 || dog.wake < 0 || epoll_ctl(dog.epoll, EPOLL_CTL_ADD, dog.wake, &e)) return errno;
  return 0;
}

static void pynccl_wake(void) {
  const uint64_t one = 1;
  if (dog.wake >= 0) (void)!write(dog.wake, &one, sizeof one);
}

// --- a communicator's watch --------------------------------------------------------------------------------

int pynccl_watch_start(pynccl_comm* comm, const int* sockets, int64_t timeout_ms, int cure, uintptr_t context) {
  pynccl_watch* w = calloc(1, sizeof *w + (size_t)comm->size * sizeof(pynccl_peer));
  if (!w) return ENOMEM;
  w->comm = comm;
  w->size = comm->size;
  w->rank = comm->rank;
  w->connected = sockets != NULL;
  w->is_cpu = comm->waits;
  w->context = context;
  w->cure = cure;
  w->timeout = timeout_ms * MS;
  w->handle = comm->handle;
  w->last_kind = -1;
  pthread_mutex_lock(&dog.lock);
  int r = pynccl_run_watchdog();
  w->id = ++dog.last_id;
  for (int i = 0; i < w->size; ++i) {
    w->peers[i].socket = sockets && i != w->rank ? sockets[i] : -1;
    if (w->peers[i].socket < -1) {
      w->peers[i].gone = 1;
      w->dying = pynccl_now();
    }
    w->peers[i].heard = pynccl_now();
    if (!r && w->peers[i].socket >= 0) pynccl_watch_epoll(w, i, EPOLL_CTL_ADD);
  }
  if (!r) {
    w->listed = 1;
    w->next = dog.watches;
    dog.watches = w;
    comm->watch = w;
    if (!dog.running) {
      r = pynccl_start_thread(pynccl_watch_all, NULL);
      dog.running = !r;
    }
    pynccl_wake();
  }
  pthread_mutex_unlock(&dog.lock);
  if (r && comm->watch)
    pynccl_watch_stop(comm, PYNCCL_STAYS);
  else if (r)
    free(w);
  return r;
}

static void pynccl_watch_unlist(pynccl_watch* w) {
  pynccl_watch** at = &dog.watches;
  while (*at && *at != w) at = &(*at)->next;
  if (*at) *at = w->next;
  w->listed = 0;
}

void pynccl_watch_stop(pynccl_comm* comm, int goodbye) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&dog.lock);
  w->handle = 0;
  for (const int64_t until = pynccl_now() + 1000 * MS; w->touching && pynccl_await(until);) continue;
  if (w->listed) {
    pynccl_watch_unlist(w);
    const pynccl_frame bye = {.kind = FRAME_GOODBYE, .code = (uint32_t)goodbye};
    if (goodbye) pynccl_tell_all(w, &bye);
    for (int r = 0; r < w->size; ++r) pynccl_hang_up(w, r);
    for (int i = 0; i < w->marker_count; ++i) {
      pynccl_event_free(w, w->markers[i].events[0]);
      pynccl_event_free(w, w->markers[i].events[1]);
    }
    w->marker_count = 0;
    pynccl_wake();
    // The thread ends with the last watch.
    for (const int64_t until = pynccl_now() + 1000 * MS;
         !pynccl_is_watchdog && !dog.watches && dog.running && pynccl_await(until);)
      continue;
  }
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
}

// By pynccl_comm_release, when nobody has the communicator any more.
static void pynccl_watch_free(pynccl_comm* comm) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  // Collected without an end: to the others this rank is gone.
  pynccl_watch_stop(comm, PYNCCL_STAYS);
  for (int r = 0; r < w->size; ++r) {
    free(w->peers[r].output);
    free(w->peers[r].inbox);
    free(w->peers[r].report);
  }
  free(w->markers);
  free(w->said);
  free(w);
}

static int pynccl_settled(pynccl_watch* w, int64_t wait_ms) {
  const int64_t until = pynccl_now() + wait_ms * MS;
  while ((w->curing || w->touching) && pynccl_await(until)) continue;
  return !w->ended;
}

int pynccl_watch_settle(pynccl_comm* comm, int64_t wait_ms) {
  if (!comm->watch) return 1;
  pthread_mutex_lock(&dog.lock);
  const int there = pynccl_settled(comm->watch, wait_ms);
  pthread_mutex_unlock(&dog.lock);
  return there;
}

int pynccl_watch_claim(pynccl_comm* comm, int64_t wait_ms) {
  if (!comm->watch) return 1;
  pthread_mutex_lock(&dog.lock);
  const int mine = pynccl_settled(comm->watch, wait_ms);
  comm->watch->handle = 0;
  pthread_mutex_unlock(&dog.lock);
  return mine;
}

int pynccl_watch_verdict(pynccl_comm* comm, pynccl_verdict* out, int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  if (!w) return PYNCCL_FINE;
  if (!wait_ms && !__atomic_load_n(&w->verdict.trouble, __ATOMIC_ACQUIRE)) return PYNCCL_FINE;
  pthread_mutex_lock(&dog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  while (w->listed && !w->verdict.trouble && pynccl_await(until)) continue;
  if (w->verdict.trouble && out) *out = w->verdict;
  const int trouble = w->verdict.trouble;
  pthread_mutex_unlock(&dog.lock);
  return trouble;
}

int pynccl_watch_expire(pynccl_comm* comm, const char* what, int condemn, pynccl_verdict* out) {
  pynccl_watch* w = comm->watch;
  if (!w) return PYNCCL_FINE;
  pthread_mutex_lock(&dog.lock);
  const int64_t until = pynccl_now() + SILENCE_NS;
  for (int unsure = 1; unsure && !w->verdict.trouble && pynccl_now() < until;) {
    unsure = w->dying != 0;
    for (int r = 0; r < w->size; ++r) {
      const int64_t now = pynccl_now();
      unsure |=
          pynccl_silent(&w->peers[r], now, 2 * BEAT_NS) && !pynccl_silent(&w->peers[r], now, SILENCE_NS);
    }
    const int64_t soon = pynccl_now() + TICK_MS * MS;
    if (unsure) pynccl_await(soon < until ? soon : until);
  }
  if (!w->verdict.trouble) {
    pynccl_verdict v;
    const int trouble = pynccl_explain(w, what, &v);
    *out = v;
    if (condemn && w->listed) {
      v.trouble = PYNCCL_FINE;
      w->verdict = v;
      pynccl_publish(w, trouble);
    }
  } else {
    *out = w->verdict;
  }
  pthread_mutex_unlock(&dog.lock);
  return out->trouble;
}

int pynccl_watch_connected(pynccl_comm* comm) { return comm->watch && comm->watch->connected; }

int pynccl_watch_dead(pynccl_comm* comm, int* ranks) {
  pynccl_watch* w = comm->watch;
  if (!w) return 0;
  int count = 0;
  pthread_mutex_lock(&dog.lock);
  for (int r = 0; r < w->size; ++r)
    if (w->peers[r].gone && !w->peers[r].goodbye) ranks[count++] = r;
  pthread_mutex_unlock(&dog.lock);
  return count;
}

int pynccl_watch_send(pynccl_comm* comm, int rank, uint64_t tag, const char* data, size_t size) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f = {.kind = FRAME_MESSAGE, .number = tag};
  if (!w || rank < 0 || rank >= w->size || size > sizeof f.text) return EINVAL;
  memcpy(f.text, data, size);
  pthread_mutex_lock(&dog.lock);
  const int r = pynccl_send_frame(w, rank, &f);
  pthread_mutex_unlock(&dog.lock);
  return r;
}

static int pynccl_take_frame(pynccl_peer* p, uint32_t kind, uint64_t number, pynccl_frame* out) {
  for (int i = 0; i < p->inbox_count; ++i) {
    if (p->inbox[i].kind != kind || p->inbox[i].number != number) continue;
    *out = p->inbox[i];
    memmove(&p->inbox[i], &p->inbox[i + 1], (size_t)(--p->inbox_count - i) * sizeof *p->inbox);
    return 1;
  }
  return 0;
}

int pynccl_watch_receive(pynccl_comm* comm, int rank, uint64_t tag, char* data, size_t size,
                         int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f;
  if (!w || rank < 0 || rank >= w->size || size > sizeof f.text) return EINVAL;
  pthread_mutex_lock(&dog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  pynccl_peer* p = &w->peers[rank];
  int found;
  while (!(found = pynccl_take_frame(p, FRAME_MESSAGE, tag, &f)) && p->socket >= 0 && pynccl_await(until))
    continue;
  const int r = found ? 0 : p->socket < 0 ? ECONNRESET : ETIMEDOUT;
  pthread_mutex_unlock(&dog.lock);
  if (!r) memcpy(data, f.text, size);
  return r;
}

int pynccl_watched(void) {
  pthread_mutex_lock(&dog.lock);
  int count = 0;
  for (pynccl_watch* w = dog.watches; w; w = w->next) ++count;
  pthread_mutex_unlock(&dog.lock);
  return count;
}

int pynccl_watchdog_runs(void) {
  pthread_mutex_lock(&dog.lock);
  const int running = dog.running;
  pthread_mutex_unlock(&dog.lock);
  return running;
}

// --- around a call -----------------------------------------------------------------------------------------

static int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count);
static int pynccl_check_wait(pynccl_watch* w);

// Tell the other ranks what is about to be called.
static int pynccl_watch_announce(pynccl_comm* comm, const pynccl_call* calls, int count) {
  return comm->watch->checking ? pynccl_check_say(comm->watch, calls, count) : 0;
}

static int pynccl_watch_begin(pynccl_comm* comm, const pynccl_call* calls, int count) {
  pynccl_watch* w = comm->watch;
  // In a group that somebody opened in C the counterparts may come later.
  const int r = w->checking && !pynccl_depth ? pynccl_check_wait(w) : 0;
  if (r) return r;
  for (int i = 0; i < count; ++i)
    if (calls[i].comm == comm) {
      ++w->calls;
      w->last_kind = calls[i].kind;
    }
  __atomic_store_n(&w->in_call, pynccl_now(), __ATOMIC_RELEASE);
  return 0;
}

static void pynccl_watch_end(pynccl_comm* comm) {
  __atomic_store_n(&comm->watch->in_call, 0, __ATOMIC_RELEASE);
}

// Calls on a stream that nobody waits for at once.
static void pynccl_watch_issued(pynccl_comm* comm, uintptr_t stream) {
  pynccl_watch* w = comm->watch;
  // In a group that somebody opened in C nothing is on the stream yet.
  if (!w->timeout || pynccl_depth) return;
  pthread_mutex_lock(&dog.lock);
  if (w->listed && w->handle) pynccl_mark(w, stream);
  pthread_mutex_unlock(&dog.lock);
}
