#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct pynccl_watchdog pynccl_watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = -1};

int pynccl_await(int64_t until) {
  if (pynccl_now() >= until) return 0;
  const struct timespec t = {until / (1000 * MS), until % (1000 * MS)};
  pthread_cond_timedwait(&pynccl_watchdog.changed, &pynccl_watchdog.lock, &t);
  return 1;
}

int pynccl_hold(pynccl_watch* w) {
  int* references = &w->comm->references;
  int n = __atomic_load_n(references, __ATOMIC_RELAXED);
  while (n && !__atomic_compare_exchange_n(references, &n, n + 1, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    continue;
  return n;
}

void pynccl_let_go(pynccl_watch* w) {
  pynccl_comm* comm = w->comm;
  int n = __atomic_load_n(&comm->references, __ATOMIC_RELAXED);
  while (n > 1 &&
         !__atomic_compare_exchange_n(&comm->references, &n, n - 1, 1, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
    continue;
  if (n > 1) return;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  pynccl_comm_release(comm);
  pthread_mutex_lock(&pynccl_watchdog.lock);
}

// --- frames ------------------------------------------------------------------------------------------------

static int pynccl_address(const pynccl_watch* w, int rank, const pynccl_frame* frame) {
  pynccl_frame sent = *frame;
  sent.channel = w->channel;
  sent.from = (uint32_t)w->rank;
  sent.at = (uint32_t)rank;
  const int ends = w->departure || frame->kind == FRAME_END;
  return pynccl_line_send(w->peers[rank].line, &sent, ends ? SIZE_MAX : MOST_OUTPUT);
}

int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame) {
  const pynccl_peer* p = &w->peers[rank];
  return p->line && !p->last_sent ? pynccl_address(w, rank, frame) : ECONNRESET;
}

void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame) {
  for (int r = 0; r < w->size; ++r) pynccl_send_frame(w, r, frame);
}

// --- the ranks ---------------------------------------------------------------------------------------------

int pynccl_takes_part(const pynccl_watch* w, int rank) {
  const pynccl_peer* p = &w->peers[rank];
  return w->connected && rank != w->rank && !p->gone && !p->departure;
}

int pynccl_owes(const pynccl_watch* w, int rank, int64_t limit) {
  const int64_t since = w->peers[rank].owes;
  return since && pynccl_watchdog.awake - since > limit;
}

int64_t pynccl_heard(const pynccl_peer* p) {
  return p->line && p->line->heard > p->heard ? p->line->heard : p->heard;
}

int pynccl_silent(const pynccl_watch* w, int rank, int64_t limit) {
  return pynccl_takes_part(w, rank) && pynccl_watchdog.awake - pynccl_heard(&w->peers[rank]) > limit &&
         pynccl_owes(w, rank, limit);
}

static size_t pynccl_row_words(const pynccl_watch* w) { return ((size_t)w->size + 63) / 64; }

int pynccl_has_lost(const pynccl_watch* w, int rank, int other) {
  if (!w->lost) return 0;
  return (int)(w->lost[(size_t)rank * pynccl_row_words(w) + (size_t)other / 64] >> (other % 64) & 1);
}

int pynccl_note_lost(pynccl_watch* w, int rank, int other) {
  if (!w->dying) w->dying = pynccl_now();
  if (!w->lost) w->lost = calloc((size_t)w->size * pynccl_row_words(w), sizeof *w->lost);
  if (!w->lost || pynccl_has_lost(w, rank, other)) return 0;
  w->lost[(size_t)rank * pynccl_row_words(w) + (size_t)other / 64] |= 1ULL << (other % 64);
  ++w->peers[rank].losses;
  ++w->peers[other].lost_by;
  return 1;
}

int pynccl_spread_loss(pynccl_watch* w, int rank, int other) {
  if (!pynccl_note_lost(w, rank, other)) return 0;
  pynccl_loss* pairs = pynccl_room(w->pairs, w->pair_count, &w->pair_capacity, sizeof *pairs);
  if (!pairs) return 1;
  w->pairs = pairs;
  pairs[w->pair_count++] = (pynccl_loss){(uint16_t)rank, (uint16_t)other};
  w->more_lost = 1;
  return 1;
}

void pynccl_report_loss(pynccl_watch* w, int rank) { pynccl_spread_loss(w, w->rank, rank); }

void pynccl_reach(const pynccl_watch* w, char* missed) {
  int* queue = malloc((size_t)w->size * sizeof *queue);
  if (!queue) return;
  memset(missed, 1, (size_t)w->size);
  int first = 0, last = 0;
  missed[queue[last++] = w->rank] = 0;
  for (; first < last; ++first)
    for (int i = 0, rank = queue[first]; i < w->step_count; ++i) {
      const int other = (rank + w->steps[i]) % w->size;
      if (!missed[other] || pynccl_has_lost(w, rank, other)) continue;
      if (!(w->peers[rank].departure && w->peers[other].lost_by)) missed[queue[last++] = other] = 0;
    }
  free(queue);
}

void pynccl_find_gone(pynccl_watch* w) {
  char* missed = w->mesh || !w->more_lost ? NULL : calloc(1, (size_t)w->size);
  if (!missed) return;
  w->more_lost = 0;
  pynccl_reach(w, missed);
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (!missed[r] || p->line || !pynccl_takes_part(w, r)) continue;
    w->stale = p->gone = 1;
    p->gone_at = pynccl_now();
    pthread_cond_broadcast(&pynccl_watchdog.changed);
  }
  free(missed);
}

void pynccl_hang_up(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  pynccl_line* line = p->line;
  if (!line) return;
  // The end of the connection tells it, too.
  if (line->references > 1) pynccl_address(w, rank, &(pynccl_frame){.kind = FRAME_END});
  p->line = NULL;
  w->stale = p->gone = 1;
  p->gone_at = pynccl_now();
  p->provable =
      p->gone_at >= pynccl_watchdog.blind_until && (line->local || p->gone_at - line->heard_at <= ENDING_NS);
  pynccl_line_release(line);
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  if (!p->departure) p->departure = p->hearsay;
  if (!w->listed || p->departure) return;
  if (w->mesh)
    pynccl_report_loss(w, rank);
  else
    w->doubtful += p->doubtful = 1;
}

// Report ranks whose connection has ended, unless others have told of their departure: the rank's own word is
// lost if its kernel had unread frames when it closed the connection.
static void pynccl_end_doubts(pynccl_watch* w) {
  for (int r = 0; r < w->size && w->doubtful; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (!p->doubtful || !(p->departure || pynccl_now() - p->gone_at > DOUBT_NS)) continue;
    p->doubtful = 0;
    --w->doubtful;
    if (!p->departure) pynccl_report_loss(w, r);
  }
}

int64_t pynccl_silence(const pynccl_watch* w) { return w->question * (SILENCE_NS / QUESTION_NS); }

int64_t pynccl_grace(const pynccl_watch* w) { return w->mesh ? GRACE_NS : 2 * GRACE_NS; }

// --- frames for any rank -----------------------------------------------------------------------------------

int pynccl_is_for(const pynccl_frame* frame, int rank) {
  if (frame->to == TO_ALL) return 1;
  if (!(frame->to & TO_SET)) return frame->to == (uint32_t)rank;
  const uint32_t at = (uint32_t)rank - (frame->to ^ TO_SET);
  return at < SET_RANKS && frame->set[at / 64] >> at % 64 & 1;
}

void pynccl_pass_on(pynccl_watch* w, const pynccl_frame* frame, int from) {
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (!p->line || p->clogged || r == from || (uint32_t)r == frame->origin) continue;
    if (w->mesh && !pynccl_is_for(frame, r)) continue;
    const int error = pynccl_send_frame(w, r, frame);
    p->clogged = error == ENOBUFS || error == ENOMEM;
  }
}

