// The shared memory of a communicator's ranks on one host: an unnamed file, so nothing remains after them. A
// process maps it once for all of its ranks.
#pragma once

#include "transport/transport.hpp"

namespace pncpu {

class Segment {
 public:
  // The rings of collectives are so many times as large as those of messages: a power of two.
  Segment(int ranks, size_t ring_bytes, size_t coll_factor = 1);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ncclResult_t create();
  // Maps the file of another rank. Refuses a file whose size is wrong or not sealed: accessing a file that
  // has shrunk would kill the process.
  ncclResult_t open(Fd fd);
  int fd() const { return fd_.get(); }
  size_t bytes() const { return bytes_; }
  size_t ring_bytes() const { return ring_bytes_; }    // of messages: the smaller ones
  size_t shown_bytes() const { return shown_bytes_; }  // of a board
  // All rings; also how many bytes release_rings() gives back.
  size_t rings_bytes() const { return bytes_ - data_at_; }
  Cell& cell(int local) const { return reinterpret_cast<Cell*>(base_)[local]; }
  Board board(int local) const {
    return {reinterpret_cast<Notice*>(base_ + notices_at_) + local,
            base_ + shown_at_ + size_t(local) * shown_bytes_, size_t(ranks_), shown_bytes_};
  }
  void attach(int me, int peer, Link* link) const;  // the pipes and signals between two local ranks
  void release_rings();  // frees the rings' pages; the next access allocates empty ones

 private:
  ncclResult_t map();
  size_t pair(int from, int to) const { return size_t(from) * size_t(ranks_) + size_t(to); }
  Signals& signals(int from, int to) const {
    return reinterpret_cast<Signals*>(base_ + signals_at_)[pair(from, to)];
  }
  std::atomic<uint64_t>* counters(int from, int to) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + counters_at_) + pair(from, to) * kCounters;
  }
  size_t ring_bytes(int channel) const { return channel == kColl ? coll_factor_ * ring_bytes_ : ring_bytes_; }
  size_t pair_bytes() const { return ring_bytes(kColl) + ring_bytes(kP2p); }
  Ring ring(int from, int to, int channel) const;

  int ranks_;
  size_t ring_bytes_, coll_factor_, states_at_ = 0, signals_at_ = 0, counters_at_ = 0, notices_at_ = 0,
                                    shown_at_ = 0, shown_bytes_ = 0, data_at_ = 0, bytes_ = 0;
  Fd fd_;
  char* base_ = nullptr;
};

}  // namespace pncpu
