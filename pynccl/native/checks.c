#include "checks.h"

#include <stdlib.h>

#include "names.h"
#include "ring.h"
#include "verdicts.h"

// The time-out of a communicator without one.
#define CHECK_SECONDS 300
// How long a rank that knows of a mismatch waits for the calls of the others.
#define TABLE_NS (1000 * MS)

enum { SIDE_ALL, SIDE_SENDS, SIDE_RECEIVES };
enum { PART_LAST = 1 };
enum { NO_RING, RING, RING_OF_COMMUNICATORS };
// Which calls a wait for a comparison holds up: none if the wait has a limit, or while a signal handler runs;
// those on this communicator; or those on all.
enum { FREE, BLOCKED_HERE, BLOCKED_EVERYWHERE };
enum { MOST_HOPS = 4096 };

// An announcement, and its counterpart: of a message, the peer's; of a collective, in each step another
// rank's.
typedef struct pynccl_said {
  int peer;  // -1: a collective
  int answered;
  int left;           // an interrupt has ended the wait; the others go on
  int step;           // of a collective
  uint64_t round;     // of a collective; 0: a message
  int64_t missed_at;  // since when only ranks that have closed lack the counterpart; 0: others lack it, too
  pynccl_frame frame, answer;
} pynccl_said;

static int (*pynccl_locate)(char* text, int size);

void pynccl_check_locator(int (*locate)(char* text, int size)) { pynccl_locate = locate; }

int pynccl_check_on(pynccl_comm* comm, int on) {
  if (!comm->watch || !comm->watch->connected) return 0;
  return comm->watch->checking = on;
}

static int pynccl_side(int kind) {
  return kind == PYNCCL_SEND ? SIDE_SENDS : kind == PYNCCL_RECV ? SIDE_RECEIVES : SIDE_ALL;
}

static int pynccl_is_message(const pynccl_frame* f) {
  return f->kind == FRAME_CALL && pynccl_side((int)f->words[0]) != SIDE_ALL;
}

// Whether a call has counterparts; a one-sided call has none, and a message to this rank itself neither.
static int pynccl_concerns(const pynccl_watch* w, const pynccl_call* c) {
  if (c->comm != w->comm || pynccl_is_one_sided(c->kind)) return 0;
  return pynccl_side(c->kind) == SIDE_ALL || (c->root != w->rank && c->root >= 0 && c->root < w->size);
}

static void pynccl_describe(const pynccl_frame* f, char* text, size_t size) {
  const int kind = (int)f->words[0], type = (int)f->words[1], op = (int)f->words[3], root = (int)f->words[4];
  pynccl_say(text, size, "%s", pynccl_kind_name(kind));
  if (kind <= PYNCCL_RECV)
    pynccl_say(text, size, "(%s, %llu", type >= 0 && type < ncclNumTypes ? pynccl_type_names[type] : "?",
               (unsigned long long)f->words[2]);
  if (pynccl_reduces(kind))
    pynccl_say(text, size, ", %s", op < ncclNumOps ? pynccl_op_names[op] : "a pre_mul_sum");
  if (pynccl_has_root(kind)) pynccl_say(text, size, ", root %d", root);
  if (kind <= PYNCCL_RECV) pynccl_say(text, size, ")");
  if (kind == PYNCCL_SEND) pynccl_say(text, size, " to rank %d", root);
  if (kind == PYNCCL_RECV) pynccl_say(text, size, " from rank %d", root);
  if ((uint32_t)f->words[5] > 1) pynccl_say(text, size, " in a group of %u", (uint32_t)f->words[5]);
  if (f->text[0]) pynccl_say(text, size, " at %s", f->text);
}

