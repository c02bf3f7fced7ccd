// A libcuda.so.1 without a GPU: it records every call and answers as the driver would.
//
// Streams hold a queue of launches, event records and event waits, which advance in order; a test can hold a
// stream, so that what depends on it stays undone. During a capture they record launches into a graph
// instead. The fake_cuda_* functions are the test's side.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  OK = 0,
  INVALID_VALUE = 1,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_READY = 600,
  LAUNCH_TIMEOUT = 702,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
};
enum { MAX_DEVICES = 16, MAX_OPS = 256, MAX_HANDLES = 256, MAX_STACK = 16, LOG_BYTES = 1 << 20 };
enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALID };
enum { MODE_RELAXED = 2 };
enum { NO_GRAPH, GRAPH, EXECUTABLE };

typedef struct {
  int device, retained;
} Context;
typedef struct {
  int used, device, recorded, done;
} Event;
typedef struct {
  enum { LAUNCH, RECORD, WAIT } kind;
  int value, generation;
} Op;
typedef struct {
  int used, device, held, capture, head, tail;
  Op ops[MAX_OPS];
  struct Graph* graph;
} Stream;
// Also an instantiated one, a copy.
typedef struct Graph {
  int kind, count, nodes[MAX_OPS];
} Graph;
typedef struct {
  uintptr_t begin, end;
  int type, device;
} Region;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Context contexts[MAX_DEVICES];
static Stream streams[MAX_HANDLES];
static Event events[MAX_HANDLES];
static Region regions[MAX_HANDLES];
static Graph graphs[MAX_HANDLES];
static int initialized, region_count;
static int64_t spent[MAX_DEVICES];
static char record[LOG_BYTES];
static struct {
  char name[64];
  int code;
} failure;
static __thread Context* stack[MAX_STACK];
static __thread int depth = 1;
static __thread int capture_mode;
static __thread Stream* captured[MAX_DEVICES];

static void note(const char* format, ...) {
  size_t used = strlen(record);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(record + used, LOG_BYTES - used, format, arguments);
  va_end(arguments);
}

static int device_count(void) {
  const char* text = getenv("FAKE_CUDA_DEVICES");
  return text ? atoi(text) : 2;
}

static int leave(int code) {
  pthread_mutex_unlock(&mutex);
  return code;
}

// Every function begins so: recorded, under the lock, and failing where the test wants it.
#define ENTER(function, ...)                                           \
  pthread_mutex_lock(&mutex);                                          \
  note(function " " __VA_ARGS__);                                      \
  note("\n");                                                          \
  if (strcmp(failure.name, function) == 0) return leave(failure.code); \
  if (!initialized && strcmp(function, "cuInit") != 0) return leave(NOT_INITIALIZED)

static void run(Stream* stream) {
  while (!stream->held && stream->head < stream->tail) {
    Op* op = &stream->ops[stream->head % MAX_OPS];
    Event* event = &events[op->value % MAX_HANDLES];
    if (op->kind == WAIT && event->used && event->done < op->generation) return;
    if (op->kind == RECORD) event->done = op->generation;
    if (op->kind == LAUNCH) note("run %d\n", op->value);
    ++stream->head;
  }
}

static void progress(void) {
  for (int round = 0; round < MAX_HANDLES; ++round)
    for (int i = 0; i < MAX_HANDLES; ++i)
      if (streams[i].used) run(&streams[i]);
}

// Handles are indices from 0x1000; below are the default streams of the current device.
static Stream* find_stream(uintptr_t handle) {
  if (handle <= 2) {
    Context* context = stack[depth - 1];
    if (!context) return NULL;
    Stream* stream = &streams[context->device];
    stream->used = 1;
    stream->device = context->device;
    return stream;
  }
  uintptr_t index = handle - 0x1000;
  return index >= MAX_DEVICES && index < MAX_HANDLES && streams[index].used ? &streams[index] : NULL;
}

static Event* find_event(uintptr_t handle) {
  uintptr_t index = handle - 0x2000;
  return index < MAX_HANDLES && events[index].used == 1 ? &events[index] : NULL;
}

static void push(Stream* stream, int kind, int value, int generation) {
  if (stream->tail - stream->head == MAX_OPS) abort();
  stream->ops[stream->tail++ % MAX_OPS] = (Op){kind, value, generation};
  progress();
}

// Records a launch into the graph of a stream that is captured.
static int capture(Stream* stream, int value) {
  Graph* graph = stream->graph;
  if (!graph) return 0;
  if (graph->count == MAX_OPS) abort();
  note("record %d\n", value);
  graph->nodes[graph->count++] = value;
  return 1;
}

