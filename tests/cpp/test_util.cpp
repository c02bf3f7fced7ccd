// The CPU library's log, parameters, sockets and fault injection.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <regex.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "base/net.hpp"
#include "base/params.hpp"
#include "comm/fault.hpp"
#include "helpers.hpp"

using namespace pncpu;
using namespace testing;

namespace {

bool matches(const std::string& text, const std::string& pattern) {
  regex_t compiled;
  CHECK(regcomp(&compiled, ("^(" + pattern + ")$").c_str(), REG_EXTENDED | REG_NOSUB) == 0);
  bool matched = regexec(&compiled, text.c_str(), 0, nullptr, 0) == 0;
  regfree(&compiled);
  return matched;
}

fs::path log_to_file(const char* level) {
  fs::path path = scratch / "log";
  set("NCCL_DEBUG", level);
  set("NCCL_DEBUG_FILE", path.c_str());
  reset_debug();
  return path;
}

// What `body` writes to stdout.
template <typename Body>
std::string stdout_of(Body body) {
  fs::path path = scratch / "stdout";
  fflush(stdout);
  Fd saved(dup(STDOUT_FILENO));
  Fd file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  dup2(file.get(), STDOUT_FILENO);
  body();
  dup2(saved.get(), STDOUT_FILENO);
  return read_text(path);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Deadline in_ms(int ms) { return Clock::now() + std::chrono::milliseconds(ms); }

// ---- log

TEST_CASE("log is silent by default") {
  std::string text = stdout_of([] {
    log(Level::Warn, "no %d", 1);
    CHECK_EQ(fail(ncclInternalError, "no %s", "2"), ncclInternalError);
  });
  CHECK_EQ(text, std::string());
  CHECK_EQ(std::string(last_error()), std::string("no 2"));
}

TEST_CASE("log lines") {
  std::string text = stdout_of([] {
    set("NCCL_DEBUG", "warn");
    log(Level::Info, "hidden");
    errno = EBUSY;
    log(Level::Warn, "shown %d", 7);
    CHECK_EQ(errno, EBUSY);
    fail(ncclSystemError, "failed %d", 8);
  });
  std::string head =
      "[^ :.]+:" + std::to_string(getpid()) + ":" + std::to_string(getpid()) + " \\[0\\] NCCL ";
  std::string version = "NCCL version 2\\.32\\.3\\+pynccl-cpu\n";
  CHECK(matches(text, version + head + "WARN shown 7\n" + head + "WARN failed 8\n"));
}

TEST_CASE("log levels") {
  fs::path path = log_to_file("VERSION");
  log(Level::Warn, "a warning");
  CHECK_EQ(read_text(path), std::string("NCCL version 2.32.3+pynccl-cpu\n"));
  log_to_file("TRACE");
  log(Level::Trace, "a trace");
  log(Level::Abort, "an abort");
  log(Level::Info, "an info");
  std::string text = read_text(path);
  CHECK(contains(text, "NCCL TRACE a trace\n"));
  CHECK(contains(text, "NCCL ABORT an abort\n"));
  CHECK(contains(text, "NCCL INFO an info\n"));
  CHECK_EQ(text.rfind("NCCL version"), size_t{0});
  log_to_file("0");
  log(Level::Warn, "late");
  CHECK_EQ(read_text(path), text);
  log_to_file("LOUD");
  log(Level::Info, "late");
  CHECK(contains(read_text(path), "NCCL_DEBUG is \"LOUD\""));
  CHECK(!contains(read_text(path), "late"));
}

TEST_CASE("log file names") {
  set("NCCL_DEBUG", "INFO");
  set("NCCL_DEBUG_FILE", (scratch / "%h.%p.%%.%x").c_str());
  log(Level::Info, "parent");
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  host[strcspn(host, ".")] = '\0';
  auto path = [&] { return scratch / (std::string(host) + "." + std::to_string(getpid()) + ".%.%x"); };
  CHECK(contains(read_text(path()), "INFO parent\n"));
  CHECK_EQ(in_child([&] {
             log(Level::Info, "child");
             CHECK(contains(read_text(path()), "INFO child\n"));
             CHECK(!contains(read_text(path()), "parent"));
           }),
           0);
  CHECK(!contains(read_text(path()), "child"));
  set("NCCL_DEBUG_FILE", (scratch / "other").c_str());
  reset_debug();
  log(Level::Info, "moved");
  CHECK(contains(read_text(scratch / "other"), "INFO moved\n"));
  std::string text = stdout_of([] {
    set("NCCL_DEBUG_FILE", (scratch / "absent" / "file").c_str());
    reset_debug();
    log(Level::Info, "fallback");
  });
  CHECK(contains(text, "cannot open"));
  CHECK(contains(text, "INFO fallback\n"));
}

TEST_CASE("log from threads") {
  fs::path path = log_to_file("INFO");
  constexpr int kThreads = 4, kLines = 200;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < kLines; ++i) {
        fail(ncclInternalError, "line %d.%d.", t, i);
        if (i % 50 == 0) reset_debug();
        CHECK_EQ(std::string(last_error()), "line " + std::to_string(t) + "." + std::to_string(i) + ".");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::istringstream text(read_text(path));
  std::set<std::string> lines;
  std::string wanted = "[^ ]+:[0-9]+:[0-9]+ \\[0\\] NCCL WARN line [0-9]+\\.[0-9]+\\.";
  for (std::string line; std::getline(text, line);) {
    if (matches(line, wanted)) lines.insert(line);
  }
  CHECK_EQ(lines.size(), static_cast<size_t>(kThreads * kLines));
}

TEST_CASE("last error") {
  CHECK_EQ(std::string(last_error()), std::string());
  std::thread([] { set_last_error(ncclInternalError, "theirs"); }).join();
  CHECK_EQ(std::string(last_error()), std::string("theirs"));
  set_last_error(ncclInternalError, "mine");
  std::thread([] { CHECK_EQ(std::string(last_error()), std::string("mine")); }).join();
  std::thread([] { set_last_error(ncclInternalError, "theirs again"); }).join();
  CHECK_EQ(std::string(last_error()), std::string("mine"));
  set_last_error(ncclInternalError, std::string(10000, 'x'));
  std::string text = last_error();
  CHECK(text.size() > 1000);
  CHECK(text.size() < 10000);
  CHECK(text.substr(text.size() - 4) == "x...");
}

// ---- params

TEST_CASE("param values") {
  CHECK(param_str("NCCL_COMM_ID") == nullptr);
  CHECK_EQ(param_int("PYNCCL_CPU_DIRECT"), int64_t{1});
  CHECK_EQ(param_int("PYNCCL_CPU_SPIN_US"), int64_t{-1});
  CHECK_EQ(param_int("PYNCCL_CPU_RING_BYTES"), int64_t{262144});
  CHECK_EQ(param_int("NCCL_COMM_BLOCKING"), int64_t{NCCL_CONFIG_UNDEF_INT});
  CHECK_EQ(param_seconds("PYNCCL_CPU_INIT_TIMEOUT"), 120.0);
  set("PYNCCL_CPU_TIMEOUT", "0.25");
  set("PYNCCL_CPU_RING_BYTES", "0x2000");
  set("NCCL_COMM_ID", "");
  CHECK_EQ(param_seconds("PYNCCL_CPU_TIMEOUT"), 0.25);
  CHECK_EQ(param_int("PYNCCL_CPU_RING_BYTES"), int64_t{8192});
  CHECK(param_str("NCCL_COMM_ID") == nullptr);
  CHECK_EQ(param_int("PYNCCL_CPU_DEVICES"), int64_t{1});
  set("LOCAL_WORLD_SIZE", "4");
  CHECK_EQ(param_int("PYNCCL_CPU_DEVICES"), int64_t{4});
  set("PYNCCL_CPU_DEVICES", "3");
  CHECK_EQ(param_int("PYNCCL_CPU_DEVICES"), int64_t{3});
  CHECK_EQ(in_child([] { stdout_of([] { param_int("NO_SUCH_PARAMETER"); }); }), -SIGABRT);
}

TEST_CASE("param malformed") {
  fs::path path = log_to_file("WARN");
  for (const char* bad : {"two", "1.5", "2", "-1", "1 0", "99999999999999999999"}) {
    set("PYNCCL_CPU_DIRECT", bad);
    CHECK_EQ(param_int("PYNCCL_CPU_DIRECT"), int64_t{1});
  }
  for (const char* bad : {"nan", "inf", "-0.5", "1s", "1e300"}) {
    set("PYNCCL_CPU_TIMEOUT", bad);
    CHECK_EQ(param_seconds("PYNCCL_CPU_TIMEOUT"), 0.0);
  }
  CHECK((param_error() != nullptr && contains(param_error(), "PYNCCL_CPU_DIRECT is \"9999")));
  set("PYNCCL_CPU_DIRECT", "0");
  CHECK(contains(param_error(), "PYNCCL_CPU_TIMEOUT is \"1e300\", which is no number of seconds from 0 to"));
  set("PYNCCL_CPU_TIMEOUT", "");
  CHECK(param_error() == nullptr);
  std::string text = read_text(path);
  CHECK(contains(text, "PYNCCL_CPU_DIRECT is \"two\""));
  CHECK(!contains(text, "1.5"));
  CHECK(contains(text, "PYNCCL_CPU_TIMEOUT is \"nan\""));
}

TEST_CASE("param conf files") {
  fs::create_directories(scratch / "home");
  write_text(scratch / "home" / ".nccl.conf",
             "# NCCL_HOSTID=comment\nNCCL_HOSTID=home\r\nNCCL_HOSTID=second\n\nno assignment\n"
             "PYNCCL_CPU_TIMEOUT = 3.5\nNCCL_SOCKET_IFNAME=eth0\nNCCL_COMM_ID=a=b\n");
  write_text(scratch / "file.conf", "NCCL_HOSTID=file\n");
  set("HOME", (scratch / "home").c_str());
  CHECK_EQ(in_child([] {
             CHECK_EQ(std::string(param_str("NCCL_HOSTID")), std::string("home"));
             CHECK_EQ(param_seconds("PYNCCL_CPU_TIMEOUT"), 3.5);
             CHECK_EQ(std::string(param_str("NCCL_COMM_ID")), std::string("a=b"));
             CHECK(getenv("NCCL_HOSTID") == nullptr);
             set("NCCL_HOSTID", "environment");
             set("NCCL_SOCKET_IFNAME", "");
             CHECK_EQ(std::string(param_str("NCCL_HOSTID")), std::string("environment"));
             CHECK(param_str("NCCL_SOCKET_IFNAME") == nullptr);
           }),
           0);
  // What has no end, or nobody at its other end, is no file of settings.
  CHECK_EQ(mkfifo((scratch / "pipe").c_str(), 0600), 0);
  for (const std::string& endless : {std::string("/dev/zero"), (scratch / "pipe").string()}) {
    set("NCCL_CONF_FILE", endless.c_str());
    CHECK_EQ(in_child([] { CHECK(param_str("NCCL_HOSTID") == nullptr); }), 0);
  }
  set("NCCL_CONF_FILE", (scratch / "file.conf").c_str());
  CHECK_EQ(std::string(param_str("NCCL_HOSTID")), std::string("file"));
  CHECK_EQ(param_seconds("PYNCCL_CPU_TIMEOUT"), 0.0);
}

TEST_CASE("param conf from threads") {
  write_text(scratch / "file.conf", "NCCL_HOSTID=file\n");
  set("NCCL_CONF_FILE", (scratch / "file.conf").c_str());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] { CHECK_EQ(std::string(param_str("NCCL_HOSTID")), std::string("file")); });
  }
  for (std::thread& thread : threads) thread.join();
}

