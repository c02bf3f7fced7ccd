// Included by the generated binding, behind channel.c.
//
// The library is called without the lock, except for questions that it answers at once; whatever may take long
// (revoke, abort) has a thread of its own.

// The flight recorder's, where there is one.
void pynccl_dump_on_trouble(pynccl_comm* comm, const char* why) __attribute__((weak));

// --- verdicts ----------------------------------------------------------------------------------------------

static void* pynccl_cure_it(void* argument) {
  pynccl_watch* w = argument;
  pynccl_comm* comm = w->comm;
  if (pynccl_dump_on_trouble) pynccl_dump_on_trouble(comm, w->verdict.text);
  // Who waits in slices has left by then, and no longer asks the library about it.
  if (w->cure == PYNCCL_ABORT) usleep(250000);
  pthread_mutex_lock(&dog.lock);
  const uintptr_t handle = w->handle;
  if (handle && w->cure == PYNCCL_ABORT) {
    w->handle = 0;
    w->ended = 1;
  }
  pthread_mutex_unlock(&dog.lock);
  if (handle && w->cure == PYNCCL_REVOKE) ncclCommRevoke(handle, NCCL_REVOKE_DEFAULT);
  if (handle && w->cure == PYNCCL_ABORT) ncclCommAbort(handle);
  pthread_mutex_lock(&dog.lock);
  w->curing = 0;
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
  pynccl_comm_release(comm);
  return NULL;
}

static int pynccl_start_thread(void* (*work)(void*), void* argument) {
  sigset_t all, before;
  pthread_t thread;
  pthread_attr_t attributes;
  sigfillset(&all);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // Signals are for the program's own threads.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int r = pthread_create(&thread, &attributes, work, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return r;
}

// The verdict is written: publish it, tell the other ranks, and end what is outstanding.
static void pynccl_publish(pynccl_watch* w, int trouble) {
  pynccl_verdict* v = &w->verdict;
  __atomic_store_n(&v->trouble, trouble, __ATOMIC_RELEASE);
  // Every later call is refused, at no cost to those before.
  __atomic_store_n(&w->comm->handle, 0, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&dog.changed);
  for (int i = 0; i < v->count; ++i) {
    const pynccl_frame failed = {.kind = FRAME_FAILED, .number = (uint64_t)v->ranks[i]};
    pynccl_tell_all(w, &failed);
  }
  for (const char* rest = v->text; *rest; rest += strnlen(rest, PYNCCL_FRAME_TEXT - 1)) {
    pynccl_frame text = {.kind = FRAME_TEXT};
    memcpy(text.text, rest, strnlen(rest, PYNCCL_FRAME_TEXT - 1));
    pynccl_tell_all(w, &text);
  }
  const pynccl_frame told = {.kind = FRAME_TROUBLE, .code = (uint32_t)trouble, .number = (uint64_t)v->result};
  pynccl_tell_all(w, &told);
  w->curing = 1;
  __atomic_add_fetch(&w->comm->references, 1, __ATOMIC_RELAXED);
  if (pynccl_start_thread(pynccl_cure_it, w)) {
    w->curing = 0;
    // The caller holds another reference.
    __atomic_sub_fetch(&w->comm->references, 1, __ATOMIC_ACQ_REL);
  }
}

static void pynccl_add_rank(pynccl_verdict* v, int rank) {
  if (v->count < PYNCCL_MOST_RANKS) v->ranks[v->count++] = rank;
}

static void pynccl_condemn_failed(pynccl_watch* w) {
  pynccl_verdict* v = &w->verdict;
  v->count = 0;
  v->text[0] = 0;
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int aborted = p->goodbye == PYNCCL_ABORTS_FIRST, died = p->gone && !p->goodbye;
    if (!aborted && !died && !p->suspect) continue;
    pynccl_add_rank(v, r);
    pynccl_say(v->text, sizeof v->text, "%srank %d ", v->count > 1 ? "; " : "", r);
    if (died || aborted)
      pynccl_say(v->text, sizeof v->text, "%s",
                 aborted ? "aborted its communicator" : "died, or exited without closing its communicator");
    else if (r == w->rank)
      pynccl_say(v->text, sizeof v->text, "(this one) did not respond, and the others go on without it");
    else
      pynccl_say(v->text, sizeof v->text, "is not responding: last heard of %.1f s ago",
                 (double)(pynccl_now() - p->heard) / 1e9);
  }
  if (v->count) {
    pynccl_say(v->text, sizeof v->text, " (noticed by rank %d of %d)", w->rank, w->size);
    pynccl_publish(w, PYNCCL_RANKS_FAILED);
  }
  w->dying = 0;
}