// What may wait is forbidden to a thread that captures, and spoils its captures.
static int spoils(void) {
  int active = 0;
  for (int i = 0; i < MAX_DEVICES; ++i) {
    if (!captured[i] || capture_mode == MODE_RELAXED) continue;
    captured[i]->capture = CAPTURE_INVALID;
    active = 1;
  }
  return active;
}

static int stream_ready(const Stream* stream) { return stream->head == stream->tail; }
static int event_ready(const Event* event) { return event->done >= event->recorded; }

// --- the test's side ---

const char* fake_cuda_log(void) { return record; }

void fake_cuda_fail(const char* name, int code) {
  snprintf(failure.name, sizeof failure.name, "%s", name);
  failure.code = code;
}

void fake_cuda_hold(uintptr_t handle, int held) {
  pthread_mutex_lock(&mutex);
  find_stream(handle)->held = held;
  progress();
  pthread_mutex_unlock(&mutex);
}

void fake_cuda_launch(uintptr_t handle, int value) {
  pthread_mutex_lock(&mutex);
  if (!capture(find_stream(handle), value)) push(find_stream(handle), LAUNCH, value, 0);
  pthread_mutex_unlock(&mutex);
}

void fake_cuda_capture(uintptr_t handle, int status) { find_stream(handle)->capture = status; }

static void add_region(uintptr_t begin, size_t bytes, int type, int device) {
  regions[region_count++] = (Region){begin, begin + bytes, type, device};
}

void fake_cuda_register(uintptr_t begin, size_t bytes, int type, int device) {
  pthread_mutex_lock(&mutex);
  add_region(begin, bytes, type, device);
  pthread_mutex_unlock(&mutex);
}

void fake_cuda_forget(uintptr_t begin) {
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < region_count; ++i)
    if (regions[i].begin == begin) regions[i--] = regions[--region_count];
  pthread_mutex_unlock(&mutex);
}

// Memory of a device that a library uses for itself.
void fake_cuda_spend(int device, int64_t bytes) {
  pthread_mutex_lock(&mutex);
  spent[device] += bytes;
  pthread_mutex_unlock(&mutex);
}

// --- devices and contexts ---

int cuInit(unsigned int flags) {
  ENTER("cuInit", "%u", flags);
  initialized = 1;
  return leave(device_count() ? OK : NO_DEVICE);
}

int cuDriverGetVersion(int* version) {
  *version = 13010;
  return OK;
}

int cuGetErrorName(int error, const char** name) {
  *name = error == INVALID_VALUE         ? "CUDA_ERROR_INVALID_VALUE"
          : error == NO_DEVICE           ? "CUDA_ERROR_NO_DEVICE"
          : error == INVALID_CONTEXT     ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == INVALID_HANDLE      ? "CUDA_ERROR_INVALID_HANDLE"
          : error == LAUNCH_TIMEOUT      ? "CUDA_ERROR_LAUNCH_TIMEOUT"
          : error == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : error == CAPTURE_INVALIDATED ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
                                         : NULL;
  return *name ? OK : INVALID_VALUE;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == INVALID_HANDLE ? "invalid resource handle" : NULL;
  return *text ? OK : INVALID_VALUE;
}

int cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount", "");
  *count = device_count();
  return leave(OK);
}

int cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet", "%d", ordinal);
  *device = ordinal;
  return leave(ordinal >= 0 && ordinal < device_count() ? OK : INVALID_DEVICE);
}

int cuDeviceGetName(char* name, int length, int device) {
  ENTER("cuDeviceGetName", "%d", device);
  snprintf(name, length, "Fake %d", device);
  return leave(OK);
}

int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  ENTER("cuDeviceGetUuid_v2", "%d", device);
  const char* first = getenv("FAKE_CUDA_FIRST");  // which of the machine's devices is number 0 here
  for (int i = 0; i < 16; ++i) uuid[i] = (unsigned char)(16 * (device + (first ? atoi(first) : 0)) + i);
  return leave(OK);
}

int cuDeviceGetUuid(unsigned char* uuid, int device) {
  ENTER("cuDeviceGetUuid", "%d", device);
  memset(uuid, 0xee, 16);
  return leave(OK);
}

int cuDeviceGetPCIBusId(char* id, int length, int device) {
  ENTER("cuDeviceGetPCIBusId", "%d", device);
  snprintf(id, (size_t)length, "0000:%02X:00.0", device + 1);
  return leave(OK);
}