#define CHECK_FAILS(call, wanted, message)                                     \
  do {                                                                         \
    CHECK_EQ(static_cast<int>(call), static_cast<int>(wanted));                \
    CHECK_MESSAGE(contains(last_error(), message), std::string(last_error())); \
  } while (0)

ncclParamHandle_t bind(const char* key) {
  ncclParamHandle_t handle = nullptr;
  CHECK_EQ(ncclParamBind(&handle, key), ncclSuccess);
  return handle;
}

TEST_CASE("param typed getters") {
  ncclParamHandle_t ring = bind("PYNCCL_CPU_RING_BYTES"), spin = bind("PYNCCL_CPU_SPIN_US");
  int8_t i8;
  int16_t i16;
  int32_t i32;
  int64_t i64;
  uint8_t u8;
  uint16_t u16;
  uint32_t u32;
  uint64_t u64;
  CHECK(ncclParamGetI32(ring, &i32) == ncclSuccess);
  CHECK(i32 == 262144);
  CHECK(ncclParamGetI64(ring, &i64) == ncclSuccess);
  CHECK(i64 == 262144);
  CHECK(ncclParamGetU32(ring, &u32) == ncclSuccess);
  CHECK(u32 == 262144);
  CHECK(ncclParamGetU64(ring, &u64) == ncclSuccess);
  CHECK(u64 == 262144);
  CHECK(ncclParamGetI8(spin, &i8) == ncclSuccess);
  CHECK(i8 == -1);
  CHECK(ncclParamGetI16(spin, &i16) == ncclSuccess);
  CHECK(i16 == -1);
  CHECK_FAILS(ncclParamGetI8(ring, &i8), ncclInvalidArgument,
              "262144 of PYNCCL_CPU_RING_BYTES does not fit int8");
  CHECK_FAILS(ncclParamGetU16(ring, &u16), ncclInvalidArgument, "does not fit uint16");
  CHECK_FAILS(ncclParamGetU8(spin, &u8), ncclInvalidArgument, "-1 of PYNCCL_CPU_SPIN_US does not fit uint8");
  set("PYNCCL_CPU_TIMEOUT", "1.5");
  CHECK_FAILS(ncclParamGetI32(bind("PYNCCL_CPU_TIMEOUT"), &i32), ncclInvalidArgument, "1.5");
  set("PYNCCL_CPU_TIMEOUT", "2");
  CHECK(ncclParamGetU8(bind("PYNCCL_CPU_TIMEOUT"), &u8) == ncclSuccess);
  CHECK(u8 == 2);
  CHECK_FAILS(ncclParamGetI32(bind("NCCL_DEBUG"), &i32), ncclInvalidArgument, "NCCL_DEBUG is a string");
  CHECK_FAILS(ncclParamGetI32(nullptr, &i32), ncclInvalidArgument, "ncclParamGetI32: h argument is NULL");
  CHECK_FAILS(ncclParamGetI32(ring, nullptr), ncclInvalidArgument, "out argument is NULL");
  auto strange = reinterpret_cast<ncclParamHandle_t>(&i32);
  CHECK_FAILS(ncclParamGetI32(strange, &i32), ncclInvalidArgument, "not one that ncclParamBind gave");
}

