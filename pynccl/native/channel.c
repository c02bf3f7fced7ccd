// The control channel: frames of one size between any two ranks of a communicator, and what the watchdog
// knows of each. Included by the generated binding, behind watchdog.h and the wrappers of NCCL's functions.
//
// Everything here and in watchdog.c and checks.c is under one lock.

#include <errno.h>
#include <fcntl.h>
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
// A process whose connection ended has ended too within so long, or it lives.
#define ENDING_NS (2000 * MS)
// What sealing adds to a frame.
#define TAG_BYTES 16

enum {
  FRAME_BEAT = 1,
  FRAME_GOODBYE,
  FRAME_FAILED,  // the sender's verdict names a rank
  FRAME_TEXT,
  FRAME_TROUBLE,
  FRAME_MESSAGE,
  FRAME_CALL,
  FRAME_LOST  // the connection between two ranks has ended
};

// The functions of pynccl_sealing.
typedef int pynccl_encrypt(unsigned char* out, unsigned long long* out_bytes, const unsigned char* message,
                           unsigned long long bytes, const unsigned char* also, unsigned long long also_bytes,
                           const unsigned char* unused, const unsigned char* nonce, const unsigned char* key);
typedef int pynccl_decrypt(unsigned char* out, unsigned long long* out_bytes, unsigned char* unused,
                           const unsigned char* sealed, unsigned long long bytes, const unsigned char* also,
                           unsigned long long also_bytes, const unsigned char* nonce,
                           const unsigned char* key);

typedef struct pynccl_peer {
  int socket;
  int goodbye;
  int gone;       // the connection has ended
  int named;      // as failed, by another rank's verdict
  int64_t heard;  // by the clock of dog.awake
  int pid;        // 0: it is not known whether the process has ended
  uint64_t start;
  int ended;
  int64_t gone_at;
  uint64_t calls;
  int last_kind;  // of the newest call, -1 before the first
  size_t input_bytes;
  unsigned char input[sizeof(pynccl_frame) + TAG_BYTES];
  pynccl_cipher outgoing, incoming;
  int spoiled;  // sent what its key has not sealed
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
  pynccl_encrypt* encrypt;  // NULL: frames are plain
  pynccl_decrypt* decrypt;
  struct pynccl_said* said;  // to a peer, and not answered yet
  int said_count, said_capacity;
  int64_t timeout;
  uintptr_t handle;   // 0: no longer the watchdog's to touch
  uintptr_t context;  // of the events
  int touching, curing, ended;
  int64_t dying;       // when the first death was noticed
  int64_t late;        // since when, by dog.awake, something has taken too long
  uint64_t* lost;      // a row of bits for every rank: whom it cannot reach; NULL while nobody lacks anybody
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
  // For how long the thread has listened: who was stopped, or starved, cannot say of others that they were
  // silent.
  int64_t awake;
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

// As far as the watchdog has listened.
static int pynccl_silent(const pynccl_peer* p, int64_t limit) {
  return !p->gone && !p->goodbye && p->socket >= 0 && dog.awake - p->heard > limit;
}

static size_t pynccl_row_words(const pynccl_watch* w) { return ((size_t)w->size + 63) / 64; }

static int pynccl_has_lost(const pynccl_watch* w, int rank, int other) {
  if (!w->lost) return 0;
  return (int)(w->lost[(size_t)rank * pynccl_row_words(w) + (size_t)other / 64] >> (other % 64) & 1);
}

static void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame);