void pynccl_flood(pynccl_watch* w, pynccl_frame* frame) {
  frame->origin = (uint32_t)w->rank;
  frame->sequence = ++w->sequence;
  pynccl_pass_on(w, frame, -1);
}

void pynccl_forward(pynccl_watch* w, const pynccl_frame* frame) {
  pynccl_find_ways(w);
  const int way = w->mesh ? (int)frame->to : w->ways[frame->to];
  if (way >= 0) pynccl_send_frame(w, way, frame);
}

void pynccl_post(pynccl_watch* w, pynccl_frame* frame, int rank) {
  frame->origin = (uint32_t)w->rank;
  frame->to = (uint32_t)rank;
  frame->sequence = 0;
  frame->serial = ++w->peers[rank].posted;
  pynccl_forward(w, frame);
}

void pynccl_find_ways(pynccl_watch* w) {
  if (!w->stale || w->mesh) return;
  int* queue = w->ways + w->size;
  int first = 0, last = 0;
  for (int r = 0; r < w->size; ++r) w->ways[r] = -1;
  w->ways[queue[last++] = w->rank] = w->rank;
  for (; first < last; ++first)
    for (int i = 0, rank = queue[first]; i < w->step_count; ++i) {
      const int other = (rank + w->steps[i]) % w->size;
      if (w->ways[other] >= 0) continue;
      w->ways[other] = rank == w->rank ? other : w->ways[rank];
      if (pynccl_takes_part(w, other)) queue[last++] = other;
    }
  w->stale = w->cut = 0;
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    p->hidden = w->ways[r] < 0 && pynccl_takes_part(w, r);
    if (p->hidden) p->owes = 0;
    w->cut |= p->hidden || (w->ways[r] < 0 && p->departure);
  }
}

