// The control channel: frames of one size between the ranks of a communicator, and the state of each rank.
// One lock protects everything here and in the layers above, up to the watchdog.
//
// Connections join a rank to its neighbours: with few ranks to all others (a mesh), with more to those whose
// number differs by a power of two, modulo the number of ranks. That graph has about 2 log2(n) connections
// for each rank, and stays in one piece whichever log2(n) of them die. All below is the same for both graphs;
// only a graph that is not complete passes frames on.
//
// - Frames for some or all ranks are flooded: a rank that sees one for the first time passes it on to its
// other neighbours, then handles it. They have their origin's sequence number. Connections keep the order,
// and each rank passes all on in the order in which they came. So whatever path brings a frame, the frames
// that its origin sent, or had passed on, before it came earlier. A connection that had to drop one carries
// no later one.
// - What ranks know of each other only grows, and is told instead of flooded: the pairs of ranks that lost
// each other, and for each rank its newest number of calls and its departure. A rank collects what is new to
// it, and tells all neighbours at once, after the frames that came before.
// - The end of a connection is a loss: one of two neighbours has failed, or both. A rank without a connection
// to this one is gone when it cannot be reached over the connections that are not lost, see pynccl_reach.
// Each of its neighbours had passed on all its frames before it told the loss, so that none comes after its
// end. A frame that comes nevertheless (from a neighbour that lost this rank, by another way) is not handled.
// - A rank that left does not pass frames on. It may hide others, which are not lost for that: it counts as
// reaching all ranks that nobody has lost. A hidden rank is not asked, so it is never named as silent.
// - A frame for one rank takes the shortest way over ranks that have not left, and each of them finds the way
// again. A neighbour that hears from a rank that it leaves sends it a last frame. In check mode a rank that
// leaves passes frames on until all neighbours have done so: what was sent over it before is not lost. Frames
// of one origin may overtake each other; the receiver puts them in order.
// - Such a frame can be lost only if the rank that has it is cut off: only ranks that have left are around
// it, or around it and others. The receiver then sees ranks that have left or are hidden, and have no
// neighbour among those that it can reach. Check mode compares messages only between neighbours from then on.
// - Heartbeats go to the ranks whose number is greater by 1, 2, 4 and so on. To learn whether others respond,
// a rank asks all, at most once in QUESTION_NS; each passes the question on, if it has not just done so, and
// tells its news.
// - Sealing is between neighbours: a rank that passes a frame on seals it again, and every rank has the
// secret.
#pragma once

#include "lines.h"

#define TICK_MS 50
// Many ranks tell together what they hear of each other within this time.
#define NEWS_NS (10 * MS)
// Between heartbeats: within ENDING_NS.
#define BEAT_NS (1000 * MS)
// Between questions; with many ranks, see pynccl_watch.
#define QUESTION_NS (250 * MS)
// Deaths within this time count as one event, so that all survivors name the same ranks.
// More if the ranks tell each other what they know.
#define GRACE_NS (150 * MS)
// For this time a rank whose connection has ended may have left: others may tell so.
#define DOUBT_NS (100 * MS)
// A rank that has been silent for this time when a wait times out is named as not responding; with many ranks
// pynccl_silence().
#define SILENCE_NS (1000 * MS)
// A process ends within this time after its connection, or it is taken for alive.
#define ENDING_NS (2000 * MS)

// In place of the rank for which another one waits.
enum { AWAITS_NOBODY = 0xffff, AWAITS_UNKNOWN = 0xfffe };

// Of a search for rings of waits: the rank that began it, in one of its communicators, and how many searches
// began there, with this one. Then whether it has passed from one communicator to another, and how often it
// was passed on.
typedef struct pynccl_probe {
  uint64_t origin, serial;
  uint64_t across, hops;
} pynccl_probe;

typedef struct pynccl_peer {
  pynccl_line* line;  // NULL: none
  int order;          // of its process, see pynccl_connection
  int departure;
  int hearsay;    // the departure of a neighbour as others tell it, before its own last frames
  int gone;       // the connection to it has ended, or no neighbour reaches it
  int late;       // it never began: the rank did not connect in time
  int named;      // another rank's verdict names it as failed
  int64_t heard;  // when its last frame or news came, by pynccl_watchdog.awake
  // The rank for which its calls wait. If there are several it is one that waits, itself or through others,
  // for a rank that waits for nobody.
  int awaits;
  int awaited, before;   // see pynccl_mark_awaited
  int lacks;             // see pynccl_find_lacking
  pynccl_probe passed;   // the last one that was passed on, of those with an origin that leads here
  int64_t owes;          // since when it has not answered a question, by the same clock; 0: it has
  uint64_t seen;         // the number of its last flooded frame
  uint64_t posted, got;  // the serials of the last frames posted to it, and by it and taken in order
  int hidden;            // it takes part, but those who have left are on every way to it
  int last_sent;         // it leaves, and has got this rank's last frame
  int last_came;         // its last frame to this rank has come
  uint32_t stamp;
  int fresh;     // its news are to be told
  int doubtful;  // the connection has ended, and that is not told yet
  int clogged;   // the connection had to drop a flooded frame
  int losses;    // how many ranks it has lost, and how many have lost it
  int lost_by;
  int pid;  // 0: unknown
  uint64_t start;
  int ended;
  int64_t gone_at;
  int provable;  // the end of its process is a proof: it did not go on without this rank before
  uint64_t calls;
  int last_kind;  // kind of its newest call; -1: none
  int64_t since;  // when its newest call began
  int tampered;   // a frame from it was not authentic
  char* report;   // the text of its verdict, received so far
  pynccl_frame* inbox;
  int inbox_count, inbox_capacity;
} pynccl_peer;

