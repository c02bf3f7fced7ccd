// The interface for Python to the control channel between a communicator's ranks, and to the watchdog: the
// one thread of the process that notices ranks which die, stop or make no call.
#pragma once

#include "comm.h"

// With more ranks than these everything of the control channel takes longer, in proportion.
enum pynccl_channel_size { PYNCCL_FAST_RANKS = 64 };

enum pynccl_trouble {
  PYNCCL_FINE,
  PYNCCL_RANKS_FAILED,    // died, stopped, or aborted
  PYNCCL_TIMED_OUT,       // although all ranks respond
  PYNCCL_MISMATCHED,      // the ranks called different things
  PYNCCL_LIBRARY_FAILED,  // the library reported an error in the background
  PYNCCL_MOST_RANKS = 256,
  PYNCCL_MOST_TEXT = 4096,
  PYNCCL_FRAME_TEXT = 160
};

// What the watchdog does to the library's communicator after a failure: it refuses later calls; in addition
// it revokes or aborts the communicator.
enum pynccl_on_failure { PYNCCL_ON_FAILURE_MARK, PYNCCL_ON_FAILURE_REVOKE, PYNCCL_ON_FAILURE_ABORT };

// The reason for which a rank leaves the channel. The other ranks read it so:
// - ENDS: its program has ended, or dropped the communicator, without closing it. A rank that waits for it
// treats it as failed.
// - ABORTS_TOO: it aborts because of a failure that it knows of; it is not the cause.
// - ABORTS_FIRST: its abort is the failure.
// - GOES_ON: a communicator of the survivors replaces this one.
enum pynccl_departure {
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
  int reporter;  // 1 + the rank that found it; 0: this rank
  int place;     // bytes at the beginning of the text that name the rank which found it
  int relayed;   // behind that the text names another rank, which has reported it to the one that found it
  int count;     // of the ranks that have failed; at a time-out of those that are behind the others,
                 // or have not come to a call that is checked
  int ranks[PYNCCL_MOST_RANKS];
  char text[PYNCCL_MOST_TEXT];
} pynccl_verdict;

// One direction of an encrypted connection: the key, and how many messages it has sealed.
typedef struct pynccl_cipher {
  char key[32];
  uint64_t count;
} pynccl_cipher;

// A process on any machine: where its number holds, the number, and its start time in ticks (0: unknown).
typedef struct pynccl_process {
  char space[16];
  int pid;
  uint64_t start;
} pynccl_process;

// A rank's connection to another one: a connected socket or PYNCCL_SHARED, the name of the line, and the
// process at the other end. Or there is none: the rank is no neighbour, has gone, or did not connect in time.
enum pynccl_connected {
  PYNCCL_NO_LINE = -1,
  PYNCCL_LINE_GONE = -2,
  PYNCCL_LINE_LATE = -3,
  PYNCCL_SHARED = -4
};
typedef struct pynccl_connection {
  int order;  // of the rank's process: the same in all communicators
  int socket;
  uint64_t line;
  pynccl_process process;
} pynccl_connection;

// libsodium's crypto_aead_chacha20poly1305_ietf_encrypt and _decrypt, and two ciphers for each rank: for
// frames to it and from it.
typedef struct pynccl_sealing {
  uintptr_t encrypt, decrypt;
  const pynccl_cipher *outgoing, *incoming;
} pynccl_sealing;

// Start the watchdog's thread, before the other ranks rely on this one, and keep it. Returns 0 or an errno.
int pynccl_watch_reserve(void);
void pynccl_watch_unreserve(void);
// Write the differences, modulo `size`, between a rank's number and those of its neighbours, and return how
// many there are, at most `size` - 1. With up to `mesh` ranks all others are neighbours, see channel.h.
int pynccl_watch_neighbours(int size, int mesh, int* steps);
// A line to a process that a new communicator could share, by its name; 0: there is none. It stays open until
// it is withdrawn, or passed on as a connection. `sealed`: whether it must encrypt.
uint64_t pynccl_line_offer(const pynccl_process* other, int sealed);
void pynccl_line_withdraw(uint64_t name);
// Keep what other ranks send over shared lines for a rank of a new communicator, until it watches or gives
// up. Returns 0 or ENOMEM.
int pynccl_channel_expect(uint64_t channel, int rank);
// The rank will not watch: close its connections.
void pynccl_channel_give_up(uint64_t channel, int rank, const pynccl_connection* made, int size);
// Start to watch a communicator, within a reservation. `made` has a connection for each rank, which the watch
// then owns, or is NULL: no channel. `channel` is the communicator's number, equal on all ranks. `context` is
// the CUDA context of its device; 0: the CPU library, or no driver. `sealing` is NULL without a secret:
// frames are not encrypted. Returns 0 or ENOMEM. The watch lives as long as the communicator.
int pynccl_watch_start(pynccl_comm* comm, const pynccl_connection* made, uint64_t channel, int mesh,
                       int64_t timeout_ms, int on_failure, uintptr_t context, const pynccl_sealing* sealing);
