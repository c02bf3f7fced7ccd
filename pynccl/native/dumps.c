// The recorder's dumps. Nothing here allocates or waits: it runs in signal handlers.

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "names.h"
#include "ring.h"

#define PYNCCL_REASONS 16
// The last line of the answer to a signal.
#define PYNCCL_ANSWERED "end\n"

typedef struct pynccl_reason {
  char kind[16];
  char text[480];
  int64_t ns;
  int ready;
} pynccl_reason;

static pynccl_reason pynccl_reasons[PYNCCL_REASONS];
static int pynccl_reason_count;
static char pynccl_process[4096];
// Where dumps go: the folder, its identity when it was set, and the names of the file and of its draft.
static char pynccl_folder[4096], pynccl_file[300], pynccl_draft[304];
static struct stat pynccl_found;
static int pynccl_pending;

static struct {
  int fd;
  int error;
  size_t used;
  pynccl_instant now;
  char text[16384];
} out;

static int64_t pynccl_ns(uint64_t ticks, pynccl_instant last) {
  const int64_t span = last.ticks - pynccl_first.ticks;
  if (span <= 0) return last.ns;
  return pynccl_first.ns +
         (__int128)(int64_t)(ticks - pynccl_first.ticks) * (last.ns - pynccl_first.ns) / span;
}

static void pynccl_flush(void) {
  for (size_t done = 0; done < out.used && !out.error;) {
    const ssize_t n = write(out.fd, out.text + done, out.used - done);
    if (n > 0) done += n;
    if (n < 0 && errno != EINTR) out.error = errno;
  }
  out.used = 0;
}

static void pynccl_put(const char* text) {
  for (; *text; ++text) {
    if (out.used == sizeof out.text) pynccl_flush();
    out.text[out.used++] = *text;
  }
}

static void pynccl_put_number(int64_t value) {
  char digits[24], *at = digits + sizeof digits;
  uint64_t rest = value < 0 ? -(uint64_t)value : (uint64_t)value;
  *--at = 0;
  do *--at = '0' + rest % 10;
  while (rest /= 10);
  if (value < 0) *--at = '-';
  pynccl_put(at);
}

static void pynccl_put_text(const char* text) {
  pynccl_put("\"");
  for (; *text; ++text) {
    const char one[] = {*text, 0}, escaped[] = {'\\', *text, 0};
    pynccl_put(*text == '"' || *text == '\\' ? escaped : (unsigned char)*text < ' ' ? " " : one);
  }
  pynccl_put("\"");
}

static void pynccl_field(const char* name, int64_t value) {
  pynccl_put(", \"");
  pynccl_put(name);
  pynccl_put("\": ");
  pynccl_put_number(value);
}

static void pynccl_text_field(const char* name, const char* value) {
  pynccl_put(", \"");
  pynccl_put(name);
  pynccl_put("\": ");
  pynccl_put_text(value);
}

static const char* const pynccl_state_names[] = {"called", "taken", "done", "failed"};

// The algorithm of a call with arrays; NULL: it has none, or this is unknown. The library discards empty
// calls, and a call may fail before the choice.
static const char* pynccl_algorithm(const pynccl_trace* t, const pynccl_entry* r, int datatype) {
  if (r->kind >= PYNCCL_SEND || datatype >= ncclNumTypes || !r->count || pynccl_state_of(r) == PYNCCL_FAILED)
    return NULL;
  const pynccl_algorithms* known = &t->algorithms[r->kind];
  const char* first = __atomic_load_n(&known->by_size[0].name, __ATOMIC_ACQUIRE);
  int i = 0;
  while (first && i < 3 && r->count > known->by_size[i].most / pynccl_item_sizes[datatype]) ++i;
  return i ? known->by_size[i].name : first;
}

