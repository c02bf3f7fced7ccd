// Lines: connections between processes. All communicators with ranks at both ends of a line share it, so a
// derived communicator connects only ranks whose processes have none yet. A frame says which communicator and
// which of its ranks it is for. The lock of channel.h protects everything here.
#pragma once

#include <pthread.h>

#include "frames.h"
#include "internal.h"

// A line with this much unsent output takes no more frames, but those that end a communicator.
#define MOST_OUTPUT (1 << 20)
// The bytes that encryption adds to a frame.
#define TAG_BYTES 16
// The most frames that one system call receives, and the bytes of output at which a corked line sends.
#define INPUT_FRAMES 16
#define CORKED_BYTES (1 << 16)

// The functions of pynccl_sealing.
typedef int pynccl_encrypt(unsigned char* out, unsigned long long* out_bytes, const unsigned char* message,
                           unsigned long long bytes, const unsigned char* also, unsigned long long also_bytes,
                           const unsigned char* unused, const unsigned char* nonce, const unsigned char* key);
typedef int pynccl_decrypt(unsigned char* out, unsigned long long* out_bytes, unsigned char* unused,
                           const unsigned char* sealed, unsigned long long bytes, const unsigned char* also,
                           unsigned long long also_bytes, const unsigned char* nonce,
                           const unsigned char* key);

typedef struct pynccl_line {
  struct pynccl_line* next;
  uint32_t id;              // of this end
  uint64_t name;            // the same at both ends
  pynccl_process other;     // at the other end
  int references;           // the peers that use it, and offers
  int socket;               // -1: the connection has ended
  int local;                // it does not leave the host
  int64_t heard_at;         // when the last frame came, by CLOCK_MONOTONIC
  int64_t heard;            // the same, by pynccl_watchdog.awake
  int64_t sent_at;          // when the last frame was sent, by CLOCK_MONOTONIC
  pynccl_encrypt* encrypt;  // NULL: frames are plain
  pynccl_decrypt* decrypt;
  pynccl_cipher outgoing, incoming;
  int wants_output;
  char* output;
  size_t output_bytes, output_capacity;
  size_t input_read, input_bytes;
  unsigned char input[INPUT_FRAMES * (sizeof(pynccl_frame) + TAG_BYTES)];
} pynccl_line;

// A frame that came before its receiver watched the communicator, and the line's id.
typedef struct pynccl_early {
  struct pynccl_early* next;
  uint32_t line;
  pynccl_frame frame;
} pynccl_early;

// A rank that will watch a communicator: what comes for it before is kept.
typedef struct pynccl_expected {
  struct pynccl_expected* next;
  uint64_t channel;
  uint32_t rank;
  pynccl_early* frames;
} pynccl_expected;

struct pynccl_lines {
  pynccl_line* first;
  pynccl_expected* expected;
  int epoll;
  uint32_t last_id;
};

#pragma GCC visibility push(hidden)

extern struct pynccl_lines pynccl_lines;

// The line over a connected socket, with one reference; NULL without memory. `sealing`: NULL, or that of the
// rank at the other end.
pynccl_line* pynccl_line_new(const pynccl_connection* made, const pynccl_sealing* sealing, int rank);
pynccl_line* pynccl_line_with_id(uint32_t id);
pynccl_line* pynccl_line_named(uint64_t name);
// Of the lines to a process, the one with the smallest name, which both ends find; NULL: there is none.
pynccl_line* pynccl_line_to(const pynccl_process* other, int sealed);
// Drop a reference. The last one closes the connection.
void pynccl_line_release(pynccl_line* line);
// Send a frame, unless more than `most` bytes are unsent: 0 or an errno.
int pynccl_line_send(pynccl_line* line, const pynccl_frame* frame, size_t most);
// Send what has been kept.
void pynccl_line_push(pynccl_line* line);
// Keep the frames of this thread until pynccl_uncork(), which sends them: those of one turn of the watchdog
// go over a line together, or with the next frame of another thread.
void pynccl_cork(void);
void pynccl_uncork(void);
// Receive a frame: 1. 0: none has come. -1: the connection has ended. -2: it is not authentic, or not the
// next one.
int pynccl_line_receive(pynccl_line* line, pynccl_frame* frame);
void pynccl_line_close(pynccl_line* line);
// Keep the frames for a rank: 0 or ENOMEM.
int pynccl_expect(uint64_t channel, int rank);
// Stop keeping frames for a rank, and return those that have come. pynccl_drop_early() frees them.
pynccl_early* pynccl_take_early(uint64_t channel, int rank);
void pynccl_drop_early(pynccl_early* frames);
// Keep a frame, if its receiver is expected.
void pynccl_keep_early(const pynccl_line* line, const pynccl_frame* frame);
// In a forked child: open copies of the parent's connections would hide its death from the other ranks.
void pynccl_lines_of_the_parent(void);

#pragma GCC visibility pop