static int pynccl_alike(const pynccl_frame* a, const pynccl_frame* b) {
  const uint64_t* x = a->words;
  const uint64_t* y = b->words;
  const int message = pynccl_side((int)x[0]) != SIDE_ALL;
  if (x[1] != y[1] || x[2] != y[2]) return 0;
  // PreMulSum operations have different numbers on every rank.
  const int ops = x[3] == y[3] || (x[3] >= ncclNumOps && y[3] >= ncclNumOps);
  // NCCL chooses one algorithm for the collectives of a group together.
  const int together = x[5] >> 32 == y[5] >> 32;
  return message || (x[0] == y[0] && ops && x[4] == y[4] && together);
}

// --- the calls of all ranks, after a difference ------------------------------------------------------------

static void pynccl_make_told(pynccl_watch* w) {
  if (!w->told) w->told = calloc((size_t)w->size, sizeof *w->told);
}

// Tell all the call in the round of the question, or the newest.
static void pynccl_answer_all(pynccl_watch* w) {
  const pynccl_said* newest = NULL;
  for (int i = 0; i < w->said_count; ++i) {
    const pynccl_said* s = &w->said[i];
    if (!s->left) newest = s;
    if (!s->left && s->round && s->round == w->told_about) break;
  }
  if (!w->telling || !newest) return;
  pynccl_frame told = newest->frame;
  told.kind = FRAME_TOLD;
  told.to = TO_ALL;
  told.number = newest->round;
  pynccl_flood(w, &told);
}

static int pynccl_tell(pynccl_watch* w, uint64_t round) {
  if (w->telling && round >= w->told_about) return 0;
  pynccl_make_told(w);
  w->telling = 1;
  w->told_about = round;
  pynccl_answer_all(w);
  return 1;
}

// Ask all ranks for what they call in a round, unless that was asked.
static void pynccl_ask_calls(pynccl_watch* w, uint64_t round) {
  pynccl_frame tell = {.kind = FRAME_TELL, .to = TO_ALL, .number = round};
  if (pynccl_tell(w, round)) pynccl_flood(w, &tell);
}

static const pynccl_frame* pynccl_told(const pynccl_watch* w, int rank) {
  return w->told && w->told[rank].kind ? &w->told[rank] : NULL;
}

static void pynccl_forget_told(pynccl_watch* w) {
  free(w->told);
  w->told = NULL;
  w->telling = 0;
}

// --- announcements -----------------------------------------------------------------------------------------

static void pynccl_tell_step(pynccl_watch* w, pynccl_said* s) {
  s->frame.code = (uint32_t)s->step;
  pynccl_post(w, &s->frame, (w->rank + (1 << s->step)) % w->size);
}

// Whose frame is awaited in this step of a collective.
static int pynccl_partner(const pynccl_watch* w, const pynccl_said* s) {
  return (w->rank - (1 << s->step) + w->size) % w->size;
}

// Make the steps of collectives for which the frames are here.
static void pynccl_make_steps(pynccl_watch* w) {
  int kept = 0;
  for (int i = 0; i < w->said_count; ++i) {
    pynccl_said* s = &w->said[i];
    while (s->round && !s->answered) {
      pynccl_peer* p = &w->peers[pynccl_partner(w, s)];
      int at = 0;
      while (at < p->inbox_count &&
             (p->inbox[at].kind != FRAME_CALL || pynccl_side((int)p->inbox[at].words[0]) != SIDE_ALL ||
              p->inbox[at].number != s->round || p->inbox[at].code != (uint32_t)s->step))
        ++at;
      if (at == p->inbox_count) break;
      s->answer = p->inbox[at];
      pynccl_drop_frame(p, at);
      ++s->step;
      s->answered = !pynccl_alike(&s->frame, &s->answer) || 1 << s->step >= w->size;
      if (s->answered)
        pthread_cond_broadcast(&pynccl_watchdog.changed);
      else
        pynccl_tell_step(w, s);
    }
    if (!(s->left && s->answered)) w->said[kept++] = *s;
  }
  w->said_count = kept;
}