TEST_CASE("param strings and bytes") {
  const char* text = nullptr;
  int len = -1;
  set("NCCL_HOSTID", "here");
  CHECK(ncclParamGetStr(bind("NCCL_HOSTID"), &text) == ncclSuccess);
  CHECK(std::string(text) == "here");
  CHECK(ncclParamGetStr(bind("PYNCCL_CPU_TIMEOUT"), &text) == ncclSuccess);
  CHECK(std::string(text) == "0");
  CHECK(ncclParamGetParameter("NCCL_HOSTID", &text, &len) == ncclSuccess);
  CHECK(std::string(text) == "here");
  CHECK_EQ(len, 4);
  CHECK(ncclParamGetParameter("NCCL_COMM_ID", &text, &len) == ncclSuccess);
  CHECK(std::string(text).empty());
  CHECK(len == 0);
  CHECK_FAILS(ncclParamGetParameter("NCCL_NO", &text, &len), ncclInvalidArgument, "\"NCCL_NO\"");
  CHECK(text == nullptr);
  ncclParamHandle_t handle = nullptr;
  CHECK_FAILS(ncclParamBind(&handle, "NCCL_NO"), ncclInvalidArgument, "\"NCCL_NO\"");
  CHECK_FAILS(ncclParamBind(nullptr, "NCCL_DEBUG"), ncclInvalidArgument, "out argument");
  CHECK_FAILS(ncclParamBind(&handle, nullptr), ncclInvalidArgument, "key argument");
  CHECK(handle == nullptr);
  char bytes[16];
  CHECK(ncclParamGet(bind("NCCL_HOSTID"), bytes, 5, &len) == ncclSuccess);
  CHECK(len == 5);
  CHECK(!strcmp(bytes, "here"));
  CHECK_FAILS(ncclParamGet(bind("NCCL_HOSTID"), bytes, 4, &len), ncclInvalidArgument, "needs 5 bytes");
  CHECK_EQ(len, 5);
  int64_t number = 0;
  CHECK(ncclParamGet(bind("PYNCCL_CPU_SPIN_US"), &number, sizeof(number), &len) == ncclSuccess);
  CHECK(number == -1);
  double real = 0;
  CHECK(ncclParamGet(bind("PYNCCL_CPU_INIT_TIMEOUT"), &real, sizeof(real), &len) == ncclSuccess);
  CHECK(real == 120);
  CHECK_FAILS(ncclParamGet(bind("NCCL_HOSTID"), nullptr, 4, &len), ncclInvalidArgument, "out argument");
  CHECK_FAILS(ncclParamGet(bind("NCCL_HOSTID"), bytes, 4, nullptr), ncclInvalidArgument, "len argument");
}

