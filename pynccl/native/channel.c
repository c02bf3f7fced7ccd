#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct pynccl_watchdog pynccl_watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER, .epoll = -1, .wake = -1};

int pynccl_await(int64_t until) {
  if (pynccl_now() >= until) return 0;
  const struct timespec t = {until / (1000 * MS), until % (1000 * MS)};
  pthread_cond_timedwait(&pynccl_watchdog.changed, &pynccl_watchdog.lock, &t);
  return 1;
}

// --- frames ------------------------------------------------------------------------------------------------

void pynccl_watch_epoll(pynccl_watch* w, int rank, int how) {
  pynccl_peer* p = &w->peers[rank];
  p->wants_output = p->output_bytes != 0;
  struct epoll_event e = {.events = EPOLLIN | (p->wants_output ? EPOLLOUT : 0)};
  e.data.u64 = (uint64_t)w->id << 32 | (uint32_t)rank;
  epoll_ctl(pynccl_watchdog.epoll, how, p->socket, &e);
}

int pynccl_silent(const pynccl_peer* p, int64_t limit) {
  return !p->gone && !p->departure && p->socket >= 0 && pynccl_watchdog.awake - p->heard > limit;
}

static size_t pynccl_row_words(const pynccl_watch* w) { return ((size_t)w->size + 63) / 64; }

int pynccl_has_lost(const pynccl_watch* w, int rank, int other) {
  if (!w->lost) return 0;
  return (int)(w->lost[(size_t)rank * pynccl_row_words(w) + (size_t)other / 64] >> (other % 64) & 1);
}

int pynccl_note_lost(pynccl_watch* w, int rank, int other) {
  if (!w->dying) w->dying = pynccl_now();
  if (!w->lost) w->lost = calloc((size_t)w->size * pynccl_row_words(w), sizeof *w->lost);
  if (!w->lost || pynccl_has_lost(w, rank, other)) return 0;
  w->lost[(size_t)rank * pynccl_row_words(w) + (size_t)other / 64] |= 1ULL << (other % 64);
  return 1;
}

void pynccl_report_loss(pynccl_watch* w, int rank) {
  if (!pynccl_note_lost(w, w->rank, rank)) return;
  const pynccl_frame lost = {.kind = FRAME_LOST, .code = (uint32_t)w->rank, .number = (uint64_t)rank};
  pynccl_tell_all(w, &lost);
}

void pynccl_hang_up(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  if (p->socket < 0) return;
  // Closing a socket with unread input resets the connection, and the peer might lose the departure.
  char unread[4096];
  while (recv(p->socket, unread, sizeof unread, MSG_DONTWAIT) > 0) continue;
  shutdown(p->socket, SHUT_WR);
  close(p->socket);
  p->socket = -1;
  p->gone = 1;
  p->gone_at = pynccl_now();
  p->provable =
      p->gone_at >= pynccl_watchdog.blind_until && (p->local || p->gone_at - p->heard_at <= ENDING_NS);
  p->output_bytes = 0;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  if (!w->listed || p->departure) return;
  pynccl_report_loss(w, rank);
}

void pynccl_take_socket(pynccl_peer* p, int socket) {
  struct sockaddr_storage at = {0};
  socklen_t size = sizeof at;
  p->socket = socket;
  p->heard = pynccl_watchdog.awake;
  p->heard_at = pynccl_now();
  p->provable = 1;
  if (socket < 0 || getpeername(socket, (struct sockaddr*)&at, &size)) return;
  const struct in6_addr* v6 = &((struct sockaddr_in6*)&at)->sin6_addr;
  const int mapped = at.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(v6);
  const unsigned char v4 = mapped ? v6->s6_addr[12] : *(unsigned char*)&((struct sockaddr_in*)&at)->sin_addr;
  p->local = at.ss_family == AF_UNIX || (at.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(v6)) ||
             ((mapped || at.ss_family == AF_INET) && v4 == 127);
}

void pynccl_push(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  while (p->output_bytes) {
    const ssize_t n = send(p->socket, p->output, p->output_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    // Reading notices the end of the connection, after the peer's last frames.
    if (n < 0) break;
    p->output_bytes -= (size_t)n;
    memmove(p->output, p->output + n, p->output_bytes);
  }
  if (p->wants_output != (p->output_bytes != 0)) pynccl_watch_epoll(w, rank, EPOLL_CTL_MOD);
}

void pynccl_seal_with(pynccl_watch* w, const pynccl_sealing* sealing) {
  w->encrypt = (pynccl_encrypt*)sealing->encrypt;
  w->decrypt = (pynccl_decrypt*)sealing->decrypt;
  for (int r = 0; r < w->size; ++r) {
    w->peers[r].outgoing = sealing->outgoing[r];
    w->peers[r].incoming = sealing->incoming[r];
  }
}

size_t pynccl_wire_bytes(const pynccl_watch* w) {
  return sizeof(pynccl_frame) + (w->encrypt ? TAG_BYTES : 0);
}

// Noise's nonces: four zero bytes and a counter, which never repeats.
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

int pynccl_unpack(const pynccl_watch* w, pynccl_peer* p, pynccl_frame* frame) {
  unsigned char nonce[12];
  if (!w->decrypt) {
    memcpy(frame, p->input, sizeof *frame);
    return 1;
  }
  pynccl_next_nonce(&p->incoming, nonce);
  return !w->decrypt((unsigned char*)frame, NULL, NULL, p->input, sizeof p->input, NULL, 0, nonce,
                     (const unsigned char*)p->incoming.key);
}

int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame) {
  pynccl_peer* p = &w->peers[rank];
  if (p->socket < 0) return ECONNRESET;
  // A peer that does not read needs no second heartbeat.
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

void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame) {
  for (int r = 0; r < w->size; ++r) pynccl_send_frame(w, r, frame);
}

