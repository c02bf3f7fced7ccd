// Frames: what the ranks of a communicator tell each other, all of one size.
#pragma once

#include "watch.h"

enum {
  // Between neighbours.
  FRAME_NEWS = 1,  // of ranks
  FRAME_LOST,      // pairs of ranks
  FRAME_FAILED,    // ranks that the sender's verdict names
  FRAME_TEXT,
  FRAME_TROUBLE,  // its text has a bit for each rank of the verdict
  FRAME_LAST,     // the last one to a rank that leaves
  FRAME_END,      // the sender has no connection to the receiver any more
  // From any rank to others.
  FRAME_ASK,
  FRAME_MESSAGE,
  // Of check mode.
  FRAME_CALL,  // what the sender is about to call
  FRAME_TELL,  // a question for the calls of all
  FRAME_TOLD,
  FRAME_PROBE,  // of a wait for a message, or with code - 1 for that step of a collective
  FRAME_EARLY   // in the inbox: a FRAME_CALL before which another one is to come
};

#define TROUBLE_RANKS (8 * (PYNCCL_FRAME_TEXT - 1))

// The receivers of a frame: one rank, or all, or those in `set`, whose first rank is the number beside
// TO_SET.
#define TO_SET 0x40000000U
#define TO_ALL 0x80000000U
#define SET_RANKS 384

// What a rank tells of a rank. A larger stamp is newer.
typedef struct pynccl_news {
  uint64_t calls : 48;
  uint64_t awaits : 16;  // as when the sender was asked last, see pynccl_peer
  uint32_t stamp;
  uint16_t rank;
  uint16_t kind : 6;  // of its newest call; NO_KIND: none
  uint16_t departure : 3;
  uint16_t age : 7;  // of its newest call, in AGE_NS
} pynccl_news;
#define NO_KIND 63
#define AGE_NS (40 * MS)
#define MOST_AGE 127

#define FRAME_NEWS_COUNT 13

// A rank, and one that it cannot reach.
typedef struct pynccl_loss {
  uint16_t rank, other;
} pynccl_loss;
#define FRAME_PAIRS 52
#define FRAME_RANKS 104

// What travels over a line, always whole.
typedef struct pynccl_frame {
  // Set for each connection that the frame goes over: the communicator, and the two neighbours' ranks in it.
  uint64_t channel;
  uint32_t from, at;
  uint32_t kind;
  uint32_t code;  // of news, pairs and ranks: how many
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
    uint16_t ranks[FRAME_RANKS];
  };
} pynccl_frame;