static const char* const pynccl_kind_names[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                                                "reduce_scatter", "all_to_all", "gather",    "scatter",
                                                "send",           "recv"};

static int pynccl_silent(const pynccl_peer* p, int64_t now, int64_t limit) {
  return !p->gone && !p->goodbye && p->socket >= 0 && now - p->heard > limit;
}

static uint64_t pynccl_calls_of(const pynccl_watch* w, int rank) {
  return rank == w->rank ? w->calls : w->peers[rank].calls;
}

// Say why something took too long: silent ranks, or what every rank has called.
static int pynccl_explain(pynccl_watch* w, const char* what, pynccl_verdict* v) {
  const int64_t now = pynccl_now();
  *v = (pynccl_verdict){0};
  pynccl_say(v->text, sizeof v->text, "%s", what);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (r == w->rank || !pynccl_silent(p, now, SILENCE_NS)) continue;
    pynccl_add_rank(v, r);
    pynccl_say(v->text, sizeof v->text, "; rank %d is not responding: last heard of %.1f s ago", r,
               (double)(now - p->heard) / 1e9);
  }
  if (v->count) return v->trouble = PYNCCL_RANKS_FAILED;
  int connected = 0;
  for (int r = 0; r < w->size; ++r) connected += w->peers[r].socket >= 0 || w->peers[r].goodbye;
  if (!connected) return v->trouble = PYNCCL_TIMED_OUT;
  pynccl_say(v->text, sizeof v->text, "; all ranks respond, and have called:");
  for (int r = 0, end; r < w->size; r = end) {
    const uint64_t calls = pynccl_calls_of(w, r);
    const int kind = r == w->rank ? w->last_kind : w->peers[r].last_kind;
    for (end = r + 1; end < w->size && pynccl_calls_of(w, end) == calls; ++end)
      if ((end == w->rank ? w->last_kind : w->peers[end].last_kind) != kind ||
          w->peers[end].goodbye != w->peers[r].goodbye)
        break;
    pynccl_say(v->text, sizeof v->text, end == r + 1 ? "%s rank %d" : "%s ranks %d", r ? "," : "", r);
    if (end > r + 1) pynccl_say(v->text, sizeof v->text, "-%d", end - 1);
    if (!calls) pynccl_say(v->text, sizeof v->text, ": nothing");
    if (calls) pynccl_say(v->text, sizeof v->text, ": #%llu %s", (unsigned long long)calls, pynccl_kind_names[kind]);
    if (w->peers[r].goodbye) pynccl_say(v->text, sizeof v->text, ", then closed its communicator");
  }
  return v->trouble = PYNCCL_TIMED_OUT;
}

// --- streams -----------------------------------------------------------------------------------------------

static int pynccl_event_done(const pynccl_watch* w, uintptr_t event) {
  return (w->is_cpu ? pyncclCpuEventQuery(event) : cuEventQuery(event)) == 0;
}

static int pynccl_event_new(const pynccl_watch* w, uintptr_t* event) {
  const unsigned no_timing = 2;
  return w->is_cpu ? pyncclCpuEventCreate(event) : cuEventCreate(event, no_timing);
}

static void pynccl_event_free(const pynccl_watch* w, uintptr_t event) {
  if (!event) return;
  if (w->is_cpu)
    pyncclCpuEventDestroy(event);
  else
    cuEventDestroy_v2(event);
}

static pynccl_marker* pynccl_marker_of(pynccl_watch* w, uintptr_t stream) {
  for (int i = 0; i < w->marker_count; ++i)
    if (w->markers[i].stream == stream) return &w->markers[i];
  // One whose calls are done is free for another stream.
  for (int i = 0; i < w->marker_count; ++i)
    if (!w->markers[i].pending) {
      w->markers[i].stream = stream;
      return &w->markers[i];
    }
  if (w->marker_count == w->marker_capacity) {
    const int capacity = 2 * w->marker_capacity + 4;
    pynccl_marker* more = realloc(w->markers, (size_t)capacity * sizeof *more);
    if (!more) return NULL;
    w->markers = more;
    w->marker_capacity = capacity;
  }
  pynccl_marker fresh = {.stream = stream};
  if (pynccl_event_new(w, &fresh.events[0])) return NULL;
  if (pynccl_event_new(w, &fresh.events[1])) {
    pynccl_event_free(w, fresh.events[0]);
    return NULL;
  }
  w->markers[w->marker_count] = fresh;
  return &w->markers[w->marker_count++];
}

