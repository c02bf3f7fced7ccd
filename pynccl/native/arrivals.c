#include "arrivals.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "checks.h"
#include "verdicts.h"

// Another rank has lost a rank. If this one does not hear of it either, all ranks must know before any
// decides.
static void pynccl_confirm(pynccl_watch* w, int reporter, int lost) {
  const int rank = lost == w->rank ? reporter : lost;
  if (rank != w->rank && pynccl_silent(w, rank, pynccl_silence(w) - w->question)) pynccl_report_loss(w, rank);
}

// A call, and those after it that have overtaken it.
static void pynccl_take_calls(pynccl_watch* w, int from, pynccl_frame* f) {
  pynccl_peer* p = &w->peers[from];
  // What is missing may never come.
  if (!pynccl_posts_arrive(w, from)) p->got = f->serial - 1;
  if (f->serial != p->got + 1) {
    f->kind = FRAME_EARLY;
    if (f->serial > p->got) pynccl_keep_frame(p, f);
    return;
  }
  ++p->got;
  pynccl_check_heard(w, from, f);
  for (int i = 0; i < p->inbox_count; ++i) {
    if (p->inbox[i].kind != FRAME_EARLY || p->inbox[i].serial != p->got + 1) continue;
    pynccl_frame next = p->inbox[i];
    pynccl_drop_frame(p, i);
    next.kind = FRAME_CALL;
    pynccl_take_calls(w, from, &next);
    return;
  }
}

// Another rank's verdict, unless there is one here.
static void pynccl_take_verdict(pynccl_watch* w, int from, const pynccl_frame* f) {
  const pynccl_peer* p = &w->peers[from];
  if (w->verdict.trouble || f->code == PYNCCL_RANKS_FAILED) return;
  w->verdict.result = (int)f->number;
  w->verdict.text[0] = 0;
  // A report that is passed on names its first author.
  w->verdict.reporter = f->words[0] && f->words[0] <= (uint64_t)w->size ? (int)f->words[0] : from + 1;
  pynccl_say(w->verdict.text, sizeof w->verdict.text, "%s", p->report ? p->report : "");
  w->verdict.place = f->words[1] <= strlen(w->verdict.text) ? (int)f->words[1] : 0;
  w->verdict.relayed = f->words[2] != 0;
  w->verdict.count = 0;
  for (int r = 0; r < w->size && r < TROUBLE_RANKS; ++r)
    if (f->text[r / 8] >> r % 8 & 1) pynccl_add_rank(&w->verdict, r);
  pynccl_publish(
      w, f->code == PYNCCL_MISMATCHED || f->code == PYNCCL_LIBRARY_FAILED ? (int)f->code : PYNCCL_TIMED_OUT);
}

static void pynccl_handle(pynccl_watch* w, int from, pynccl_frame* f) {
  pynccl_peer* p = &w->peers[from];
  // A rank that leaves only passes on what comes.
  if (w->departure && f->kind != FRAME_NEWS && f->kind != FRAME_LOST && f->kind != FRAME_LAST) return;
  if (f->kind != FRAME_MESSAGE && f->kind != FRAME_NEWS && f->kind != FRAME_LOST && f->kind != FRAME_FAILED)
    f->text[sizeof f->text - 1] = 0;
  switch (f->kind) {
    case FRAME_NEWS:
      for (uint32_t i = 0; i < f->code && i < FRAME_NEWS_COUNT; ++i) pynccl_learn(w, &f->news[i], from);
      break;
    case FRAME_LOST:
      for (uint32_t i = 0; i < f->code && i < FRAME_PAIRS; ++i) {
        const pynccl_loss pair = f->pairs[i];
        if (pair.rank >= w->size || pair.other >= w->size) continue;
        pynccl_spread_loss(w, pair.rank, pair.other);
        pynccl_confirm(w, pair.rank, pair.other);
      }
      break;
    case FRAME_FAILED:
      for (uint32_t i = 0; i < f->code && i < FRAME_RANKS; ++i) {
        const int failed = f->ranks[i];
        if (failed >= w->size) continue;
        w->peers[failed].named = 1;
        pynccl_note_lost(w, from, failed);
        pynccl_confirm(w, from, failed);
      }
      break;
    case FRAME_TEXT:
      if (!p->report && !(p->report = calloc(1, PYNCCL_MOST_TEXT))) break;
      pynccl_say(p->report, PYNCCL_MOST_TEXT, "%s", f->text);
      break;
    case FRAME_TROUBLE:
      pynccl_take_verdict(w, from, f);
      break;
    case FRAME_LAST:
      p->last_came = 1;
      pthread_cond_broadcast(&pynccl_watchdog.changed);
      break;
    case FRAME_MESSAGE:
      if (pynccl_keep_frame(p, f)) pthread_cond_broadcast(&pynccl_watchdog.changed);
      break;
    case FRAME_CALL:
      pynccl_take_calls(w, from, f);
      break;
    case FRAME_TELL:
    case FRAME_TOLD:
    case FRAME_PROBE:
      pynccl_check_heard(w, from, f);
      break;
    default:
      break;
  }
}