// The index of the peer's next announcement that can be the counterpart of a message; -1: none so far.
static int pynccl_answer(const pynccl_peer* p, const pynccl_frame* said) {
  for (int i = 0; i < p->inbox_count; ++i)
    if (pynccl_is_message(&p->inbox[i]) &&
        pynccl_side((int)p->inbox[i].words[0]) != pynccl_side((int)said->words[0]))
      return i;
  return -1;
}

// --- rings of waits ----------------------------------------------------------------------------------------

static uint64_t pynccl_origin(const pynccl_watch* w) { return pynccl_watchdog.process + w->id; }

// Whether messages between this rank and a peer lack the other side: announced by this rank, or by the peer.
static int pynccl_lacks_side(const pynccl_watch* w, int rank, int by_peer) {
  const pynccl_peer* p = &w->peers[rank];
  for (int side = SIDE_SENDS; side <= SIDE_RECEIVES; ++side) {
    int said = 0, heard = 0;
    for (int i = 0; i < w->said_count; ++i) {
      const pynccl_said* s = &w->said[i];
      said += !s->left && !s->answered && s->peer == rank && pynccl_side((int)s->frame.words[0]) == side;
    }
    for (int i = 0; i < p->inbox_count; ++i)
      heard += pynccl_is_message(&p->inbox[i]) && pynccl_side((int)p->inbox[i].words[0]) != side;
    if (by_peer ? heard > said : said > heard) return 1;
  }
  return 0;
}

// Send a probe to the rank for which an announced call waits.
static void pynccl_send_probe(pynccl_watch* w, const pynccl_said* s, const pynccl_probe* probe) {
  const int to = s->round ? pynccl_partner(w, s) : s->peer;
  pynccl_frame frame = {.kind = FRAME_PROBE,
                        .code = s->round ? (uint32_t)s->step + 1 : 0,
                        .origin = (uint32_t)w->rank,
                        .to = (uint32_t)to,
                        .number = s->round,
                        .words = {probe->origin, probe->serial, probe->across, probe->hops + 1}};
  pynccl_describe(&s->frame, frame.text, sizeof frame.text);
  pynccl_forward(w, &frame);
}

// Whether a message is the first one to or from its peer that waits.
static int pynccl_is_first(const pynccl_watch* w, const pynccl_said* s) {
  const pynccl_said* first = w->said;
  while (first->peer != s->peer || first->left || first->answered) ++first;
  return first == s;
}

// Send a probe to all ranks for which this one waits.
static void pynccl_send_probes(pynccl_watch* w, const pynccl_probe* probe) {
  for (int i = 0; i < w->said_count; ++i) {
    const pynccl_said* s = &w->said[i];
    if (s->left || s->answered) continue;
    if (s->round || (pynccl_is_first(w, s) && pynccl_lacks_side(w, s->peer, 0)))
      pynccl_send_probe(w, s, probe);
  }
}

// Note that a probe is passed on. Returns whether it was before.
static int pynccl_has_passed(pynccl_watch* w, const pynccl_probe* probe) {
  pynccl_probe* last = &w->peers[probe->origin % (uint64_t)w->size].passed;
  const int passed = last->origin == probe->origin && last->serial >= probe->serial;
  if (!passed) *last = *probe;
  return passed;
}

// The communicator whose wait must end before the program can call anything on this one; NULL: there is none.
static pynccl_watch* pynccl_blocked(pynccl_watch* w) {
  if (w->blocked) return w;
  for (pynccl_watch* other = pynccl_watchdog.watches; other; other = other->next)
    if (other->blocked == BLOCKED_EVERYWHERE) return other;
  return NULL;
}