// FAKE_CUDA_PEERS=0: no device reaches another's memory.
int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER("cuDeviceCanAccessPeer", "%d %d", device, peer);
  const char* text = getenv("FAKE_CUDA_PEERS");
  *can = device != peer && (!text || atoi(text));
  return leave(OK);
}

// FAKE_CUDA_LINKS, such as "01:0:1 02:1:0": the rank and the atomics of the path between two devices, in
// either order; else 0 and 1. FAKE_CUDA_LINKS=none: the driver fails.
int cuDeviceGetP2PAttribute(int* value, int attribute, int device, int peer) {
  ENTER("cuDeviceGetP2PAttribute", "%d %d %d", attribute, device, peer);
  const char* text = getenv("FAKE_CUDA_LINKS");
  if (text && !strcmp(text, "none")) return leave(INVALID_VALUE);
  char pair[4] = {(char)('0' + (device < peer ? device : peer)),
                  (char)('0' + (device < peer ? peer : device)), ':', 0};
  const char* found = text ? strstr(text, pair) : NULL;
  // PERFORMANCE_RANK and NATIVE_ATOMIC_SUPPORTED.
  if (attribute != 1 && attribute != 3) return leave(INVALID_VALUE);
  *value = found ? found[attribute == 1 ? 3 : 5] - '0' : attribute == 3;
  return leave(OK);
}

int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  ENTER("cuDevicePrimaryCtxRetain", "%d", device);
  contexts[device].device = device;
  ++contexts[device].retained;
  *context = (uintptr_t)&contexts[device];
  return leave(OK);
}

int cuCtxGetCurrent(uintptr_t* context) {
  ENTER("cuCtxGetCurrent", "");
  *context = (uintptr_t)stack[depth - 1];
  return leave(OK);
}

static int known(Context* context) {
  return !context || (context >= contexts && context < contexts + MAX_DEVICES && context->retained);
}

int cuCtxSetCurrent(uintptr_t context) {
  ENTER("cuCtxSetCurrent", "%d", context ? ((Context*)context)->device : -1);
  if (!known((Context*)context)) return leave(INVALID_CONTEXT);
  stack[depth - 1] = (Context*)context;
  return leave(OK);
}

int cuCtxGetDevice(int* device) {
  ENTER("cuCtxGetDevice", "");
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  *device = stack[depth - 1]->device;
  return leave(OK);
}

int cuCtxPushCurrent_v2(uintptr_t context) {
  ENTER("cuCtxPushCurrent_v2", "%d", context ? ((Context*)context)->device : -1);
  if (!context || !known((Context*)context) || depth == MAX_STACK) return leave(INVALID_CONTEXT);
  stack[depth++] = (Context*)context;
  return leave(OK);
}

int cuCtxPopCurrent_v2(uintptr_t* context) {
  ENTER("cuCtxPopCurrent_v2", "");
  if (depth == 1) return leave(INVALID_CONTEXT);
  *context = (uintptr_t)stack[--depth];
  return leave(OK);
}

int cuCtxSynchronize(void) {
  ENTER("cuCtxSynchronize", "");
  if (spoils()) return leave(CAPTURE_UNSUPPORTED);
  return leave(stack[depth - 1] ? OK : INVALID_CONTEXT);
}

// --- streams and events ---

int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER("cuThreadExchangeStreamCaptureMode", "%d", *mode);
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return leave(OK);
}

int cuStreamCreate(uintptr_t* handle, unsigned int flags) {
  ENTER("cuStreamCreate", "%u", flags);
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  for (int i = MAX_DEVICES; i < MAX_HANDLES; ++i) {
    if (streams[i].used) continue;
    memset(&streams[i], 0, sizeof streams[i]);
    streams[i].used = 1;
    streams[i].device = stack[depth - 1]->device;
    *handle = 0x1000 + i;
    return leave(OK);
  }
  return leave(INVALID_VALUE);
}

#define STREAM(handle)                  \
  Stream* stream = find_stream(handle); \
  if (!stream) return leave(handle <= 2 ? INVALID_CONTEXT : INVALID_HANDLE)

#define EVENT(handle)                \
  Event* event = find_event(handle); \
  if (!event) return leave(INVALID_HANDLE)

int cuStreamDestroy_v2(uintptr_t handle) {
  ENTER("cuStreamDestroy_v2", "%#lx", (unsigned long)handle);
  STREAM(handle);
  stream->used = 0;
  return leave(OK);
}

