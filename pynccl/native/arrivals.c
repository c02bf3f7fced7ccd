#include "arrivals.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "verdicts.h"

static void pynccl_keep_frame(pynccl_peer* p, const pynccl_frame* frame) {
  pynccl_frame* inbox = pynccl_room(p->inbox, p->inbox_count, &p->inbox_capacity, sizeof *inbox);
  if (!inbox) return;
  p->inbox = inbox;
  inbox[p->inbox_count++] = *frame;
  pthread_cond_broadcast(&pynccl_watchdog.changed);
}

// Another rank has lost a rank. If this one does not hear of it either, all ranks must know before any
// decides.
static void pynccl_confirm(pynccl_watch* w, int reporter, int lost) {
  const int rank = lost == w->rank ? reporter : lost;
  if (rank != w->rank && pynccl_silent(&w->peers[rank], pynccl_silence(w) - w->beat))
    pynccl_report_loss(w, rank);
}

static void pynccl_arrived(pynccl_watch* w, int from, pynccl_frame* f) {
  pynccl_peer* p = &w->peers[from];
  f->text[sizeof f->text - 1] = f->kind == FRAME_MESSAGE ? f->text[sizeof f->text - 1] : 0;
  switch (f->kind) {
    case FRAME_BEAT:
      p->calls = f->number;
      p->last_kind = f->code < PYNCCL_PLAN ? (int)f->code : 0;
      break;
    case FRAME_DEPARTURE:
      p->departure = f->code ? (int)f->code : PYNCCL_CLOSES;
      if (p->departure == PYNCCL_ABORTS_FIRST && !w->dying) w->dying = pynccl_now();
      break;
    case FRAME_FAILED:
      if (f->number >= (uint64_t)w->size) break;
      w->peers[f->number].named = 1;
      pynccl_note_lost(w, from, (int)f->number);
      pynccl_confirm(w, from, (int)f->number);
      break;
    case FRAME_LOST:
      if (f->code >= (uint32_t)w->size || f->number >= (uint64_t)w->size) break;
      // Pass it on: the sender cannot tell the other end.
      if (pynccl_note_lost(w, (int)f->code, (int)f->number)) pynccl_send_frame(w, (int)f->number, f);
      pynccl_confirm(w, (int)f->code, (int)f->number);
      break;
    case FRAME_TEXT:
      if (!p->report && !(p->report = calloc(1, PYNCCL_MOST_TEXT))) break;
      pynccl_say(p->report, PYNCCL_MOST_TEXT, "%s", f->text);
      break;
    case FRAME_TROUBLE:
      if (w->verdict.trouble || f->code == PYNCCL_RANKS_FAILED) break;
      w->verdict.result = (int)f->number;
      w->verdict.text[0] = 0;
      // A report that is passed on names its first author.
      w->verdict.reporter = f->words[0] && f->words[0] <= (uint64_t)w->size ? (int)f->words[0] : from + 1;
      pynccl_say(w->verdict.text, sizeof w->verdict.text, "%s", p->report ? p->report : "");
      pynccl_publish(w, f->code == PYNCCL_MISMATCHED || f->code == PYNCCL_LIBRARY_FAILED ? (int)f->code
                                                                                         : PYNCCL_TIMED_OUT);
      break;
    case FRAME_MESSAGE:
    case FRAME_CALL:
      pynccl_keep_frame(p, f);
      break;
    default:
      break;
  }
}

void pynccl_read(pynccl_watch* w, int rank) {
  pynccl_peer* p = &w->peers[rank];
  const size_t bytes = pynccl_wire_bytes(w);
  while (p->socket >= 0) {
    const ssize_t n = recv(p->socket, p->input + p->input_bytes, bytes - p->input_bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      pynccl_hang_up(w, rank);
      return;
    }
    p->input_bytes += (size_t)n;
    if (p->input_bytes < bytes) continue;
    p->input_bytes = 0;
    pynccl_frame frame;
    if (!pynccl_unpack(w, p, &frame)) {
      p->tampered = 1;
      pynccl_hang_up(w, rank);
      return;
    }
    p->heard = pynccl_watchdog.awake;
    p->heard_at = pynccl_now();
    pynccl_arrived(w, rank, &frame);
  }
}