int pynccl_posts_arrive(const pynccl_watch* w, int rank) { return !w->cut || w->ways[rank] == rank; }

// --- what ranks know of each other -------------------------------------------------------------------------

static pynccl_news pynccl_news_of(const pynccl_watch* w, int rank) {
  const pynccl_peer* p = &w->peers[rank];
  const int mine = rank == w->rank, departure = p->departure ? p->departure : p->hearsay;
  // First the number: a thread that reads it also reads the kind.
  const uint64_t calls = mine ? pynccl_calls(w) : p->calls;
  const int kind = mine ? pynccl_newest_kind(w) : p->last_kind;
  const int64_t began = mine ? __atomic_load_n(&w->called_at, __ATOMIC_RELAXED) : p->since;
  const int64_t age = (pynccl_now() - began) / AGE_NS;
  return (pynccl_news){.calls = calls & ((1ULL << 48) - 1),
                       .awaits = (uint16_t)p->awaits,
                       .stamp = p->stamp,
                       .rank = (uint16_t)rank,
                       .kind = (kind < 0 ? NO_KIND : kind) & NO_KIND,
                       .departure = (mine ? w->departure : departure) & 7,
                       .age = (age < MOST_AGE ? age : MOST_AGE) & MOST_AGE};
}

static void pynccl_freshen(pynccl_watch* w, int rank) {
  w->fresh += !w->peers[rank].fresh;
  w->peers[rank].fresh = 1;
}

void pynccl_beat(pynccl_watch* w) {
  const pynccl_frame beat = {.kind = FRAME_NEWS, .code = 1, .news = {pynccl_news_of(w, w->rank)}};
  const int64_t before = pynccl_now() - BEAT_NS / 2;
  const int idle = w->beaten == beat.news[0].calls;
  w->beaten = beat.news[0].calls;
  for (int step = 1; step < w->size; step *= 2) {
    const int r = (w->rank + step) % w->size;
    const pynccl_line* line = w->peers[r].line;
    // A peer that does not read needs no second heartbeat, and one for all communicators of a line is enough.
    if (line && !line->wants_output && !(idle && line->sent_at > before)) pynccl_send_frame(w, r, &beat);
  }
}

int pynccl_hears_beats(const pynccl_watch* w, int rank) {
  const int step = (w->rank - rank + w->size) % w->size;
  return step && !(step & (step - 1));
}

void pynccl_depart(pynccl_watch* w, int departure) {
  w->departure = departure;
  ++w->peers[w->rank].stamp;
  pynccl_freshen(w, w->rank);
  pynccl_tell_news(w);
}

static int pynccl_is_needed(const pynccl_watch* w) {
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (p->line && (!p->last_came || p->line->output_bytes)) return 1;
  }
  return 0;
}

void pynccl_pass_last(pynccl_watch* w) {
  // A neighbour that does not respond must not keep this rank.
  const int64_t until = pynccl_now() + pynccl_silence(w);
  while (w->listed && pynccl_is_needed(w)) {
    const int64_t soon = pynccl_now() + TICK_MS * MS;
    if (!pynccl_await(soon < until ? soon : until)) break;
  }
}

static void pynccl_departed(pynccl_watch* w, pynccl_peer* p, int departure) {
  p->departure = departure;
  w->stale = 1;
  if (!w->mesh && p->line) {
    const pynccl_frame last = {.kind = FRAME_LAST};
    pynccl_send_frame(w, (int)(p - w->peers), &last);
    p->last_sent = 1;
  }
  if (departure == PYNCCL_ABORTS_FIRST && !w->dying) w->dying = pynccl_now();
  if (!p->line && !p->gone) {
    p->gone = 1;
    p->gone_at = pynccl_now();
  }
  pthread_cond_broadcast(&pynccl_watchdog.changed);
}