static void pynccl_put_record(const pynccl_trace* t, const pynccl_entry* r, uint64_t number, int of_plan) {
  const int pair = pynccl_is_pair(r->kind), one_sided = pynccl_is_one_sided(r->kind),
            array = r->kind < PYNCCL_BARRIER || r->kind == PYNCCL_PUT_SIGNAL;
  const int done = pynccl_state_of(r) == PYNCCL_DONE, datatype = r->datatype_op & 15,
            op = r->datatype_op >> 4;
  pynccl_put("{\"call\": ");
  pynccl_put_text(pynccl_kind_name(r->kind));
  if (pair) {
    pynccl_field("peer_seq", number);
    pynccl_field("peer", r->root);
  } else if (one_sided) {
    pynccl_field("peer", r->root);
    pynccl_field("signal", number & ((1 << PYNCCL_SIGNAL_BITS) - 1));
    pynccl_field("context", number >> PYNCCL_SIGNAL_BITS);
    if (r->kind == PYNCCL_WAIT_SIGNAL) pynccl_field("signals", r->count);
    if (r->kind == PYNCCL_PUT_SIGNAL) pynccl_field("offset", r->recv);
  } else if (pynccl_is_collective(r->kind) || r->kind == PYNCCL_INIT) {
    pynccl_field("seq", r->kind == PYNCCL_INIT ? 0 : number);
  }
  if (array) {
    pynccl_field("count", r->count);
    pynccl_text_field("dtype", datatype < ncclNumTypes ? pynccl_type_names[datatype] : "?");
    if (pynccl_reduces(r->kind))
      pynccl_text_field("op", op < ncclNumOps ? pynccl_op_names[op] : "pre_mul_sum");
    if (pynccl_has_root(r->kind)) pynccl_field("root", r->root);
    const char* algorithm = pynccl_algorithm(t, r, datatype);
    if (algorithm) pynccl_text_field("algorithm", algorithm);
    pynccl_field("send", r->send);
    if (!one_sided) pynccl_field("recv", r->recv);
  }
  if (array || one_sided) pynccl_field("stream", r->stream);
  if (r->kind == PYNCCL_SPLIT) pynccl_field("color", r->root);
  if (r->group) pynccl_field("group", r->group);
  if (of_plan) pynccl_put(", \"plan\": true");
  pynccl_field("time_ns", pynccl_ns(r->called, out.now));
  if (done) pynccl_field("end_ns", pynccl_ns(r->outcome >> 2, out.now));
  pynccl_text_field("state", pynccl_state_names[pynccl_state_of(r)]);
  pynccl_field("result", done ? 0 : (int64_t)r->outcome >> 2);
  const char* at = __atomic_load_n(&pynccl_callers[r->caller], __ATOMIC_ACQUIRE);
  if (at) pynccl_text_field("at", at);
  pynccl_put("}\n");
}

// The whole number of a send or recv; the counters have the newest.
static uint64_t pynccl_pair_number(const pynccl_trace* t, const pynccl_entry* r) {
  return pynccl_whole(*pynccl_pair(t, t->pairs, r->kind, r->root), r->number);
}

// The position at which a dump starts, so that it shows about `shown` calls even if plans have many. Sets
// `scratch` to the number of earlier calls with each peer.
static uint64_t pynccl_dump_start(const pynccl_trace* t, uint64_t next) {
  const uint64_t oldest = pynccl_trace_oldest(t, next);
  size_t shown = 0;
  uint64_t at = next;
  memcpy(t->scratch, t->pairs, 2 * (size_t)t->size * sizeof *t->pairs);
  while (at > oldest && shown < t->shown) {
    pynccl_entry r;
    if (!pynccl_trace_copy(t, --at, &r)) return at + 1;
    const pynccl_digest* plan = r.kind == PYNCCL_PLAN ? r.plan : NULL;
    shown += plan ? plan->count : 1;
    if (pynccl_is_pair(r.kind)) *pynccl_pair(t, t->scratch, r.kind, r.root) = pynccl_pair_number(t, &r) - 1;
    for (int i = 0; plan && i < plan->count; ++i)
      if (pynccl_is_pair(plan->calls[i].kind))
        --*pynccl_pair(t, t->scratch, plan->calls[i].kind, plan->calls[i].root);
  }
  return at;
}

