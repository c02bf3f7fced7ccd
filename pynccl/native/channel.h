// The control channel: frames of one size between any two ranks of a communicator, and what the watchdog
// knows of each. Everything here and in the layers above, up to the watchdog, is under one lock.
#pragma once

#include <pthread.h>

#include "internal.h"
#include "watch.h"

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
  int64_t heard;  // by the clock of pynccl_watchdog.awake
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
  int touching, responding, ended;
  int64_t dying;       // when the first death was noticed
  int64_t late;        // since when, by pynccl_watchdog.awake, something has taken too long
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

struct pynccl_watchdog {
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
};

#pragma GCC visibility push(hidden)

extern struct pynccl_watchdog pynccl_watchdog;

// Wait for a change until a time; 0 when that has passed.
int pynccl_await(int64_t until);

void pynccl_watch_epoll(pynccl_watch* w, int rank, int how);
// As far as the watchdog has listened.
int pynccl_silent(const pynccl_peer* p, int64_t limit);
int pynccl_has_lost(const pynccl_watch* w, int rank, int other);
// A rank lacks another one: which of them has failed is judged when all have had the time to say so. Answers
// whether that is news.
int pynccl_note_lost(pynccl_watch* w, int rank, int other);
void pynccl_hang_up(pynccl_watch* w, int rank);
void pynccl_seal_with(pynccl_watch* w, const pynccl_sealing* sealing);
size_t pynccl_wire_bytes(const pynccl_watch* w);
// Answers 0 where what has come was not sealed as the next frame.
int pynccl_unpack(const pynccl_watch* w, pynccl_peer* p, pynccl_frame* frame);
// Send what waits to be sent to a rank.
void pynccl_push(pynccl_watch* w, int rank);
int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame);
void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame);
void pynccl_beat(pynccl_watch* w);
// Whose connections have ended: look whether the processes have, too.
void pynccl_see_ends(pynccl_watch* w, int64_t now);

// Counted by who calls, without the lock.
static inline uint64_t pynccl_calls(const pynccl_watch* w) {
  return __atomic_load_n(&w->calls, __ATOMIC_RELAXED);
}
static inline int pynccl_newest_kind(const pynccl_watch* w) {
  return __atomic_load_n(&w->last_kind, __ATOMIC_RELAXED);
}

#pragma GCC visibility pop