int cuStreamQuery(uintptr_t handle) {
  ENTER("cuStreamQuery", "%#lx", (unsigned long)handle);
  STREAM(handle);
  if (stream->graph) {
    stream->capture = CAPTURE_INVALID;
    return leave(CAPTURE_UNSUPPORTED);
  }
  return leave(stream_ready(stream) ? OK : NOT_READY);
}

int cuStreamIsCapturing(uintptr_t handle, int* status) {
  ENTER("cuStreamIsCapturing", "%#lx", (unsigned long)handle);
  STREAM(handle);
  *status = stream->capture;
  return leave(OK);
}

int cuStreamWaitEvent(uintptr_t handle, uintptr_t event_handle, unsigned int flags) {
  ENTER("cuStreamWaitEvent", "%#lx %#lx %u", (unsigned long)handle, (unsigned long)event_handle, flags);
  STREAM(handle);
  EVENT(event_handle);
  if (stream->graph) return leave(CAPTURE_UNSUPPORTED);  // real drivers record it
  push(stream, WAIT, (int)(event - events), event->recorded);
  return leave(OK);
}

int cuEventCreate(uintptr_t* handle, unsigned int flags) {
  ENTER("cuEventCreate", "%u", flags);
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  for (int i = 0; i < MAX_HANDLES; ++i) {
    if (events[i].used) continue;
    events[i] = (Event){1, stack[depth - 1]->device, 0, 0};
    *handle = 0x2000 + i;
    return leave(OK);
  }
  return leave(INVALID_VALUE);
}

int cuEventDestroy_v2(uintptr_t handle) {
  ENTER("cuEventDestroy_v2", "%#lx", (unsigned long)handle);
  EVENT(handle);
  // As with the driver, the work that waits for it still does: here the event lives on until it has happened.
  event->used = event_ready(event) ? 0 : 2;
  return leave(OK);
}

int cuEventRecord(uintptr_t handle, uintptr_t stream_handle) {
  ENTER("cuEventRecord", "%#lx %#lx", (unsigned long)handle, (unsigned long)stream_handle);
  EVENT(handle);
  STREAM(stream_handle);
  if (event->device != stream->device) return leave(INVALID_HANDLE);
  if (stream->graph) return leave(CAPTURE_UNSUPPORTED);  // real drivers record it
  push(stream, RECORD, (int)(event - events), ++event->recorded);
  return leave(OK);
}

int cuEventQuery(uintptr_t handle) {
  ENTER("cuEventQuery", "%#lx", (unsigned long)handle);
  EVENT(handle);
  return leave(event_ready(event) ? OK : NOT_READY);
}

// --- graphs ---

static Graph* new_graph(int kind) {
  for (int i = 0; i < MAX_HANDLES; ++i) {
    if (graphs[i].kind != NO_GRAPH) continue;
    graphs[i] = (Graph){.kind = kind};
    return &graphs[i];
  }
  abort();
}

static Graph* find_graph(uintptr_t handle, int kind) {
  uintptr_t index = handle - 0x3000;
  return index < MAX_HANDLES && graphs[index].kind == kind ? &graphs[index] : NULL;
}

static uintptr_t graph_handle(const Graph* graph) { return 0x3000 + (uintptr_t)(graph - graphs); }

int cuStreamBeginCapture_v2(uintptr_t handle, int mode) {
  ENTER("cuStreamBeginCapture_v2", "%#lx %d", (unsigned long)handle, mode);
  STREAM(handle);
  if (handle <= 1) return leave(CAPTURE_UNSUPPORTED);
  if (stream->capture) return leave(ILLEGAL_STATE);
  for (int i = 0; i < MAX_DEVICES; ++i) {
    if (captured[i]) continue;
    captured[i] = stream;
    stream->capture = CAPTURE_ACTIVE;
    stream->graph = new_graph(GRAPH);
    return leave(OK);
  }
  abort();
}

int cuStreamEndCapture(uintptr_t handle, uintptr_t* graph) {
  ENTER("cuStreamEndCapture", "%#lx", (unsigned long)handle);
  STREAM(handle);
  for (int i = 0; i < MAX_DEVICES; ++i) {
    if (captured[i] != stream) continue;
    const int valid = stream->capture == CAPTURE_ACTIVE;
    *graph = valid ? graph_handle(stream->graph) : 0;
    if (!valid) stream->graph->kind = NO_GRAPH;
    captured[i] = NULL;
    stream->capture = CAPTURE_NONE;
    stream->graph = NULL;
    return leave(valid ? OK : CAPTURE_INVALIDATED);
  }
  return leave(ILLEGAL_STATE);
}