static void pynccl_take_probe(pynccl_watch* w, int from, const pynccl_frame* frame) {
  pynccl_probe probe = {frame->words[0], frame->words[1], frame->words[2], frame->words[3]};
  // Origins that lead to the same place of `passed` could keep each other's probes alive.
  if (probe.hops > MOST_HOPS) return;
  if (!frame->code && !pynccl_lacks_side(w, from, 1)) return;
  if (frame->code && frame->number <= w->rounds) {
    // This rank has called the collective, and makes its steps whether its program waits or not.
    for (int i = 0; i < w->said_count; ++i) {
      const pynccl_said* s = &w->said[i];
      if (s->round == frame->number && !s->answered && s->step + 1 < (int)frame->code)
        pynccl_send_probe(w, s, &probe);
    }
    return;
  }
  pynccl_watch* blocked = pynccl_blocked(w);
  if (!blocked) return;
  probe.across |= blocked != w;
  if (probe.origin != pynccl_origin(blocked)) {
    if (!pynccl_has_passed(blocked, &probe)) pynccl_send_probes(blocked, &probe);
  } else if (probe.serial >= blocked->first_probe) {
    blocked->ring = probe.across ? RING_OF_COMMUNICATORS : RING;
    blocked->beyond[0] = 0;
    if (blocked != w) memcpy(blocked->beyond, frame->text, sizeof blocked->beyond);
    pthread_cond_broadcast(&pynccl_watchdog.changed);
  }
}

void pynccl_check_heard(pynccl_watch* w, int from, const pynccl_frame* frame) {
  if (frame->kind == FRAME_TELL) {
    pynccl_tell(w, frame->number);
  } else if (frame->kind == FRAME_PROBE) {
    pynccl_take_probe(w, from, frame);
  } else if (frame->kind == FRAME_TOLD) {
    pynccl_make_told(w);
    if (w->told && (!w->told[from].kind || frame->number == w->told_about)) w->told[from] = *frame;
    pthread_cond_broadcast(&pynccl_watchdog.changed);
  } else if ((!pynccl_is_message(frame) || pynccl_posts_arrive(w, from)) &&
             pynccl_keep_frame(&w->peers[from], frame)) {
    if (pynccl_side((int)frame->words[0]) == SIDE_ALL)
      pynccl_make_steps(w);
    else
      pthread_cond_broadcast(&pynccl_watchdog.changed);
  }
}

// Whether a later one of the calls is a message to or from the same peer.
static int pynccl_follows(const pynccl_watch* w, const pynccl_call* calls, int count, int at) {
  for (int i = at + 1; i < count; ++i)
    if (pynccl_concerns(w, &calls[i]) && pynccl_side(calls[i].kind) != SIDE_ALL &&
        calls[i].root == calls[at].root)
      return 1;
  return 0;
}

// Drop what was announced; `interrupted`: the steps of collectives go on.
static void pynccl_drop_said(pynccl_watch* w, int interrupted) {
  int kept = 0;
  for (int i = 0; i < w->said_count; ++i) {
    pynccl_said* s = &w->said[i];
    s->left |= interrupted && s->round && !s->answered;
    if (s->left) w->said[kept++] = *s;
  }
  w->said_count = kept;
}

// Drop the announcement of a call that does not go on.
static void pynccl_check_leave(pynccl_watch* w) {
  if (!w->announced) return;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  pynccl_drop_said(w, 1);
  w->announced = 0;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
}

void pynccl_check_limit(pynccl_comm* comm, int64_t wait_ms) {
  if (comm->watch) comm->watch->patience = wait_ms * MS;
}

void pynccl_check_resume(pynccl_comm* comm, int resumes) {
  if (comm->watch) comm->watch->resumed = resumes;
}

