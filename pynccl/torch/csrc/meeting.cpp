// The ranks of a group meet in its store before a call for which NCCL waits without a time-out.
#include <sstream>

#include "backend.hpp"

namespace pynccl {
namespace {

constexpr std::chrono::seconds kVerdict{5};
const char* const kGo = "go";

// What a rank calls.
struct Word {
  std::string name;
  std::vector<int> ranks;

  static Word read(const std::vector<uint8_t>& bytes) {
    std::istringstream from(std::string(bytes.begin(), bytes.end()));
    Word word;
    from >> word.name;
    for (int rank; from >> rank;) word.ranks.push_back(rank);
    return word;
  }
  std::string written() const { return name + " " + c10::Join(" ", ranks); }
  std::string text() const { return ranks.empty() ? name : name + " with ranks " + in_brackets(ranks); }
  bool operator==(const Word& other) const { return name == other.name && ranks == other.ranks; }
};

// A rank outside its own list is in no new group, so its list does not matter.
bool fit(const std::vector<Word>& words) {
  for (int r = 0; r < int(words.size()); ++r) {
    if (words[size_t(r)].name != words[0].name) return false;
    auto& ranks = words[size_t(r)].ranks;
    if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) continue;
    for (int member : ranks)
      if (!(words.at(size_t(member)) == words[size_t(r)])) return false;
  }
  return true;
}

std::string differences(const std::vector<Word>& words) {
  std::vector<std::pair<std::string, std::vector<int>>> callers;
  for (int r = 0; r < int(words.size()); ++r) {
    const std::string call = words[size_t(r)].text();
    auto same = std::find_if(callers.begin(), callers.end(), [&](auto& one) { return one.first == call; });
    if (same == callers.end()) same = callers.insert(same, {call, {}});
    same->second.push_back(r);
  }
  std::string text = "pynccl: the calls of the group's ranks differ:";
  for (auto& [call, ranks] : callers)
    text += c10::str(ranks.size() > 1 ? " ranks " : " rank ", c10::Join(", ", ranks),
                     ranks.size() > 1 ? " call " : " calls ", call, ";");
  return text + " expected the same call, and for a new group the same list on each of its ranks";
}

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

// The first rank that knows whether the call goes on decides for all, so that none makes it alone. `check`
// may refuse the call; then the other ranks learn why.
void Backend::meet(const std::string& name, const std::vector<int>& ranks,
                   const std::function<void()>& check) {
  std::unique_ptr<pybind11::gil_scoped_release> release;
  if (PyGILState_Check()) release = std::make_unique<pybind11::gil_scoped_release>();
  auto lock = entered();
  check_has_members();
  if (ended_.load()) C10_THROW_ERROR(DistBackendError, "pynccl: the process group was shut down or aborted");
  const std::string key = c10::str("pynccl/meeting/", meetings_++, "/");
  const auto limit = options_->timeout;
  // One for all meetings: a new connection to a TCPStore may take seconds.
  if (!meeting_store_) {
    // torch tries until the group's time-out to reach a store that has ended.
    if (const std::string server = ended_server(store_); !server.empty())
      C10_THROW_ERROR(DistBackendError,
                      c10::str("pynccl: ", name, " on ", here(), ": the store at ", server,
                               " is gone, in which the ranks meet: the process that served it has ended"));
    meeting_store_ = std::make_shared<OwnStore>(store_);
  }
  const OwnStore store = *meeting_store_;
  lock.unlock();

  auto decide = [&](const std::function<std::string()>& verdict) {
    if (store->add(key + "decided", 1) == 1) store->set(key + "verdict", bytes(verdict()));
  };
  auto key_of = [&](int rank) { return c10::str(key, rank); };
  auto late = [&] {
    std::vector<int> late;
    for (int r = 0; r < size_; ++r)
      if (!store->check({key_of(r)})) late.push_back(r);
    return late;
  };
  auto failed = [&](const std::string& why) { return c10::str("pynccl: ", name, " on ", here(), ": ", why); };
  auto trouble = [&]() -> std::string {
    for (auto& lane : all_lanes())
      if (lane->comm)
        if (const std::string text = lane->comm->trouble(); !text.empty()) return failed(text);
    return "";
  };
  auto leaver = [&]() -> std::string {
    for (int r : late())
      if (Leavers::has(*store, r))
        return failed(c10::str("rank ", r,
                               " has left the group: its program has ended, or it has destroyed the group"));
    return "";
  };
  auto timed_out = [&] {
    const auto ranks = late();
    if (ranks.empty())
      return c10::str(
          "pynccl: Timed out waiting ", limit.count(), "ms for ", name, " on ", here(),
          "; all ranks have called it, and the last of them did not say so in time. The group is as "
          "it was.");
    return c10::str("pynccl: Timed out waiting ", limit.count(), "ms for ", name, " on ", here(),
                    "; it waits for ", ranks.size() > 1 ? "calls of ranks " : "a call of rank ",
                    c10::Join(", ", ranks), ". No rank has begun it: the group is as it was.");
  };

  const auto deadline = Clock::now() + limit;
  auto look = Clock::now() + kSlice, look_for_leavers = look;
  try {
    check();
    store->set(key_of(rank_), bytes(Word{name, ranks}.written()));
    const int64_t place = store->add(key + "come", 1);
    if (place == size_)
      decide([&] {
        std::vector<std::string> keys;
        for (int r = 0; r < size_; ++r) keys.push_back(key_of(r));
        std::vector<Word> words;
        for (auto& written : store->multiGet(keys)) words.push_back(Word::read(written));
        return fit(words) ? std::string(kGo) : differences(words);
      });
    for (auto pause = std::chrono::microseconds(50); !store->check({key + "verdict"});
         pause = std::min<std::chrono::microseconds>(pause * 2, Milliseconds(10))) {
      std::this_thread::sleep_for(pause);
      const auto now = Clock::now();
      if (now < look) continue;
      look = now + kSlice;
      check_signals();
      if (now >= deadline) decide(timed_out);
      // The rank that decided may have died before it told.
      if (now >= deadline + kVerdict) C10_THROW_ERROR(DistBackendError, timed_out());
      if (const std::string why = trouble(); !why.empty()) decide([&] { return why; });
      // One rank looks for all, since it looks for each.
      if (place != 1 || now < look_for_leavers) continue;
      look_for_leavers = now + kLookForLeavers;
      if (const std::string why = leaver(); !why.empty()) decide([&] { return why; });
    }
  } catch (const std::exception& error) {
    const auto raised = std::current_exception();
    try {
      const std::string why = error.what();
      decide([&] {
        return c10::str("pynccl: ", name, " was given up by ", here(), ": ", why.substr(0, why.find('\n')));
      });
    } catch (const std::exception&) {  // the store is gone, and the other ranks notice that
    }
    std::rethrow_exception(raised);
  }
  auto told = store->get(key + "verdict");
  const std::string verdict(told.begin(), told.end());
  if (verdict == kGo) return;
  const bool own = verdict.find(" on " + here()) != std::string::npos;
  C10_THROW_ERROR(DistBackendError, own ? verdict : c10::str(verdict, " (on ", here(), ")"));
}

}  // namespace pynccl
