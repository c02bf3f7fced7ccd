#include "service/line.hpp"

#include <sys/epoll.h>

#include <set>
#include <utility>

#include "service/process.hpp"
#include "service/state.hpp"

namespace pncpu {
namespace {

// Beyond this a put waits until the other process has read more.
constexpr size_t kMostUnsentPuts = size_t(1) << 20;

LineHeader header_of(const Token& to, int from, Ctl kind, uint64_t tag, size_t bytes) {
  return {{kind, uint32_t(bytes), tag}, to, from, 0};
}

Service::LineKey key_of(const PeerInfo& peer, const PeerInfo& self) {
  return {peer.process, peer.host == self.host};
}

}  // namespace

bool Line::send(const Token& to, int from, Ctl kind, uint64_t tag, Blob body) {
  LineHeader header = header_of(to, from, kind, tag, body.size);
  return socket_->send_frame(&header, sizeof header, std::move(body));
}

bool Line::send(const std::vector<Recipient>& to, int from, Ctl kind, const Blob& body) {
  const size_t size = sizeof(SeveralHead) + to.size() * sizeof(Recipient) + body.size;
  if (to.size() == 1 || size > kMaxFrame) {
    bool sent = true;
    for (const Recipient& one : to) sent = send(one.to, from, kind, one.tag, body) && sent;
    return sent;
  }
  std::vector<char> bytes;
  bytes.reserve(size);
  append(&bytes, SeveralHead{kind, uint32_t(to.size())});
  for (const Recipient& one : to) append(&bytes, one);
  bytes.insert(bytes.end(), body.data, body.data + body.size);
  return send({}, from, Ctl::Several, 0, Blob::of(std::move(bytes)));
}

bool Line::has_room() { return socket_->unsent() < kMostUnsentPuts; }

Line::Link* Line::find(const Token& mine, int theirs) {
  auto at = links_.find(mine);
  if (at == links_.end()) return nullptr;
  auto link = at->second.find(theirs);
  return link == at->second.end() ? nullptr : &link->second;
}

// Without memory the line stays until it is unused again.
void Line::rest_if_unused() try {
  if (!links_.empty() || (!dialed_ && !asked_)) return;
  uint64_t number = dialed_ ? ++questions_ : std::exchange(asked_, 0);
  resting_ = !dialed_;
  send({}, 0, Ctl::Rest, number, {});
} catch (const std::bad_alloc&) {
}

// ---- the links of a rank ----

std::vector<Linked> Service::link_lines(const Token& mine, int rank, const Table& table,
                                        std::vector<int>* missing, int* dials) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  std::vector<Linked> linked;
  std::vector<int> left;
  auto local = locals.find(mine);
  if (local == locals.end()) return linked;
  local->second.table = table;
  std::map<LinePtr, std::vector<Recipient>> others;
  for (int q : *missing) {
    LineKey key = key_of(table[q], table[rank]);
    LinePtr line = open_line_to(key);
    if (!line) {
      left.push_back(q);
      if (*dials < 0 && key.first < process && !calls_.count(key)) *dials = q;
      continue;
    }
    LineHeader bye = header_of(table[q].token, rank, Ctl::Closed, 0, 0);
    Line::Link link;
    link.bye = Socket::frame(&bye, sizeof bye, {});
    link.end_notice.push_back({mine, q, {Ctl::Closed, 0, 0}, {}, key.first});
    linked.push_back({q, line});
    line->links_[mine].insert_or_assign(q, std::move(link));
    others[line].push_back({table[q].token, uint64_t(q)});
  }
  const Blob token = Blob::copy(&mine, sizeof mine);
  for (auto& [line, recipients] : others) line->send(recipients, rank, Ctl::Link, token);
  if (*dials >= 0) calls_.insert(key_of(table[*dials], table[rank]));
  missing->swap(left);
  return linked;
}

void Service::leave_lines(const Token& mine) {
  for (auto& [key, line] : lines) {
    auto at = line->links_.find(mine);
    if (at == line->links_.end()) continue;
    Frames byes;
    for (auto& [rank, link] : at->second)
      if (!link.ended) byes.splice(byes.end(), link.bye);
    line->socket_->send_frames(std::move(byes));
    line->links_.erase(at);
    line->rest_if_unused();
  }
}

// ---- calls ----

void Service::called(const LineKey& key, SocketPtr socket) {
  auto connection = std::make_unique<Connection>();
  connection->stage = Connection::Calls;
  connection->local = key.second;
  connection->process = key.first;
  watch(socket, std::move(connection), EPOLLIN | EPOLLRDHUP);
}

void Service::end_call(const LineKey& key) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  calls_.erase(key);
  wake_creations();
}

void Service::wake_creations() {
  for (auto& [token, local] : locals)
    if (!local.attached && local.sink) local.sink->news();
}

// The other process dials only if it has no line. So if there is one here, it has ended, or rests.
bool Service::accept_line(Connection& c) {
  LineKey key{c.process, c.local};
  if (!(process < key.first)) return false;
  auto at = lines.find(key);
  if (at != lines.end()) {
    SocketPtr before = at->second->socket_;
    attend(before->fd(), EPOLLIN);
    at = lines.find(key);
    if (at != lines.end() && !at->second->resting_) return false;
    if (at != lines.end()) drop(before);
  }
  LineHeader answer = header_of({}, 0, Ctl::Line, 0, 0);
  if (!c.socket->send_frame(&answer, sizeof answer, {})) return false;
  open_line(c, false);
  return true;
}