int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count) {
  const int again = w->resumed && w->announced;
  w->resumed = 0;
  if (again) return 0;
  pynccl_check_leave(w);
  char where[PYNCCL_FRAME_TEXT] = "";
  if (pynccl_locate && pynccl_locate(where, sizeof where) == PYNCCL_LOCATED_STOPS) return PYNCCL_STOPPED;
  int r = 0;
  // The calls of a group on this communicator, and the collectives among them.
  uint64_t mine = 0, collectives = 0;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  for (int i = 0; i < count; ++i) {
    mine += calls[i].comm == w->comm;
    collectives += pynccl_concerns(w, &calls[i]) && pynccl_side(calls[i].kind) == SIDE_ALL;
  }
  const uint64_t rounds = w->rounds + collectives;
  for (int i = 0; i < count && !r; ++i) {
    const pynccl_call* c = &calls[i];
    if (!pynccl_concerns(w, c)) continue;
    pynccl_said* said = pynccl_room(w->said, w->said_count, &w->said_capacity, sizeof *said);
    r = said ? 0 : PYNCCL_NO_MEMORY;
    if (r) break;
    w->said = said;
    said += w->said_count++;
    *said = (pynccl_said){.peer = -1, .frame = {.kind = FRAME_CALL}};
    const uint64_t words[] = {c->kind,         c->datatype,       c->count,
                              (uint64_t)c->op, (uint64_t)c->root, collectives << 32 | mine};
    memcpy(said->frame.words, words, sizeof words);
    memcpy(said->frame.text, where, sizeof where);
    if (pynccl_side(c->kind) == SIDE_ALL) {
      said->frame.number = said->round = ++w->rounds;
      pynccl_tell_step(w, said);
    } else {
      said->peer = c->root;
      said->frame.number = rounds;
      said->frame.code = pynccl_depth || pynccl_follows(w, calls, count, i) ? 0 : PART_LAST;
      pynccl_post(w, &said->frame, c->root);
    }
  }
  pynccl_make_steps(w);
  pynccl_answer_all(w);
  w->announced = 1;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return r;
}

// --- the wait for counterparts -----------------------------------------------------------------------------

// Whether a rank waits for a message that this rank has not announced: one of a call before the round.
static int pynccl_waits_for_this(const pynccl_watch* w, int rank, uint64_t round) {
  const pynccl_peer* p = &w->peers[rank];
  if (!pynccl_posts_arrive(w, rank)) return 0;
  for (int i = p->inbox_count; i-- > 0;)
    if (pynccl_is_message(&p->inbox[i])) return p->inbox[i].code & PART_LAST && p->inbox[i].number < round;
  return 0;
}

static int pynccl_is_contradicted(const pynccl_watch* w, const pynccl_said* s) {
  if (s->answered) return !pynccl_alike(&s->frame, &s->answer);
  // Both ranks wait, each for a call that the other has not announced.
  if (!s->round) return pynccl_waits_for_this(w, s->peer, UINT64_MAX);
  for (int r = 0; r < w->size; ++r)
    if (pynccl_waits_for_this(w, r, s->round)) return 1;
  return 0;
}

// Match messages with counterparts. Returns this rank's first announcement that a peer contradicts, or NULL;
// sets the first one without an answer.
static const pynccl_said* pynccl_compare(pynccl_watch* w, pynccl_said** open) {
  *open = NULL;
  pynccl_find_ways(w);
  for (int i = 0; i < w->said_count; ++i) {
    pynccl_said* s = &w->said[i];
    if (s->left) continue;
    if (!s->answered && !s->round && !pynccl_posts_arrive(w, s->peer)) {
      s->answered = 1;
      s->answer = s->frame;
    }
    const int at = s->answered || s->round ? -1 : pynccl_answer(&w->peers[s->peer], &s->frame);
    if (at >= 0) {
      s->answered = 1;
      s->answer = w->peers[s->peer].inbox[at];
      pynccl_drop_frame(&w->peers[s->peer], at);
    }
    if (!*open && !s->answered) *open = s;
  }
  for (int i = 0; i < w->said_count; ++i)
    if (!w->said[i].left && pynccl_is_contradicted(w, &w->said[i])) return &w->said[i];
  return NULL;
}

