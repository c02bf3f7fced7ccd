// What lies below the operations: the shared segment and who may offer one, pipes, and direct access.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <random>

#include "helpers.hpp"
#include "service/socket.hpp"
#include "transport/segment.hpp"

using namespace testing;
using namespace pncpu;

namespace {

constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Fd file_of(size_t bytes, int seals) {
  Fd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(fd.get(), off_t(bytes)), 0);
  if (seals) CHECK_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST_CASE("a segment keeps its size") {
  Segment s(3, 4096);
  CHECK_EQ(int(s.create()), int(ncclSuccess));
  CHECK_EQ(ftruncate(s.fd(), 0), -1);
  CHECK_EQ(errno, EPERM);
  CHECK_EQ(ftruncate(s.fd(), off_t(2 * s.bytes())), -1);
  CHECK_EQ(fcntl(s.fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
}

TEST_CASE("only a sealed file of the right size is opened") {
  Segment right(2, 8192);
  size_t bytes = right.bytes();
  CHECK_EQ(int(right.open(file_of(bytes, kAll))), int(ncclSuccess));

  for (int seals : {0, F_SEAL_SHRINK, F_SEAL_SHRINK | F_SEAL_GROW, F_SEAL_GROW | F_SEAL_SEAL}) {
    Segment s(2, 8192);
    CHECK_EQ(int(s.open(file_of(bytes, seals))), int(ncclSystemError));
    CHECK(contains(last_error(), "not sealed"));
  }
  for (size_t wrong : {size_t(0), bytes - 4096, bytes + 4096}) {
    Segment s(2, 8192);
    CHECK_EQ(int(s.open(file_of(wrong, kAll))), int(ncclSystemError));
    CHECK(contains(last_error(), "the shared segment has " + std::to_string(wrong) + " bytes, expected " +
                                     std::to_string(bytes)));
  }
  std::string path = scratch / "plain";
  write_text(path, std::string(bytes, 0));
  Segment of_a_file(2, 8192);
  CHECK_EQ(int(of_a_file.open(Fd(open(path.c_str(), O_RDWR | O_CLOEXEC)))), int(ncclSystemError));
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  close(ends[1]);
  Segment of_a_pipe(2, 8192);
  CHECK_EQ(int(of_a_pipe.open(Fd(ends[0]))), int(ncclSystemError));
}

// What the leader of a host says about its rings.
TEST_CASE("rings of any announced size are bounded") {
  for (size_t ring : {size_t(0), size_t(1), size_t(4095), size_t(5000), size_t(3) << 20, size_t(1) << 31,
                      size_t(1) << 63, ~size_t(0)}) {
    Segment s(2, ring);
    CHECK_EQ(int(s.open(file_of(1 << 20, kAll))), int(ncclInternalError));
    CHECK(contains(last_error(), std::to_string(ring)));
    Segment mine(2, ring);
    CHECK_EQ(int(mine.create()), int(ncclInternalError));
  }
  for (int ranks : {-1, 0, 1 << 20}) {
    Segment s(ranks, 4096);
    CHECK_EQ(int(s.create()), int(ncclInternalError));
  }
}

TEST_CASE("many ranks have smaller rings") {
  Segment few(2, size_t(1) << 20), many(64, size_t(1) << 20), again(64, many.ring_bytes());
  CHECK_EQ(few.ring_bytes(), size_t(1) << 20);
  CHECK(many.rings_bytes() <= size_t(256) << 20);
  CHECK_EQ(again.bytes(), many.bytes());  // those who open it come to the same
}

blkcnt_t blocks_of(int fd) {
  struct stat st;
  CHECK_EQ(fstat(fd, &st), 0);
  return st.st_blocks;
}

TEST_CASE("a sealed segment gives pages back") {
  Segment s(2, size_t(1) << 20);
  CHECK_EQ(int(s.create()), int(ncclSuccess));
  Link link, back;
  s.attach(0, 1, &link);
  s.attach(1, 0, &back);
  std::vector<char> bytes(size_t(1) << 20, 'x'), got(bytes.size());
  for (int round = 0; round < 2; ++round) {
    CHECK_EQ(link.pipe[kColl]->write(bytes.data(), bytes.size()), bytes.size());
    CHECK_EQ(back.pipe[kColl]->read(got.data(), got.size()), got.size());
    CHECK(got == bytes);
    CHECK(link.pipe[kColl]->idle());
    CHECK(back.pipe[kColl]->idle());
    blkcnt_t full = blocks_of(s.fd());
    s.release_rings();
    CHECK(blocks_of(s.fd()) + 2000 < full);  // of 512 bytes each
  }
}

TEST_CASE("a segment leaves nothing mapped") {
  auto maps = [] {
    std::string text = read_text("/proc/self/maps");
    size_t count = 0;
    for (size_t at = 0; (at = text.find("memfd:pynccl", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  for (int round = 0; round < 3; ++round) {
    Segment a(2, 4096), b(2, 4096);
    CHECK_EQ(int(a.create()), int(ncclSuccess));
    CHECK_EQ(int(b.open(Fd(dup(a.fd())))), int(ncclSuccess));
    CHECK_EQ(maps(), size_t(2));
    a.cell(1).closed.store(uint32_t(round + 1));
    CHECK_EQ(b.cell(1).closed.load(), uint32_t(round + 1));
  }
  CHECK_EQ(maps(), size_t(0));
}

// ---- pipes ----

struct Ends {
  Link a, b;
  Segment segment{2, 4096};
  explicit Ends(bool sockets) {
    if (!sockets) {
      CHECK_EQ(int(segment.create()), int(ncclSuccess));
      segment.attach(0, 1, &a);
      segment.attach(1, 0, &b);
      return;
    }
    for (int c = 0; c < kChannels; ++c) {
      int fds[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
      a.pipe[c] = tcp_pipe(std::make_shared<Socket>(Fd(fds[0])));
      b.pipe[c] = tcp_pipe(std::make_shared<Socket>(Fd(fds[1])));
    }
  }
};

// Random calls on both sides: what arrives is what was written, in order, and no more is promised than is
// there.
TEST_CASE("pipes keep every byte in order") {
  for (bool sockets : {false, true})
    for (unsigned seed = 1; seed <= 20; ++seed) {
      std::mt19937 random(seed);
      Ends ends(sockets);
      Pipe &out = *ends.a.pipe[kP2p], &in = *ends.b.pipe[kP2p];
      std::string sent, got;
      while (got.size() < 200000) {
        std::string s(random() % 4000 + 1, 0);
        for (char &c : s) c = char(random());
        size_t first = random() % s.size();
        if (random() % 2)
          sent += s.substr(0, out.write(s.data(), s.size()));
        else if (out.put(s.data(), first, s.data() + first, s.size() - first))
          sent += s;
        std::string buffer(random() % 5000, 0);
        if (random() % 2) {
          buffer.resize(in.read(&buffer[0], buffer.size()));
          got += buffer;
          continue;
        }
        Span front = in.peek();
        size_t there = in.readable(), skip = there ? random() % there : 0;
        CHECK(front.size <= there);
        CHECK(got + std::string(front.data, front.size) == sent.substr(0, got.size() + front.size));
        buffer.resize(there - skip);
        in.copy_out(skip, &buffer[0], buffer.size());
        CHECK(buffer == sent.substr(got.size() + skip, buffer.size()));
        in.consume(skip);
        got += sent.substr(got.size(), skip);
      }
      CHECK(got == sent.substr(0, got.size()));
      CHECK((out.fault() == nullptr && in.fault() == nullptr));
      CHECK_EQ(out.take_moved(), !sockets);
      CHECK(!out.take_moved());
    }
}

TEST_CASE("a full pipe takes nothing") {
  for (bool sockets : {false, true}) {
    Ends ends(sockets);
    Pipe &out = *ends.a.pipe[kColl];
    std::vector<char> bytes(4096, 'y');
    size_t taken = 0, n;
    while ((n = out.write(bytes.data(), bytes.size())) > 0) taken += n;
    CHECK(taken >= 4096);
    CHECK_EQ(out.write(bytes.data(), 1), size_t(0));
    if (!sockets) CHECK(!out.put(bytes.data(), 1, nullptr, 0));
    CHECK((!out.idle() || sockets));
    std::vector<char> got(taken);
    size_t read = 0;
    while ((n = ends.b.pipe[kColl]->read(got.data() + read, taken - read)) > 0) read += n;
    CHECK_EQ(read, taken);
    CHECK(out.put(bytes.data(), bytes.size(), nullptr, 0));
  }
}

// What a socket's pipe could not send at once goes out with flush(), and what is asked for at once comes at
// once, however long.
TEST_CASE("a long message comes at once") {
  Ends ends(true);
  Pipe &out = *ends.a.pipe[kColl], &in = *ends.b.pipe[kColl];
  std::string head(1000, 'h'), body(3000000, 0);
  for (size_t i = 0; i < body.size(); ++i) body[i] = char(i * 31 >> 8);
  size_t bytes = head.size() + body.size();
  std::vector<char> got(bytes);
  for (int round = 0; round < 3; ++round) {
    CHECK(out.put(head.data(), head.size(), body.data(), body.size()));
    CHECK(!out.flush());
    CHECK(!out.idle());
    in.readable();
    CHECK(in.reserve(bytes));
    for (int i = 0; i < 10000 && in.readable() < bytes; ++i) out.flush();
    Span all = in.peek();
    CHECK_EQ(all.size, bytes);
    CHECK(std::string(all.data, head.size()) == head);
    CHECK(std::string(all.data + head.size(), all.size - head.size()) == body);
    in.consume(all.size);
    CHECK(out.flush());
    CHECK(out.idle());
    CHECK(in.idle());
  }
  Ends rings(false);
  CHECK(rings.a.pipe[kColl]->reserve(4096));
  CHECK(!rings.a.pipe[kColl]->reserve(4097));
}

TEST_CASE("a socket that ended is no crash") {
  Ends ends(true);
  Pipe &out = *ends.a.pipe[kColl], &in = *ends.b.pipe[kColl];
  CHECK_EQ(out.write("last", 4), size_t(4));
  shutdown(out.socket()->fd(), SHUT_RDWR);
  char text[8] = {};
  CHECK_EQ(in.read(text, 8), size_t(4));  // what came before the end still counts
  CHECK_EQ(std::string(text), std::string("last"));
  CHECK_EQ(in.readable(), size_t(0));
  CHECK_EQ(out.write("more", 4), size_t(0));
  out.put("more", 4, nullptr, 0);
  CHECK(out.flush());  // nobody is left to send to
  CHECK(!out.more_may_come());
  out.close();
  CHECK(out.socket() == nullptr);
}

// ---- direct access ----

struct Target {
  uint64_t nonce[2] = {0x1234, 0x5678};
  char bytes[64] = "the peer's bytes";
  Remote remote(pid_t pid) const { return {pid, reinterpret_cast<uintptr_t>(nonce), {nonce[0], nonce[1]}}; }
};

TEST_CASE("a process is known by its nonce") {
  static Target target;
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  pid_t child = fork();
  if (child == 0) {
    char byte;
    close(ends[1]);
    while (read(ends[0], &byte, 1) < 0) continue;
    _exit(strcmp(target.bytes, "from the parent") != 0);
  }
  auto memory = process_memory(target.remote(child));
  char got[64] = {};
  uint64_t at = reinterpret_cast<uintptr_t>(target.bytes);
  CHECK(memory->works());
  CHECK(memory->at(at) == nullptr);
  CHECK(memory->read(got, at, sizeof got, true) == RemoteResult::Ok);
  CHECK_EQ(std::string(got), std::string(target.bytes));
  CHECK(memory->write("from the parent", at, 16) == RemoteResult::Ok);
  CHECK(memory->read(got, 8, sizeof got, false) == RemoteResult::Fault);
  CHECK(memory->read(got, 8, sizeof got, true) == RemoteResult::Fault);
  CHECK(memory->write(got, 8, sizeof got) == RemoteResult::Fault);

  // Another process under the same id.
  Remote other = target.remote(child);
  other.nonce[1] ^= 1;
  auto stranger = process_memory(other);
  char untouched[16] = "untouched";
  CHECK(!stranger->works());
  CHECK(stranger->read(untouched, at, 4, true) == RemoteResult::Gone);
  CHECK(stranger->write(untouched, at, 4) == RemoteResult::Gone);

  close(ends[0]);
  close(ends[1]);
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(memory->read(got, at, sizeof got, true) == RemoteResult::Gone);
}

TEST_CASE("a rank that failed lets nobody write") {
  Ends ends(false);
  char theirs[8] = "before";
  uint64_t at = reinterpret_cast<uintptr_t>(theirs);
  ends.a.memory = own_memory();
  CHECK(ends.a.write("first", at, 6) == RemoteResult::Ok);
  CHECK_EQ(std::string(theirs), std::string("first"));
  ends.a.cell->closed.store(1);
  CHECK(ends.a.write("later", at, 6) == RemoteResult::Closed);
  CHECK_EQ(std::string(theirs), std::string("first"));
  CHECK_EQ(ends.b.theirs->inside.load(), uint64_t(0));
}

}  // namespace