void Service::open_line(Connection& c, bool dialed) {
  c.line = std::make_shared<Line>(c.socket, dialed);
  lines[{c.process, c.local}] = c.line;
  c.stage = Connection::Lines;
  wake_creations();
}

void Service::end_line(Connection& c) {
  auto at = lines.find({c.process, c.local});
  if (at != lines.end() && at->second == c.line) lines.erase(at);
  Line::Links links;
  links.swap(c.line->links_);
  for (auto& [mine, theirs] : links)
    for (auto& [rank, link] : theirs) try {
        if (!link.ended) give(link.end_notice);
      } catch (const std::exception& e) {
        log(Level::Warn, "the bootstrap service: %s", e.what());
      }
  wake_creations();
}

// ---- frames ----

// False closes the line.
bool Service::take_from_line(Connection& c, const Blob& body) {
  const LineHeader head = c.head;
  Line* line = c.line.get();
  if (line && head.frame.kind == Ctl::Several) return take_several(c, body);
  if (line && head.frame.kind == Ctl::Rest) {
    if (line->dialed_) return head.frame.tag != line->questions_ || !line->links_.empty();
    line->asked_ = head.frame.tag;
    line->rest_if_unused();
    return true;
  }
  take_frame(c, {head.to, head.from, head.frame, body, c.process});
  return true;
}

bool Service::take_several(Connection& c, const Blob& body) {
  const int from = c.head.from;
  SeveralHead several;
  if (body.size < sizeof several) return false;
  memcpy(&several, body.data, sizeof several);
  const size_t room = (body.size - sizeof several) / sizeof(Recipient);
  if (several.recipients > room || several.kind == Ctl::Several || several.kind == Ctl::Rest) return false;
  const char* at = body.data + sizeof several;
  const char* data = at + several.recipients * sizeof(Recipient);
  const Blob shared{body.owner, data, size_t(body.data + body.size - data)};
  for (; at < data; at += sizeof(Recipient)) {
    Recipient one;
    memcpy(static_cast<void*>(&one), at, sizeof one);
    take_frame(c, {one.to, from, {several.kind, uint32_t(shared.size), one.tag}, shared, c.process});
  }
  return true;
}

void Service::take_frame(Connection& c, Post frame) {
  Line* line = c.line.get();
  const Token to = frame.to;
  const int from = frame.from;
  const CtlHeader header = frame.header;
  if (line && header.kind == Ctl::Link) {
    line->asked_ = 0;
    if (std::exchange(line->resting_, false)) wake_creations();
    Token theirs;
    if (locals.count(to) || frame.body.size != sizeof theirs) return;
    memcpy(static_cast<void*>(&theirs), frame.body.data, sizeof theirs);
    line->send(theirs, int(header.tag), Ctl::Closed, 0, {});
    return;
  }
  if (Line::Link* link = line && header.kind == Ctl::Closed ? line->find(to, from) : nullptr)
    if (std::exchange(link->ended, true)) return;
  try {
    Posts post;
    post.push_back(std::move(frame));
    give(post);
  } catch (const std::exception& e) {
    log(Level::Warn, "the bootstrap service lost a message of rank %d: %s", from, e.what());
    if (line) lose(*line, to, from);
  }
}

// Puts may wait for room.
void Service::tell_room(const Line& line) {
  for (auto& link : line.links_) {
    auto local = locals.find(link.first);
    if (local != locals.end() && local->second.sink) local->second.sink->data_ready();
  }
}

void Service::lose(Line& line, const Token& mine, int theirs) {
  Line::Link* link = line.find(mine, theirs);
  if (!link || link->end_notice.empty()) return;
  link->ended = true;
  Posts notice = std::move(link->end_notice);
  give(notice);
}

// ---- the interface for the rest of the library ----

std::vector<Linked> link_lines(const Token& mine, int rank, const Table& table, std::vector<int>* missing,
                               int* dials) {
  Service* s = Service::get("a communicator");
  return s ? s->link_lines(mine, rank, table, missing, dials) : std::vector<Linked>();
}

LinePtr line_to(const PeerInfo& peer, bool local) {
  Service* s = Service::get("a communicator");
  if (!s) return nullptr;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  return s->open_line_to({peer.process, local});
}

size_t count_missing_lines(int rank, const Table& table) {
  Service* s = Service::get("a communicator");
  if (!s) return 0;
  std::lock_guard<std::recursive_mutex> lock(s->mutex);
  std::set<Service::LineKey> missing;
  for (int q = 0; q < table.size(); ++q) {
    Service::LineKey key = key_of(table[q], table[rank]);
    if (key.first != s->process && !s->open_line_to(key)) missing.insert(key);
  }
  return missing.size();
}

LineCall::~LineCall() {
  if (handed_over_) return;
  if (Service* s = Service::get("a communicator")) s->end_call({process_, local_});
}

void LineCall::connected(SocketPtr socket) {
  if (Service* s = Service::get("a communicator")) {
    s->called({process_, local_}, std::move(socket));
    handed_over_ = true;
  }
}

}  // namespace pncpu