// The call of each rank in the place of `about`. Returns how many are not known yet.
static int pynccl_collect(pynccl_watch* w, const pynccl_said* about, const pynccl_frame** table) {
  int missing = 0;
  for (int r = 0; r < w->size; ++r) {
    table[r] = r == w->rank ? &about->frame : pynccl_told(w, r);
    if (r == about->peer && about->answered) table[r] = &about->answer;
    missing += !table[r] && !w->peers[r].gone;
  }
  return missing;
}

static const char* const pynccl_titles[] = {
    [NO_RING] = "the ranks called different things",
    [RING] =
        "deadlock: the ranks wait for each other in a ring; sends and receives of one group, or of "
        "send_recv, start together",
    [RING_OF_COMMUNICATORS] =
        "deadlock: the ranks wait for each other in a ring, through several "
        "communicators; all ranks must use them in the same order",
};

static void pynccl_write_table(const pynccl_watch* w, const pynccl_frame** table, int ring, char* text,
                               size_t size) {
  pynccl_say(text, size, "%s:", pynccl_titles[ring]);
  for (int r = 0, end; r < w->size; r = end) {
    char line[256] = "", next[256] = "";
    for (end = r; end < w->size; ++end) {
      next[0] = 0;
      if (table[end])
        pynccl_describe(table[end], next, sizeof next);
      else
        pynccl_say(
            next, sizeof next,
            w->peers[end].departure && !ring ? "nothing: it has closed its communicator" : "nothing yet");
      if (end == r) memcpy(line, next, sizeof line);
      if (strcmp(line, next)) break;
    }
    pynccl_say(text, size, end == r + 1 ? "\n  rank " : "\n  ranks ");
    pynccl_say_ranks(text, size, r, end);
    pynccl_say(text, size, ": %s", line);
  }
  if (ring == RING_OF_COMMUNICATORS && w->beyond[0])
    pynccl_say(text, size, "\n  on another communicator, a rank waits for rank %d of this one in %s", w->rank,
               w->beyond);
}

// Whether a rank has not announced the counterpart.
static int pynccl_lacks(const pynccl_watch* w, const pynccl_said* s, int rank) {
  if (!s->round) return rank == s->peer;
  return rank != w->rank && !(pynccl_told(w, rank) && w->told[rank].number == s->round);
}

// Note the ranks that have not announced the counterpart. If all have, those noted before stay: they were
// late.
static void pynccl_find_lacking(pynccl_watch* w, const pynccl_said* s) {
  int any = 0;
  for (int r = 0; r < w->size; ++r) any |= pynccl_lacks(w, s, r);
  for (int r = 0; r < w->size && any; ++r) w->peers[r].lacks = pynccl_lacks(w, s, r);
}

// Name the ranks that pynccl_find_lacking has noted.
static void pynccl_say_who_lacks(const pynccl_watch* w, char* text, size_t size) {
  char who[256] = "";
  int count = 0;
  for (int r = 0, end; r < w->size; r = end) {
    for (end = r; end < w->size && w->peers[end].lacks;) ++end;
    if (end == r) {
      ++end;
      continue;
    }
    if (count) pynccl_say(who, sizeof who, ", ");
    pynccl_say_ranks(who, sizeof who, r, end);
    count += end - r;
  }
  pynccl_say(text, size, count ? ": rank%s %s" : ": the rank%s%s", count == 1 ? "" : "s", who);
}

static void pynccl_publish_table(pynccl_watch* w, const pynccl_frame** table, int ring) {
  w->verdict = (pynccl_verdict){.result = ncclInvalidUsage};
  pynccl_write_table(w, table, ring, w->verdict.text, sizeof w->verdict.text);
  pynccl_publish(w, PYNCCL_MISMATCHED);
}

