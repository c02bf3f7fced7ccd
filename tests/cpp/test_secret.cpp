// PYNCCL_SECRET admits only processes that have it. Errors say where it is missing and never show it.
#include <sys/stat.h>

#include "job.hpp"
#include "service/ids.hpp"
#include "stranger.hpp"

using namespace testing;
using namespace pncpu;

namespace {

std::string hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (uint8_t byte : digest) snprintf(two, sizeof two, "%02x", byte), text += two;
  return text;
}

// FIPS 180-4's examples (NIST's SHA256.pdf) and RFC 4231.
TEST_CASE("hashes") {
  auto hash = [](const std::string& text) { return hex(sha256(text.data(), text.size())); };
  auto mac = [](const std::string& key, const std::string& text) {
    return hex(hmac_sha256(key, text.data(), text.size()));
  };
  using std::string;
  CHECK_EQ(hash("abc"), string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  CHECK_EQ(hash(""), string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  CHECK_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  CHECK_EQ(hash(string(1000000, 'a')),
           string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
  CHECK_EQ(mac(string(20, '\x0b'), "Hi There"),
           string("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  CHECK_EQ(mac("Jefe", "what do ya want for nothing?"),
           string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(mac(string(20, '\xaa'), string(50, '\xdd')),
           string("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"));
  CHECK_EQ(mac(string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
           string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
  CHECK(equal_in_constant_time("abc", "abc", 3));
  CHECK(!equal_in_constant_time("abc", "abd", 3));
}

// What a stranger with this secret ("" for none) gets to hear as rank 1, before it announces itself.
std::string greet(const sockaddr_in& at, const std::string& secret, Hello hello, Digest* replay = nullptr) {
  int fd = connect_patiently(at);
  hello.secured = !secret.empty();
  put(fd, hello);
  std::string got;
  if (!secret.empty()) {
    Challenge challenge;
    CHECK(read_exactly(fd, &challenge, sizeof challenge));
    CHECK_EQ(challenge.secured, 1u);
    Digest answer = proof(secret, Role::Connects, hello, challenge.nonce);
    put(fd, replay ? *replay : answer);
  }
  Announce a = announce_as(1, 2);
  put_frame(fd, Ctl::Announce, &a, sizeof a, sizeof a);
  CHECK(read_to_end(fd, 10, &got));
  close(fd);
  return got;
}

TEST_CASE("with a secret only who has it gets in") {
  set("PYNCCL_SECRET", "open sesame, please");
  sockaddr_in at = use_public_id();
  Child evil([&] {
    CHECK(contains(greet(at, "", public_hello(1)), "has a secret (PYNCCL_SECRET)"));
    CHECK_EQ(greet(at, "open barley, please", public_hello(1)), std::string());
    CHECK_EQ(greet(at, "open sesame, please ", public_hello(1)), std::string());
    // What a rank with the secret once said on another connection.
    int fd = connect_patiently(at);
    Hello hello = public_hello(1);
    hello.secured = 1;
    put(fd, hello);
    Challenge challenge;
    CHECK(read_exactly(fd, &challenge, sizeof challenge));
    Digest theirs = proof("open sesame, please", Role::Listens, hello, challenge.nonce);
    CHECK(equal_in_constant_time(theirs.data(), challenge.proof.data(), theirs.size()));
    Digest recorded = proof("open sesame, please", Role::Connects, hello, challenge.nonce);
    put(fd, recorded);
    close(fd);
    CHECK_EQ(greet(at, "open sesame, please", hello, &recorded), std::string());
    // The root's own proof, sent back.
    CHECK_EQ(greet(at, "open sesame, please", hello, &theirs), std::string());
  });
  Child other([&] {
    pause_for(1.5);
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    take_part(id, 2, 1);
  });
  ncclUniqueId id = settled_id();
  take_part(id, 2, 0);
  CHECK_EQ(evil.wait(), 0);
  CHECK_EQ(other.wait(), 0);
}

// An id from ncclGetUniqueId, whose root and rank 0 have the secret `mine`, and rank 1 has `theirs`.
void secrets_differ(const char* mine, const char* theirs, const char* at_root, const char* at_rank) {
  CHECK_EQ(in_child([&] {
             if (*mine) set("PYNCCL_SECRET", mine);
             ncclUniqueId id = settled_id();
             Child other([&] {
               unsetenv("PYNCCL_SECRET");
               if (*theirs) set("PYNCCL_SECRET", theirs);
               ncclComm_t comm = nullptr;
               CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 1)), int(ncclInvalidUsage));
               std::string text = ncclGetLastError(nullptr);
               SAYS(text, at_rank);
             });
             ncclComm_t comm = nullptr;
             CHECK_EQ(int(ncclCommInitRank(&comm, 2, id, 0)), int(ncclInvalidUsage));
             std::string text = ncclGetLastError(nullptr);
             SAYS(text, at_root);
             CHECK_EQ(other.wait(), 0);
           }),
           0);
}

TEST_CASE("a secret on one side only is said on both") {
  secrets_differ("a secret of rank 0", "", "has no secret (PYNCCL_SECRET), and the root has one",
                 "this rank has none");
  secrets_differ("", "a secret of rank 1", "has a secret (PYNCCL_SECRET), and the root has none",
                 "the other has none");
  secrets_differ("a secret of rank 0", "a secret of rank 1", "the root's secret", "another secret");
}

TEST_CASE("secrets from a file") {
  fs::path file = scratch / "secret";
  write_text(file, " out of a secret file\n");
  set("PYNCCL_SECRET_FILE", file.c_str());
  chmod(file.c_str(), 0644);
  ncclUniqueId id;
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "is open to every user (mode 0644); expected 0600"));
  chmod(file.c_str(), 0600);
  id = settled_id();
  Child other([&] {
    unsetenv("PYNCCL_SECRET_FILE");
    set("PYNCCL_SECRET", "out of a secret file");
    take_part(id, 2, 1);
  });
  take_part(id, 2, 0);
  CHECK_EQ(other.wait(), 0);
  write_text(file, "\n");
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "is empty; expected the secret"));
  write_text(file, " not a secret \n");
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr),
                 "PYNCCL_SECRET_FILE: the secret has 12 bytes; expected at least 16"));
  set("PYNCCL_SECRET", "fifteen letters");
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "PYNCCL_SECRET has 15 bytes; expected at least 16"));
  unsetenv("PYNCCL_SECRET");
  set("PYNCCL_SECRET_FILE", "/nowhere");
  CHECK_EQ(int(ncclGetUniqueId(&id)), int(ncclInvalidArgument));
  CHECK(contains(ncclGetLastError(nullptr), "cannot read '/nowhere'"));
}

TEST_CASE("a secret is never shown") {
  set("PYNCCL_SECRET", "never to be in any log");
  const char* value = nullptr;
  int length = 0;
  OK(ncclParamGetParameter("PYNCCL_SECRET", &value, &length));
  CHECK_EQ(std::string(value), std::string("<hidden>"));
  fs::path file = scratch / "log";
  set("NCCL_DEBUG_FILE", file.c_str());
  set("NCCL_DEBUG", "TRACE");
  ncclParamDumpAll();
  run_job(2);
  CHECK(contains(read_text(file), "PYNCCL_SECRET"));
  CHECK(!contains(read_text(file), "never to be in any log"));
}

const AtOnce kAtOnce(3);

}  // namespace
