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
// anew. A neighbour that hears from a rank that it leaves bids it farewell, and sends nothing more to it. In
// check mode a rank that leaves passes frames on until all neighbours have done so: what was sent over it
// before is not lost. Frames of one origin may overtake each other; the receiver puts them in order.
// - Such a frame can be lost only if the rank that has it is cut off: only ranks that have left are around
// it, or around it and others. The receiver then sees ranks that have left or are hidden, and have no
// neighbour among those that it can reach. Check mode compares messages only between neighbours from then on.
// - Heartbeats go to those neighbours only that there are without a mesh. To learn whether others respond, a
// rank asks all, at most once in QUESTION_NS; each passes the question on, if it has not just done so, and
// tells its news.
// - Sealing is between neighbours: who passes a frame on seals it anew, and every rank has the secret.
#pragma once

#include <pthread.h>

#include "internal.h"
#include "watch.h"

#define TICK_MS 50
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
// A peer with this much unsent output gets no more frames.
#define MOST_OUTPUT (1 << 20)
// A process ends within this time after its connection, or it is taken for alive.
#define ENDING_NS (2000 * MS)
// The bytes that encryption adds to a frame.
#define TAG_BYTES 16

enum {
  // Between neighbours.
  FRAME_NEWS = 1,  // of ranks
  FRAME_LOST,      // pairs of ranks
  FRAME_FAILED,    // the sender's verdict names a rank
  FRAME_TEXT,
  FRAME_TROUBLE,   // its text has a bit for each rank of the verdict
  FRAME_FAREWELL,  // the last one to a rank that leaves
  // From any rank to others.
  FRAME_ASK,
  FRAME_MESSAGE,
  // Of check mode.
  FRAME_CALL,  // what the sender is about to call
  FRAME_TELL,  // a question for the calls of all
  FRAME_TOLD,
  FRAME_EARLY  // in the inbox: a FRAME_CALL before which another one is to come
};

#define TROUBLE_RANKS (8 * (PYNCCL_FRAME_TEXT - 1))

// The receivers of a frame: one rank, or all, or those in `set`, whose first rank is the number beside
// TO_SET.
#define TO_SET 0x40000000U
#define TO_ALL 0x80000000U
#define SET_RANKS 384

// What a rank tells of a rank. A larger stamp is newer.
typedef struct pynccl_news {
  uint64_t calls;
  uint32_t stamp;
  uint16_t rank;
  uint8_t kind;  // of its newest call; NO_KIND: none
  uint8_t departure;
} pynccl_news;
#define NO_KIND 255

#define FRAME_NEWS_COUNT 13

// A rank, and one that it cannot reach.
typedef struct pynccl_loss {
  uint16_t rank, other;
} pynccl_loss;
#define FRAME_PAIRS 52

// What travels over the channel, always whole.
typedef struct pynccl_frame {
  uint32_t kind;
  uint32_t code;  // of news and pairs: how many
  uint32_t origin, to;
  uint64_t sequence;  // of the origin; 0: not flooded
  uint64_t serial;    // counts what the origin has posted to this receiver; 0: not posted
  uint64_t number;
  union {
    struct {
      uint64_t words[6];
      char text[PYNCCL_FRAME_TEXT];
    };
    uint64_t set[SET_RANKS / 64];
    pynccl_news news[FRAME_NEWS_COUNT];
    pynccl_loss pairs[FRAME_PAIRS];
  };
} pynccl_frame;

// The functions of pynccl_sealing.
typedef int pynccl_encrypt(unsigned char* out, unsigned long long* out_bytes, const unsigned char* message,
                           unsigned long long bytes, const unsigned char* also, unsigned long long also_bytes,
                           const unsigned char* unused, const unsigned char* nonce, const unsigned char* key);
typedef int pynccl_decrypt(unsigned char* out, unsigned long long* out_bytes, unsigned char* unused,
                           const unsigned char* sealed, unsigned long long bytes, const unsigned char* also,
                           unsigned long long also_bytes, const unsigned char* nonce,
                           const unsigned char* key);