// Where a chain of waits ends: from the peer of a message on, a rank may wait for a message of another one.
// If it ends at this rank, the ranks form a ring.
static int pynccl_end_of_chain(const pynccl_watch* w, const pynccl_said* s) {
  int rank = s->peer;
  for (int i = 0; i < w->size && rank != w->rank; ++i) {
    const pynccl_frame* told = pynccl_told(w, rank);
    // A rank in a group has told its last call, and may wait in another one.
    if (!told || pynccl_side((int)told->words[0]) == SIDE_ALL || (uint32_t)told->words[5] > 1) break;
    if (told->words[4] >= (uint64_t)w->size) break;
    rank = (int)told->words[4];
  }
  return rank;
}

// Add the ranks that are late: `late`, or, for those that have not announced the counterpart, those for which
// they wait.
static void pynccl_add_lacking(const pynccl_watch* w, int late, pynccl_verdict* v) {
  char* added = calloc(1, (size_t)w->size);
  v->count = 0;
  for (int r = 0; r < w->size && added; ++r) {
    if (late >= 0 ? r != late : !w->peers[r].lacks) continue;
    const int end = late < 0 ? pynccl_end_of_waits(w, r, 1) : -1;
    added[end < 0 ? r : end] = 1;
  }
  for (int r = 0; r < w->size && added; ++r)
    if (added[r]) pynccl_add_rank(v, r);
  free(added);
}

static void pynccl_check_timed_out(pynccl_watch* w, int64_t waited, const pynccl_frame** table) {
  char what[512] = "";
  pynccl_said* open;
  pynccl_compare(w, &open);
  if (open) pynccl_ask_calls(w, open->round);
  if (open) pynccl_find_lacking(w, open);
  pynccl_mark_awaited(w);
  pynccl_hear_all(w);
  if (pynccl_compare(w, &open) || !open || w->verdict.trouble || !w->listed) return;
  int late = open->round ? -1 : pynccl_end_of_chain(w, open);
  if (late == w->rank) {
    pynccl_collect(w, open, table);
    pynccl_publish_table(w, table, RING);
    return;
  }
  // The announcements may be newer than the time-out.
  const int waited_for = open->round ? -1 : pynccl_end_of_waits(w, open->peer, 1);
  if (waited_for >= 0) late = waited_for;
  pynccl_describe(&open->frame, what, sizeof what);
  pynccl_find_lacking(w, open);
  pynccl_say_who_lacks(w, what, sizeof what);
  pynccl_say(what, sizeof what, " did not come within %g s", (double)waited / 1e9);
  if (late >= 0 && late != open->peer) pynccl_say(what, sizeof what, "; it waits in turn for rank %d", late);
  pynccl_verdict v;
  pynccl_explain(w, what, NULL, 0, 1, &v);
  // Numbers of calls say nothing here: a call counts only after the comparison.
  if (v.trouble == PYNCCL_TIMED_OUT) pynccl_add_lacking(w, late, &v);
  pynccl_conclude(w, &v);
}

// Whether a rank has ended before it announced a counterpart. Its last announcement may take another way than
// the news of its end.
static int pynccl_cannot_answer(const pynccl_watch* w, const pynccl_said* s, int64_t now) {
  for (int r = 0; r < w->size; ++r) {
    const pynccl_peer* p = &w->peers[r];
    if (!(s->round || r == s->peer) || p->departure != PYNCCL_ENDS || !p->gone) continue;
    if (now - p->gone_at > GRACE_NS) return 1;
  }
  return 0;
}

// Whether a rank has closed its communicator without the counterpart. Its last announcement may take another
// way than the news of its end: meanwhile all other ranks respond, which pass it on. In a collective all of
// them must have announced theirs: until then one may only be slow.
static int pynccl_is_missed(pynccl_watch* w, pynccl_said* s, int64_t now) {
  int closed = 0, others = 0;
  for (int r = 0; r < w->size; ++r) {
    others |= pynccl_takes_part(w, r) && pynccl_owes(w, r, w->question);
    if (!pynccl_lacks(w, s, r)) continue;
    const int has_closed = w->peers[r].departure == PYNCCL_CLOSES;
    closed |= has_closed;
    others |= !has_closed;
  }
  if (closed) pynccl_ask_all(w);
  if (closed && s->round) pynccl_ask_calls(w, s->round);
  if (!closed || others)
    s->missed_at = 0;
  else if (!s->missed_at)
    s->missed_at = now;
  return s->missed_at && now - s->missed_at > pynccl_silence(w);
}

