"""A libnccl that writes calls down, fails where it is told to, and is of any version.

It stays beside null_library, whose functions follow from the C types and have no state: this one knows its
communicators, their devices and errors, the group that is open and the memory that it gave. Its functions are
written by hand, so that a test reads in the log which call of NCCL was made, and on which stream.

It moves nothing, but in an all_gather of int64 all ranks have what this rank has; with FAKE_NCCL_FOLDER, a
folder that the ranks share, an all_gather of int64 or int8 moves what it should.
Linked with the fake driver it takes its device from the current context and launches on streams as NCCL does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pynccl

_SOURCE = r"""
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#pragma weak cuCtxGetDevice
#pragma weak cuDevicePrimaryCtxRetain
#pragma weak cuCtxPushCurrent_v2
#pragma weak cuCtxPopCurrent_v2
#pragma weak fake_cuda_launch
#pragma weak fake_cuda_register
#pragma weak fake_cuda_forget
#pragma weak fake_cuda_spend
int cuCtxGetDevice(int* device);
int cuDevicePrimaryCtxRetain(uintptr_t* context, int device);
int cuCtxPushCurrent_v2(uintptr_t context);
int cuCtxPopCurrent_v2(uintptr_t* context);
void fake_cuda_launch(uintptr_t stream, int value);
void fake_cuda_register(uintptr_t begin, size_t bytes, int type, int device);
void fake_cuda_forget(uintptr_t begin);
void fake_cuda_spend(int device, int64_t bytes);

typedef struct { int rank, nranks, device, async_error, in_progress, suspended; } Comm;
typedef struct { char internal[128]; } Id;
typedef struct { size_t size; unsigned magic, version; float estimate; } SimInfo;
typedef struct { size_t size; unsigned magic, version; void* ext; int minCTAs; } CollConfig;

static char text[1 << 20];
static size_t used;
static int fail_at = -1, fail_with, end_with, newest, calls;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
// What a communicator uses of its device's memory.
enum { COMM_BYTES = 3 << 20 };

static void note_list(const char* format, va_list arguments) {
  used += vsnprintf(text + used, sizeof text - used, format, arguments);
}
static void note(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  note_list(format, arguments);
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}
static int end(Comm* comm, const char* how) {
  if (fake_cuda_spend) fake_cuda_spend(comm->device, -COMM_BYTES);
  return free(comm), note("%s\n", how), 0;
}

const char* fake_log(void) { return text; }
void fake_clear(void) { text[used = 0] = 0; }
int fake_calls(void) { return calls; }
void fake_fail(int at, int result) { calls = 0; fail_at = at; fail_with = result; }
void fake_fail_end(int result) { end_with = result; }
void fake_async_error(Comm* comm, int result) { comm->async_error = result; }
void fake_in_progress(Comm* comm, int count) { comm->in_progress = count; }

int ncclGetVersion(int* version) { return *version = VERSION, 0; }
int ncclGetUniqueId(Id* id) { return memset(id, 7, sizeof *id), 0; }
const char* ncclGetErrorString(int result) { return result ? "something failed" : "no error"; }
const char* ncclGetLastError(Comm* comm) { return comm ? "the cause" : ""; }

int ncclCommInitRank(Comm** out, int nranks, Id id, int rank) {
  *out = calloc(1, sizeof **out);
  **out = (Comm){.rank = rank, .nranks = nranks};
  if (id.internal[0] != 7 || (cuCtxGetDevice && cuCtxGetDevice(&(*out)->device))) return 1;
  if (fake_cuda_spend) fake_cuda_spend((*out)->device, COMM_BYTES);
  return 0;
}
int ncclCommCount(Comm* comm, int* out) { return *out = comm->nranks, 0; }
int ncclCommUserRank(Comm* comm, int* out) { return *out = comm->rank, 0; }
int ncclCommCuDevice(Comm* comm, int* out) { return *out = comm->device, 0; }
int ncclCommGetAsyncError(Comm* comm, int* out) {
  *out = comm->in_progress > 0 && --comm->in_progress ? 7 : comm->async_error;
  return 0;
}
int ncclCommFinalize(Comm* comm) { return (void)comm, note("finalize\n"), 0; }
int ncclCommDestroy(Comm* comm) { return end(comm, "destroy"); }
int ncclCommAbort(Comm* comm) { return end(comm, "abort"); }
int ncclGroupStart(void) { return note("start\n"), newest = 0; }
int ncclGroupEnd(void) { return note("end\n"), end_with ? end_with : newest; }

