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

// One meeting: what each rank calls, and one verdict for all.
struct Backend::Meeting {
  const StorePtr own;
  const std::string key;
  const int size;
  const std::string name;
  const std::string here;
  const Milliseconds limit;
  // The verdict is this rank's, and its text names this rank.
  mutable bool names_this_rank = false;

  c10d::Store& store() const { return **own; }
  std::string of(int rank) const { return c10::str(key, rank); }
  std::string failed(const std::string& why) const {
    return c10::str("pynccl: ", name, " on ", here, ": ", why);
  }

  // The first rank that knows whether the call goes on decides for all, so that none makes it alone.
  void decide(const std::function<std::string()>& verdict, bool names = true) const {
    if (store().add(key + "decided", 1) != 1) return;
    names_this_rank = names;
    store().set(key + "verdict", bytes(verdict()));
  }
  bool decided() const { return store().check({key + "verdict"}); }
  std::string verdict() const {
    const auto told = store().get(key + "verdict");
    return {told.begin(), told.end()};
  }

  // Returns how many ranks have come with this one.
  int64_t come(int rank, const std::vector<int>& ranks) const {
    store().set(of(rank), bytes(Word{name, ranks}.written()));
    const int64_t place = store().add(key + "come", 1);
    if (place == size) decide([&] { return compared(); }, false);
    return place;
  }
  std::string compared() const {
    std::vector<std::string> keys;
    for (int r = 0; r < size; ++r) keys.push_back(of(r));
    std::vector<Word> words;
    for (auto& written : store().multiGet(keys)) words.push_back(Word::read(written));
    return fit(words) ? kGo : differences(words);
  }

  std::vector<int> late() const {
    std::vector<int> found;
    for (int r = 0; r < size; ++r)
      if (!store().check({of(r)})) found.push_back(r);
    return found;
  }
  void look_for_leavers() const {
    for (int r : late())
      if (Leavers::has(store(), r))
        return decide([&] {
          return failed(c10::str(
              "rank ", r, " has left the group: its program has ended, or it has destroyed the group"));
        });
  }
  std::string timed_out() const {
    const auto ranks = late();
    const std::string text =
        c10::str("pynccl: Timed out waiting ", limit.count(), "ms for ", name, " on ", here, "; ");
    if (ranks.empty())
      return text +
             "all ranks have called it, and the last of them did not say so in time. The group is as it was.";
    return c10::str(text, "it waits for ", ranks.size() > 1 ? "calls of ranks " : "a call of rank ",
                    c10::Join(", ", ranks), ". No rank has begun it: the group is as it was.");
  }

  // Waits for the verdict. One rank, `looks`, looks for ranks that have left, since it looks for each.
  void wait(bool looks, const std::function<std::string()>& trouble) const {
    const auto deadline = Clock::now() + limit;
    auto look = Clock::now() + kSlice, looked = look;
    for (auto pause = std::chrono::microseconds(50); !decided();
         pause = std::min<std::chrono::microseconds>(pause * 2, Milliseconds(10))) {
      std::this_thread::sleep_for(pause);
      const auto now = Clock::now();
      if (now < look) continue;
      look = now + kSlice;
      check_signals();
      if (now >= deadline) decide([&] { return timed_out(); });
      // The rank that decided may have died before it told.
      if (now >= deadline + kVerdict) C10_THROW_ERROR(DistBackendError, timed_out());
      if (const std::string why = trouble(); !why.empty()) decide([&] { return failed(why); });
      if (!looks || now < looked) continue;
      looked = now + kLookForLeavers;
      look_for_leavers();
    }
  }

  void give_up(const std::string& why) const {
    try {
      decide([&] {
        return c10::str("pynccl: ", name, " was given up by ", here, ": ", why.substr(0, why.find('\n')));
      });
    } catch (const std::exception&) {  // the store is gone, and the other ranks notice that
    }
  }
};

Backend::Meeting Backend::meeting(const std::string& name) {
  auto lock = entered();
  check_has_members();
  if (ended_.load()) C10_THROW_ERROR(DistBackendError, "pynccl: the process group was shut down or aborted");
  StorePtr store = stores_->made_common();
  if (!store) {
    // torch tries until the group's time-out to reach a store that has ended.
    if (const std::string server = stores_->ended(); !server.empty())
      C10_THROW_ERROR(DistBackendError,
                      c10::str("pynccl: ", name, " on ", here(), ": the store at ", server,
                               " is gone, in which the ranks meet: the process that served it has ended"));
    store = stores_->common();
  }
  return {store, c10::str("pynccl/meeting/", meetings_++, "/"), size_, name, here(), options_->timeout};
}

// After the operations in flight. A rank whose call is refused, also by `check`, tells the others why.
void Backend::meet(const std::string& name, const std::vector<int>& ranks,
                   const std::function<void()>& check) {
  const WithoutGil released;
  const Meeting all = meeting(name);
  auto trouble = [&]() -> std::string {
    for (auto& lane : all_lanes())
      if (lane->comm)
        if (std::string text = lane->comm->trouble(); !text.empty()) return text;
    return "";
  };
  try {
    {
      auto lock = entered();
      TORCH_CHECK(!coalesced_, name, " cannot be coalesced");
    }
    finish_all(name);
    check();
    const bool first = all.come(rank_, ranks) == 1;
    all.wait(first, trouble);
  } catch (const std::exception& error) {
    const auto raised = std::current_exception();
    all.give_up(error.what());
    std::rethrow_exception(raised);
  }
  const std::string verdict = all.verdict();
  if (verdict == kGo) return;
  C10_THROW_ERROR(DistBackendError, all.names_this_rank ? verdict : c10::str(verdict, " (on ", here(), ")"));
}

}  // namespace pynccl
