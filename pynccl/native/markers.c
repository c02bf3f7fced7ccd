#include "markers.h"

static int pynccl_event_done(const pynccl_watch* w, uintptr_t event) {
  // The CPU library returns the error of the work before the event.
  return w->is_cpu ? pyncclCpuEventQuery(event) != ncclInProgress : cuEventQuery(event) == 0;
}

static int pynccl_event_new(const pynccl_watch* w, uintptr_t* event) {
  const unsigned no_timing = 2;
  return w->is_cpu ? pyncclCpuEventCreate(event) : cuEventCreate(event, no_timing);
}

void pynccl_event_free(const pynccl_watch* w, uintptr_t event) {
  if (!event) return;
  if (w->is_cpu)
    pyncclCpuEventDestroy(event);
  else
    cuEventDestroy_v2(event);
}

static pynccl_marker* pynccl_marker_of(pynccl_watch* w, uintptr_t stream) {
  for (int i = 0; i < w->marker_count; ++i)
    if (w->markers[i].stream == stream) return &w->markers[i];
  // Reuse a marker without outstanding calls.
  for (int i = 0; i < w->marker_count; ++i)
    if (!w->markers[i].pending) {
      w->markers[i].stream = stream;
      return &w->markers[i];
    }
  pynccl_marker* markers = pynccl_room(w->markers, w->marker_count, &w->marker_capacity, sizeof *markers);
  if (!markers) return NULL;
  w->markers = markers;
  pynccl_marker fresh = {.stream = stream};
  if (pynccl_event_new(w, &fresh.events[0])) return NULL;
  if (pynccl_event_new(w, &fresh.events[1])) {
    pynccl_event_free(w, fresh.events[0]);
    return NULL;
  }
  markers[w->marker_count] = fresh;
  return &markers[w->marker_count++];
}

void pynccl_mark(pynccl_watch* w, uintptr_t stream) {
  int capturing = 0;
  uintptr_t before;
  if (!w->is_cpu && (!w->context || cuCtxPushCurrent_v2(w->context))) return;
  const int may = w->is_cpu || (cuStreamIsCapturing(stream, &capturing) == 0 && !capturing);
  pynccl_marker* m = may ? pynccl_marker_of(w, stream) : NULL;
  if (m) {
    const int which = m->pending != 0;
    const uintptr_t event = m->events[which], handle = w->handle;
    m->recording = 1;
    ++w->touching;
    // Without the lock: recording an event blocks if the stream hangs and its queue is full.
    pthread_mutex_unlock(&pynccl_watchdog.lock);
    const int r = w->is_cpu ? pyncclCpuEventRecord(handle, event, stream) : cuEventRecord(event, stream);
    pthread_mutex_lock(&pynccl_watchdog.lock);
    --w->touching;
    m->recording = 0;
    if (!r) {
      m->at[which] = pynccl_now();
      m->calls[which] = pynccl_calls(w);
      m->kind[which] = pynccl_newest_kind(w);
      m->pending |= 1 << which;
    }
    pthread_cond_broadcast(&pynccl_watchdog.changed);
  }
  if (!w->is_cpu) cuCtxPopCurrent_v2(&before);
}

int pynccl_oldest(pynccl_watch* w, pynccl_marker* oldest) {
  int found = 0;
  for (int i = 0; i < w->marker_count; ++i) {
    pynccl_marker* m = &w->markers[i];
    if (m->pending && !m->recording && pynccl_event_done(w, m->events[0])) {
      const uintptr_t event = m->events[0];
      m->events[0] = m->events[1];
      m->events[1] = event;
      m->at[0] = m->at[1];
      m->calls[0] = m->calls[1];
      m->kind[0] = m->kind[1];
      m->pending >>= 1;
    }
    if (m->pending && (!found || m->at[0] < oldest->at[0])) {
      *oldest = *m;
      found = 1;
    }
  }
  return found;
}
