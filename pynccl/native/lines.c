#include "lines.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct pynccl_lines pynccl_lines = {.epoll = -1};

static void pynccl_line_epoll(pynccl_line* line, int how) {
  line->wants_output = line->output_bytes != 0;
  struct epoll_event e = {.events = EPOLLIN | (line->wants_output ? EPOLLOUT : 0), .data.u64 = line->id};
  epoll_ctl(pynccl_lines.epoll, how, line->socket, &e);
}

static int pynccl_is_local(int socket) {
  struct sockaddr_storage at = {0};
  socklen_t size = sizeof at;
  if (getpeername(socket, (struct sockaddr*)&at, &size)) return 0;
  const struct in6_addr* v6 = &((struct sockaddr_in6*)&at)->sin6_addr;
  const int mapped = at.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(v6);
  const unsigned char v4 = mapped ? v6->s6_addr[12] : *(unsigned char*)&((struct sockaddr_in*)&at)->sin_addr;
  return at.ss_family == AF_UNIX || (at.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(v6)) ||
         ((mapped || at.ss_family == AF_INET) && v4 == 127);
}

pynccl_line* pynccl_line_new(const pynccl_connection* made, const pynccl_sealing* sealing, int rank) {
  pynccl_line* line = calloc(1, sizeof *line);
  if (!line) return NULL;
  line->name = made->line;
  line->other = made->process;
  line->socket = made->socket;
  line->local = pynccl_is_local(line->socket);
  line->heard_at = pynccl_now();
  line->references = 1;
  if (sealing) {
    line->encrypt = (pynccl_encrypt*)sealing->encrypt;
    line->decrypt = (pynccl_decrypt*)sealing->decrypt;
    line->outgoing = sealing->outgoing[rank];
    line->incoming = sealing->incoming[rank];
  }
  while (!++pynccl_lines.last_id || pynccl_line_with_id(pynccl_lines.last_id)) continue;
  line->id = pynccl_lines.last_id;
  line->next = pynccl_lines.first;
  pynccl_lines.first = line;
  pynccl_line_epoll(line, EPOLL_CTL_ADD);
  return line;
}

pynccl_line* pynccl_line_with_id(uint32_t id) {
  pynccl_line* line = pynccl_lines.first;
  while (line && line->id != id) line = line->next;
  return line;
}

pynccl_line* pynccl_line_named(uint64_t name) {
  pynccl_line* line = pynccl_lines.first;
  while (line && line->name != name) line = line->next;
  return line;
}

pynccl_line* pynccl_line_to(const pynccl_process* other, int sealed) {
  pynccl_line* found = NULL;
  for (pynccl_line* line = pynccl_lines.first; line; line = line->next) {
    const pynccl_process* there = &line->other;
    if (line->socket < 0 || there->pid != other->pid || there->start != other->start ||
        memcmp(there->space, other->space, sizeof other->space) || sealed != !!line->encrypt)
      continue;
    if (!found || line->name < found->name) found = line;
  }
  return found;
}

void pynccl_line_close(pynccl_line* line) {
  if (line->socket < 0) return;
  if (!line->wants_output) pynccl_line_push(line);
  // Closing a socket with unread input resets the connection, and the peer might lose the last frames.
  char unread[4096];
  // A forked child may hold a copy of the socket, which would stay in the set.
  epoll_ctl(pynccl_lines.epoll, EPOLL_CTL_DEL, line->socket, NULL);
  while (recv(line->socket, unread, sizeof unread, MSG_DONTWAIT) > 0) continue;
  shutdown(line->socket, SHUT_WR);
  close(line->socket);
  line->socket = -1;
  line->output_bytes = 0;
}

void pynccl_line_release(pynccl_line* line) {
  if (--line->references) return;
  pynccl_line** at = &pynccl_lines.first;
  while (*at != line) at = &(*at)->next;
  *at = line->next;
  pynccl_line_close(line);
  free(line->output);
  explicit_bzero(line, sizeof *line);
  free(line);
}