// Two events behind the calls of a stream: the watchdog queries the older one; the newer one follows every
// call.
typedef struct pynccl_marker {
  uintptr_t stream, events[2];
  int64_t at[2];
  uint64_t calls[2];  // the number of the newest call before each event
  int kind[2];        // and its kind
  int pending, recording;
} pynccl_marker;

struct pynccl_watch {
  pynccl_comm* comm;
  pynccl_watch* next;
  uint32_t id;
  uint64_t channel;     // the communicator's number in frames
  pynccl_early* early;  // frames that came before this rank watched
  int begun;            // they have been handled
  int listed, connected, checking, size, rank, is_cpu, on_failure;
  struct pynccl_said* said;  // announced calls without a counterpart so far
  int said_count, said_capacity;
  uint64_t rounds;   // how many collectives were announced
  int announced;     // a call, or a group, that is not issued yet
  int resumed;       // the next call is one that was interrupted
  int blocked;       // see checks.c
  int64_t patience;  // of the next comparison; 0: endless
  // How many probes this rank has begun, and the number of the first that it could begin in this wait.
  uint64_t probes, first_probe;
  int lacking;                     // the rank whose counterpart is awaited
  int ring;                        // this wait is one of a ring, see checks.c
  char beyond[PYNCCL_FRAME_TEXT];  // and the call on another communicator that waits for this rank
  int telling;                     // ranks are asked for their calls
  uint64_t told_about;             // in this round
  pynccl_frame* told;              // the answer of each rank; NULL: nobody has asked
  int64_t timeout;
  int64_t question;   // between questions
  int64_t beat_at;    // of the last one
  int64_t inspected;  // when the watchdog last looked for trouble
  int mesh;           // all ranks are neighbours
  int* steps;         // to the neighbours: the differences of their numbers
  int step_count;
  uint64_t beaten;    // how many calls of this rank the last heartbeat told
  int departure;      // of this rank
  uint64_t sequence;  // of its last flooded frame
  int* ways;      // for each rank the neighbour over which frames reach it, -1: none; then room for a search
  int cut;        // a rank has no way, and has not died
  int stale;      // ranks have left or gone since `ways`, `cut` and `hidden` were found out
  int64_t asked;  // when the last question came, by pynccl_watchdog.awake
  int fresh;      // how many ranks have news to be told
  int64_t news_at;     // when the watchdog has told the news
  int doubtful;        // how many connections have ended, and that is not told yet
  pynccl_loss* pairs;  // losses to be told
  int pair_count, pair_capacity;
  int more_lost;      // losses have come since pynccl_find_gone()
  uintptr_t handle;   // 0: the watchdog must not use it any more
  uintptr_t context;  // the CUDA context of the events
  int touching, responding, ended;
  int64_t dying;       // when the first death was noticed
  int64_t late;        // when a call exceeded the time-out, by pynccl_watchdog.awake
  uint64_t* lost;      // for every rank a row of bits: the ranks that it cannot reach; NULL: none
  int64_t library_at;  // when the library reported an error
  int library_error;
  pynccl_verdict verdict;
  uint64_t calls;
  int last_kind;
  int64_t in_call;    // when a thread entered the library; 0: none is inside
  int64_t called_at;  // when the newest call began
  int64_t marked_at;  // when pynccl_mark_awaited looked
  pynccl_marker* markers;
  int marker_count, marker_capacity;
  pynccl_peer peers[];
};

struct pynccl_watchdog {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pynccl_watch* watches;
  int running, wake;
  int reserved;  // how many communicators will be watched, besides `watches`
  uint32_t last_id;
  // For how long the thread has listened. A process that was stopped or got no CPU must not take the others
  // for silent.
  int64_t awake;
  int64_t blind_until;  // after the process was suspended
  uint64_t process;     // a random number for it
  int prepared;
};

#pragma GCC visibility push(hidden)

extern struct pynccl_watchdog pynccl_watchdog;

// Wait for a change until a time; 0 if that has passed.
int pynccl_await(int64_t until);