int pynccl_check_wait(pynccl_watch* w) {
  const pynccl_frame** table = calloc((size_t)w->size, sizeof(pynccl_frame*));
  const int64_t start = pynccl_now(), limit = w->timeout ? w->timeout : CHECK_SECONDS * 1000 * MS;
  int64_t differed = 0, polled = start, probed = start;
  pynccl_said* open;
  int r = table ? 0 : PYNCCL_NO_MEMORY;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  const int64_t patience = w->patience;
  w->patience = 0;
  // Else the locator is asked first.
  w->blocked = pynccl_locate || patience ? FREE : BLOCKED_HERE;
  w->first_probe = w->probes + 1;
  w->ring = NO_RING;
  __atomic_store_n(&w->called_at, start, __ATOMIC_RELAXED);
  while (!r) {
    const int64_t now = pynccl_now();
    if (w->verdict.trouble || !w->listed || w->departure) {
      r = PYNCCL_CLOSED;
      break;
    }
    const pynccl_said* about = pynccl_compare(w, &open);
    if (!about && !open) break;
    w->lacking = !open ? AWAITS_UNKNOWN : open->round ? pynccl_partner(w, open) : open->peer;
    if (!about && (w->ring || pynccl_is_missed(w, open, now))) about = open;
    if (about) pynccl_ask_calls(w, about->round);
    if (about && !differed) differed = now;
    if (about && (!pynccl_collect(w, about, table) || now - differed > TABLE_NS)) {
      pynccl_publish_table(w, table, w->ring);
      continue;
    }
    if (!about && pynccl_cannot_answer(w, open, now)) {
      pynccl_conclude_failed(w);
      if (w->verdict.trouble) continue;
    }
    if (!about && now - start > limit) {
      pynccl_check_timed_out(w, limit, table);
      continue;
    }
    if (!patience && now - probed > pynccl_silence(w)) {
      const pynccl_probe probe = {.origin = pynccl_origin(w), .serial = ++w->probes};
      pynccl_send_probes(w, &probe);
      probed = now;
    }
    if (patience && now - start > patience) {
      r = PYNCCL_TOO_LATE;
      break;
    }
    pynccl_ask_before(w, now - start, limit);
    pynccl_await(now + PYNCCL_SLICE_MS * MS);
    // Let Python handle signals.
    if (pynccl_locate && pynccl_now() - polled > PYNCCL_SLICE_MS * MS) {
      w->blocked = FREE;
      pthread_mutex_unlock(&pynccl_watchdog.lock);
      const int located = pynccl_locate(NULL, 0);
      pthread_mutex_lock(&pynccl_watchdog.lock);
      if (located == PYNCCL_LOCATED_STOPS) r = PYNCCL_STOPPED;
      if (!patience) w->blocked = located == PYNCCL_LOCATED ? BLOCKED_EVERYWHERE : BLOCKED_HERE;
      polled = pynccl_now();
    }
  }
  w->blocked = FREE;
  if (r != PYNCCL_STOPPED && r != PYNCCL_TOO_LATE) pynccl_drop_said(w, 0);
  if (!r) pynccl_forget_told(w);
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  free(table);
  return r;
}

int pynccl_check_other(pynccl_comm* comm, int kind) {
  pynccl_watch* w = comm->watch;
  if (!w || !w->checking) return 0;
  const pynccl_call call = {.comm = comm, .kind = kind};
  int r = pynccl_check_say(w, &call, 1);
  if (!r) r = pynccl_check_wait(w);
  pynccl_check_leave(w);
  return r;
}