int cuGraphInstantiateWithFlags(uintptr_t* executable, uintptr_t handle, unsigned long long flags) {
  ENTER("cuGraphInstantiateWithFlags", "%#lx %llu", (unsigned long)handle, flags);
  const Graph* graph = find_graph(handle, GRAPH);
  if (!graph) return leave(INVALID_VALUE);
  Graph* copy = new_graph(EXECUTABLE);
  memcpy(copy->nodes, graph->nodes, sizeof copy->nodes);
  copy->count = graph->count;
  *executable = graph_handle(copy);
  return leave(OK);
}

int cuGraphLaunch(uintptr_t executable, uintptr_t handle) {
  ENTER("cuGraphLaunch", "%#lx %#lx", (unsigned long)executable, (unsigned long)handle);
  const Graph* graph = find_graph(executable, EXECUTABLE);
  STREAM(handle);
  if (!graph) return leave(INVALID_VALUE);
  if (stream->graph) return leave(CAPTURE_UNSUPPORTED);  // real drivers record it
  for (int i = 0; i < graph->count; ++i) push(stream, LAUNCH, graph->nodes[i], 0);
  return leave(OK);
}

static int destroy_graph(uintptr_t handle, int kind) {
  Graph* graph = find_graph(handle, kind);
  if (!graph) return INVALID_VALUE;
  graph->kind = NO_GRAPH;
  return OK;
}

int cuGraphExecDestroy(uintptr_t executable) {
  ENTER("cuGraphExecDestroy", "%#lx", (unsigned long)executable);
  return leave(destroy_graph(executable, EXECUTABLE));
}

int cuGraphDestroy(uintptr_t graph) {
  ENTER("cuGraphDestroy", "%#lx", (unsigned long)graph);
  return leave(destroy_graph(graph, GRAPH));
}

// --- memory ---

int cuPointerGetAttribute(void* data, int attribute, unsigned long long pointer) {
  ENTER("cuPointerGetAttribute", "%d", attribute);
  for (int i = 0; i < region_count; ++i) {
    Region* region = &regions[i];
    if (pointer < region->begin || pointer >= region->end) continue;
    int managed = region->type == 4;
    *(int*)data = attribute == 2 ? (managed ? 2 : region->type) : attribute == 8 ? managed : region->device;
    return leave(OK);
  }
  return leave(INVALID_VALUE);
}

// Each device has 16 GiB.
int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ENTER("cuMemGetInfo_v2", "");
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  const int device = stack[depth - 1]->device;
  *total = (size_t)16 << 30;
  *free_bytes = *total - (size_t)spent[device];
  for (int i = 0; i < region_count; ++i)
    if (regions[i].type == 2 && regions[i].device == device) *free_bytes -= regions[i].end - regions[i].begin;
  return leave(OK);
}

int cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  ENTER("cuMemAlloc_v2", "%zu", bytes);
  if (spoils()) return leave(CAPTURE_UNSUPPORTED);
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  *pointer = (unsigned long long)(uintptr_t)calloc(1, bytes);
  add_region((uintptr_t)*pointer, bytes, 2, stack[depth - 1]->device);
  return leave(OK);
}

int cuMemFree_v2(unsigned long long pointer) {
  ENTER("cuMemFree_v2", "");
  for (int i = 0; i < region_count; ++i) {
    if (regions[i].begin != pointer) continue;
    regions[i] = regions[--region_count];
    free((void*)(uintptr_t)pointer);
    return leave(OK);
  }
  return leave(INVALID_VALUE);
}

int cuMemcpyHtoD_v2(unsigned long long to, uintptr_t from, size_t bytes) {
  ENTER("cuMemcpyHtoD_v2", "%zu", bytes);
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  if (spoils()) return leave(CAPTURE_UNSUPPORTED);
  memcpy((void*)(uintptr_t)to, (const void*)from, bytes);
  return leave(OK);
}

int cuMemcpyDtoH_v2(uintptr_t to, unsigned long long from, size_t bytes) {
  ENTER("cuMemcpyDtoH_v2", "%zu", bytes);
  if (!stack[depth - 1]) return leave(INVALID_CONTEXT);
  if (spoils()) return leave(CAPTURE_UNSUPPORTED);
  memcpy((void*)to, (const void*)(uintptr_t)from, bytes);
  return leave(OK);
}