std::set<std::string> all_keys() {
  const char** table = nullptr;
  int count = 0;
  CHECK_EQ(ncclParamGetAllParameterKeys(&table, &count), ncclSuccess);
  return {table, table + count};
}

TEST_CASE("param lists") {
  std::set<std::string> published = all_keys();
  CHECK(published.count("NCCL_DEBUG"));
  CHECK(published.count("PYNCCL_CPU_FAULT"));
  CHECK(!published.count("LOCAL_WORLD_SIZE"));
  std::string dump = stdout_of(ncclParamDumpAll);
  CHECK(contains(dump, "\nPYNCCL_CPU_TIMEOUT (number of seconds) [Published] "));
  CHECK(contains(dump, "set_by=Default"));
  CHECK(!contains(dump, "LOCAL_WORLD_SIZE ("));
  set("NCCL_PARAM_DUMP_ALL", "true");
  CHECK_EQ(all_keys().size(), published.size() + 2);  // and WORLD_SIZE
  CHECK(contains(stdout_of(ncclParamDumpAll), "LOCAL_WORLD_SIZE (integer) [Private]"));
  CHECK_FAILS(ncclParamGetAllParameterKeys(nullptr, nullptr), ncclInvalidArgument, "table argument");
  for (const std::string& key : all_keys()) bind(key.c_str());
}

