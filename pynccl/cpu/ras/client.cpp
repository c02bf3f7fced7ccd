#include "ras/client.hpp"

#include <strings.h>

#include <cstdlib>

namespace pncpu {
namespace {

constexpr size_t kMostLine = 1024, kMostUnsent = 4096;
constexpr std::chrono::seconds kMostPatience{10};
constexpr auto kOrders = std::chrono::seconds(10), kDelivery = std::chrono::seconds(10);

// The rest of the line if it begins so, as in NCCL in any case of letters.
const char* after(const std::string& line, const char* command) {
  size_t size = strlen(command);
  return strncasecmp(line.c_str(), command, size) == 0 ? line.c_str() + size : nullptr;
}

}  // namespace

RasClient::RasClient(Fd fd, Deadline now) : fd_(std::move(fd)), began_(now), deadline_(now + kOrders) {}

short RasClient::events() const {
  bool sends = !out_.empty() || answer_;
  bool reads = stage_ == Stage::Orders && out_.size() < kMostUnsent;
  return short((sends ? POLLOUT : 0) | (reads ? POLLIN : 0));
}

void RasClient::proceed(short revents, Deadline now) {
  if (revents & (POLLERR | POLLNVAL)) return drop();
  if (revents & POLLIN) read();
  if (stage_ != Stage::Gone && (!out_.empty() || answer_)) write();
  if ((revents & POLLHUP) && out_.empty() && !answer_) return drop();
  if (stage_ == Stage::Orders && ended_) return drop();
  if (stage_ != Stage::Waits && deadline_ <= now) drop();
}

void RasClient::read() {
  char bytes[kMostLine];
  ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n < 0) return drop();
  ended_ = n == 0;
  in_.append(bytes, size_t(n));
  for (size_t end; stage_ == Stage::Orders && (end = in_.find('\n')) != std::string::npos;) {
    std::string line = in_.substr(0, end);
    in_.erase(0, end + 1);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    obey(line);
  }
  if (in_.size() > kMostLine && stage_ == Stage::Orders) drop();
}

void RasClient::obey(const std::string& line) {
  if (after(line, "client protocol ")) return speaks_ = true, say("SERVER PROTOCOL 2\n");
  if (const char* text = after(line, "timeout ")) {
    char* end = nullptr;
    long seconds = strtol(text, &end, 10);
    if (end == text || *end || seconds < 0)
      return say("ERROR: Invalid timeout value " + std::string(text) + "\n");
    // NCCL's client documents 0 as no time-out.
    patience_ = seconds ? std::min(std::chrono::seconds(seconds), kMostPatience) : kMostPatience;
    return say("OK\n");
  }
  if (const char* format = after(line, "set format ")) {
    bool text = strcasecmp(format, "text") == 0, json = strcasecmp(format, "json") == 0;
    if (!text && !json) return say("ERROR: Invalid format " + std::string(format) + "\n");
    json_ = json;
    return say("OK\n");
  }
  verbose_ = strcasecmp(line.c_str(), "verbose status") == 0;
  if (verbose_ || strcasecmp(line.c_str(), "status") == 0)
    stage_ = Stage::Waits;
  else if (after(line, "monitor"))
    say("ERROR: The CPU library reports no events\n");
  else
    say("ERROR: Unknown command " + line + "\n");
}

void RasClient::say(const std::string& text) { out_ += text; }

void RasClient::answer(std::shared_ptr<const std::string> text, Deadline now) {
  answer_ = std::move(text);
  stage_ = Stage::Answered;
  deadline_ = now + kDelivery;
  write();
}

void RasClient::write() {
  while (!out_.empty() || (answer_ && sent_ < answer_->size())) {
    const char* at = out_.empty() ? answer_->data() + sent_ : out_.data();
    size_t left = out_.empty() ? answer_->size() - sent_ : out_.size();
    ssize_t n = send(fd_.get(), at, left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) return drop();
    if (out_.empty())
      sent_ += size_t(n);
    else
      out_.erase(0, size_t(n));
  }
  if (answer_) drop();
}

}  // namespace pncpu
