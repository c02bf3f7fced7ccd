#include "ras/report.hpp"

#include <algorithm>
#include <cctype>
#include <cstdarg>
#include <cstring>
#include <ctime>
#include <tuple>

namespace pncpu {
namespace {

constexpr int kDetail = 10;  // NCCL names no more ranks than these unless asked to be verbose
// NCCL's order of the collectives, then those that NCCL does not count.
constexpr const char* kRasCollectives[kCountedKinds] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                                        "AllReduce", "AlltoAll", "Gather",    "Scatter"};
constexpr char kVersion[] = "2.32.3+cpu";
static_assert(NCCL_VERSION_CODE == 23203, "kVersion names the version");

enum Status { kNoComm = 1, kInit = 2, kRunning = 4, kFinalize = 8, kAbort = 16 };
constexpr const char* kStatusNames[] = {"NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT"};
enum Error { kDiffers = 1, kFailed = 2, kIsIncomplete = 4 };
constexpr const char* kErrorNames[] = {"OK",
                                       "MISMATCH",
                                       "ERROR",
                                       "ERROR,MISMATCH",
                                       "INCOMPLETE",
                                       "INCOMPLETE,MISMATCH",
                                       "INCOMPLETE,ERROR",
                                       "INCOMPLETE,ERROR,MISMATCH"};

void append(std::string* out, const char* format, ...) __attribute__((format(printf, 2, 3)));
void append(std::string* out, const char* format, ...) {
  char line[1024];
  va_list args;
  va_start(args, format);
  int size = vsnprintf(line, sizeof line, format, args);
  va_end(args);
  if (size > 0) out->append(line, std::min(size_t(size), sizeof line - 1));
}

const char* plural(size_t count, const char* ending = "s") { return count == 1 ? "" : ending; }

const char* status_name(int bit) { return kStatusNames[31 - __builtin_clz(unsigned(bit))]; }

const char* result_name(int result) {
  switch (result) {
    case ncclUnhandledCudaError:
      return "Unhandled CUDA error";
    case ncclSystemError:
      return "System error";
    case ncclInternalError:
      return "Internal error";
    case ncclInvalidArgument:
      return "Invalid argument";
    case ncclInvalidUsage:
      return "Invalid usage";
    case ncclRemoteError:
      return "Remote process error";
    default:
      return "Unexpected error";
  }
}

bool failed(int result) { return result != ncclSuccess && result != ncclInProgress; }

int status_of(const RankState& rank) {
  if (rank.aborted) return kAbort;
  if (rank.finalized || rank.destroyed) return kFinalize;
  return rank.init_state == ncclSuccess ? kRunning : kInit;
}

bool is_outlier(size_t count, bool verbose, int total = -1) {
  if (count == 1) return true;
  if (verbose) return total == -1 || double(count) < total * 0.5;
  return count <= kDetail && (total == -1 || double(count) <= total * 0.25);
}

std::string list(const std::set<int>& numbers) {
  std::string text;
  for (int number : numbers) text += (text.empty() ? "" : ",") + std::to_string(number);
  return text;
}

std::string where(const RasJob::Place& place) {
  return "GPU " + std::to_string(place.device) + " managed by process " + std::to_string(place.pid) +
         " on node " + place.host;
}

const char* truth(bool value) { return value ? "true" : "false"; }

// Names of hosts come from peers; the formats have no escapes.
std::string safe(const char* text) {
  std::string name(text, strnlen(text, sizeof RankPlace::host_name));
  for (char& c : name)
    if (!isalnum(static_cast<unsigned char>(c)) && !strchr(".:_-%", c)) c = '?';
  return name.empty() ? "unknown" : name;
}

}  // namespace

// ---- from process to process ----

namespace {

template <class T>
bool take(const char** at, size_t* left, T* out) {
  if (*left < sizeof *out) return false;
  memcpy(static_cast<void*>(out), *at, sizeof *out);
  *at += sizeof *out;
  *left -= sizeof *out;
  return true;
}

}  // namespace