// A rank lacks another one: which of them has failed is judged when all have had the time to say so. Answers
// whether that is news.
static int pynccl_note_lost(pynccl_watch* w, int rank, int other) {
  if (!w->dying) w->dying = pynccl_now();
  if (!w->lost) w->lost = calloc((size_t)w->size * pynccl_row_words(w), sizeof *w->lost);
  if (!w->lost || pynccl_has_lost(w, rank, other)) return 0;
  w->lost[(size_t)rank * pynccl_row_words(w) + (size_t)other / 64] |= 1ULL << (other % 64);
  return 1;
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
  p->gone_at = pynccl_now();
  p->output_bytes = 0;
  pthread_cond_broadcast(&dog.changed);
  if (!w->listed || p->goodbye) return;
  pynccl_note_lost(w, w->rank, rank);
  const pynccl_frame lost = {.kind = FRAME_LOST, .code = (uint32_t)w->rank, .number = (uint64_t)rank};
  pynccl_tell_all(w, &lost);
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

static void pynccl_seal_with(pynccl_watch* w, const pynccl_sealing* sealing) {
  w->encrypt = (pynccl_encrypt*)sealing->encrypt;
  w->decrypt = (pynccl_decrypt*)sealing->decrypt;
  for (int r = 0; r < w->size; ++r) {
    w->peers[r].outgoing = sealing->outgoing[r];
    w->peers[r].incoming = sealing->incoming[r];
  }
}

static size_t pynccl_wire_bytes(const pynccl_watch* w) {
  return sizeof(pynccl_frame) + (w->encrypt ? TAG_BYTES : 0);
}

// Noise's nonces: four bytes of zero, and a number that never comes again.
static void pynccl_next_nonce(pynccl_cipher* c, unsigned char nonce[12]) {
  memset(nonce, 0, 4);
  for (int i = 0; i < 8; ++i) nonce[4 + i] = (unsigned char)(c->count >> 8 * i);
  ++c->count;
}

static void pynccl_pack(const pynccl_watch* w, pynccl_peer* p, const pynccl_frame* frame, char* out) {
  unsigned char nonce[12];
  if (!w->encrypt) {
    memcpy(out, frame, sizeof *frame);
    return;
  }
  pynccl_next_nonce(&p->outgoing, nonce);
  w->encrypt((unsigned char*)out, NULL, (const unsigned char*)frame, sizeof *frame, NULL, 0, NULL, nonce,
             (const unsigned char*)p->outgoing.key);
}

// Answers 0 where what has come was not sealed as the next frame.
static int pynccl_unpack(const pynccl_watch* w, pynccl_peer* p, pynccl_frame* frame) {
  unsigned char nonce[12];
  if (!w->decrypt) {
    memcpy(frame, p->input, sizeof *frame);
    return 1;
  }
  pynccl_next_nonce(&p->incoming, nonce);
  return !w->decrypt((unsigned char*)frame, NULL, NULL, p->input, sizeof p->input, NULL, 0, nonce,
                     (const unsigned char*)p->incoming.key);
}

static int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame) {
  pynccl_peer* p = &w->peers[rank];
  if (p->socket < 0) return ECONNRESET;
  // Who does not read needs no second heartbeat.
  if (p->output_bytes > (frame->kind == FRAME_BEAT ? 0 : MOST_OUTPUT)) return ENOBUFS;
  const size_t bytes = pynccl_wire_bytes(w);
  if (p->output_bytes + bytes > p->output_capacity) {
    const size_t capacity = 2 * p->output_capacity + 4 * bytes;
    char* more = realloc(p->output, capacity);
    if (!more) return ENOMEM;
    p->output = more;
    p->output_capacity = capacity;
  }
  pynccl_pack(w, p, frame, p->output + p->output_bytes);
  p->output_bytes += bytes;
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
      if (f->number >= (uint64_t)w->size) break;
      w->peers[f->number].named = 1;
      pynccl_note_lost(w, from, (int)f->number);
      break;
    case FRAME_LOST:
      if (f->code >= (uint32_t)w->size || f->number >= (uint64_t)w->size) break;
      // The other end cannot hear it from the one that says so.
      if (pynccl_note_lost(w, (int)f->code, (int)f->number)) pynccl_send_frame(w, (int)f->number, f);
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
  const size_t bytes = pynccl_wire_bytes(w);
  while (p->socket >= 0) {
    const ssize_t n = recv(p->socket, p->input + p->input_bytes, bytes - p->input_bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      pynccl_hang_up(w, rank);
      return;
    }
    p->input_bytes += (size_t)n;
    if (p->input_bytes < bytes) continue;
    p->input_bytes = 0;
    pynccl_frame frame;
    if (!pynccl_unpack(w, p, &frame)) {
      p->spoiled = 1;
      pynccl_hang_up(w, rank);
      return;
    }
    p->heard = dog.awake;
    pynccl_arrived(w, rank, &frame);
  }
}

// --- processes ---------------------------------------------------------------------------------------------

uint64_t pynccl_process_start(int pid) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  // The name, in parentheses, may hold anything.
  const char* rest = strrchr(text, ')');
  char state;
  long threads;
  unsigned long long start;
  const char* format = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld %*s %llu";
  if (!rest || sscanf(rest, format, &state, &threads, &start) != 3) return 0;
  // A zombie with more threads is one whose first thread has ended.
  return strchr("ZXx", state) && threads <= 1 ? 0 : start;
}

int pynccl_watch_processes(pynccl_comm* comm, const int* pids, const uint64_t* starts) {
  pynccl_watch* w = comm->watch;
  if (!w) return EINVAL;
  pthread_mutex_lock(&dog.lock);
  for (int r = 0; r < w->size; ++r) {
    w->peers[r].pid = pids[r];
    w->peers[r].start = starts[r];
  }
  pthread_mutex_unlock(&dog.lock);
  return 0;
}

static void pynccl_see_ends(pynccl_watch* w, int64_t now) {
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (!p->gone || p->ended || !p->pid) continue;
    p->ended = pynccl_process_start(p->pid) != p->start;
    if (p->ended) pthread_cond_broadcast(&dog.changed);
    if (now - p->gone_at > ENDING_NS) p->pid = 0;
  }
}

void pynccl_watch_told_end(pynccl_comm* comm, int rank, int64_t at) {
  pynccl_watch* w = comm->watch;
  if (!w || rank < 0 || rank >= w->size) return;
  pthread_mutex_lock(&dog.lock);
  pynccl_peer* p = &w->peers[rank];
  if (p->gone && at - p->gone_at <= ENDING_NS) p->ended = 1;
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
}

// --- for recovery ------------------------------------------------------------------------------------------

int pynccl_watch_connected(pynccl_comm* comm) { return comm->watch && comm->watch->connected; }

void pynccl_watch_fates(pynccl_comm* comm, unsigned char* fates) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&dog.lock);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int silent = r != w->rank && pynccl_silent(p, SILENCE_NS);
    fates[r] = (unsigned char)(p->goodbye | (p->gone ? PYNCCL_GONE : 0) | (silent ? PYNCCL_SILENT : 0) |
                               (p->ended ? PYNCCL_ENDED : 0));
  }
  pthread_mutex_unlock(&dog.lock);
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

int pynccl_watch_take(pynccl_comm* comm, int* rank, uint64_t tag, char* data, size_t size, int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f;
  if (!w || size > sizeof f.text) return EINVAL;
  pthread_mutex_lock(&dog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  int found = 0;
  for (int waited = 0; !found; ++waited) {
    for (*rank = 0; *rank < w->size && !found; *rank += !found)
      found = pynccl_take_frame(&w->peers[*rank], FRAME_MESSAGE, tag, &f);
    if (found || waited || !pynccl_await(until)) break;
  }
  pthread_mutex_unlock(&dog.lock);
  if (found) memcpy(data, f.text, size);
  return found ? 0 : EAGAIN;
}