TEST_CASE("set encryption") {
  ncclEncryptionConfig_t config{sizeof(config), NCCL_API_MAGIC, 23203, NCCL_ENCRYPTION_MODE_PSK, "key"};
  CHECK_FAILS(ncclSetEncryption(&config), ncclInvalidUsage, "does not encrypt");
  config.mode = NCCL_ENCRYPTION_MODE_NONE;
  CHECK_FAILS(ncclSetEncryption(&config), ncclInvalidUsage, "does not encrypt");
  config.mode = 2;
  CHECK_FAILS(ncclSetEncryption(&config), ncclInvalidArgument, "mode 2");
  config.magic = 0;
  CHECK_FAILS(ncclSetEncryption(&config), ncclInvalidArgument, "INITIALIZER");
  CHECK_FAILS(ncclSetEncryption(nullptr), ncclInvalidArgument, "config argument is NULL");
}

// ---- net

TEST_CASE("address parse") {
  Address addr;
  std::string why;
  for (const char* text : {"127.0.0.1:80", "[::1]:65535", "[fe80::1%lo]:9"}) {
    CHECK(Address::parse(text, &addr, &why));
    CHECK_EQ(addr.str(), std::string(text));
  }
  CHECK(Address::parse("localhost:5", &addr, &why));
  CHECK_EQ(addr.port(), 5);
  CHECK(Address::parse("[fe80::1%1]:9", &addr, &why));
  CHECK(addr.str() == "[fe80::1%lo]:9");
  struct {
    const char* text;
    const char* message;
  } bad[] = {
      {"", "Net : string is null"},
      {nullptr, "Net : string is null"},
      {"127.0.0.1", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {":80", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {"127.0.0.1:", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {"127.0.0.1:0", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {"127.0.0.1:65536", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {"127.0.0.1:80x", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {"::1:80", "Net : No valid <IPv4_or_hostname>:<port> pair found"},
      {"[::1]", "Net : No valid [IPv6]:port pair found"},
      {"[::1:80", "Net : No valid [IPv6]:port pair found"},
      {"[::g]:80", "Net : No valid [IPv6]:port pair found"},
      {"[fe80::1%nosuch]:80", "Net : no interface \"nosuch\""},
      {"no such host:80", "Net : error encountered when getting address info"},
  };
  for (auto& item : bad) {
    CHECK(!Address::parse(item.text, &addr, &why));
    CHECK(contains(why, item.message));
  }
}

Address loopback(bool v6) {
  Address addr;
  Address::parse(v6 ? "[::1]:1" : "127.0.0.1:1", &addr, nullptr);
  addr.set_port(0);
  return addr;
}

void check_transfer(int from, int to) {
  std::vector<char> sent(5 << 20), received(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<char>(i * 2654435761u >> 13);
  std::thread sender([&] { CHECK(send_all(from, sent.data(), sent.size(), in_ms(20000))); });
  CHECK(recv_all(to, received.data(), received.size(), Deadline::max()));
  sender.join();
  CHECK(sent == received);
}

void check_connection(Address addr) {
  std::string why;
  Fd listener = listen_on(&addr, &why);
  CHECK(listener);
  CHECK(addr.port() > 0);
  Fd client = connect_to(addr, in_ms(5000), &why);
  Fd server(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(client);
  CHECK(server);
  int on = 0;
  socklen_t size = sizeof(on);
  CHECK(getsockopt(client.get(), IPPROTO_TCP, TCP_NODELAY, &on, &size) == 0);
  CHECK(on != 0);
  CHECK((fcntl(client.get(), F_GETFL) & O_NONBLOCK) == 0);
  CHECK((fcntl(client.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK((fcntl(listener.get(), F_GETFD) & FD_CLOEXEC) != 0);
  check_transfer(client.get(), server.get());
  check_transfer(server.get(), client.get());
  char byte;
  auto start = Clock::now();
  CHECK(!recv_all(client.get(), &byte, 1, in_ms(50)));
  CHECK(errno == ETIMEDOUT);
  CHECK(seconds_since(start) >= 0.05);
  CHECK(seconds_since(start) < 4);
  std::vector<char> much(64 << 20);
  CHECK(!send_all(client.get(), much.data(), much.size(), in_ms(50)));
  CHECK(errno == ETIMEDOUT);
  client.reset();
  while (recv_all(server.get(), &byte, 1, in_ms(1000))) continue;
  CHECK_EQ(errno, ECONNRESET);
  Address taken = addr;
  CHECK(!listen_on(&taken, &why));
  CHECK(contains(why, "Address already in use"));
  CHECK(contains(why, addr.str()));
}

TEST_CASE("connection") {
  check_connection(loopback(false));
  Fd probe(socket(AF_INET6, SOCK_STREAM, 0));
  Address v6 = loopback(true);
  bool have_v6 = probe && ::bind(probe.get(), reinterpret_cast<sockaddr*>(&v6.ss), v6.len) == 0;
  if (have_v6) {
    check_connection(v6);
  } else {
    MESSAGE("left out: no IPv6 loopback here");
  }
}

TEST_CASE("send to closed peer") {
  Address addr = loopback(false);
  Fd listener = listen_on(&addr, nullptr);
  Fd client = connect_to(addr, in_ms(5000), nullptr);
  Fd(accept(listener.get(), nullptr, nullptr)).reset();
  char data[4096] = "";
  bool sent = true;
  for (int i = 0; i < 1000 && sent; ++i) sent = send_all(client.get(), data, sizeof(data), in_ms(1000));
  CHECK((!sent && (errno == EPIPE || errno == ECONNRESET)));
}

TEST_CASE("connect refused") {
  Address addr = loopback(false);
  std::string why;
  listen_on(&addr, &why).reset();
  auto start = Clock::now();
  CHECK(!connect_to(addr, in_ms(5000), &why, Deadline::min()));
  CHECK(seconds_since(start) < 4);
  CHECK(contains(why, "Connection refused"));
  CHECK(contains(why, addr.str()));
  start = Clock::now();
  CHECK(!connect_to(addr, in_ms(200), &why));
  CHECK(seconds_since(start) >= 0.2);
  CHECK(seconds_since(start) < 10);
  std::thread late([addr]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Fd listener = listen_on(&addr, nullptr);
    CHECK(Fd(accept(listener.get(), nullptr, nullptr)));
  });
  CHECK(connect_to(addr, in_ms(10000), &why));
  late.join();
}

TEST_CASE("pick interface") {
  Address addr;
  set("NCCL_SOCKET_IFNAME", "=lo");
  set("NCCL_SOCKET_FAMILY", "AF_INET");
  CHECK_EQ(pick_interface(&addr), ncclSuccess);
  CHECK_EQ(addr.str(), std::string("127.0.0.1:0"));
  set("NCCL_SOCKET_IFNAME", "nosuch,l");
  CHECK(pick_interface(&addr) == ncclSuccess);
  CHECK(addr.str() == "127.0.0.1:0");
  set("NCCL_SOCKET_IFNAME", "=l,nosuch");
  CHECK_FAILS(pick_interface(&addr), ncclInvalidUsage, "NCCL_SOCKET_IFNAME==l,nosuch");
  CHECK(contains(last_error(), "lo 127.0.0.1"));
  set("NCCL_SOCKET_IFNAME", "^=nosuch");
  CHECK_EQ(pick_interface(&addr), ncclSuccess);
  set("NCCL_SOCKET_FAMILY", "IPX");
  CHECK_FAILS(pick_interface(&addr), ncclInvalidUsage, "\"IPX\"");
  unsetenv("NCCL_SOCKET_FAMILY");
  unsetenv("NCCL_SOCKET_IFNAME");
  CHECK(pick_interface(&addr) == ncclSuccess);
  CHECK(addr.port() == 0);
  CHECK(listen_on(&addr, nullptr));
}

// ---- fault

bool nothing(Fault fault) { return fault.action == FaultAction::None; }

TEST_CASE("fault actions") {
  CHECK(nothing(fault_point(0, 1)));
  CHECK(nothing(fault_point(0, 2)));
  CHECK(fault_error() == nullptr);
  set("PYNCCL_CPU_FAULT",
      "rank=1,call=2,action=fail:ncclRemoteError;call=3,rank=1,action=fail:5;"
      "rank=2,call=1,action=sleep:0.1;rank=2,call=1,action=drop;rank=0,call=4,action=die");
  CHECK(fault_error() == nullptr);
  CHECK(nothing(fault_point(1, 1)));
  CHECK(nothing(fault_point(0, 2)));
  Fault fault = fault_point(1, 2);
  CHECK(fault.action == FaultAction::Fail);
  CHECK(fault.result == ncclRemoteError);
  CHECK_EQ(fault_point(1, 3).result, ncclInvalidUsage);
  auto start = Clock::now();
  CHECK(fault_point(2, 1).action == FaultAction::Drop);
  CHECK(seconds_since(start) >= 0.1);
  CHECK_EQ(in_child([] { fault_point(0, 4); }), -SIGKILL);
  unsetenv("PYNCCL_CPU_FAULT");
  CHECK(!nothing(fault_point(1, 2)));
  CHECK(nothing(fault_point(0, 1)));
  CHECK(nothing(fault_point(1, 2)));
}

TEST_CASE("fault malformed") {
  fs::path path = log_to_file("WARN");
  for (const char* bad :
       {"x", "rank=1", "rank=1,call=1", "rank=-1,call=1,action=die", "rank=1,call=0,action=die",
        "rank=1,call=1,action=explode", "rank=1,call=1,action=sleep", "rank=1,call=1,action=sleep:-1",
        "rank=1,call=1,action=fail:0", "rank=1,call=1,action=fail:ncclSuccess", "rank=1,call=1,action=fail:7",
        "rank=1,call=1,action=die,action=drop", "rank=1,call=1,action=die:1",
        "rank=1,call=1,action=die,when=now", "rank=1,call=1,action=drop;y"}) {
    set("PYNCCL_CPU_FAULT", bad);
    CHECK((fault_error() != nullptr && contains(fault_error(), bad)));
    CHECK(nothing(fault_point(1, 1)));
  }
  std::string text = read_text(path);
  std::string last = "PYNCCL_CPU_FAULT=rank=1,call=1,action=drop;y";
  CHECK(contains(text, last));
  CHECK(text.find(last) == text.rfind(last));
}

TEST_CASE("fault from threads") {
  set("PYNCCL_CPU_FAULT", "rank=3,call=1,action=drop");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (uint64_t call = 1; call < 100; ++call)
        CHECK_EQ(nothing(fault_point(t, call)), !(t == 3 && call == 1));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
