// A libnccl over the fake driver: it moves nothing, but takes its device from the current context as NCCL
// does, launches its work on the stream that it is given, and records the calls.
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuCtxGetDevice(int* device);
int cuDevicePrimaryCtxRetain(uintptr_t* context, int device);
int cuCtxPushCurrent_v2(uintptr_t context);
int cuCtxPopCurrent_v2(uintptr_t* context);
void fake_cuda_launch(uintptr_t stream, int value);

struct comm {
  int rank, nranks, device, async_error, in_progress;
};
static char record[1 << 16];

static void note(const char* format, ...) {
  size_t used = strlen(record);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(record + used, sizeof record - used, format, arguments);
  va_end(arguments);
}

const char* null_log(void) { return record; }
void null_async_error(struct comm* comm, int result) { comm->async_error = result; }
// The next all_reduce is in progress until that was asked for so many times.
void null_in_progress(struct comm* comm, int count) { comm->in_progress = count; }

int ncclGetVersion(int* version) { return *version = 22809, 0; }
int ncclGetUniqueId(char* id) { return memset(id, 7, 128), 0; }
const char* ncclGetErrorString(int result) { return result ? "something" : "no error"; }
const char* ncclGetLastError(struct comm* comm) { return comm ? "what happened" : ""; }

typedef struct {
  char internal[128];
} Id;

int ncclCommInitRank(struct comm** out, int nranks, Id id, int rank) {
  struct comm* comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->nranks = nranks;
  if (cuCtxGetDevice(&comm->device)) return 1;
  note("init rank %d of %d on device %d, id %d\n", rank, nranks, comm->device, id.internal[0]);
  *out = comm;
  return 0;
}

int ncclCommCount(struct comm* comm, int* out) { return *out = comm->nranks, 0; }
int ncclCommUserRank(struct comm* comm, int* out) { return *out = comm->rank, 0; }
int ncclCommCuDevice(struct comm* comm, int* out) { return *out = comm->device, 0; }
int ncclCommGetAsyncError(struct comm* comm, int* out) {
  *out = comm->in_progress > 0 && --comm->in_progress ? 7 : comm->async_error;
  return 0;
}

// Whatever device is current, the work is for the communicator's.
static int launch(struct comm* comm, uintptr_t stream, int value) {
  uintptr_t context;
  if (cuDevicePrimaryCtxRetain(&context, comm->device) || cuCtxPushCurrent_v2(context)) return 1;
  fake_cuda_launch(stream, value);
  return cuCtxPopCurrent_v2(&context) != 0;
}

static int newest;

int ncclAllReduce(const void* send, void* recv, size_t count, int type, int op, struct comm* comm,
                  uintptr_t stream) {
  note("all_reduce %s count %zu type %d op %d stream %#lx rank %d\n",
       send == recv ? "in place" : "out of place", count, type, op, (unsigned long)stream, comm->rank);
  if (launch(comm, stream, (int)count)) return 1;
  return newest = comm->in_progress ? 7 : 0;
}

int ncclGroupStart(void) { return newest = 0; }
int ncclGroupEnd(void) { return newest; }

int ncclBroadcast(const void* send, void* recv, size_t count, int type, int root, struct comm* comm,
                  uintptr_t stream) {
  note("broadcast %s count %zu type %d root %d stream %#lx rank %d\n",
       send == recv ? "in place" : "out of place", count, type, root, (unsigned long)stream, comm->rank);
  return launch(comm, stream, (int)count);
}

int ncclCommFinalize(struct comm* comm) { return note("finalize %d\n", comm->rank), 0; }
int ncclCommDestroy(struct comm* comm) { return note("destroy %d\n", comm->rank), 0; }
int ncclCommAbort(struct comm* comm) { return note("abort %d\n", comm->rank), 0; }