static void pynccl_unfold(const pynccl_trace* t, const pynccl_entry* run, uint64_t collective) {
  const pynccl_digest* plan = run->plan;
  for (int i = 0; i < plan->count; ++i) {
    const pynccl_call* c = &plan->calls[i];
    const uint64_t number = pynccl_is_pair(c->kind)        ? ++*pynccl_pair(t, t->scratch, c->kind, c->root)
                            : pynccl_is_one_sided(c->kind) ? (uint64_t)c->op
                                                           : collective++;
    pynccl_entry r;
    pynccl_put_call(&r, c, run->called, number, run->group);
    r.outcome = run->outcome;
    pynccl_put_record(t, &r, number, 1);
  }
}

// Any thread may revoke or abort, while another thread writes records: such a call has a mark instead.
static void pynccl_put_mark(const pynccl_trace* t, int kind, uint64_t ticks) {
  const pynccl_entry r = {
      .called = ticks, .outcome = pynccl_outcome(PYNCCL_DONE, (int64_t)ticks), .kind = kind};
  pynccl_put_record(t, &r, 0, 0);
}

static void pynccl_dump_trace(const pynccl_trace* t) {
  const uint64_t next = __atomic_load_n(&t->next, __ATOMIC_ACQUIRE), start = pynccl_dump_start(t, next);
  const uint64_t collectives = t->collectives;
  const int mark = __atomic_load_n(&t->mark, __ATOMIC_ACQUIRE);
  pynccl_put("{");
  pynccl_put(t->header);
  pynccl_field("collectives", collectives);
  pynccl_field("overwritten", start);
  if (t->closed) pynccl_put(", \"closed\": true");
  if (mark) {
    pynccl_text_field("ended", pynccl_kind_name(mark));
    pynccl_field("ended_ns", pynccl_ns(t->marked, out.now));
  }
  pynccl_put("}\n");
  for (uint64_t at = start; at < next; ++at) {
    pynccl_entry record;
    if (!pynccl_trace_copy(t, at, &record)) continue;
    uint64_t number =
        pynccl_is_one_sided(record.kind) ? record.number : pynccl_whole(collectives, record.number);
    if (pynccl_is_pair(record.kind))
      number = *pynccl_pair(t, t->scratch, record.kind, record.root) = pynccl_pair_number(t, &record);
    if (record.kind == PYNCCL_PLAN)
      pynccl_unfold(t, &record, number);
    else
      pynccl_put_record(t, &record, number, 0);
  }
  const uint64_t revoked = __atomic_load_n(&t->revoked, __ATOMIC_ACQUIRE);
  if (revoked) pynccl_put_mark(t, PYNCCL_REVOKE, revoked);
  if (mark == PYNCCL_ABORT) pynccl_put_mark(t, mark, t->marked);
}

static void pynccl_put_process(void) {
  pynccl_put("{");
  pynccl_put(pynccl_process);
  pynccl_put(", \"clock\": [[");
  pynccl_put_number(pynccl_first.ticks);
  pynccl_put(", ");
  pynccl_put_number(pynccl_first.ns);
  pynccl_put("], [");
  pynccl_put_number(out.now.ticks);
  pynccl_put(", ");
  pynccl_put_number(out.now.ns);
  pynccl_put("]], \"reasons\": [");
  const int count = __atomic_load_n(&pynccl_reason_count, __ATOMIC_ACQUIRE);
  for (int i = 0, shown = 0; i < count && i < PYNCCL_REASONS; ++i) {
    if (!__atomic_load_n(&pynccl_reasons[i].ready, __ATOMIC_ACQUIRE)) continue;
    pynccl_put(shown++ ? ", {\"kind\": " : "{\"kind\": ");
    pynccl_put_text(pynccl_reasons[i].kind);
    pynccl_text_field("text", pynccl_reasons[i].text);
    pynccl_field("time_ns", pynccl_reasons[i].ns);
    pynccl_put("}");
  }
  pynccl_put("]}\n");
}

// The callers of the functions below hold pynccl_dumping.
static int pynccl_dump_to(int fd, const pynccl_trace* only) {
  out.fd = fd;
  out.error = 0;
  out.used = 0;
  out.now = pynccl_clock();
  pynccl_put_process();
  for (pynccl_node* node = __atomic_load_n(&pynccl_nodes, __ATOMIC_SEQ_CST); node; node = node->next) {
    const pynccl_trace* trace = __atomic_load_n(&node->trace, __ATOMIC_SEQ_CST);
    if (trace && (!only || trace == only)) pynccl_dump_trace(trace);
  }
  pynccl_flush();
  return out.error;
}

