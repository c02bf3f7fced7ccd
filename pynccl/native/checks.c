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

// An announcement to a peer, and the peer's counterpart.
typedef struct pynccl_said {
  int peer, answered;
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

// Whether a peer must make the counterpart of a call; a one-sided call has none.
static int pynccl_concerns(const pynccl_watch* w, const pynccl_call* c, int peer) {
  if (c->comm != w->comm || pynccl_is_one_sided(c->kind)) return 0;
  return pynccl_side(c->kind) == SIDE_ALL || c->root == peer;
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
  if (f->words[5] > 1) pynccl_say(text, size, " in a group of %llu", (unsigned long long)f->words[5]);
  if (f->text[0]) pynccl_say(text, size, " at %s", f->text);
}

static int pynccl_alike(const pynccl_frame* a, const pynccl_frame* b) {
  const uint64_t* x = a->words;
  const uint64_t* y = b->words;
  const int message = pynccl_side((int)x[0]) != SIDE_ALL;
  if (x[1] != y[1] || x[2] != y[2]) return 0;
  // PreMulSum operations have different numbers on every rank.
  const int ops = x[3] == y[3] || (x[3] >= ncclNumOps && y[3] >= ncclNumOps);
  return message || (x[0] == y[0] && ops && x[4] == y[4]);
}

// Announce a call to a peer, and remember it until the counterpart has come.
static int pynccl_say_to(pynccl_watch* w, int peer, const pynccl_frame* frame) {
  pynccl_said* said = pynccl_room(w->said, w->said_count, &w->said_capacity, sizeof *said);
  if (!said) return PYNCCL_NO_MEMORY;
  w->said = said;
  said[w->said_count++] = (pynccl_said){.peer = peer, .frame = *frame};
  pynccl_send_frame(w, peer, frame);
  return 0;
}

int pynccl_check_say(pynccl_watch* w, const pynccl_call* calls, int count) {
  char where[PYNCCL_FRAME_TEXT] = "";
  if (pynccl_locate && pynccl_locate(where, sizeof where)) return PYNCCL_STOPPED;
  int r = 0, mine = 0;
  for (int i = 0; i < count; ++i) mine += calls[i].comm == w->comm;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  for (int peer = 0; peer < w->size && !r; ++peer) {
    if (peer == w->rank) continue;
    int last = -1;
    for (int i = 0; i < count; ++i)
      if (pynccl_concerns(w, &calls[i], peer)) last = i;
    for (int i = 0; i <= last && !r; ++i) {
      const pynccl_call* c = &calls[i];
      if (!pynccl_concerns(w, c, peer)) continue;
      pynccl_frame frame = {.kind = FRAME_CALL, .number = (uint64_t)i};
      frame.code = i == last && !pynccl_depth ? PART_LAST : 0;
      const uint64_t words[] = {c->kind,         c->datatype,       c->count,
                                (uint64_t)c->op, (uint64_t)c->root, (uint64_t)mine};
      memcpy(frame.words, words, sizeof words);
      memcpy(frame.text, where, sizeof where);
      r = pynccl_say_to(w, peer, &frame);
    }
  }
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  return r;
}

// The index of the peer's next announcement that can be the counterpart; -1: none so far.
static int pynccl_answer(const pynccl_peer* p, const pynccl_frame* said) {
  const int side = pynccl_side((int)said->words[0]);
  const int wanted = side == SIDE_SENDS ? SIDE_RECEIVES : side == SIDE_RECEIVES ? SIDE_SENDS : SIDE_ALL;
  for (int i = 0; i < p->inbox_count; ++i)
    if (p->inbox[i].kind == FRAME_CALL && pynccl_side((int)p->inbox[i].words[0]) == wanted) return i;
  return -1;
}

static const pynccl_frame* pynccl_newest(const pynccl_peer* p) {
  for (int i = p->inbox_count; i-- > 0;)
    if (p->inbox[i].kind == FRAME_CALL) return &p->inbox[i];
  return NULL;
}

// Match announcements with counterparts. Returns this rank's first one that a peer contradicts, or NULL.
static const pynccl_said* pynccl_compare(pynccl_watch* w, int* open) {
  *open = 0;
  for (int i = 0; i < w->said_count; ++i) {
    pynccl_said* s = &w->said[i];
    pynccl_peer* p = &w->peers[s->peer];
    const int at = s->answered ? -1 : pynccl_answer(p, &s->frame);
    if (at >= 0) {
      s->answered = 1;
      s->answer = p->inbox[at];
      memmove(&p->inbox[at], &p->inbox[at + 1], (size_t)(--p->inbox_count - at) * sizeof *p->inbox);
    }
    *open += !s->answered;
  }
  const pynccl_said* first = NULL;
  for (int i = 0; i < w->said_count; ++i) {
    const pynccl_said* s = &w->said[i];
    // Both ranks wait, each for a call that the other has not announced.
    const pynccl_frame* newest = s->answered ? NULL : pynccl_newest(&w->peers[s->peer]);
    const int contradicted =
        s->answered ? !pynccl_alike(&s->frame, &s->answer) : newest && newest->code & PART_LAST;
    if (contradicted && (!first || s->frame.number < first->frame.number)) first = s;
  }
  return first;
}

// The call of each rank in the place of `about`. Returns how many are not known yet.
static int pynccl_collect(pynccl_watch* w, const pynccl_said* about, const pynccl_frame** table) {
  int missing = 0;
  for (int r = 0; r < w->size; ++r) {
    table[r] = r == w->rank ? &about->frame : NULL;
    for (int i = 0; i < w->said_count && !table[r]; ++i) {
      const pynccl_said* s = &w->said[i];
      if (s->peer == r && s->answered && s->frame.number == about->frame.number) table[r] = &s->answer;
    }
    if (!table[r]) table[r] = pynccl_newest(&w->peers[r]);
    missing += !table[r] && !w->peers[r].gone;
  }
  return missing;
}

static void pynccl_write_table(const pynccl_watch* w, const pynccl_frame** table, char* text, size_t size) {
  pynccl_say(text, size, "the ranks called different things:");
  for (int r = 0, end; r < w->size; r = end) {
    char line[256] = "", next[256] = "";
    for (end = r; end < w->size; ++end) {
      next[0] = 0;
      if (table[end])
        pynccl_describe(table[end], next, sizeof next);
      else
        pynccl_say(next, sizeof next,
                   w->peers[end].departure ? "nothing: it has closed its communicator" : "nothing yet");
      if (end == r) memcpy(line, next, sizeof line);
      if (strcmp(line, next)) break;
    }
    pynccl_say(text, size, end == r + 1 ? "\n  rank %d" : "\n  ranks %d", r);
    if (end > r + 1) pynccl_say(text, size, "-%d", end - 1);
    pynccl_say(text, size, ": %s", line);
  }
}

static void pynccl_check_timed_out(pynccl_watch* w, int64_t waited) {
  char what[512] = "";
  const pynccl_said* s = w->said;
  while (s->answered) ++s;
  pynccl_describe(&s->frame, what, sizeof what);
  pynccl_say(what, sizeof what, ": rank %d did not come within %g s", s->peer, (double)waited / 1e9);
  pynccl_hear_all(w);
  int open;
  const int answered = !pynccl_compare(w, &open) && !open;
  if (answered || w->verdict.trouble || !w->listed) return;
  pynccl_verdict v;
  pynccl_explain(w, what, 1, &v);
  pynccl_conclude(w, &v);
}

// Whether a rank has ended before it announced a counterpart.
static int pynccl_cannot_answer(const pynccl_watch* w) {
  for (int i = 0; i < w->said_count; ++i)
    if (!w->said[i].answered && w->peers[w->said[i].peer].departure == PYNCCL_ENDS) return 1;
  return 0;
}

int pynccl_check_wait(pynccl_watch* w) {
  const pynccl_frame** table = calloc((size_t)w->size, sizeof(pynccl_frame*));
  const int64_t start = pynccl_now(), limit = w->timeout ? w->timeout : CHECK_SECONDS * 1000 * MS;
  int64_t differed = 0, polled = start;
  int r = table ? 0 : PYNCCL_NO_MEMORY, open;
  pthread_mutex_lock(&pynccl_watchdog.lock);
  while (!r) {
    const int64_t now = pynccl_now();
    if (w->verdict.trouble || !w->listed) {
      r = PYNCCL_CLOSED;
      break;
    }
    const pynccl_said* about = pynccl_compare(w, &open);
    if (!about && !open) break;
    if (about && !differed) differed = now;
    if (about && (!pynccl_collect(w, about, table) || now - differed > TABLE_NS)) {
      w->verdict = (pynccl_verdict){.result = ncclInvalidUsage};
      pynccl_write_table(w, table, w->verdict.text, sizeof w->verdict.text);
      pynccl_publish(w, PYNCCL_MISMATCHED);
      continue;
    }
    if (!about && pynccl_cannot_answer(w)) {
      pynccl_conclude_failed(w);
      if (w->verdict.trouble) continue;
    }
    if (!about && now - start > limit) {
      pynccl_check_timed_out(w, limit);
      continue;
    }
    pynccl_await(now + 100 * MS);
    // Let Python handle signals.
    if (pynccl_locate && pynccl_now() - polled > 100 * MS) {
      pthread_mutex_unlock(&pynccl_watchdog.lock);
      if (pynccl_locate(NULL, 0)) r = PYNCCL_STOPPED;
      pthread_mutex_lock(&pynccl_watchdog.lock);
      polled = pynccl_now();
    }
  }
  w->said_count = 0;
  pthread_mutex_unlock(&pynccl_watchdog.lock);
  free(table);
  return r;
}

int pynccl_check_other(pynccl_comm* comm, int kind) {
  pynccl_watch* w = comm->watch;
  if (!w || !w->checking) return 0;
  const pynccl_call call = {.comm = comm, .kind = kind};
  const int r = pynccl_check_say(w, &call, 1);
  return r ? r : pynccl_check_wait(w);
}