bool read_process(const char* data, size_t size, RasProcess* process) {
  if (!take(&data, &size, &process->speaker)) return false;
  while (size) {
    RasProcess::Rank rank;
    if (!take(&data, &size, &rank.state)) return false;
    int nranks = rank.state.nranks;
    if (nranks < 1 || nranks > kMostRanks || rank.state.rank < 0 || rank.state.rank >= nranks) return false;
    if (size / sizeof(RankPlace) < size_t(nranks)) return false;
    rank.places.resize(size_t(nranks));
    for (RankPlace& place : rank.places) take(&data, &size, &place);
    process->ranks.push_back(std::move(rank));
  }
  return true;
}

// ---- the job ----

void RasJob::heard(const RasProcess& said) {
  heard_[said.speaker.process] = {safe(said.speaker.host_name), said.speaker.pid, {}};
  for (const RasProcess::Rank& rank : said.ranks) {
    Comm& comm = comms_[rank.state.hash];
    if (!comm.size) {
      comm.hash = rank.state.hash;
      comm.size = rank.state.nranks;
      comm.secondary[0] = rank.places[0].process.a;
      comm.secondary[1] = rank.places[0].process.b;
    }
    if (comm.size != rank.state.nranks) continue;
    comm.ranks[rank.state.rank] = rank.state;
    for (int q = 0; q < comm.size; ++q) {
      const RankPlace& seen = rank.places[size_t(q)];
      Place& place = comm.places[q];
      place.process = seen.process;
      place.pid = seen.pid;
      place.device = seen.device;
      place.host = safe(seen.host_name);
      place.left |= seen.presence == Presence::Left;
      place.dead |= seen.presence == Presence::Dead;
    }
  }
}

bool RasJob::is_dead(const Place& place) const {
  return !responded(place) && !place.left && (place.dead || refused_.count(place.process));
}

std::map<Token, RasJob::Process> RasJob::processes() const {
  std::map<Token, Process> found = heard_;
  for (auto& [hash, comm] : comms_)
    for (auto& [number, place] : comm.places) {
      if (place.left && !responded(place)) continue;
      Process& process = found[place.process];
      process.host = place.host;
      process.pid = place.pid;
      process.devices.insert(place.device);
    }
  return found;
}

int RasJob::timeouts() const {
  std::set<Token> silent;
  for (auto& [hash, comm] : comms_)
    for (auto& [number, place] : comm.places)
      if (is_silent(place)) silent.insert(place.process);
  return int(silent.size());
}

std::string RasJob::json() const {
  char now[64];
  time_t seconds_now = time(nullptr);
  struct tm parts;
  strftime(now, sizeof now, "%F %T", localtime_r(&seconds_now, &parts));
  std::string out;
  append(&out,
         "{\n  \"nccl_version\": \"%s\",\n  \"cuda_runtime_version\": 0,\n  \"cuda_driver_version\": 0,\n"
         "  \"timestamp\": \"%s\",\n  \"communicators_count\": %zu,\n  \"communicators\": [\n",
         kVersion, now, comms_.size());
  const char* before_comm = "";
  for (auto& [hash, comm] : comms_) {
    append(&out,
           "%s    {\n      \"hash\": \"0x%llx\",\n      \"secondary_hash\": \"0x%llx:0x%llx\",\n"
           "      \"size\": %d,\n      \"ranks_count\": %zu,\n      \"missing_ranks_count\": %zu,\n"
           "      \"ranks\": [\n",
           before_comm, static_cast<unsigned long long>(hash),
           static_cast<unsigned long long>(comm.secondary[0]),
           static_cast<unsigned long long>(comm.secondary[1]), comm.size, comm.ranks.size(),
           size_t(comm.size) - comm.ranks.size());
    before_comm = ",\n";
    auto describe = [&](const char* before, int number, const RasJob::Place& place) {
      append(&out,
             "%s        {\n          \"rank\": %d,\n          \"host\": \"%s\",\n          \"pid\": %lld,\n"
             "          \"cuda_dev\": %d,\n          \"nvml_dev\": %d,\n          \"status\": {\n",
             before, number, place.host.c_str(), static_cast<long long>(place.pid), place.device,
             place.device);
    };
    const char* before = "";
    for (auto& [number, rank] : comm.ranks) {
      describe(before, number, comm.places.at(number));
      before = ",\n";
      append(&out,
             "            \"init_state\": %d,\n            \"async_error\": %d,\n"
             "            \"finalize_called\": %s,\n            \"destroy_flag\": %s,\n"
             "            \"abort_flag\": %s\n          },\n          \"collective_counts\": {\n",
             rank.init_state, rank.async_error, truth(rank.finalized), truth(rank.destroyed),
             truth(rank.aborted));
      for (size_t i = 0; i < kCountedKinds; ++i)
        append(&out, "            \"%s\": %llu%s\n", kRasCollectives[i],
               static_cast<unsigned long long>(rank.counts[i]), i + 1 < kCountedKinds ? "," : "");
      out += "          }\n        }";
    }
    out += "\n      ],\n      \"missing_ranks\": [\n";
    before = "";
    for (auto& [number, place] : comm.places) {
      if (comm.ranks.count(number)) continue;
      describe(before, number, place);
      before = ",\n";
      append(&out,
             "            \"unresponsive\": %s,\n            \"considered_dead\": %s\n          }\n        }",
             truth(!responded(place) && !place.left), truth(is_dead(place)));
    }
    out += "\n      ]\n    }";
  }
  append(&out,
         "\n  ],\n  \"ras\": {\n    \"collection_time_sec\": %.3f,\n    \"timeouts_count\": %d\n  }\n}\n",
         seconds, timeouts());
  return out;
}