// By the thread that has just issued on the stream: nobody else may touch a stream, which may be captured.
static void pynccl_mark(pynccl_watch* w, uintptr_t stream) {
  int capturing = 0;
  uintptr_t before;
  if (!w->is_cpu && (!w->context || cuCtxPushCurrent_v2(w->context))) return;
  if (w->is_cpu || (cuStreamIsCapturing(stream, &capturing) == 0 && !capturing)) {
    pynccl_marker* m = pynccl_marker_of(w, stream);
    const int which = m && m->pending;
    if (m && (w->is_cpu ? pyncclCpuEventRecord(w->handle, m->events[which], stream)
                        : cuEventRecord(m->events[which], stream)) == 0) {
      m->at[which] = pynccl_now();
      m->pending |= 1 << which;
    }
  }
  if (!w->is_cpu) cuCtxPopCurrent_v2(&before);
}

// Answers since when calls of the communicator have been outstanding on a stream; 0 when none has.
static int64_t pynccl_oldest(pynccl_watch* w, uintptr_t* stream) {
  int64_t oldest = 0;
  for (int i = 0; i < w->marker_count; ++i) {
    pynccl_marker* m = &w->markers[i];
    if (m->pending && pynccl_event_done(w, m->events[0])) {
      const uintptr_t event = m->events[0];
      m->events[0] = m->events[1];
      m->events[1] = event;
      m->at[0] = m->at[1];
      m->pending >>= 1;
    }
    if (m->pending && (!oldest || m->at[0] < oldest)) {
      oldest = m->at[0];
      *stream = m->stream;
    }
  }
  return oldest;
}

// --- the thread --------------------------------------------------------------------------------------------

// Ask the library for an error in the background, without the lock.
static int pynccl_ask(pynccl_watch* w) {
  const uintptr_t handle = w->handle;
  int state = 0;
  w->touching = 1;
  pthread_mutex_unlock(&dog.lock);
  const int r = ncclCommGetAsyncError(handle, &state);
  pthread_mutex_lock(&dog.lock);
  w->touching = 0;
  pthread_cond_broadcast(&dog.changed);
  return r || state == ncclInProgress ? 0 : state;
}

static void pynccl_look_after(pynccl_watch* w, int64_t now) {
  if (w->verdict.trouble) return;
  if (w->dying && now - w->dying > GRACE_NS) pynccl_condemn_failed(w);
  if (w->verdict.trouble) return;
  if (w->handle && !w->library_error && (w->library_error = pynccl_ask(w))) w->library_at = now;
  if (!w->listed || w->verdict.trouble) return;
  // A dead rank is the better explanation, and may be noticed a little later.
  if (w->library_error && now - w->library_at > SILENCE_NS) {
    const char* text = w->handle ? ncclGetLastError(w->handle) : NULL;
    w->verdict.result = w->library_error;
    w->verdict.text[0] = 0;
    pynccl_say(w->verdict.text, sizeof w->verdict.text, "the library reports: %s", text ? text : "");
    pynccl_publish(w, PYNCCL_LIBRARY_FAILED);
    return;
  }
  if (!w->timeout) return;
  uintptr_t stream = 0;
  uintptr_t before;
  const int inside_context = w->context && w->marker_count && cuCtxPushCurrent_v2(w->context) == 0;
  const int64_t issued = pynccl_oldest(w, &stream);
  if (inside_context) cuCtxPopCurrent_v2(&before);
  const int64_t in_call = __atomic_load_n(&w->in_call, __ATOMIC_ACQUIRE);
  const int inside = in_call && now - in_call > w->timeout;
  if (!inside && !(issued && now - issued > w->timeout)) return;
  // Whether a silent rank is stopped is known only after a while.
  for (int r = 0; r < w->size; ++r)
    if (pynccl_silent(&w->peers[r], now, 2 * BEAT_NS) && !pynccl_silent(&w->peers[r], now, SILENCE_NS))
      return;
  char what[160] = "";
  const double seconds = (double)w->timeout / 1e9;
  if (inside)
    pynccl_say(what, sizeof what, "a call of %s did not return within %g s", pynccl_kind_names[w->last_kind],
               seconds);
  else
    pynccl_say(what, sizeof what, "calls on stream %#lx did not complete within %g s", (unsigned long)stream,
               seconds);
  pynccl_verdict v;
  const int trouble = pynccl_explain(w, what, &v);
  v.trouble = PYNCCL_FINE;
  w->verdict = v;
  pynccl_publish(w, trouble);
}