static void pynccl_arrived(pynccl_watch* w, int from, pynccl_frame* f) {
  if (f->kind < FRAME_ASK) {
    pynccl_handle(w, from, f);
    return;
  }
  const int origin = (int)f->origin;
  if (f->origin >= (uint32_t)w->size || origin == w->rank || (w->mesh && origin != from)) return;
  pynccl_peer* p = &w->peers[origin];
  if (!f->sequence) {
    if (f->to == (uint32_t)w->rank)
      pynccl_handle(w, origin, f);
    else if (f->to < (uint32_t)w->size)
      pynccl_forward(w, f);
    return;
  }
  if (f->sequence <= p->seen) return;
  p->seen = f->sequence;
  if (f->kind == FRAME_ASK && !pynccl_asked(w)) return;
  if (!w->mesh) pynccl_pass_on(w, f, from);
  if (pynccl_is_for(f, w->rank) && !p->gone) pynccl_handle(w, origin, f);
}

// A frame for a rank of this process came over a line.
static void pynccl_deliver(pynccl_watch* w, uint32_t line, pynccl_frame* f) {
  const int from = (int)f->from;
  if (f->from >= (uint32_t)w->size) return;
  pynccl_peer* p = &w->peers[from];
  if (!p->line || p->line->id != line) return;
  p->heard = pynccl_watchdog.awake;
  p->owes = 0;
  if (f->kind == FRAME_END)
    pynccl_hang_up(w, from);
  else
    pynccl_arrived(w, from, f);
}

void pynccl_catch_up(pynccl_watch* w) {
  if (w->begun) return;
  w->begun = 1;
  while (w->early) {
    pynccl_early* first = w->early;
    w->early = first->next;
    pynccl_deliver(w, first->line, &first->frame);
    free(first);
  }
  for (int r = 0; r < w->size; ++r)
    if (w->peers[r].line && w->peers[r].line->socket < 0) pynccl_hang_up(w, r);
}

static pynccl_watch* pynccl_receiver(const pynccl_frame* f) {
  pynccl_watch* w = pynccl_watchdog.watches;
  while (w && (w->channel != f->channel || (uint32_t)w->rank != f->at)) w = w->next;
  return w;
}

// The connection has ended, for all communicators.
static void pynccl_line_ended(pynccl_line* line, int tampered) {
  pynccl_line_close(line);
  for (pynccl_watch* w = pynccl_watchdog.watches; w; w = w->next)
    for (int r = 0; r < w->size && w->begun; ++r) {
      if (w->peers[r].line != line) continue;
      w->peers[r].tampered = tampered;
      pynccl_hang_up(w, r);
    }
}

void pynccl_read(pynccl_line* line) {
  pynccl_frame frame;
  int came;
  while ((came = pynccl_line_receive(line, &frame)) > 0) {
    line->heard = pynccl_watchdog.awake;
    pynccl_watch* w = pynccl_receiver(&frame);
    if (!w) {
      pynccl_keep_early(line, &frame);
    } else if (pynccl_hold(w)) {
      pynccl_catch_up(w);
      pynccl_deliver(w, line->id, &frame);
      pynccl_let_go(w);
    }
  }
  if (came < 0) pynccl_line_ended(line, came == -2);
}
