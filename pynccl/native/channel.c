// The control channel: frames of one size between any two ranks of a communicator, and what the watchdog
// knows of each. Included by the generated binding, behind watchdog.h and the wrappers of NCCL's functions.
//
// Everything here and in watchdog.c and checks.c is under one lock.

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
  int pending, recording;
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
  int64_t listened;  // when the thread last did
  int prepared;
} dog = {.lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .wake = -1};

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

// An array with room for one more; NULL without memory, and the array stays as it is.
static void* pynccl_room(void* items, int count, int* capacity, size_t size) {
  if (count < *capacity) return items;
  const int more = *capacity ? 2 * *capacity : 8;
  void* grown = realloc(items, (size_t)more * size);
  if (grown) *capacity = more;
  return grown;
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

static void pynccl_push(pynccl_watch* w, int rank) {
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
  pynccl_push(w, rank);
  return 0;
}

static void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame) {
  for (int r = 0; r < w->size; ++r) pynccl_send_frame(w, r, frame);
}

// Counted by who calls, without the lock.
static uint64_t pynccl_calls(const pynccl_watch* w) { return __atomic_load_n(&w->calls, __ATOMIC_RELAXED); }
static int pynccl_newest_kind(const pynccl_watch* w) {
  return __atomic_load_n(&w->last_kind, __ATOMIC_RELAXED);
}

static void pynccl_beat(pynccl_watch* w) {
  const pynccl_frame beat = {
      .kind = FRAME_BEAT, .code = (uint32_t)pynccl_newest_kind(w), .number = pynccl_calls(w)};
  pynccl_tell_all(w, &beat);
}

// The verdict is written: publish it.
static void pynccl_publish(pynccl_watch* w, int trouble);

// --- what arrives ------------------------------------------------------------------------------------------

static void pynccl_keep_frame(pynccl_peer* p, const pynccl_frame* frame) {
  pynccl_frame* inbox = pynccl_room(p->inbox, p->inbox_count, &p->inbox_capacity, sizeof *inbox);
  if (!inbox) return;
  p->inbox = inbox;
  inbox[p->inbox_count++] = *frame;
  pthread_cond_broadcast(&dog.changed);
}

static void pynccl_arrived(pynccl_watch* w, int from, pynccl_frame* f) {
  pynccl_peer* p = &w->peers[from];
  f->text[sizeof f->text - 1] = f->kind == FRAME_MESSAGE ? f->text[sizeof f->text - 1] : 0;
  switch (f->kind) {
    case FRAME_BEAT:
      p->calls = f->number;
      p->last_kind = f->code <= PYNCCL_BARRIER ? (int)f->code : 0;
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
      pynccl_publish(w, f->code == PYNCCL_MISMATCHED || f->code == PYNCCL_LIBRARY_FAILED ? (int)f->code
                                                                                         : PYNCCL_TIMED_OUT);
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

// --- for recovery
// -------------------------------------------------------------------------------------------

int pynccl_watch_connected(pynccl_comm* comm) { return comm->watch && comm->watch->connected; }

int pynccl_watch_dead(pynccl_comm* comm, int* ranks) {
  pynccl_watch* w = comm->watch;
  if (!w) return 0;
  int count = 0;
  pthread_mutex_lock(&dog.lock);
  for (int r = 0; r < w->size; ++r)
    if (w->peers[r].goodbye == PYNCCL_ENDS || (w->peers[r].gone && !w->peers[r].goodbye)) ranks[count++] = r;
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