// ---- text ----

struct RasJob::Summary {
  const Comm* comm = nullptr;
  int nodes = 0, least = 0, most = 0;  // ranks of a node
  int status = 0, errors = 0;
  std::vector<int> unknown, absent;  // ranks of processes that are silent, and that have left
  auto key() const {
    return std::make_tuple(-comm->size, -nodes, -(31 - __builtin_clz(unsigned(status))), -errors);
  }
};

std::vector<RasJob::Summary> RasJob::summaries() const {
  std::vector<Summary> found;
  for (auto& [hash, comm] : comms_) {
    Summary one;
    one.comm = &comm;
    std::map<std::string, int> nodes;
    for (auto& [number, place] : comm.places) {
      auto rank = comm.ranks.find(number);
      if (rank == comm.ranks.end()) {
        (responded(place) || place.left ? one.absent : one.unknown).push_back(number);
        continue;
      }
      ++nodes[place.host];
      one.status |= status_of(rank->second);
      if (memcmp(rank->second.counts, comm.ranks.begin()->second.counts, sizeof rank->second.counts) != 0)
        one.errors |= kDiffers;
      if (failed(rank->second.init_state) || failed(rank->second.async_error)) one.errors |= kFailed;
    }
    if (!one.absent.empty()) one.status |= kNoComm;
    if (!one.unknown.empty()) one.errors |= kIsIncomplete;
    if (__builtin_popcount(unsigned(one.status)) > 1 || !one.absent.empty()) one.errors |= kDiffers;
    one.nodes = int(nodes.size());
    for (auto& [host, ranks] : nodes) {
      one.least = one.least ? std::min(one.least, ranks) : ranks;
      one.most = std::max(one.most, ranks);
    }
    found.push_back(std::move(one));
  }
  std::sort(found.begin(), found.end(), [](const Summary& a, const Summary& b) {
    return std::make_tuple(a.key(), a.comm->hash) < std::make_tuple(b.key(), b.comm->hash);
  });
  return found;
}