int64_t pynccl_silence(const pynccl_watch* w) { return w->beat * (SILENCE_NS / BEAT_NS); }

void pynccl_beat(pynccl_watch* w) {
  const pynccl_frame beat = {
      .kind = FRAME_BEAT, .code = (uint32_t)pynccl_newest_kind(w), .number = pynccl_calls(w)};
  pynccl_tell_all(w, &beat);
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
  // The name is in parentheses and may contain any character.
  const char* rest = strrchr(text, ')');
  char state;
  long threads;
  unsigned long long start;
  const char* format = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld %*s %llu";
  if (!rest || sscanf(rest, format, &state, &threads, &start) != 3) return 0;
  // In a zombie with several threads only the first thread has ended.
  return strchr("ZXx", state) && threads <= 1 ? 0 : start;
}

int pynccl_watch_processes(pynccl_comm* comm, const int* pids, const uint64_t* starts) {
  pynccl_watch* w = comm->watch;
  if (!w) return EINVAL;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  for (int r = 0; r < w->size; ++r) {
    w->peers[r].pid = pids[r];
    w->peers[r].start = starts[r];
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return 0;
}

// Whether the end of a process proves that its rank did not go on without this one.
static int pynccl_proves(const pynccl_peer* p) { return p->provable && p->departure != PYNCCL_GOES_ON; }

void pynccl_check_processes(pynccl_watch* w, int64_t now) {
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (!p->gone || p->ended || !p->pid || !pynccl_proves(p)) continue;
    p->ended = pynccl_process_start(p->pid) != p->start;
    if (p->ended) pthread_cond_broadcast(&pynccl_watchdog.changed);
    if (now - p->gone_at > ENDING_NS) p->pid = 0;
  }
}

void pynccl_watch_told_end(pynccl_comm* comm, int rank, int64_t at) {
  pynccl_watch* w = comm->watch;
  if (!w || rank < 0 || rank >= w->size) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_peer* p = &w->peers[rank];
  if (p->gone && pynccl_proves(p) && at - p->gone_at <= ENDING_NS) p->ended = 1;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

// --- for recovery ------------------------------------------------------------------------------------------

int pynccl_watch_connected(pynccl_comm* comm) { return comm->watch && comm->watch->connected; }

void pynccl_watch_fates(pynccl_comm* comm, unsigned char* fates) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int silent = r != w->rank && pynccl_silent(p, pynccl_silence(w));
    fates[r] = (unsigned char)(p->departure | (p->gone ? PYNCCL_GONE : 0) | (silent ? PYNCCL_SILENT : 0) |
                               (p->ended ? PYNCCL_ENDED : 0));
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

int64_t pynccl_watch_heard(pynccl_comm* comm, int rank) {
  pynccl_watch* w = comm->watch;
  if (!w || rank < 0 || rank >= w->size) return 0;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int64_t heard = w->peers[rank].heard;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return heard;
}

int pynccl_watch_send(pynccl_comm* comm, int rank, uint64_t tag, const char* data, size_t size) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f = {.kind = FRAME_MESSAGE, .number = tag};
  if (!w || rank < 0 || rank >= w->size || size > sizeof f.text) return EINVAL;
  memcpy(f.text, data, size);
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int r = pynccl_send_frame(w, rank, &f);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
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
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  pynccl_peer* p = &w->peers[rank];
  int found;
  while (!(found = pynccl_take_frame(p, FRAME_MESSAGE, tag, &f)) && p->socket >= 0 && pynccl_await(until))
    continue;
  const int r = found ? 0 : p->socket < 0 ? ECONNRESET : ETIMEDOUT;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  if (!r) memcpy(data, f.text, size);
  return r;
}

int pynccl_watch_take(pynccl_comm* comm, int* rank, const uint64_t* tags, char* data, size_t size,
                      int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f;
  if (!w || size > sizeof f.text) return EINVAL;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  int found = 0;
  for (int waited = 0; !found; ++waited) {
    for (*rank = 0; *rank < w->size && !found; *rank += !found)
      found = pynccl_take_frame(&w->peers[*rank], FRAME_MESSAGE, tags[*rank], &f);
    if (found || waited || !pynccl_await(until)) break;
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  if (found) memcpy(data, f.text, size);
  return found ? 0 : EAGAIN;
}
