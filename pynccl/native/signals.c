#include "signals.h"

#include "internal.h"
#include "ring.h"

// The signals of one peer and number that are known to be missing; later waits for them are not counted.
typedef struct pynccl_missing {
  int peer, op;
} pynccl_missing;

enum { MOST_MISSING = 8 };

typedef struct pynccl_missings {
  pynccl_missing found[MOST_MISSING];
  int count;
} pynccl_missings;

static int pynccl_is_known(const pynccl_missings* all, int peer, int op) {
  for (int i = 0; i < all->count; ++i)
    if (all->found[i].peer == peer && all->found[i].op == op) return 1;
  return 0;
}

static void pynccl_say_wait(const pynccl_comm* comm, pynccl_missings* all, int peer, int op, size_t expected,
                            char* text, size_t size) {
  if (all->count == MOST_MISSING || pynccl_is_known(all, peer, op)) return;
  const int signal = op & ((1 << PYNCCL_SIGNAL_BITS) - 1), context = op >> PYNCCL_SIGNAL_BITS;
  uint64_t arrived = 0;
  const int known = comm->waits && !pyncclCpuSignalCount(comm->handle, peer, signal, context, &arrived);
  if (known && arrived >= expected) return;
  all->found[all->count++] = (pynccl_missing){peer, op};
  pynccl_say(text, size, "; it waits for signal %d", signal);
  if (context) pynccl_say(text, size, " of context %d", context);
  pynccl_say(text, size, " from rank %d: %zu expected", peer, expected);
  if (known) pynccl_say(text, size, ", %llu arrived", (unsigned long long)arrived);
}

void pynccl_say_signals(const pynccl_comm* comm, char* text, size_t size) {
  const pynccl_trace* t = comm->trace;
  if (!t) return;
  pynccl_missings all = {.count = 0};
  const uint64_t next = __atomic_load_n(&t->next, __ATOMIC_ACQUIRE);
  for (uint64_t at = pynccl_trace_oldest(t, next); at < next; ++at) {
    pynccl_entry r;
    if (!pynccl_trace_copy(t, at, &r) || pynccl_state_of(&r) > PYNCCL_TAKEN) continue;
    if (r.kind == PYNCCL_WAIT_SIGNAL) pynccl_say_wait(comm, &all, r.root, (int)r.number, r.count, text, size);
    for (int i = 0; r.kind == PYNCCL_PLAN && i < r.plan->count; ++i)
      if (r.plan->calls[i].kind == PYNCCL_WAIT_SIGNAL)
        pynccl_say_wait(comm, &all, r.plan->calls[i].root, r.plan->calls[i].op, r.plan->calls[i].count, text,
                        size);
  }
}