// Keep a watch alive while the lock is released. Fails if its last reference is gone: the thread that dropped
// it waits for the lock to remove the watch from the list.
int pynccl_hold(pynccl_watch* w);
void pynccl_let_go(pynccl_watch* w);
// Whether another rank takes part: it has neither left nor gone.
int pynccl_takes_part(const pynccl_watch* w, int rank);
// Whether a rank was asked longer than `limit` ago, and has not answered.
int pynccl_owes(const pynccl_watch* w, int rank, int64_t limit);
// When the last sign of a rank's life came, by pynccl_watchdog.awake.
int64_t pynccl_heard(const pynccl_peer* p);
// Whether a rank has been silent for longer than `limit` while the watchdog listened, and should have said
// something.
int pynccl_silent(const pynccl_watch* w, int rank, int64_t limit);
int64_t pynccl_silence(const pynccl_watch* w);
int64_t pynccl_grace(const pynccl_watch* w);
int pynccl_has_lost(const pynccl_watch* w, int rank, int other);
// Note that a rank cannot reach another one. Which of the two has failed is decided after GRACE_NS, when all
// ranks have reported. Returns whether this is new.
int pynccl_note_lost(pynccl_watch* w, int rank, int other);
// The same, and tell all, once.
int pynccl_spread_loss(pynccl_watch* w, int rank, int other);
// Tell all that this rank cannot reach another one.
void pynccl_report_loss(pynccl_watch* w, int rank);
// Clear `missed` for the ranks that this rank reaches, directly or through others.
void pynccl_reach(const pynccl_watch* w, char* missed);
// Find ranks without a connection that cannot be reached any more.
void pynccl_find_gone(pynccl_watch* w);
// The connection to a rank has ended, or ends here.
void pynccl_hang_up(pynccl_watch* w, int rank);
// Put a frame of a rank into its inbox. The caller announces the change.
int pynccl_keep_frame(pynccl_peer* p, const pynccl_frame* frame);
void pynccl_drop_frame(pynccl_peer* p, int at);
// Send a frame to a neighbour, and to all.
int pynccl_send_frame(pynccl_watch* w, int rank, const pynccl_frame* frame);
void pynccl_tell_all(pynccl_watch* w, const pynccl_frame* frame);
// Send a frame to its receivers; pass one on that came from `from`.
void pynccl_flood(pynccl_watch* w, pynccl_frame* frame);
void pynccl_pass_on(pynccl_watch* w, const pynccl_frame* frame, int from);
// Send a frame to one rank, by the shortest way: nothing replaces it if a rank on the way dies.
void pynccl_post(pynccl_watch* w, pynccl_frame* frame, int rank);
void pynccl_forward(pynccl_watch* w, const pynccl_frame* frame);
// Find the ways to all ranks, and which are hidden, if ranks have left or gone since.
void pynccl_find_ways(pynccl_watch* w);
// Whether all that a rank posts arrives, unless a rank dies.
int pynccl_posts_arrive(const pynccl_watch* w, int rank);
int pynccl_is_for(const pynccl_frame* frame, int rank);
// Send heartbeats with this rank's news.
void pynccl_beat(pynccl_watch* w);
// Whether the heartbeats of another rank come to this one.
int pynccl_hears_beats(const pynccl_watch* w, int rank);
// Tell them that it leaves; wait, under the lock, until nothing more is to be passed on.
void pynccl_depart(pynccl_watch* w, int departure);
void pynccl_pass_last(pynccl_watch* w);
// Learn the news of a rank that came from `from`.
void pynccl_learn(pynccl_watch* w, const pynccl_news* news, int from);
// Tell the neighbours all that is new.
void pynccl_tell_news(pynccl_watch* w);
// Ask all ranks whether they respond, unless a question is on its way.
void pynccl_ask_all(pynccl_watch* w);
// The same shortly before a wait times out: then it is known who does not respond.
void pynccl_ask_before(pynccl_watch* w, int64_t waited, int64_t limit);
// Whether the library says that a call of this rank waits for another rank; only the CPU library can tell.
int pynccl_awaits(const pynccl_watch* w, int rank);
// At a time-out, note for which ranks this one waits, and for which they did, as far as it is known.
void pynccl_mark_awaited(pynccl_watch* w);
// Follow the waits from a rank to one that waits for nobody; -1: it is not known, or they lead to this rank
// or in a circle. `marked`: the waits when pynccl_mark_awaited looked; else as they were last heard of.
int pynccl_end_of_waits(const pynccl_watch* w, int rank, int marked);
// A question has come. Returns whether to pass it on.
int pynccl_asked(pynccl_watch* w);
// Check whether the processes of ranks without a connection have ended.
void pynccl_check_processes(pynccl_watch* w, int64_t now);

// The calling threads write these without the lock.
static inline uint64_t pynccl_calls(const pynccl_watch* w) {
  return __atomic_load_n(&w->calls, __ATOMIC_RELAXED);
}
static inline int pynccl_newest_kind(const pynccl_watch* w) {
  return __atomic_load_n(&w->last_kind, __ATOMIC_RELAXED);
}

#pragma GCC visibility pop