static __thread int pynccl_is_watchdog;

static pynccl_watch* pynccl_find_watch(uint32_t id) {
  pynccl_watch* w = dog.watches;
  while (w && w->id != id) w = w->next;
  return w;
}

static void* pynccl_watch_all(void* nothing) {
  (void)nothing;
  pynccl_is_watchdog = 1;
  // Asking for an event would otherwise spoil a capture that another thread has begun.
  int relaxed = 2;
  cuThreadExchangeStreamCaptureMode(&relaxed);
  struct epoll_event events[64];
  int64_t last = pynccl_now();
  pthread_mutex_lock(&dog.lock);
  while (dog.watches) {
    pthread_mutex_unlock(&dog.lock);
    const int n = epoll_wait(dog.epoll, events, 64, TICK_MS);
    pthread_mutex_lock(&dog.lock);
    int64_t now = pynccl_now();
    // This process itself was stopped, or starved: it cannot say of the others that they were silent.
    if (now - last > SILENCE_NS / 2)
      for (pynccl_watch* w = dog.watches; w; w = w->next)
        for (int r = 0; r < w->size; ++r) w->peers[r].heard = now;
    last = now;
    for (int i = 0; i < n; ++i) {
      if (!events[i].data.u64) {
        uint64_t count;
        (void)!read(dog.wake, &count, sizeof count);
        continue;
      }
      pynccl_watch* w = pynccl_find_watch((uint32_t)(events[i].data.u64 >> 32));
      const int rank = (int)(uint32_t)events[i].data.u64;
      if (w && events[i].events & EPOLLOUT && w->peers[rank].socket >= 0) pynccl_flush(w, rank);
      if (w && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) pynccl_read(w, rank);
    }
    const int beat = now - dog.beat_at >= BEAT_NS;
    if (beat) dog.beat_at = now;
    // Looking after one lets go of the lock: go by numbers, since the list may change.
    for (uint32_t id = 0;;) {
      pynccl_watch* next = NULL;
      for (pynccl_watch* w = dog.watches; w; w = w->next)
        if (w->id > id && (!next || w->id < next->id)) next = w;
      if (!next) break;
      id = next->id;
      if (beat) pynccl_beat(next);
      __atomic_add_fetch(&next->comm->references, 1, __ATOMIC_RELAXED);
      pynccl_look_after(next, now);
      pthread_mutex_unlock(&dog.lock);
      pynccl_comm_release(next->comm);
      pthread_mutex_lock(&dog.lock);
    }
  }
  close(dog.epoll);
  close(dog.wake);
  dog.epoll = dog.wake = -1;
  dog.running = 0;
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
  return NULL;
}

static void pynccl_before_fork(void) { pthread_mutex_lock(&dog.lock); }
static void pynccl_in_parent(void) { pthread_mutex_unlock(&dog.lock); }

// An open copy of the parent's connections would hide its death from the other ranks.
static void pynccl_in_child(void) {
  for (pynccl_watch* w = dog.watches; w; w = w->next) {
    w->listed = w->curing = w->touching = 0;
    w->handle = 0;
    w->marker_count = 0;
    for (int r = 0; r < w->size; ++r) {
      if (w->peers[r].socket >= 0) close(w->peers[r].socket);
      w->peers[r].socket = -1;
    }
  }
  if (dog.epoll >= 0) close(dog.epoll);
  if (dog.wake >= 0) close(dog.wake);
  dog.epoll = dog.wake = -1;
  dog.watches = NULL;
  dog.running = 0;
  pthread_mutex_unlock(&dog.lock);
}

static int pynccl_run_watchdog(void) {
  if (!dog.prepared) {
    // Deadlines are the monotonic clock's.
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&dog.changed, &clock);
    pthread_condattr_destroy(&clock);
    if (pthread_atfork(pynccl_before_fork, pynccl_in_parent, pynccl_in_child)) return ENOMEM;
    dog.prepared = 1;
  }
  if (dog.running) return 0;
  dog.epoll = epoll_create1(EPOLL_CLOEXEC);
  dog.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  struct epoll_event e = {.events = EPOLLIN, .data.u64 = 0};
  if (dog.epoll < 0 || dog.wake < 0 || epoll_ctl(dog.epoll, EPOLL_CTL_ADD, dog.wake, &e)) return errno;
  return 0;
}