typedef struct pynccl_peer {
  int socket;  // -1: none
  int departure;
  int hearsay;           // the departure of a neighbour as others tell it, before its own last frames
  int gone;              // the connection has ended, or no neighbour reaches it
  int late;              // it never began: the rank did not connect in time
  int named;             // another rank's verdict names it as failed
  int64_t heard;         // when its last frame or news came, by pynccl_watchdog.awake
  int64_t owes;          // since when it has not answered a question, by the same clock; 0: it has
  uint64_t seen;         // the number of its last flooded frame
  uint64_t posted, got;  // the serials of the last frames posted to it, and by it and taken in order
  int hidden;            // it takes part, but those who have left are on every way to it
  int parted;            // it leaves, and this rank has bid it farewell
  int farewell;          // it has bid this rank farewell
  uint32_t stamp;
  int fresh;     // its news are to be told
  int doubtful;  // the connection has ended, and that is not told yet
  int clogged;   // the connection had to drop a flooded frame
  int losses;    // how many ranks it has lost, and how many have lost it
  int lost_by;
  int pid;  // 0: unknown
  uint64_t start;
  int ended;
  int local;         // the connection does not leave the host
  int64_t heard_at;  // when the last frame came over its connection, by CLOCK_MONOTONIC
  int64_t gone_at;
  int provable;  // the end of its process is a proof: it did not go on without this rank before
  uint64_t calls;
  int last_kind;  // kind of its newest call; -1: none
  size_t input_bytes;
  unsigned char input[sizeof(pynccl_frame) + TAG_BYTES];
  pynccl_cipher outgoing, incoming;
  int tampered;  // a frame from it was not authentic
  int wants_output;
  char* output;
  size_t output_bytes, output_capacity;
  char* report;  // the text of its verdict, received so far
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
  int listed, connected, checking, size, rank, is_cpu, on_failure;
  pynccl_encrypt* encrypt;  // NULL: frames are plain
  pynccl_decrypt* decrypt;
  struct pynccl_said* said;  // announced calls without a counterpart so far
  int said_count, said_capacity;
  uint64_t rounds;      // how many collectives were announced
  int telling;          // ranks are asked for their calls
  uint64_t told_about;  // in this round
  pynccl_frame* told;   // the answer of each rank; NULL: nobody has asked
  int64_t timeout;
  int64_t question;   // between questions
  int64_t beat_at;    // of the last one
  int64_t inspected;  // when the watchdog last looked for trouble
  int mesh;           // all ranks are neighbours
  int* steps;         // to the neighbours: the differences of their numbers
  int step_count;
  int* beats;  // the same to those that get heartbeats: few, also in a mesh
  int beat_count;
  int departure;      // of this rank
  uint64_t sequence;  // of its last flooded frame
  int* ways;      // for each rank the neighbour over which frames reach it, -1: none; then room for a search
  int cut;        // a rank has no way, and has not died
  int stale;      // ranks have left or gone since `ways`, `cut` and `hidden` were found out
  int64_t asked;  // when the last question came, by pynccl_watchdog.awake
  int fresh;      // how many ranks have news to be told
  int doubtful;   // how many connections have ended, and that is not told yet
  pynccl_loss* pairs;  // losses to be told
  int pair_count, pair_capacity;
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
  int64_t in_call;  // when a thread entered the library; 0: none is inside
  pynccl_marker* markers;
  int marker_count, marker_capacity;
  pynccl_peer peers[];
};

struct pynccl_watchdog {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pynccl_watch* watches;
  int running, epoll, wake;
  int reserved;  // how many communicators will be watched, besides `watches`
  uint32_t last_id;
  // For how long the thread has listened. A process that was stopped or got no CPU must not take the others
  // for silent.
  int64_t awake;
  int64_t blind_until;  // after the process was suspended
  int prepared;
};

#pragma GCC visibility push(hidden)

extern struct pynccl_watchdog pynccl_watchdog;

// Wait for a change until a time; 0 if that has passed.
int pynccl_await(int64_t until);

void pynccl_watch_epoll(pynccl_watch* w, int rank, int how);
// Whether another rank takes part: it has neither left nor gone.
int pynccl_takes_part(const pynccl_watch* w, int rank);
// Whether a rank was asked longer than `limit` ago, and has not answered.
int pynccl_owes(const pynccl_watch* w, int rank, int64_t limit);
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
void pynccl_hang_up(pynccl_watch* w, int rank);
// Begin with a peer's connected socket; negative: it has none.
void pynccl_take_socket(pynccl_peer* p, int socket);
void pynccl_seal_with(pynccl_watch* w, const pynccl_sealing* sealing);
size_t pynccl_wire_bytes(const pynccl_watch* w);
// Returns 0 if the input is not authentic or not the next frame.
int pynccl_unpack(const pynccl_watch* w, pynccl_peer* p, pynccl_frame* frame);
// Put a frame of a rank into its inbox. The caller announces the change.
int pynccl_keep_frame(pynccl_peer* p, const pynccl_frame* frame);
void pynccl_drop_frame(pynccl_peer* p, int at);
// Send queued output to a rank.
void pynccl_push(pynccl_watch* w, int rank);
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
// Tell all neighbours this rank's news.
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