static int call(Comm* comm, uintptr_t stream, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  note_list(format, arguments);
  used += sprintf(text + used, " stream %#lx\n", (unsigned long)stream);
  pthread_mutex_unlock(&lock);
  va_end(arguments);
  if (calls++ == fail_at) return fail_with;
  uintptr_t context;
  newest = comm->in_progress ? 7 : 0;
  if (!fake_cuda_launch) return newest;
  if (cuDevicePrimaryCtxRetain(&context, comm->device) || cuCtxPushCurrent_v2(context)) return 1;
  fake_cuda_launch(stream, calls);
  return cuCtxPopCurrent_v2(&context) ? 1 : newest;
}

#define TAIL Comm *comm, uintptr_t stream
#define PAIR const char *s, char *r
int ncclAllReduce(PAIR, size_t n, int type, int op, TAIL) {
  return call(comm, stream, "AllReduce %s %zu type %d op %d", s == r ? "in place" : "apart", n, type, op);
}
int ncclReduce(PAIR, size_t n, int type, int op, int root, TAIL) {
  (void)s;
  return call(comm, stream, "Reduce %s %zu type %d op %d root %d", r ? "to" : "from", n, type, op, root);
}
int ncclBroadcast(PAIR, size_t n, int type, int root, TAIL) {
  return call(comm, stream, "Broadcast %s %zu type %d root %d", s == r ? "in place" : "apart", n, type, root);
}
// Each rank writes a file and reads those of all ranks.
static void meet(const char* folder, const char* s, char* r, size_t bytes, const Comm* comm) {
  static int number;
  char path[512], draft[520];
  snprintf(path, sizeof path, "%s/%d.%d", folder, ++number, comm->rank);
  snprintf(draft, sizeof draft, "%s.new", path);
  FILE* file = fopen(draft, "w");
  fwrite(s, 1, bytes, file);
  fclose(file);
  rename(draft, path);
  for (int rank = 0; rank < comm->nranks; ++rank) {
    snprintf(path, sizeof path, "%s/%d.%d", folder, number, rank);
    while (!(file = fopen(path, "r"))) usleep(1000);
    if (fread(r + rank * bytes, 1, bytes, file) != bytes) abort();
    fclose(file);
  }
}
int ncclAllGather(PAIR, size_t n, int type, TAIL) {
  const char* folder = getenv("FAKE_NCCL_FOLDER");
  const size_t bytes = type == 4 ? 8 * n : type <= 1 ? n : 0;
  if (folder && bytes) meet(folder, s, r, bytes, comm);
  for (int rank = 0; !folder && type == 4 && rank < comm->nranks; ++rank) memcpy(r + rank * bytes, s, bytes);
  return call(comm, stream, "AllGather %ld %zu type %d", (long)(r - s), n, type);
}
int ncclReduceScatter(PAIR, size_t n, int type, int op, TAIL) {
  return call(comm, stream, "ReduceScatter %ld %zu type %d op %d", (long)(r - s), n, type, op);
}
int ncclSend(const char* s, size_t n, int type, int peer, TAIL) {
  return call(comm, stream, "Send %#lx %zu type %d to %d", (long)s, n, type, peer);
}
int ncclRecv(char* r, size_t n, int type, int peer, TAIL) {
  return call(comm, stream, "Recv %#lx %zu type %d from %d", (long)r, n, type, peer);
}
#if VERSION >= 21901
int ncclMemAlloc(void** out, size_t bytes) {
  int device = -1;
  if (bytes > (size_t)1 << 40) return 1;
  *out = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (cuCtxGetDevice && cuCtxGetDevice(&device)) return 1;
  if (fake_cuda_register) fake_cuda_register((uintptr_t)*out, bytes, 2, device);
  return note("MemAlloc %zu on device %d\n", bytes, device), 0;
}
int ncclMemFree(void* memory) {
  note("MemFree\n");
  if (fake_cuda_forget) fake_cuda_forget((uintptr_t)memory);
  return free(memory), 0;
}
int ncclCommRegister(Comm* comm, void* memory, size_t bytes, void** handle) {
  return (void)comm, note("Register %zu\n", bytes), *handle = memory, 0;
}
int ncclCommDeregister(Comm* comm, void* handle) { return (void)comm, (void)handle, note("Deregister\n"), 0; }
#endif
#if VERSION >= 22203
int ncclGroupSimulateEnd(SimInfo* info) {
  note("simulate\n");
  info->estimate = 12.5f;
  return end_with;
}
#endif
#if VERSION >= 22703
int ncclCommWindowRegister(Comm* comm, char* memory, size_t bytes, void** window, int flags) {
  (void)comm, *window = memory;
  return note("WindowRegister %zu at %ld of a page, flags %d\n", bytes, (long)memory % 4096, flags), 0;
}
int ncclCommWindowDeregister(Comm* comm, void* window) {
  return (void)comm, (void)window, note("WindowDeregister\n"), 0;
}
#endif
#if VERSION >= 22902
int ncclPutSignal(const void* s, size_t n, int type, int peer, void* window, size_t offset, int signal,
                  int context, unsigned flags, TAIL) {
  (void)s, (void)window;
  return call(comm, stream, "PutSignal %zu type %d to %d offset %zu signal %d context %d flags %u", n, type,
              peer, offset, signal, context, flags);
}
int ncclSignal(int peer, int signal, int context, unsigned flags, TAIL) {
  return call(comm, stream, "Signal to %d signal %d context %d flags %u", peer, signal, context, flags);
}
typedef struct { int count, peer, signal, context; } Wait;
int ncclWaitSignal(int n, const Wait* w, TAIL) {
  return call(comm, stream, "WaitSignal %d of signal %d context %d from %d (%d)", w->count, w->signal,
              w->context, w->peer, n);
}
int ncclGetPeerDevicePointer(char* window, size_t offset, int peer, void** out) {
  return *out = peer ? window + offset : NULL, 0;
}
#endif
#if VERSION >= 22803
int ncclAlltoAll(PAIR, size_t n, int type, TAIL) {
  return call(comm, stream, "AlltoAll %ld %zu type %d", (long)(r - s), n, type);
}
int ncclGather(PAIR, size_t n, int type, int root, TAIL) {
  return call(comm, stream, "Gather %s %zu type %d root %d", s && r ? "to" : "from", n, type, root);
}
int ncclScatter(PAIR, size_t n, int type, int root, TAIL) {
  return call(comm, stream, "Scatter %s %zu type %d root %d", s && r ? "from" : "to", n, type, root);
}
#endif
#if VERSION >= 22907
int ncclCommMemStats(Comm* comm, int what, uint64_t* out) {
  return *out = what == 1 ? comm->suspended : 100 << what, 0;
}
int ncclCommSuspend(Comm* comm, int flags) {
  return comm->suspended = flags & 1, note("suspend %d\n", flags), 0;
}
int ncclCommResume(Comm* comm) { return comm->suspended = 0, note("resume\n"), 0; }
#endif
#if VERSION >= 23102
int ncclAllReduceConfig(PAIR, size_t n, int type, int op, TAIL, const CollConfig* config) {
  (void)s, (void)r;
  return call(comm, stream, "AllReduceConfig %zu type %d op %d minCTAs %d", n, type, op, config->minCTAs);
}
int ncclAlltoAllConfig(PAIR, size_t n, int type, TAIL, const CollConfig* config) {
  (void)s, (void)r;
  return call(comm, stream, "AlltoAllConfig %zu type %d minCTAs %d", n, type, config->minCTAs);
}
#endif
"""


def source(version: int = 23203) -> str:
    """Return the C source of a library of a version; functions that it did not have are not there."""
    return f"#define VERSION {version}\n{_SOURCE}"


class Fake:
    """The test's side of the library that is loaded."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(pynccl.load().path)
        self._library.fake_log.restype = ctypes.c_char_p
        for call in (self._library.fake_async_error, self._library.fake_in_progress):
            call.argtypes = [ctypes.c_size_t, ctypes.c_int]

    def log(self) -> list[str]:
        """Return what was called since the last time."""
        lines: list[str] = self._library.fake_log().decode().splitlines()
        self._library.fake_clear()
        return lines

    def calls(self) -> int:
        """Return the number of operations since `fail`."""
        return int(self._library.fake_calls())

    def fail(self, at: int, result: int) -> None:
        """Have the operation `at`, counted from now, return a result; -1: none."""
        self._library.fake_fail(at, result)

    def fail_end(self, result: int) -> None:
        """Have the ends of groups return a result."""
        self._library.fake_fail_end(result)

    def async_error(self, comm: int, result: int) -> None:
        """Set a communicator's asynchronous error."""
        self._library.fake_async_error(comm, result)

    def in_progress(self, comm: int, count: int) -> None:
        """Have a communicator's calls be in progress until that was asked for so many times."""
        self._library.fake_in_progress(comm, count)