static void pynccl_wake(void) {
  const uint64_t one = 1;
  if (dog.wake >= 0) (void)!write(dog.wake, &one, sizeof one);
}

// --- a communicator's watch --------------------------------------------------------------------------------

int pynccl_watch_start(pynccl_comm* comm, const int* sockets, int64_t timeout_ms, int cure, uintptr_t context) {
  pynccl_watch* w = calloc(1, sizeof *w + (size_t)comm->size * sizeof(pynccl_peer));
  if (!w) return ENOMEM;
  w->comm = comm;
  w->size = comm->size;
  w->rank = comm->rank;
  w->connected = sockets != NULL;
  w->is_cpu = comm->waits;
  w->context = context;
  w->cure = cure;
  w->timeout = timeout_ms * MS;
  w->handle = comm->handle;
  w->last_kind = -1;
  pthread_mutex_lock(&dog.lock);
  int r = pynccl_run_watchdog();
  w->id = ++dog.last_id;
  for (int i = 0; i < w->size; ++i) {
    w->peers[i].socket = sockets && i != w->rank ? sockets[i] : -1;
    if (w->peers[i].socket < -1) {
      w->peers[i].gone = 1;
      w->dying = pynccl_now();
    }
    w->peers[i].heard = pynccl_now();
    if (!r && w->peers[i].socket >= 0) pynccl_watch_epoll(w, i, EPOLL_CTL_ADD);
  }
  if (!r) {
    w->listed = 1;
    w->next = dog.watches;
    dog.watches = w;
    comm->watch = w;
    if (!dog.running) {
      r = pynccl_start_thread(pynccl_watch_all, NULL);
      dog.running = !r;
    }
    pynccl_wake();
  }
  pthread_mutex_unlock(&dog.lock);
  if (r && comm->watch)
    pynccl_watch_stop(comm, PYNCCL_STAYS);
  else if (r)
    free(w);
  return r;
}

static void pynccl_watch_unlist(pynccl_watch* w) {
  pynccl_watch** at = &dog.watches;
  while (*at && *at != w) at = &(*at)->next;
  if (*at) *at = w->next;
  w->listed = 0;
}

void pynccl_watch_stop(pynccl_comm* comm, int goodbye) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&dog.lock);
  w->handle = 0;
  for (const int64_t until = pynccl_now() + 1000 * MS; w->touching && pynccl_await(until);) continue;
  if (w->listed) {
    pynccl_watch_unlist(w);
    const pynccl_frame bye = {.kind = FRAME_GOODBYE, .code = (uint32_t)goodbye};
    if (goodbye) pynccl_tell_all(w, &bye);
    for (int r = 0; r < w->size; ++r) pynccl_hang_up(w, r);
    for (int i = 0; i < w->marker_count; ++i) {
      pynccl_event_free(w, w->markers[i].events[0]);
      pynccl_event_free(w, w->markers[i].events[1]);
    }
    w->marker_count = 0;
    pynccl_wake();
    // The thread ends with the last watch.
    for (const int64_t until = pynccl_now() + 1000 * MS;
         !pynccl_is_watchdog && !dog.watches && dog.running && pynccl_await(until);)
      continue;
  }
  pthread_cond_broadcast(&dog.changed);
  pthread_mutex_unlock(&dog.lock);
}

// By pynccl_comm_release, when nobody has the communicator any more.
static void pynccl_watch_free(pynccl_comm* comm) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  // Collected without an end: to the others this rank is gone.
  pynccl_watch_stop(comm, PYNCCL_STAYS);
  for (int r = 0; r < w->size; ++r) {
    free(w->peers[r].output);
    free(w->peers[r].inbox);
    free(w->peers[r].report);
  }
  free(w->markers);
  free(w->said);
  free(w);
}

static int pynccl_settled(pynccl_watch* w, int64_t wait_ms) {
  const int64_t until = pynccl_now() + wait_ms * MS;
  while ((w->curing || w->touching) && pynccl_await(until)) continue;
  return !w->ended;
}

int pynccl_watch_settle(pynccl_comm* comm, int64_t wait_ms) {
  if (!comm->watch) return 1;
  pthread_mutex_lock(&dog.lock);
  const int there = pynccl_settled(comm->watch, wait_ms);
  pthread_mutex_unlock(&dog.lock);
  return there;
}