void pynccl_learn(pynccl_watch* w, const pynccl_news* news, int from) {
  const int rank = news->rank;
  if (rank >= w->size || rank == w->rank) return;
  pynccl_peer* p = &w->peers[rank];
  const int newer = (int32_t)(news->stamp - p->stamp) > 0;
  if (newer || (news->stamp == p->stamp && news->calls > p->calls)) {
    p->calls = news->calls;
    p->last_kind = news->kind < PYNCCL_PLAN ? news->kind : 0;
    p->awaits = news->awaits;
    p->since = news->age < MOST_AGE ? pynccl_now() - news->age * AGE_NS : 0;
  }
  if (newer) {
    p->stamp = news->stamp;
    p->heard = pynccl_watchdog.awake;
    p->owes = 0;
    if (!w->mesh) pynccl_freshen(w, rank);
  }
  if (!news->departure || p->departure) return;
  // Its own connection brings its last frames first.
  if (p->line && from != rank)
    p->hearsay = news->departure;
  else
    pynccl_departed(w, p, news->departure);
}

void pynccl_tell_news(pynccl_watch* w) {
  pynccl_end_doubts(w);
  for (int done = 0; done < w->pair_count;) {
    pynccl_frame lost = {.kind = FRAME_LOST};
    while (done < w->pair_count && lost.code < FRAME_PAIRS) lost.pairs[lost.code++] = w->pairs[done++];
    pynccl_tell_all(w, &lost);
  }
  w->pair_count = 0;
  for (int r = 0; w->fresh;) {
    pynccl_frame news = {.kind = FRAME_NEWS};
    for (; r < w->size && news.code < FRAME_NEWS_COUNT; ++r) {
      if (!w->peers[r].fresh) continue;
      w->peers[r].fresh = 0;
      --w->fresh;
      news.news[news.code++] = pynccl_news_of(w, r);
    }
    pynccl_tell_all(w, &news);
  }
}

int pynccl_awaits(const pynccl_watch* w, int rank) {
  int awaited = 0;
  return w->handle && !pyncclCpuIsAwaited(w->handle, rank, &awaited) && awaited;
}

void pynccl_mark_awaited(pynccl_watch* w) {
  w->marked_at = pynccl_now();
  for (int r = 0; r < w->size; ++r) {
    w->peers[r].awaited = pynccl_awaits(w, r);
    w->peers[r].before = w->peers[r].awaits;
  }
}

// For which rank another one waited at the mark. Its last answer before the mark may be old; an answer after
// the mark may be about a later wait. The newer answer counts if the rank's newest call began before the
// mark.
static int pynccl_awaits_at_mark(const pynccl_watch* w, const pynccl_peer* p) {
  const int holds = p->awaits != AWAITS_NOBODY && p->since < w->marked_at;
  return holds || p->before == AWAITS_UNKNOWN ? p->awaits : p->before;
}

int pynccl_end_of_waits(const pynccl_watch* w, int rank, int marked) {
  for (int step = 0; step < w->size && rank < w->size && rank != w->rank; ++step) {
    const pynccl_peer* p = &w->peers[rank];
    const int next = marked ? pynccl_awaits_at_mark(w, p) : p->awaits;
    if (next == AWAITS_NOBODY) return rank;
    rank = next;
  }
  return -1;
}

// Whether this process waits on another communicator. Of several ranks in it, it is not known which waits.
static int pynccl_waits_elsewhere(const pynccl_watch* w) {
  const pynccl_watch* all = pynccl_watchdog.watches;
  for (const pynccl_watch* other = all; other; other = other->next)
    if (other != w && other->channel == w->channel) return 0;
  for (const pynccl_watch* other = all; other; other = other->next)
    for (int r = 0; r < other->size && other != w; ++r)
      if (r != other->rank && pynccl_awaits(other, r)) return 1;
  return 0;
}

// For which rank this one waits, as pynccl_peer has it.
static int pynccl_find_awaited(const pynccl_watch* w) {
  if (!w->is_cpu || !w->handle) return AWAITS_UNKNOWN;
  // Check mode waits outside the library.
  if (w->said_count) return w->lacking;
  int found = AWAITS_NOBODY;
  for (int r = 0; r < w->size; ++r) {
    if (r == w->rank || !pynccl_awaits(w, r)) continue;
    if (pynccl_end_of_waits(w, r, 0) >= 0) return r;
    if (found == AWAITS_NOBODY) found = r;
  }
  return found == AWAITS_NOBODY && pynccl_waits_elsewhere(w) ? AWAITS_UNKNOWN : found;
}

