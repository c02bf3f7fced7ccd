// The control channel: frames of one size between any two ranks of a communicator, and the state of each
// rank. One lock protects everything here and in the layers above, up to the watchdog.
#pragma once

#include <pthread.h>

#include "internal.h"
#include "watch.h"

#define TICK_MS 50
#define BEAT_NS (250 * MS)
// Every rank sends heartbeats to every other: with more ranks they are rarer, in proportion.
#define FAST_RANKS 64
// Deaths within this time count as one event, so that all survivors name the same ranks.
#define GRACE_NS (150 * MS)
// A rank that has been silent for this time when a wait times out is named as not responding; with many ranks
// pynccl_silence().
#define SILENCE_NS (1000 * MS)
// A peer with this much unsent output gets no more frames.
#define MOST_OUTPUT (1 << 20)
// A process ends within this time after its connection, or it is taken for alive.
#define ENDING_NS (2000 * MS)
// The bytes that encryption adds to a frame.
#define TAG_BYTES 16

enum {
  FRAME_BEAT = 1,
  FRAME_DEPARTURE,
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
  int departure;
  int gone;       // the connection has ended
  int late;       // it never began: the rank did not connect in time
  int named;      // another rank's verdict names it as failed
  int64_t heard;  // when its last frame came, by pynccl_watchdog.awake
  int pid;        // 0: unknown
  uint64_t start;
  int ended;
  int local;         // the connection does not leave the host
  int64_t heard_at;  // when its last frame came, by CLOCK_MONOTONIC
  int64_t gone_at;
  int provable;  // the end of its process is a proof: it did not go on without this rank before
  uint64_t calls;
  int last_kind;  // kind of its newest call; -1: none
  size_t input_bytes;
  unsigned char input[sizeof(pynccl_frame) + TAG_BYTES];
  pynccl_cipher outgoing, incoming;
  int tampered;  // a frame from it was not authentic
  int wants_output;
  char* output;
  size_t output_bytes, output_capacity;
  char* report;  // the text of its verdict, received so far
  pynccl_frame* inbox;
  int inbox_count, inbox_capacity;
} pynccl_peer;

// Two events behind the calls of a stream: the watchdog queries the older one; the newer one follows every
// call.
typedef struct pynccl_marker {
  uintptr_t stream, events[2];
  int64_t at[2];
  int pending, recording;
} pynccl_marker;

struct pynccl_watch {
  pynccl_comm* comm;
  pynccl_watch* next;
  uint32_t id;
  int listed, connected, checking, size, rank, is_cpu, on_failure;
  pynccl_encrypt* encrypt;  // NULL: frames are plain
  pynccl_decrypt* decrypt;
  struct pynccl_said* said;  // announced calls without a counterpart so far
  int said_count, said_capacity;
  int64_t timeout;
  int64_t beat;       // between heartbeats
  int64_t beat_at;    // of the last one
  uintptr_t handle;   // 0: the watchdog must not use it any more
  uintptr_t context;  // the CUDA context of the events
  int touching, responding, ended;
  int64_t dying;       // when the first death was noticed
  int64_t late;        // when a call exceeded the time-out, by pynccl_watchdog.awake
  uint64_t* lost;      // for every rank a row of bits: the ranks that it cannot reach; NULL: none
  int64_t library_at;  // when the library reported an error
  int library_error;
  pynccl_verdict verdict;
  uint64_t calls;
  int last_kind;
  int64_t in_call;  // when a thread entered the library; 0: none is inside
  pynccl_marker* markers;
  int marker_count, marker_capacity;
  pynccl_peer peers[];
};

struct pynccl_watchdog {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pynccl_watch* watches;
  int running, epoll, wake;
  int reserved;  // how many communicators will be watched, besides `watches`
  uint32_t last_id;
  // For how long the thread has listened. A process that was stopped or got no CPU must not take the others
  // for silent.
  int64_t awake;
  int64_t blind_until;  // after the process was suspended
  int prepared;
};

#pragma GCC visibility push(hidden)

extern struct pynccl_watchdog pynccl_watchdog;

// Wait for a change until a time; 0 if that has passed.
int pynccl_await(int64_t until);

void pynccl_watch_epoll(pynccl_watch* w, int rank, int how);
// Whether a rank has been silent for longer than `limit` while the watchdog listened.
int pynccl_silent(const pynccl_peer* p, int64_t limit);
int64_t pynccl_silence(const pynccl_watch* w);
int pynccl_has_lost(const pynccl_watch* w, int rank, int other);
// Note that a rank cannot reach another one. Which of the two has failed is decided after GRACE_NS, when all
// ranks have reported. Returns whether this is new.
int pynccl_note_lost(pynccl_watch* w, int rank, int other);
// Note that this rank cannot reach another one, and tell all, once.
void pynccl_report_loss(pynccl_watch* w, int rank);
void pynccl_hang_up(pynccl_watch* w, int rank);
// Begin with a peer's connected socket; negative: it has none.
void pynccl_take_socket(pynccl_peer* p, int socket);
void pynccl_seal_with(pynccl_watch* w, const pynccl_sealing* sealing);
size_t pynccl_wire_bytes(const pynccl_watch* w);
// Returns 0 if the input is not authentic or not the next frame.
int pynccl_unpack(const pynccl_watch* w, pynccl_peer* p, pynccl_frame* frame);
// Send queued output to a rank.
void pynccl_push(pynccl_watch* w, int rank);
int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame);
void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame);
void pynccl_beat(pynccl_watch* w);
// Check whether the processes of ranks without a connection have ended.
void pynccl_check_processes(pynccl_watch* w, int64_t now);

// The calling threads write these without the lock.
static inline uint64_t pynccl_calls(const pynccl_watch* w) {
  return __atomic_load_n(&w->calls, __ATOMIC_RELAXED);
}
static inline int pynccl_newest_kind(const pynccl_watch* w) {
  return __atomic_load_n(&w->last_kind, __ATOMIC_RELAXED);
}

#pragma GCC visibility pop