// Open the folder if it is still the one that was set, or if this user owns its replacement.
static int pynccl_open_folder(void) {
  struct stat now;
  const int fd = open(pynccl_folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return -1;
  const int same = !fstat(fd, &now) && now.st_dev == pynccl_found.st_dev && now.st_ino == pynccl_found.st_ino;
  if (same || now.st_uid == geteuid()) return fd;
  close(fd);
  errno = EPERM;
  return -1;
}

// Write a draft first: a process that is killed meanwhile leaves the earlier dump intact. O_EXCL and
// O_NOFOLLOW: never write to another user's file or through a link.
static int pynccl_dump_into(int folder) {
  unlinkat(folder, pynccl_draft, 0);
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int fd = openat(folder, pynccl_draft, flags, 0600);
  if (fd < 0) return errno;
  int error = pynccl_dump_to(fd, NULL);
  if (close(fd) && !error) error = errno;
  if (!error && renameat(folder, pynccl_draft, folder, pynccl_file)) error = errno;
  if (error) unlinkat(folder, pynccl_draft, 0);
  return error;
}

static int pynccl_dump_to_file(void) {
  if (!*pynccl_file) return ENOENT;
  const int folder = pynccl_open_folder();
  if (folder < 0) return errno;
  const int error = pynccl_dump_into(folder);
  close(folder);
  return error;
}

static int pynccl_dump_enter(void) { return !__atomic_exchange_n(&pynccl_dumping, 1, __ATOMIC_SEQ_CST); }

static void pynccl_dump_leave(void) {
  __atomic_store_n(&pynccl_dumping, 0, __ATOMIC_SEQ_CST);
  // Another thread, or a handler that interrupted this one, requested a dump meanwhile.
  while (__atomic_exchange_n(&pynccl_pending, 0, __ATOMIC_SEQ_CST)) {
    if (!pynccl_dump_enter()) {
      __atomic_store_n(&pynccl_pending, 1, __ATOMIC_SEQ_CST);
      if (!pynccl_no_dump()) return;
      continue;
    }
    pynccl_dump_to_file();
    __atomic_store_n(&pynccl_dumping, 0, __ATOMIC_SEQ_CST);
  }
}

// The launcher has asked for a dump and ends all ranks: it causes their later errors.
static int pynccl_ends;

int pynccl_trace_dump(int fd, const pynccl_trace* only) {
  if (!pynccl_dump_enter()) return EBUSY;
  const int error = pynccl_dump_to(fd, only);
  pynccl_dump_leave();
  return error;
}

static void pynccl_copy_text(char* to, size_t room, const char* text) {
  size_t length = strlen(text);
  if (length >= room) length = room - 1;
  // Cut before a character of several bytes, not inside it.
  while (length && text[length] && ((unsigned char)text[length] & 0xc0) == 0x80) --length;
  memcpy(to, text, length);
  to[length] = 0;
}

int pynccl_trace_save(const char* kind, const char* text) {
  if (__atomic_load_n(&pynccl_ends, __ATOMIC_ACQUIRE)) return 0;
  const int index = __atomic_fetch_add(&pynccl_reason_count, 1, __ATOMIC_ACQ_REL);
  if (index < PYNCCL_REASONS) {
    pynccl_reason* reason = &pynccl_reasons[index];
    pynccl_copy_text(reason->kind, sizeof reason->kind, kind);
    pynccl_copy_text(reason->text, sizeof reason->text, text);
    reason->ns = pynccl_clock().ns;
    __atomic_store_n(&reason->ready, 1, __ATOMIC_RELEASE);
  }
  if (!pynccl_dump_enter()) {
    __atomic_store_n(&pynccl_pending, 1, __ATOMIC_SEQ_CST);
    // The dump may have ended before it saw the request.
    if (!pynccl_no_dump() || !pynccl_dump_enter()) return EBUSY;
  }
  const int error = pynccl_dump_to_file();
  pynccl_dump_leave();
  return error;
}

int pynccl_trace_process(const char* header, const char* folder, const char* file) {
  if (strlen(header) >= sizeof pynccl_process || strlen(folder) >= sizeof pynccl_folder ||
      strlen(file) >= sizeof pynccl_file)
    return ENAMETOOLONG;
  if (*folder && lstat(folder, &pynccl_found)) return errno;
  strcpy(pynccl_process, header);
  strcpy(pynccl_folder, folder);
  strcpy(pynccl_draft, file);
  if (*file) strcat(pynccl_draft, ".new");
  strcpy(pynccl_file, file);
  return 0;
}

// A signal that dumps: its handler then calls the earlier handler and writes the last line to the asker's
// file.
typedef struct pynccl_asking {
  struct sigaction before;
  char kind[16], text[64];
  int fd;
  struct stat file;
} pynccl_asking;

static pynccl_asking pynccl_signals[NSIG];

// Whether the descriptor still refers to the asker's file: the program may have closed and reused it.
static int pynccl_has_file(const pynccl_asking* a) {
  struct stat now;
  return !fstat(a->fd, &now) && now.st_dev == a->file.st_dev && now.st_ino == a->file.st_ino;
}

static void pynccl_call_earlier(int number, siginfo_t* info, void* context) {
  const struct sigaction* before = &pynccl_signals[number].before;
  if (before->sa_flags & SA_SIGINFO)
    before->sa_sigaction(number, info, context);
  else if (before->sa_handler != SIG_DFL && before->sa_handler != SIG_IGN)
    before->sa_handler(number);
}

// faulthandler reads the stacks of threads that run, and crashes when a frame changes meanwhile
// (https://github.com/python/cpython/issues/116008). In a copy of the process nothing changes, and only the
// copy crashes. The copy sends no SIGCHLD, and the program's wait() does not see it.
static void pynccl_call_earlier_in_a_copy(int number, siginfo_t* info, void* context) {
  const long copy = syscall(SYS_clone, 0, NULL, NULL, NULL, NULL);
  if (copy < 0) {
    pynccl_call_earlier(number, info, context);
  } else if (!copy) {
    const struct rlimit none = {0, 0};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setrlimit(RLIMIT_CORE, &none);
    signal(SIGSEGV, SIG_DFL);
    signal(SIGBUS, SIG_DFL);
    pynccl_call_earlier(number, info, context);
    _exit(0);
  } else {
    while (waitpid(copy, NULL, __WCLONE) < 0 && errno == EINTR) continue;
  }
}

static void pynccl_on_signal(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const pynccl_asking* a = &pynccl_signals[number];
  pynccl_trace_save(a->kind, a->text);
  if (a->fd < 0) {
    pynccl_call_earlier(number, info, context);
  } else {
    __atomic_store_n(&pynccl_ends, 1, __ATOMIC_RELEASE);
    if (pynccl_has_file(a)) {
      pynccl_call_earlier_in_a_copy(number, info, context);
      if (write(a->fd, PYNCCL_ANSWERED, strlen(PYNCCL_ANSWERED)) < 0) errno = saved;
    }
  }
  errno = saved;
}

int pynccl_trace_on_signal(int number, const char* kind, const char* text, int fd) {
  struct sigaction now,
      mine = {.sa_sigaction = pynccl_on_signal, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
  if (number < 1 || number >= NSIG) return EINVAL;
  if (sigaction(number, NULL, &now)) return errno;
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == pynccl_on_signal) return 0;
  pynccl_asking* a = &pynccl_signals[number];
  if (fd >= 0 && fstat(fd, &a->file)) return errno;
  pynccl_copy_text(a->kind, sizeof a->kind, kind);
  pynccl_copy_text(a->text, sizeof a->text, text);
  a->fd = fd;
  a->before = now;
  sigemptyset(&mine.sa_mask);
  return sigaction(number, &mine, NULL) ? errno : 0;
}

// In a forked child: the rings belong to the parent.
void pynccl_trace_forked(void) {
  pynccl_trace_busy = pynccl_dumping = pynccl_pending = 0;
  for (pynccl_node* node = pynccl_nodes; node; node = node->next) node->trace = NULL;
  memset(pynccl_reasons, 0, sizeof pynccl_reasons);
  pynccl_reason_count = 0;
  *pynccl_file = 0;
  pynccl_ends = 0;
}