int pynccl_asked(pynccl_watch* w) {
  const int64_t now = pynccl_watchdog.awake;
  if (now - w->asked < w->question) return 0;
  w->asked = now;
  pynccl_find_ways(w);
  for (int r = 0; r < w->size; ++r)
    if (pynccl_takes_part(w, r) && !w->peers[r].hidden && !w->peers[r].owes) w->peers[r].owes = now;
  ++w->peers[w->rank].stamp;
  w->peers[w->rank].awaits = pynccl_find_awaited(w);
  pynccl_freshen(w, w->rank);
  return 1;
}

void pynccl_ask_all(pynccl_watch* w) {
  if (!w->connected || !w->listed || !pynccl_asked(w)) return;
  pynccl_frame ask = {.kind = FRAME_ASK, .to = TO_ALL};
  pynccl_flood(w, &ask);
}

void pynccl_ask_before(pynccl_watch* w, int64_t waited, int64_t limit) {
  // A question earlier than needed, since the caller comes once in each slice of the wait.
  if (waited > limit - pynccl_silence(w) - w->question && waited > limit / 4) pynccl_ask_all(w);
}

void pynccl_watch_waits(pynccl_comm* comm, int64_t waited, int64_t limit) {
  if (!comm->watch) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_ask_before(comm->watch, waited, limit);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

int pynccl_watch_neighbours(int size, int mesh, int* steps) {
  int count = 0;
  for (int step = 1; step < size; step = size <= mesh ? step + 1 : 2 * step)
    for (int i = 0; i < (size <= mesh ? 1 : 2); ++i) {
      const int one = i ? size - step : step;
      int known = 0;
      for (int k = 0; k < count; ++k) known |= steps[k] == one;
      if (!known) steps[count++] = one;
    }
  return count;
}

// --- lines for a new communicator --------------------------------------------------------------------------

uint64_t pynccl_line_offer(const pynccl_process* other, int sealed) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_line* line = pynccl_line_to(other, sealed);
  if (line) ++line->references;
  const uint64_t name = line ? line->name : 0;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return name;
}

void pynccl_line_withdraw(uint64_t name) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_line* line = pynccl_line_named(name);
  if (line) pynccl_line_release(line);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

int pynccl_channel_expect(uint64_t channel, int rank) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int r = pynccl_expect(channel, rank);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return r;
}