void pynccl_line_push(pynccl_line* line) {
  while (line->output_bytes) {
    const ssize_t n = send(line->socket, line->output, line->output_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    // Reading notices the end of the connection, after the peer's last frames.
    if (n < 0) break;
    line->output_bytes -= (size_t)n;
    memmove(line->output, line->output + n, line->output_bytes);
  }
  if (line->wants_output != (line->output_bytes != 0)) pynccl_line_epoll(line, EPOLL_CTL_MOD);
}

static __thread int pynccl_corked;

void pynccl_cork(void) { pynccl_corked = 1; }

void pynccl_uncork(void) {
  pynccl_corked = 0;
  for (pynccl_line* line = pynccl_lines.first; line; line = line->next)
    if (line->output_bytes && !line->wants_output) pynccl_line_push(line);
}

static size_t pynccl_wire_bytes(const pynccl_line* line) {
  return sizeof(pynccl_frame) + (line->encrypt ? TAG_BYTES : 0);
}

// Noise's nonces: four zero bytes and a counter, which never repeats.
static void pynccl_next_nonce(pynccl_cipher* c, unsigned char nonce[12]) {
  memset(nonce, 0, 4);
  for (int i = 0; i < 8; ++i) nonce[4 + i] = (unsigned char)(c->count >> 8 * i);
  ++c->count;
}

static void pynccl_pack(pynccl_line* line, const pynccl_frame* frame, char* out) {
  unsigned char nonce[12];
  if (!line->encrypt) {
    memcpy(out, frame, sizeof *frame);
    return;
  }
  pynccl_next_nonce(&line->outgoing, nonce);
  line->encrypt((unsigned char*)out, NULL, (const unsigned char*)frame, sizeof *frame, NULL, 0, NULL, nonce,
                (const unsigned char*)line->outgoing.key);
}

static int pynccl_unpack(pynccl_line* line, pynccl_frame* frame) {
  unsigned char nonce[12];
  const unsigned char* from = line->input + line->input_read;
  if (!line->decrypt) {
    memcpy(frame, from, sizeof *frame);
    return 1;
  }
  pynccl_next_nonce(&line->incoming, nonce);
  return !line->decrypt((unsigned char*)frame, NULL, NULL, from, sizeof *frame + TAG_BYTES, NULL, 0, nonce,
                        (const unsigned char*)line->incoming.key);
}

int pynccl_line_send(pynccl_line* line, const pynccl_frame* frame, size_t most) {
  if (line->socket < 0) return ECONNRESET;
  if (line->output_bytes > most) return ENOBUFS;
  const size_t bytes = pynccl_wire_bytes(line);
  if (line->output_bytes + bytes > line->output_capacity) {
    const size_t capacity = 2 * line->output_capacity + 4 * bytes;
    char* more = realloc(line->output, capacity);
    if (!more) return ENOMEM;
    line->output = more;
    line->output_capacity = capacity;
  }
  pynccl_pack(line, frame, line->output + line->output_bytes);
  line->output_bytes += bytes;
  line->sent_at = pynccl_now();
  if (!pynccl_corked || line->output_bytes >= CORKED_BYTES) pynccl_line_push(line);
  return 0;
}

int pynccl_line_receive(pynccl_line* line, pynccl_frame* frame) {
  const size_t bytes = pynccl_wire_bytes(line);
  while (line->socket >= 0) {
    if (line->input_bytes - line->input_read >= bytes) {
      const int authentic = pynccl_unpack(line, frame);
      line->input_read += bytes;
      line->heard_at = pynccl_now();
      return authentic ? 1 : -2;
    }
    line->input_bytes -= line->input_read;
    memmove(line->input, line->input + line->input_read, line->input_bytes);
    line->input_read = 0;
    const ssize_t n = recv(line->socket, line->input + line->input_bytes,
                           sizeof line->input - line->input_bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) return -1;
    line->input_bytes += (size_t)n;
  }
  return 0;
}

int pynccl_expect(uint64_t channel, int rank) {
  pynccl_expected* e = calloc(1, sizeof *e);
  if (!e) return ENOMEM;
  *e = (pynccl_expected){pynccl_lines.expected, channel, (uint32_t)rank, NULL};
  pynccl_lines.expected = e;
  return 0;
}

static pynccl_expected** pynccl_find_expected(uint64_t channel, uint32_t rank) {
  pynccl_expected** at = &pynccl_lines.expected;
  while (*at && ((*at)->channel != channel || (*at)->rank != rank)) at = &(*at)->next;
  return at;
}

pynccl_early* pynccl_take_early(uint64_t channel, int rank) {
  pynccl_expected **at = pynccl_find_expected(channel, (uint32_t)rank), *e = *at;
  if (!e) return NULL;
  pynccl_early* frames = e->frames;
  *at = e->next;
  free(e);
  return frames;
}

void pynccl_drop_early(pynccl_early* frames) {
  for (pynccl_early* next; frames; frames = next) {
    next = frames->next;
    free(frames);
  }
}

void pynccl_keep_early(const pynccl_line* line, const pynccl_frame* frame) {
  pynccl_expected* e = *pynccl_find_expected(frame->channel, frame->at);
  pynccl_early* kept = e ? malloc(sizeof *kept) : NULL;
  if (!kept) return;
  *kept = (pynccl_early){NULL, line->id, *frame};
  pynccl_early** end = &e->frames;
  while (*end) end = &(*end)->next;
  *end = kept;
}

void pynccl_lines_of_the_parent(void) {
  while (pynccl_lines.first) {
    pynccl_line* line = pynccl_lines.first;
    // Without a shutdown, which would end the parent's connection.
    if (line->socket >= 0) close(line->socket);
    line->socket = -1;
    line->references = 1;
    pynccl_line_release(line);
  }
  while (pynccl_lines.expected) {
    const pynccl_expected* e = pynccl_lines.expected;
    pynccl_drop_early(pynccl_take_early(e->channel, (int)e->rank));
  }
}
