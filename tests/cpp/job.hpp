// Ranks as processes: forked children that cannot outlive a test, and the job that they run.
#pragma once

#include <sys/prctl.h>

#include <memory>

#include "gauge.hpp"
#include "ranks.hpp"

namespace testing {

// Its exit status says whether its checks held; it is killed when the handle goes.
class Child {
 public:
  template <class Body>
  explicit Child(Body body) {
    fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(100);
    _exit(status_of(body));
  }
  int wait() {
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) continue;
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

inline void run_rank(ncclComm_t comm, int nranks) {
  std::vector<float> small(10, 1), large(100000, 1);
  for (std::vector<float>* x : {&small, &large}) {
    OK(ncclAllReduce(x->data(), x->data(), x->size(), ncclFloat32, ncclSum, comm, nullptr));
    OK(pyncclCpuStreamSynchronize(comm, nullptr, -1));
    CHECK_EQ(size_t(std::count(x->begin(), x->end(), float(nranks))), x->size());
  }
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
}

inline void take_part(const ncclUniqueId& id, int nranks, int rank) {
  ncclComm_t comm = nullptr;
  ncclResult_t r = ncclCommInitRank(&comm, nranks, id, rank);
  if (r != ncclSuccess) fprintf(stderr, "rank %d: %s\n", rank, ncclGetLastError(nullptr));
  OK(r);
  if (comm) run_rank(comm, nranks);
}

// AddressSanitizer's allocator does not survive a fork while another thread allocates.
inline void let_service_rest() { pause_for(0.05); }

// A job whose rank 0 is this process. The other ranks are forked when it is made and wait for its id.
class Job {
 public:
  explicit Job(int nranks) : nranks_(nranks) {
    let_service_rest();
    for (int r = 1; r < nranks; ++r) {
      int ends[2];
      CHECK_EQ(pipe(ends), 0);
      ids_.push_back(ends[1]);
      others_.push_back(std::make_unique<Child>([=] {
        ncclUniqueId id;
        CHECK_EQ(read(ends[0], &id, sizeof id), ssize_t(sizeof id));
        take_part(id, nranks, r);
      }));
      close(ends[0]);
    }
  }
  void run() {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    for (int fd : ids_) CHECK_EQ(write(fd, &id, sizeof id), ssize_t(sizeof id));
    take_part(id, nranks_, 0);
    for (auto& child : others_) CHECK_EQ(child->wait(), 0);
    for (int fd : ids_) close(fd);
  }

 private:
  int nranks_;
  std::vector<int> ids_;
  std::vector<std::unique_ptr<Child>> others_;
};

inline void run_job(int nranks) { Job(nranks).run(); }

// A new id, whose service has nothing to do any more: this process may fork.
inline ncclUniqueId settled_id() {
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  let_service_rest();
  return id;
}

inline void start_service() { settled_id(); }

}  // namespace testing
