#include "comm/fault.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/generated.inc"
#include "base/log.hpp"
#include "base/params.hpp"

namespace pncpu {
namespace {

enum class Effect { Unset, Die, Drop, Fail, Sleep };

struct Entry {
  int64_t rank = -1;
  int64_t call = -1;
  Effect effect = Effect::Unset;
  double seconds = 0;
  ncclResult_t result = ncclSuccess;
};

struct Plan {
  std::string text;
  std::vector<Entry> entries;
  std::string error;
  const Plan* previous = nullptr;  // never freed: other threads may read it
};

struct ResultName {
  const char* name;
  ncclResult_t result;
};
#define PNCPU_NAMED(result) {#result, result},
constexpr ResultName kResults[] = {PNCPU_ERRORS(PNCPU_NAMED)};
#undef PNCPU_NAMED

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (;;) {
    size_t end = text.find(separator, begin);
    parts.push_back(text.substr(begin, end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

bool parse_count(const std::string& text, int64_t* out) {
  bool digits =
      !text.empty() && text.size() <= 18 && text.find_first_not_of("0123456789") == std::string::npos;
  if (digits) *out = atoll(text.c_str());
  return digits;
}

bool parse_seconds(const std::string& text, double* out) {
  return parse_real(text.c_str(), out) && *out >= 0 && *out <= 1e9;
}

bool parse_result(const std::string& text, ncclResult_t* out) {
  int64_t number = -1;
  parse_count(text, &number);
  for (const ResultName& known : kResults) {
    if (text != known.name && number != known.result) continue;
    *out = known.result;
    return true;
  }
  return false;
}

bool parse_action(const std::string& text, Entry* entry) {
  if (entry->effect != Effect::Unset) return false;
  size_t colon = std::min(text.find(':'), text.size());
  std::string name = text.substr(0, colon);
  bool bare = colon == text.size();
  std::string value = bare ? "" : text.substr(colon + 1);
  if (name == "die") entry->effect = Effect::Die;
  if (name == "drop") entry->effect = Effect::Drop;
  if (name == "sleep") entry->effect = Effect::Sleep;
  if (name == "fail") entry->effect = Effect::Fail;
  switch (entry->effect) {
    case Effect::Unset:
      return false;
    case Effect::Sleep:
      return parse_seconds(value, &entry->seconds);
    case Effect::Fail:
      return parse_result(value, &entry->result);
    default:
      return bare;
  }
}

bool parse_field(const std::string& field, Entry* entry) {
  size_t equals = field.find('=');
  if (equals == std::string::npos) return false;
  std::string key = field.substr(0, equals);
  std::string value = field.substr(equals + 1);
  if (key == "rank") return parse_count(value, &entry->rank);
  if (key == "call") return parse_count(value, &entry->call) && entry->call >= 1;
  return key == "action" && parse_action(value, entry);
}

bool parse_entry(const std::string& text, Entry* entry, std::string* error) {
  for (const std::string& field : split(text, ',')) {
    if (parse_field(field, entry)) continue;
    *error =
        "\"" + field + "\" is none of rank=R, call=K (from 1), action=die|drop|sleep:SECONDS|fail:RESULT";
    return false;
  }
  if (entry->rank >= 0 && entry->call >= 1 && entry->effect != Effect::Unset) return true;
  *error = "\"" + text + "\" lacks one of rank, call and action";
  return false;
}

Plan* parse_plan(const std::string& text) {
  Plan* plan = new Plan;
  plan->text = text;
  if (text.empty()) return plan;
  for (const std::string& part : split(text, ';')) {
    Entry entry;
    if (part.empty()) continue;
    if (!parse_entry(part, &entry, &plan->error)) {
      plan->error = "PYNCCL_CPU_FAULT=" + text + ": " + plan->error;
      plan->entries.clear();
      return plan;
    }
    plan->entries.push_back(entry);
  }
  return plan;
}

std::atomic<const Plan*> active{nullptr};

const Plan* reread() {
  const char* value = param_str("PYNCCL_CPU_FAULT");
  std::string text = value != nullptr ? value : "";
  const Plan* current = active.load(std::memory_order_acquire);
  if (current != nullptr && current->text == text) return current;
  Plan* fresh = parse_plan(text);
  fresh->previous = current;
  if (!active.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) {
    delete fresh;
    return current;
  }
  if (!fresh->error.empty()) log(Level::Warn, "%s", fresh->error.c_str());
  return fresh;
}

[[noreturn]] void die() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

}  // namespace

Fault fault_point(int rank, uint64_t call) {
  const Plan* plan = call == 1 ? reread() : active.load(std::memory_order_acquire);
  if (plan == nullptr) return {FaultAction::None, ncclSuccess};
  for (const Entry& entry : plan->entries) {
    if (entry.rank != rank || static_cast<uint64_t>(entry.call) != call) continue;
    if (entry.effect == Effect::Sleep)
      std::this_thread::sleep_for(std::chrono::duration<double>(entry.seconds));
    if (entry.effect == Effect::Die) die();
    if (entry.effect == Effect::Drop) return {FaultAction::Drop, ncclSuccess};
    if (entry.effect == Effect::Fail) return {FaultAction::Fail, entry.result};
  }
  return {FaultAction::None, ncclSuccess};
}

const char* fault_error() {
  const Plan* plan = reread();
  return plan->error.empty() ? nullptr : plan->error.c_str();
}

}  // namespace pncpu