// Announce the departure and close the channel. No effect if it is closed.
void pynccl_watch_stop(pynccl_comm* comm, int departure);
// Wait until the watchdog has handled a failure. Returns whether the library's communicator still exists.
int pynccl_watch_settle(pynccl_comm* comm, int64_t wait_ms);
// Take the library's communicator from the watchdog. Returns whether it still exists.
int pynccl_watch_claim(pynccl_comm* comm, int64_t wait_ms);
// Wait for a verdict and copy it. Returns its `trouble`.
int pynccl_watch_verdict(pynccl_comm* comm, pynccl_verdict* out, int64_t wait_ms);
// Whether the ranks are about to find out which of them have failed.
int pynccl_watch_decides(pynccl_comm* comm);
// A wait goes on: shortly before its time-out, ask all ranks whether they respond.
void pynccl_watch_waits(pynccl_comm* comm, int64_t waited, int64_t limit);
// At a time-out: wait until ranks that may be silent have been heard, or the others say that they hear them.
void pynccl_watch_hear(pynccl_comm* comm);
// A call took too long: say why. The call waits for `count` ranks; 0: the caller does not know for which.
// `publish`: make the reason the verdict, unless there is one.
int pynccl_watch_expire(pynccl_comm* comm, const char* what, const int* awaited, int count, int publish,
                        pynccl_verdict* out);
// The program is about to see an error of the library. If the error has ended the communicator it becomes the
// verdict, so that the other ranks do not take a following abort for the cause.
void pynccl_watch_library_failed(pynccl_comm* comm);
// Calls were issued asynchronously on a stream. No effect without a watch.
void pynccl_watch_issued(pynccl_comm* comm, uintptr_t stream);
// Whether there is a channel.
int pynccl_watch_connected(pynccl_comm* comm);
// For every rank its departure in the bits PYNCCL_DEPARTURE, and the other bits of pynccl_fate.
enum pynccl_fate { PYNCCL_DEPARTURE = 7, PYNCCL_GONE = 8, PYNCCL_SILENT = 16, PYNCCL_ENDED = 32 };
void pynccl_watch_fates(pynccl_comm* comm, unsigned char* fates);
// When the last sign of a rank's life arrived, in nanoseconds for which the watchdog has listened.
int64_t pynccl_watch_heard(pynccl_comm* comm, int rank);
// Set the pids of the ranks and their start times from /proc; 0: not visible here. A process that ends soon
// after its connection is PYNCCL_ENDED. One that ends later may have continued without this rank before.
int pynccl_watch_processes(pynccl_comm* comm, const int* pids, const uint64_t* starts);
// The launcher saw the process of a rank end at that time (CLOCK_MONOTONIC, ns). The same rule applies.
void pynccl_watch_told_end(pynccl_comm* comm, int rank, int64_t at);
// The start time of a process in the kernel's ticks; 0: it has ended.
uint64_t pynccl_process_start(int pid);
// Messages between ranks for recovery, of at most PYNCCL_FRAME_TEXT bytes. `to` has a bit for each rank that
// receives the message, in words of 64. `receive` returns 0, ETIMEDOUT, or
// ECONNRESET if the rank has gone. `take` receives from any rank, with the tag for this rank; it returns
// EAGAIN if the state of a rank has changed.
int pynccl_watch_send(pynccl_comm* comm, const uint64_t* to, uint64_t tag, const char* data, size_t size);
int pynccl_watch_receive(pynccl_comm* comm, int rank, uint64_t tag, char* data, size_t size, int64_t wait_ms);
int pynccl_watch_take(pynccl_comm* comm, int* rank, const uint64_t* tags, char* data, size_t size,
                      int64_t wait_ms);
// Check mode, for a communicator with a channel: every call waits until the ranks have compared it. The
// locator writes the place of the call in the program. With NULL it lets Python handle signals, and looks for
// other threads of the program, which could make a call meanwhile. STOPS ends the wait.
enum pynccl_located { PYNCCL_LOCATED, PYNCCL_LOCATED_STOPS, PYNCCL_LOCATED_AMONG_THREADS };
int pynccl_check_on(pynccl_comm* comm, int on);
void pynccl_check_locator(int (*locate)(char* text, int size));
int pynccl_check_other(pynccl_comm* comm, int kind);
// The next comparison takes at most this time, or ends with PYNCCL_TOO_LATE; 0: it has no such limit.
void pynccl_check_limit(pynccl_comm* comm, int64_t wait_ms);
// The next call is one whose comparison was interrupted, or took too long: it goes on with what it had
// announced.
void pynccl_check_resume(pynccl_comm* comm, int resumes);
// The number of watched communicators, and whether the watchdog's thread runs.
int pynccl_watched(void);
int pynccl_watchdog_runs(void);