void pynccl_channel_give_up(uint64_t channel, int rank, const pynccl_connection* made, int size) {
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_drop_early(pynccl_take_early(channel, rank));
  for (int r = 0; r < size; ++r) {
    if (made[r].socket >= 0) close(made[r].socket);
    pynccl_line* line = made[r].socket == PYNCCL_SHARED ? pynccl_line_named(made[r].line) : NULL;
    if (!line) continue;
    const pynccl_frame end = {
        .channel = channel, .from = (uint32_t)rank, .at = (uint32_t)r, .kind = FRAME_END};
    pynccl_line_send(line, &end, SIZE_MAX);
    pynccl_line_release(line);
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

// --- processes ---------------------------------------------------------------------------------------------

uint64_t pynccl_process_start(int pid) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  // The name is in parentheses and may contain any character.
  const char* rest = strrchr(text, ')');
  char state;
  long threads;
  unsigned long long start;
  const char* format = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld %*s %llu";
  if (!rest || sscanf(rest, format, &state, &threads, &start) != 3) return 0;
  // In a zombie with several threads only the first thread has ended.
  return strchr("ZXx", state) && threads <= 1 ? 0 : start;
}

int pynccl_watch_processes(pynccl_comm* comm, const int* pids, const uint64_t* starts) {
  pynccl_watch* w = comm->watch;
  if (!w) return EINVAL;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  for (int r = 0; r < w->size; ++r) {
    w->peers[r].pid = pids[r];
    w->peers[r].start = starts[r];
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return 0;
}

// Whether the end of a process proves that its rank did not go on without this one.
static int pynccl_proves(const pynccl_peer* p) { return p->provable && p->departure != PYNCCL_GOES_ON; }

void pynccl_check_processes(pynccl_watch* w, int64_t now) {
  for (int r = 0; r < w->size; ++r) {
    pynccl_peer* p = &w->peers[r];
    if (!p->gone || p->ended || !p->pid || !pynccl_proves(p)) continue;
    p->ended = pynccl_process_start(p->pid) != p->start;
    if (p->ended) pthread_cond_broadcast(&pynccl_watchdog.changed);
    if (now - p->gone_at > ENDING_NS) p->pid = 0;
  }
}

void pynccl_watch_told_end(pynccl_comm* comm, int rank, int64_t at) {
  pynccl_watch* w = comm->watch;
  if (!w || rank < 0 || rank >= w->size) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_peer* p = &w->peers[rank];
  if (p->gone && pynccl_proves(p) && at - p->gone_at <= ENDING_NS) p->ended = 1;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

// --- for recovery ------------------------------------------------------------------------------------------

int pynccl_watch_connected(pynccl_comm* comm) { return comm->watch && comm->watch->connected; }

void pynccl_watch_fates(pynccl_comm* comm, unsigned char* fates) {
  pynccl_watch* w = comm->watch;
  if (!w) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_ask_all(w);
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    const int silent = pynccl_silent(w, r, pynccl_silence(w));
    fates[r] = (unsigned char)(p->departure | (p->gone ? PYNCCL_GONE : 0) | (silent ? PYNCCL_SILENT : 0) |
                               (p->ended ? PYNCCL_ENDED : 0));
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

int64_t pynccl_watch_heard(pynccl_comm* comm, int rank) {
  pynccl_watch* w = comm->watch;
  if (!w || rank < 0 || rank >= w->size) return 0;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_ask_all(w);
  const int64_t heard = pynccl_heard(&w->peers[rank]);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return heard;
}

int pynccl_watch_send(pynccl_comm* comm, const uint64_t* to, uint64_t tag, const char* data, size_t size) {
  pynccl_watch* w = comm->watch;
  if (!w || size > PYNCCL_FRAME_TEXT) return EINVAL;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  for (int first = 0; first < w->size; first += SET_RANKS) {
    pynccl_frame f = {.kind = FRAME_MESSAGE, .to = TO_SET | (uint32_t)first, .number = tag};
    uint64_t some = 0;
    for (int i = 0; i < SET_RANKS / 64 && first + 64 * i < w->size; ++i)
      some |= f.set[i] = to[first / 64 + i];
    memcpy(f.text, data, size);
    if (some) pynccl_flood(w, &f);
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return 0;
}

int pynccl_keep_frame(pynccl_peer* p, const pynccl_frame* frame) {
  pynccl_frame* inbox = pynccl_room(p->inbox, p->inbox_count, &p->inbox_capacity, sizeof *inbox);
  if (!inbox) return 0;
  p->inbox = inbox;
  inbox[p->inbox_count++] = *frame;
  return 1;
}

void pynccl_drop_frame(pynccl_peer* p, int at) {
  memmove(&p->inbox[at], &p->inbox[at + 1], (size_t)(--p->inbox_count - at) * sizeof *p->inbox);
}

static int pynccl_take_frame(pynccl_peer* p, uint32_t kind, uint64_t number, pynccl_frame* out) {
  for (int i = 0; i < p->inbox_count; ++i) {
    if (p->inbox[i].kind != kind || p->inbox[i].number != number) continue;
    *out = p->inbox[i];
    pynccl_drop_frame(p, i);
    return 1;
  }
  return 0;
}

int pynccl_watch_receive(pynccl_comm* comm, int rank, uint64_t tag, char* data, size_t size,
                         int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f;
  if (!w || rank < 0 || rank >= w->size || size > sizeof f.text) return EINVAL;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  pynccl_peer* p = &w->peers[rank];
  int found;
  while (!(found = pynccl_take_frame(p, FRAME_MESSAGE, tag, &f)) && !p->gone && w->listed &&
         pynccl_await(until))
    continue;
  const int r = found ? 0 : p->gone || !w->listed ? ECONNRESET : ETIMEDOUT;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  if (!r) memcpy(data, f.text, size);
  return r;
}

int pynccl_watch_take(pynccl_comm* comm, int* rank, const uint64_t* tags, char* data, size_t size,
                      int64_t wait_ms) {
  pynccl_watch* w = comm->watch;
  pynccl_frame f;
  if (!w || size > sizeof f.text) return EINVAL;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int64_t until = pynccl_now() + wait_ms * MS;
  int found = 0;
  for (int waited = 0; !found; ++waited) {
    for (*rank = 0; *rank < w->size && !found; *rank += !found)
      found = pynccl_take_frame(&w->peers[*rank], FRAME_MESSAGE, tags[*rank], &f);
    if (found || waited || !pynccl_await(until)) break;
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  if (found) memcpy(data, f.text, size);
  return found ? 0 : EAGAIN;
}