std::string RasJob::job_summary() const {
  std::map<std::string, std::vector<size_t>> nodes;
  size_t count_of_processes = 0, gpus = 0;
  for (auto& [token, process] : processes()) {
    nodes[process.host].push_back(process.devices.size());
    ++count_of_processes;
    gpus += process.devices.size();
  }
  std::map<size_t, int> nodes_by_processes, processes_by_gpus;
  for (auto& [host, devices] : nodes) {
    ++nodes_by_processes[devices.size()];
    for (size_t count : devices) ++processes_by_gpus[count];
  }
  std::string out = "Job summary\n===========\n\n";
  if (nodes_by_processes.size() == 1 && processes_by_gpus.size() == 1) {
    append(&out,
           "  Nodes  Processes         GPUs  Processes     GPUs\n"
           "(total)   per node  per process    (total)  (total)\n"
           "%7zu  %9zu  %11zu  %9zu  %7zu\n",
           nodes.size(), nodes_by_processes.begin()->first, processes_by_gpus.begin()->first,
           count_of_processes, gpus);
    return out;
  }
  out += "  Nodes  Processes\n          per node\n";
  for (auto& [count, how_many] : nodes_by_processes) append(&out, "%7d  %9zu\n", how_many, count);
  out += "\n         Processes         GPUs\n                    per process\n";
  for (auto& [count, how_many] : processes_by_gpus) append(&out, "         %9d  %11zu\n", how_many, count);
  append(&out, "\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n%7zu  %9zu  %11zu\n",
         nodes.size(), count_of_processes, gpus);
  return out;
}

std::string RasJob::process_errors(bool verbose) const {
  std::map<Token, Process> all = processes(), silent, dead;
  for (auto& [hash, comm] : comms_)
    for (auto& [number, place] : comm.places)
      if (is_silent(place) || is_dead(place))
        (is_dead(place) ? dead : silent)[place.process] = all[place.process];
  std::string out;
  auto show = [&](const std::map<Token, Process>& processes) {
    if (is_outlier(processes.size(), verbose))
      for (auto& [token, process] : processes)
        out += "  Process " + std::to_string(process.pid) + " on node " + process.host + " managing GPU" +
               plural(process.devices.size()) + " " + list(process.devices) + "\n";
    out += "\n";
  };
  if (!silent.empty()) {
    append(&out, "INCOMPLETE\n  Missing communicator data from %zu job process%s\n", silent.size(),
           plural(silent.size(), "es"));
    show(silent);
  }
  if (!dead.empty()) {
    append(&out, "DEAD\n  %zu job process%s considered dead (unreachable via the RAS network)\n", dead.size(),
           dead.size() == 1 ? " is" : "es are");
    show(dead);
  }
  return out;
}

namespace {

using Ranks = std::map<uint64_t, std::vector<int>>;  // by a value that they share

std::vector<std::pair<uint64_t, std::vector<int>>> most_frequent_first(const Ranks& ranks) {
  std::vector<std::pair<uint64_t, std::vector<int>>> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() > b.second.size() : a.first < b.first;
  });
  return sorted;
}

// `say(value)` is what several ranks or one rank "have" or "has" done.
template <class Say>
void show_groups(const RasJob::Comm& comm, const Ranks& groups, bool verbose, int total, Say say,
                 std::string* out) {
  for (auto& [value, ranks] : most_frequent_first(groups)) {
    bool one = ranks.size() == 1;
    if (!one) append(out, "  %zu ranks %s\n", ranks.size(), say(value, false).c_str());
    if (!is_outlier(ranks.size(), verbose, total)) continue;
    for (int rank : ranks)
      append(out, "  Rank %d%s -- %s\n", rank, one ? (" " + say(value, true)).c_str() : "",
             where(comm.places.at(rank)).c_str());
  }
}

void show_errors(const RasJob::Comm& comm, const char* what, int32_t RankState::* result, bool verbose,
                 std::string* out) {
  Ranks groups;
  size_t count = 0;
  for (auto& [number, rank] : comm.ranks)
    if (failed(rank.*result)) groups[uint64_t(rank.*result)].push_back(number), ++count;
  if (!count) return;
  append(out, "  %s error%s on %zu rank%s\n", what, plural(count), count, plural(count));
  show_groups(
      comm, groups, verbose, -1,
      [](uint64_t value, bool) { return std::string("reported ") + result_name(int(value)); }, out);
}

}  // namespace

