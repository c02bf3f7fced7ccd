// The control channel among a communicator's ranks, and the one thread of the process that notices ranks
// which die, stop or do not come: what Python asks of them.
#pragma once

#include "comm.h"

enum pynccl_trouble {
  PYNCCL_FINE,
  PYNCCL_RANKS_FAILED,    // died, stopped, or aborted
  PYNCCL_TIMED_OUT,       // all ranks are there
  PYNCCL_MISMATCHED,      // the ranks called different things
  PYNCCL_LIBRARY_FAILED,  // the library reported an error in the background
  PYNCCL_MOST_RANKS = 256,
  PYNCCL_MOST_TEXT = 4096,
  PYNCCL_FRAME_TEXT = 160
};

// What the watchdog does to the library's communicator in trouble.
enum pynccl_cure { PYNCCL_CURE_MARK, PYNCCL_CURE_REVOKE, PYNCCL_CURE_ABORT };

// How a rank says goodbye. One that aborts because it knows of trouble is not a cause of it; one that goes on
// has another communicator in its place; one whose program ends without closing the communicator has failed
// as soon as somebody waits for it in vain.
enum pynccl_goodbye {
  PYNCCL_STAYS,
  PYNCCL_CLOSES,
  PYNCCL_ENDS,
  PYNCCL_ABORTS_TOO,
  PYNCCL_ABORTS_FIRST,
  PYNCCL_GOES_ON
};

typedef struct pynccl_verdict {
  int trouble;
  int result;    // the library's code
  int reported;  // by another rank: the text begins with its number
  int count;
  int ranks[PYNCCL_MOST_RANKS];
  char text[PYNCCL_MOST_TEXT];
} pynccl_verdict;

// What travels over the channel, always whole.
typedef struct pynccl_frame {
  uint32_t kind;
  uint32_t code;
  uint64_t number;
  uint64_t words[6];
  char text[PYNCCL_FRAME_TEXT];
} pynccl_frame;

// One direction of a connection with a secret: the key, and how many messages it has sealed so far.
typedef struct pynccl_cipher {
  char key[32];
  uint64_t count;
} pynccl_cipher;

// libsodium's crypto_aead_chacha20poly1305_ietf_encrypt and _decrypt, and the ciphers of every rank: for what
// goes to it and for what comes from it.
typedef struct pynccl_sealing {
  uintptr_t encrypt, decrypt;
  const pynccl_cipher *outgoing, *incoming;
} pynccl_sealing;

// Begin to watch a communicator over one connected socket per rank (-1 for itself, -2 for a rank that
// is gone; NULL: no channel), which are the watch's from now on. Answers 0 or an errno. The watch lives as
// long as the communicator.
// `context` is the CUDA context of its device, 0 where the library is the CPU library or there is no driver.
// `sealing` is NULL where there is no secret: frames are plain then.
int pynccl_watch_start(pynccl_comm* comm, const int* sockets, int64_t timeout_ms, int cure, uintptr_t context,
                       const pynccl_sealing* sealing);
// Say goodbye and close the channel; harmless when that was done.
void pynccl_watch_stop(pynccl_comm* comm, int goodbye);
// Wait until it is done with what it does in trouble; answers whether the library's communicator is still
// there.
int pynccl_watch_settle(pynccl_comm* comm, int64_t wait_ms);
// Keep the watchdog from the library's communicator; answers whether it is still there to be given back.
int pynccl_watch_claim(pynccl_comm* comm, int64_t wait_ms);
// Wait for a verdict and copy it; answers the trouble.
int pynccl_watch_verdict(pynccl_comm* comm, pynccl_verdict* out, int64_t wait_ms);
// Something took too long: find out why. With `condemn` this is the verdict, unless there is one already.
int pynccl_watch_expire(pynccl_comm* comm, const char* what, int condemn, pynccl_verdict* out);
// The program is told of the library's error: where that has ended the communicator it is the verdict, before
// an abort that follows is taken for the cause.
void pynccl_watch_blame_library(pynccl_comm* comm);
// Calls were issued on a stream that nobody waits for at once; harmless where nothing is watched.
void pynccl_watch_issued(pynccl_comm* comm, uintptr_t stream);
// Whether there is a channel.
int pynccl_watch_connected(pynccl_comm* comm);
// What is known of every rank: its goodbye, and the bits of pynccl_fate.
enum pynccl_fate { PYNCCL_GONE = 8, PYNCCL_SILENT = 16, PYNCCL_ENDED = 32 };
void pynccl_watch_fates(pynccl_comm* comm, unsigned char* fates);
// The processes of the ranks and when these started, by /proc; 0 where they cannot be seen. One that ends
// soon after its connection is PYNCCL_ENDED; one that ends later may have gone on without this rank before.
int pynccl_watch_processes(pynccl_comm* comm, const int* pids, const uint64_t* starts);
// The launcher of that rank saw its process end at that time (CLOCK_MONOTONIC, ns); the same rule holds.
void pynccl_watch_told_end(pynccl_comm* comm, int rank, int64_t at);
// When that process started, in the kernel's ticks; 0 where it has ended.
uint64_t pynccl_process_start(int pid);
// Short messages between ranks, for recovery: at most PYNCCL_FRAME_TEXT bytes. Receiving answers 0,
// ETIMEDOUT, or ECONNRESET where that rank is gone. Taking is receiving from any rank; it also ends, with
// EAGAIN, when something has changed.
int pynccl_watch_send(pynccl_comm* comm, int rank, uint64_t tag, const char* data, size_t size);
int pynccl_watch_receive(pynccl_comm* comm, int rank, uint64_t tag, char* data, size_t size, int64_t wait_ms);
int pynccl_watch_take(pynccl_comm* comm, int* rank, uint64_t tag, char* data, size_t size, int64_t wait_ms);
// Check mode, for a communicator with a channel: every call waits until the ranks have compared it. The
// locator writes where the calling program is; with NULL it lets Python handle signals, and answers 1 to stop
// waiting.
int pynccl_check_on(pynccl_comm* comm, int on);
void pynccl_check_locator(int (*locate)(char* text, int size));
int pynccl_check_other(pynccl_comm* comm, int kind);
// How many communicators are watched, and whether the watchdog's thread runs.
int pynccl_watched(void);
int pynccl_watchdog_runs(void);