int pynccl_watch_claim(pynccl_comm* comm, int64_t wait_ms) {
  if (!comm->watch) return 1;
  pthread_mutex_lock(&dog.lock);
  const int mine = pynccl_settled(comm->watch, wait_ms);
  comm->watch->handle = 0;
  pthread_mutex_unlock(&dog.lock);
  return mine;
}

int pynccl_watch_verdict(pynccl_comm* comm, pynccl_verdict* out, int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  if (!w) return PYNCCL_FINE;
  if (!wait_ms && !__atomic_load_n(&w->verdict.trouble, __ATOMIC_ACQUIRE)) return PYNCCL_FINE;
  pthread_mutex_lock(&dog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  while (w->listed && !w->verdict.trouble && pynccl_await(until)) continue;
  if (w->verdict.trouble && out) *out = w->verdict;
  const int trouble = w->verdict.trouble;
  pthread_mutex_unlock(&dog.lock);
  return trouble;
}

int pynccl_watch_expire(pynccl_comm* comm, const char* what, int condemn, pynccl_verdict* out) {
  pynccl_watch* w = comm->watch;
  if (!w) return PYNCCL_FINE;
  pthread_mutex_lock(&dog.lock);
  const int64_t until = pynccl_now() + SILENCE_NS;
  for (int unsure = 1; unsure && !w->verdict.trouble && pynccl_now() < until;) {
    unsure = w->dying != 0;
    for (int r = 0; r < w->size; ++r) {
      const int64_t now = pynccl_now();
      unsure |=
          pynccl_silent(&w->peers[r], now, 2 * BEAT_NS) && !pynccl_silent(&w->peers[r], now, SILENCE_NS);
    }
    const int64_t soon = pynccl_now() + TICK_MS * MS;
    if (unsure) pynccl_await(soon < until ? soon : until);
  }
  if (!w->verdict.trouble) {
    pynccl_verdict v;
    const int trouble = pynccl_explain(w, what, &v);
    *out = v;
    if (condemn && w->listed) {
      v.trouble = PYNCCL_FINE;
      w->verdict = v;
      pynccl_publish(w, trouble);
    }
  } else {
    *out = w->verdict;
  }
  pthread_mutex_unlock(&dog.lock);
  return out->trouble;
}

int pynccl_watched(void) {
  pthread_mutex_lock(&dog.lock);
  int count = 0;
  for (pynccl_watch* w = dog.watches; w; w = w->next) ++count;
  pthread_mutex_unlock(&dog.lock);
  return count;
}

int pynccl_watchdog_runs(void) {
  pthread_mutex_lock(&dog.lock);
  const int running = dog.running;
  pthread_mutex_unlock(&dog.lock);
  return running;
}

// --- around a call -----------------------------------------------------------------------------------------

static int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count);
static int pynccl_check_wait(pynccl_watch* w);

// Tell the other ranks what is about to be called.
static int pynccl_watch_announce(pynccl_comm* comm, const pynccl_call* calls, int count) {
  return comm->watch->checking ? pynccl_check_say(comm->watch, calls, count) : 0;
}

static int pynccl_watch_begin(pynccl_comm* comm, const pynccl_call* calls, int count) {
  pynccl_watch* w = comm->watch;
  // In a group that somebody opened in C the counterparts may come later.
  const int r = w->checking && !pynccl_depth ? pynccl_check_wait(w) : 0;
  if (r) return r;
  for (int i = 0; i < count; ++i)
    if (calls[i].comm == comm) {
      ++w->calls;
      w->last_kind = calls[i].kind;
    }
  __atomic_store_n(&w->in_call, pynccl_now(), __ATOMIC_RELEASE);
  return 0;
}

static void pynccl_watch_end(pynccl_comm* comm) {
  __atomic_store_n(&comm->watch->in_call, 0, __ATOMIC_RELEASE);
}

// Calls on a stream that nobody waits for at once.
static void pynccl_watch_issued(pynccl_comm* comm, uintptr_t stream) {
  pynccl_watch* w = comm->watch;
  // In a group that somebody opened in C nothing is on the stream yet.
  if (!w->timeout || pynccl_depth) return;
  pthread_mutex_lock(&dog.lock);
  if (w->listed && w->handle) pynccl_mark(w, stream);
  pthread_mutex_unlock(&dog.lock);
}