void RasJob::mismatches(const Summary& one, const std::string& name, bool verbose, std::string* out) const {
  const Comm& comm = *one.comm;
  append(out, "%s MISMATCH\n", name.c_str());
  if (__builtin_popcount(unsigned(one.status)) > 1) {
    *out += "  Communicator ranks have different status\n";
    Ranks groups;
    for (auto& [number, rank] : comm.ranks) groups[uint64_t(status_of(rank))].push_back(number);
    if (!one.absent.empty()) groups[kNoComm] = one.absent;
    show_groups(
        comm, groups, verbose, comm.size,
        [](uint64_t value, bool single) {
          return std::string(single ? "has" : "have") + " status " + status_name(int(value));
        },
        out);
  }
  for (size_t i = 0; i < kCountedKinds; ++i) {
    Ranks groups;
    for (auto& [number, rank] : comm.ranks) groups[rank.counts[i]].push_back(number);
    if (groups.size() < 2) continue;
    append(out, "  Communicator ranks have different %s operation counts\n", kRasCollectives[i]);
    show_groups(
        comm, groups, verbose, comm.size,
        [](uint64_t value, bool single) {
          return std::string(single ? "has " : "have ") +
                 (value ? "launched up to operation " + std::to_string(value)
                        : "not launched any operations");
        },
        out);
  }
  *out += "\n";
}

std::string RasJob::text(bool verbose) const {
  std::string out = std::string("NCCL version ") + kVersion + " compiled with CUDA 0.0\n";
  out += "CUDA runtime version 0, driver version 0\n\n" + job_summary();
  append(&out, "\nCommunicators... (%.3fs)\n=============\n\n", seconds);
  out += comms_.empty() ? "No communicator data collected!\n"
                        : "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
                          "    #  in group  per comm  per node  per comm  in group\n";
  std::vector<Summary> all = summaries();
  std::string errors, warnings;
  for (size_t first = 0, group = 0, last; first < all.size(); first = last, ++group) {
    std::set<std::tuple<std::string, int64_t, int>> gpus;
    int least = all[first].least, most = all[first].most;
    for (last = first; last < all.size() && all[last].key() == all[first].key(); ++last) {
      const Summary& one = all[last];
      least = std::min(least, one.least);
      most = std::max(most, one.most);
      for (auto& [number, rank] : one.comm->ranks) {
        const RasJob::Place& place = one.comm->places.at(number);
        gpus.insert({place.host, place.pid, place.device});
      }
      char name[64];
      snprintf(name, sizeof name, "#%zu-%zu (%016llx)", group, last - first,
               static_cast<unsigned long long>(one.comm->hash));
      if (one.errors & kIsIncomplete) {
        append(&errors, "%s INCOMPLETE\n  Missing communicator data from %zu rank%s\n", name,
               one.unknown.size(), plural(one.unknown.size()));
        if (is_outlier(one.unknown.size(), verbose))
          for (int rank : one.unknown)
            append(&errors, "  Rank %d -- %s\n", rank, where(one.comm->places.at(rank)).c_str());
        errors += "\n";
      }
      if (one.errors & kFailed) {
        append(&errors, "%s ERROR\n", name);
        show_errors(*one.comm, "Initialization", &RankState::init_state, verbose, &errors);
        show_errors(*one.comm, "Asynchronous", &RankState::async_error, verbose, &errors);
        errors += "\n";
      }
      if (one.errors & kDiffers) mismatches(one, name, verbose, &warnings);
    }
    std::string per_node = std::to_string(least) + (least == most ? "" : "-" + std::to_string(most));
    append(&out, "%5zu  %8zu  %8d  %8s  %8d  %8zu  %8s  %6s\n", group, last - first, all[first].nodes,
           per_node.c_str(), all[first].comm->size, gpus.size(), status_name(all[first].status),
           kErrorNames[all[first].errors]);
  }
  out += "\nErrors\n======\n\n" + process_errors(verbose) + errors + "Warnings\n========\n\n";
  if (int count = timeouts())
    append(&out, "TIMEOUT\n  Encountered %d communication timeout%s while gathering communicator data\n\n",
           count, plural(size_t(count)));
  return out + warnings;
}

}  // namespace pncpu
