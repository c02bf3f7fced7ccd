#include "base/params.hpp"

#include <locale.h>
#include <strings.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <locale>
#include <map>
#include <sstream>
#include <string>

#include "base/log.hpp"

namespace pncpu {
namespace {

enum class Kind { Str, Int, Seconds, Bool, Secret };  // a secret's value is never shown
constexpr const char* kKindNames[] = {"string", "integer", "number of seconds", "boolean", "secret"};

struct Param {
  const char* name;
  Kind kind;
  const char* fallback;  // nullptr: unset; "$NAME": that parameter's value
  double min, max;
  bool published;
  const char* doc;
  mutable std::atomic<bool> told{false};  // its malformed value was logged
};

constexpr double kMaxBytes = 1 << 30;
constexpr double kMaxSeconds = 1e9;

const Param kTable[] = {
    {"NCCL_COMM_ID", Kind::Str, nullptr, 0, 0, true,
     "Address of rank 0's listener: <ip or host name>:<port>"},
    {"NCCL_SOCKET_IFNAME", Kind::Str, nullptr, 0, 0, true,
     "Interfaces to use: a list of prefixes; ^ first excludes them, = first makes them exact names"},
    {"NCCL_SOCKET_FAMILY", Kind::Str, nullptr, 0, 0, true, "AF_INET or AF_INET6"},
    {"NCCL_DEBUG", Kind::Str, nullptr, 0, 0, true, "VERSION, WARN, INFO, ABORT or TRACE"},
    {"NCCL_DEBUG_FILE", Kind::Str, nullptr, 0, 0, true, "File of the log: %h is the host, %p the process id"},
    {"NCCL_HOSTID", Kind::Str, nullptr, 0, 0, true,
     "Ranks with different values count as different machines"},
    {"NCCL_CONF_FILE", Kind::Str, nullptr, 0, 0, true, "File read in place of ~/.nccl.conf"},
    {"NCCL_PARAM_DUMP_ALL", Kind::Bool, "0", 0, 1, true, "List parameters that are not published, too"},
    {"NCCL_COMM_BLOCKING", Kind::Int, "-2147483648", 0, 1, true,
     "Overrides the blocking field of ncclConfig_t"},
    {"NCCL_MULTI_RANK_GPU_ENABLE", Kind::Int, "0", 0, 1e9, true,
     "1: ranks may share a device of PYNCCL_CPU_DEVICES"},
    {"NCCL_RAS_ENABLE", Kind::Int, "0", 0, 1e9, true,
     "1: the first process of a host serves the RAS protocol at NCCL_RAS_ADDR; 0: none does"},
    {"NCCL_RAS_ADDR", Kind::Str, nullptr, 0, 0, true,
     "Address of the RAS server: <ip or host name>:<port>; set, it enables the server"},
    {"PYNCCL_CPU_BLOCKING", Kind::Int, "0", 0, 1, true, "1: every operation waits until it is done"},
    {"PYNCCL_CPU_DIRECT", Kind::Int, "1", 0, 1, true, "0: never read the memory of other processes directly"},
    {"PYNCCL_CPU_PTRACER", Kind::Int, "0", -1, 1 << 22, true,
     "Where Yama forbids direct reads: the process whose descendants may read this one's memory; -1: the "
     "parent"},
    {"PYNCCL_CPU_INIT_TIMEOUT", Kind::Seconds, "120", 0, kMaxSeconds, true,
     "Seconds that the creation of a communicator waits for its ranks"},
    {"PYNCCL_CPU_TIMEOUT", Kind::Seconds, "0", 0, kMaxSeconds, true,
     "Seconds that an operation waits for its peers; 0: forever"},
    {"PYNCCL_CPU_FAULT", Kind::Str, nullptr, 0, 0, true,
     "Faults to inject: rank=R,call=K,action=die|drop|sleep:SECONDS|fail:RESULT[;...]"},
    {"PYNCCL_CPU_INLINE_BYTES", Kind::Int, "8192", 0, kMaxBytes, true,
     "Largest message that travels with its header"},
    {"PYNCCL_CPU_SHOWN_BYTES", Kind::Int, "1048576", 0, kMaxBytes, true,
     "Most bytes that a rank shows the others of its host in a collective of one host"},
    {"PYNCCL_CPU_BY_HOSTS", Kind::Int, "1", 0, 1, true,
     "0: the ranks of a host do not share the work of a collective across hosts"},
    {"PYNCCL_CPU_BLOCK_BYTES", Kind::Int, "131072", 64, kMaxBytes, true, "Bytes reduced at a time"},
    {"PYNCCL_CPU_RING_BYTES", Kind::Int, "262144", 4096, kMaxBytes, true,
     "Shared memory for messages from one rank to another; collectives of up to 8 ranks have more"},
    {"PYNCCL_CPU_SPIN_US", Kind::Int, "-1", -1, 1e6, true,
     "Microseconds that a wait spins before it sleeps; -1: automatic"},
    {"PYNCCL_CPU_DEVICES", Kind::Int, "$LOCAL_WORLD_SIZE", 1, 1e6, true,
     "Number of virtual devices; set, they are shared by the ranks of a host"},
    {"PYNCCL_SECRET", Kind::Secret, nullptr, 0, 0, true,
     "What the ranks of a job prove to each other that they have"},
    {"PYNCCL_SECRET_FILE", Kind::Str, nullptr, 0, 0, true, "A file with that secret, closed to other users"},
    {"WORLD_SIZE", Kind::Int, "0", 0, 1e9, false, "Ranks in all, as launchers set it"},
    {"LOCAL_WORLD_SIZE", Kind::Int, "1", 1, 1e6, false, "Ranks on this machine, as launchers set it"},
};
constexpr int kCount = sizeof(kTable) / sizeof(kTable[0]);

struct Setting {
  std::string value;
  std::string file;
};
using Settings = std::map<std::string, Setting>;

std::string trim(const std::string& text) {
  size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// The maximum size of a settings file.
constexpr size_t kMaxFile = 1 << 20;

// Ignores devices and pipes, which may have no end or block.
std::string read_regular(const std::string& path) {
  struct stat found;
  if (stat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return "";
  std::ifstream file(path, std::ios::binary);
  std::string text(std::min(size_t(found.st_size), kMaxFile), '\0');
  file.read(&text[0], std::streamsize(text.size()));
  text.resize(size_t(std::max(file.gcount(), std::streamsize(0))));
  return text;
}

// The first assignment of a name wins, so files are read in the order of their precedence.
void read_conf(const std::string& path, Settings* settings) {
  std::istringstream file(read_regular(path));
  for (std::string line; std::getline(file, line);) {
    size_t equals = line.find('=');
    if (line[0] == '#' || equals == std::string::npos) continue;
    settings->emplace(trim(line.substr(0, equals)), Setting{trim(line.substr(equals + 1)), path});
  }
}

Settings read_conf_files() {
  Settings settings;
  const char* user_file = getenv("NCCL_CONF_FILE");
  const char* home = getenv("HOME");
  if (user_file != nullptr && user_file[0] != '\0') {
    read_conf(user_file, &settings);
  } else if (home != nullptr) {
    read_conf(std::string(home) + "/.nccl.conf", &settings);
  }
  read_conf("/etc/nccl.conf", &settings);
  return settings;
}

// No lock and no once_flag: if another thread forks meanwhile, the child reads the files itself.
const Settings& conf() {
  static std::atomic<const Settings*> loaded{nullptr};
  const Settings* current = loaded.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  const Settings* fresh = new Settings(read_conf_files());
  if (loaded.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *current;
}

const Param* find(const char* name) {
  for (const Param& param : kTable) {
    if (strcmp(param.name, name) == 0) return &param;
  }
  return nullptr;
}

const Param& registered(const char* name) {
  const Param* param = find(name);
  if (param == nullptr) {
    print(std::string("pynccl: parameter ") + name + " is not registered\n");
    abort();
  }
  return *param;
}

// The value and its source. An empty value counts as unset and hides later sources.
struct Text {
  const char* value = nullptr;
  std::string source = "Default";
};

Text lookup(const Param& param) {
  const char* value = getenv(param.name);
  if (value != nullptr) return value[0] != '\0' ? Text{value, "Environment"} : Text{};
  auto found = conf().find(param.name);
  if (found == conf().end() || found->second.value.empty()) return {};
  return {found->second.value.c_str(), found->second.file};
}

bool parse_bool(const char* text, double* out) {
  auto is_one_of = [&](std::initializer_list<const char*> words) {
    return std::any_of(words.begin(), words.end(),
                       [&](const char* word) { return strcasecmp(text, word) == 0; });
  };
  *out = is_one_of({"1", "T", "TRUE"});
  return *out != 0 || is_one_of({"0", "F", "FALSE"});
}

bool parse_integer(const char* text, double* out) {
  char* end = nullptr;
  errno = 0;
  *out = static_cast<double>(strtoll(text, &end, 0));
  return end != text && errno == 0 && end[strspn(end, " \t")] == '\0';
}

// A double represents every integer in the parameters' ranges exactly.
bool parse_number(Kind kind, const char* text, double* out) {
  if (kind == Kind::Bool) return parse_bool(text, out);
  return kind == Kind::Int ? parse_integer(text, out) : parse_real(text, out);
}

std::string format_number(double value) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(15);
  out << value;
  return out.str();
}

double default_number(const Param& param);

std::string malformed_text(const Param& param, const char* text) {
  return std::string(param.name) + " is \"" + text + "\", which is no " +
         kKindNames[static_cast<int>(param.kind)] + " from " + format_number(param.min) + " to " +
         format_number(param.max);
}

void tell_malformed(const Param& param, const char* text) {
  if (param.told.exchange(true, std::memory_order_relaxed)) return;
  log(Level::Warn, "%s; the default %s is used", malformed_text(param, text).c_str(),
      format_number(default_number(param)).c_str());
}

bool read_number(const Param& param, const char* text, double* out) {
  return parse_number(param.kind, text, out) && *out >= param.min && *out <= param.max;
}

double number(const Param& param) {
  Text text = lookup(param);
  if (text.value == nullptr) return default_number(param);
  double value;
  if (read_number(param, text.value, &value)) return value;
  tell_malformed(param, text.value);
  return default_number(param);
}

double default_number(const Param& param) {
  if (param.fallback[0] == '$') return number(registered(param.fallback + 1));
  double value = 0;
  parse_number(param.kind, param.fallback, &value);
  return value;
}

bool is_text(const Param& param) { return param.kind == Kind::Str || param.kind == Kind::Secret; }

std::string value_text(const Param& param) {
  if (!is_text(param)) return format_number(number(param));
  Text text = lookup(param);
  if (param.kind == Kind::Secret) return text.value != nullptr ? "<hidden>" : "";
  return text.value != nullptr ? text.value : "";
}

const char* or_unset(const std::string& text) { return text.empty() ? "<unset>" : text.c_str(); }

bool listed(const Param& param) { return param.published || param_int("NCCL_PARAM_DUMP_ALL") != 0; }

std::string describe(const Param& param) {
  std::string value = value_text(param);
  std::string fallback = is_text(param) ? "" : format_number(default_number(param));
  std::string text = std::string(param.name) + " (" + kKindNames[static_cast<int>(param.kind)] + ") [" +
                     (param.published ? "Published" : "Private") + "] " + param.doc + "\n";
  text += std::string("    Current value=") + or_unset(value) + " set_by=" + lookup(param).source +
          " default=" + or_unset(fallback) + "\n";
  return text;
}

ncclResult_t null_argument(const char* function, const char* argument) {
  return fail_in(function, ncclInvalidArgument, "%s argument is NULL", argument);
}

ncclResult_t unknown_key(const char* function, const char* key) {
  return fail_in(function, ncclInvalidArgument, "no parameter is called \"%s\"", key);
}

ncclResult_t unwrap(const char* function, ncclParamHandle_t handle, const Param** out) {
  if (handle == nullptr) return null_argument(function, "h");
  for (const Param& param : kTable) {
    if (reinterpret_cast<const void*>(handle) != static_cast<const void*>(&param)) continue;
    *out = &param;
    return ncclSuccess;
  }
  return fail_in(function, ncclInvalidArgument, "handle %p is not one that ncclParamBind gave",
                 reinterpret_cast<void*>(handle));
}

template <typename T>
ncclResult_t get_integer(const char* function, ncclParamHandle_t handle, T* out) {
  const Param* param = nullptr;
  ncclResult_t result = unwrap(function, handle, &param);
  if (result != ncclSuccess) return result;
  if (out == nullptr) return null_argument(function, "out");
  if (param->kind == Kind::Str) {
    return fail_in(function, ncclInvalidArgument, "%s is a string, not a number", param->name);
  }
  double value = number(*param);
  bool fits = value >= static_cast<double>(std::numeric_limits<T>::min()) &&
              value <= static_cast<double>(std::numeric_limits<T>::max()) && std::trunc(value) == value;
  if (!fits) {
    return fail_in(function, ncclInvalidArgument, "the value %s of %s does not fit %s%d",
                   format_number(value).c_str(), param->name,
                   std::numeric_limits<T>::is_signed ? "int" : "uint",
                   static_cast<int>(sizeof(T)) * CHAR_BIT);
  }
  *out = static_cast<T>(value);
  return ncclSuccess;
}

template <typename T>
std::string bytes_of(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// As in NCCL a string includes its terminator, an integer is an int64_t, a boolean is one byte.
std::string raw_value(const Param& param) {
  switch (param.kind) {
    case Kind::Str:
    case Kind::Secret:
      return value_text(param) + '\0';
    case Kind::Int:
      return bytes_of(static_cast<int64_t>(number(param)));
    case Kind::Seconds:
      return bytes_of(number(param));
    case Kind::Bool:
      return bytes_of(number(param) != 0);
  }
  return "";
}

}  // namespace

const char* param_str(const char* name) { return lookup(registered(name)).value; }

bool param_is_set(const char* name) { return lookup(registered(name)).value != nullptr; }

int64_t param_int(const char* name) { return static_cast<int64_t>(number(registered(name))); }

double param_seconds(const char* name) { return number(registered(name)); }

const char* param_error() {
  thread_local std::string text;
  for (const Param& param : kTable) {
    if (is_text(param) || strncmp(param.name, "PYNCCL_", 7) != 0) continue;
    const char* value = lookup(param).value;
    double ignored;
    if (value == nullptr || read_number(param, value, &ignored)) continue;
    text = malformed_text(param, value);
    return text.c_str();
  }
  return nullptr;
}

bool parse_real(const char* text, double* out) {
  static const locale_t classic = newlocale(LC_ALL_MASK, "C", nullptr);
  char* end = nullptr;
  *out = strtod_l(text, &end, classic);
  bool decimal = text[strcspn(text, "xXnNiI")] == '\0';  // neither hexadecimal, nan nor inf
  return decimal && end != text && end[strspn(end, " \t\n")] == '\0' && std::isfinite(*out);
}

}  // namespace pncpu

using namespace pncpu;

ncclResult_t ncclParamBind(ncclParamHandle_t* out, const char* key) {
  if (out == nullptr) return null_argument("ncclParamBind", "out");
  if (key == nullptr) return null_argument("ncclParamBind", "key");
  const Param* param = find(key);
  if (param == nullptr) return unknown_key("ncclParamBind", key);
  *out = reinterpret_cast<ncclParamHandle_t>(const_cast<Param*>(param));
  return ncclSuccess;
}

ncclResult_t ncclParamGetI8(ncclParamHandle_t h, int8_t* out) {
  return get_integer("ncclParamGetI8", h, out);
}
ncclResult_t ncclParamGetI16(ncclParamHandle_t h, int16_t* out) {
  return get_integer("ncclParamGetI16", h, out);
}
ncclResult_t ncclParamGetI32(ncclParamHandle_t h, int32_t* out) {
  return get_integer("ncclParamGetI32", h, out);
}
ncclResult_t ncclParamGetI64(ncclParamHandle_t h, int64_t* out) {
  return get_integer("ncclParamGetI64", h, out);
}
ncclResult_t ncclParamGetU8(ncclParamHandle_t h, uint8_t* out) {
  return get_integer("ncclParamGetU8", h, out);
}
ncclResult_t ncclParamGetU16(ncclParamHandle_t h, uint16_t* out) {
  return get_integer("ncclParamGetU16", h, out);
}
ncclResult_t ncclParamGetU32(ncclParamHandle_t h, uint32_t* out) {
  return get_integer("ncclParamGetU32", h, out);
}
ncclResult_t ncclParamGetU64(ncclParamHandle_t h, uint64_t* out) {
  return get_integer("ncclParamGetU64", h, out);
}

ncclResult_t ncclParamGetStr(ncclParamHandle_t h, const char** out) {
  static thread_local std::string text;
  const Param* param = nullptr;
  ncclResult_t result = unwrap("ncclParamGetStr", h, &param);
  if (result != ncclSuccess) return result;
  if (out == nullptr) return null_argument("ncclParamGetStr", "out");
  text = value_text(*param);
  *out = text.c_str();
  return ncclSuccess;
}

ncclResult_t ncclParamGet(ncclParamHandle_t h, void* out, int maxLen, int* len) {
  const Param* param = nullptr;
  ncclResult_t result = unwrap("ncclParamGet", h, &param);
  if (result != ncclSuccess) return result;
  if (out == nullptr) return null_argument("ncclParamGet", "out");
  if (len == nullptr) return null_argument("ncclParamGet", "len");
  std::string raw = raw_value(*param);
  *len = static_cast<int>(raw.size());
  if (maxLen < *len) {
    return fail_in("ncclParamGet", ncclInvalidArgument, "%s needs %d bytes, maxLen is %d", param->name, *len,
                   maxLen);
  }
  memcpy(out, raw.data(), raw.size());
  return ncclSuccess;
}

ncclResult_t ncclParamGetParameter(const char* key, const char** value, int* valueLen) {
  static thread_local std::string text;
  if (key == nullptr) return null_argument("ncclParamGetParameter", "key");
  if (value == nullptr) return null_argument("ncclParamGetParameter", "value");
  if (valueLen == nullptr) return null_argument("ncclParamGetParameter", "valueLen");
  const Param* param = find(key);
  *value = nullptr;
  *valueLen = 0;
  if (param == nullptr) return unknown_key("ncclParamGetParameter", key);
  text = value_text(*param);
  *value = text.c_str();
  *valueLen = static_cast<int>(text.size());
  return ncclSuccess;
}

ncclResult_t ncclParamGetAllParameterKeys(const char*** table, int* tableLen) {
  static thread_local const char* keys[kCount];
  if (table == nullptr) return null_argument("ncclParamGetAllParameterKeys", "table");
  if (tableLen == nullptr) return null_argument("ncclParamGetAllParameterKeys", "tableLen");
  int count = 0;
  for (const Param& param : kTable) {
    if (listed(param)) keys[count++] = param.name;
  }
  *table = keys;
  *tableLen = count;
  return ncclSuccess;
}

void ncclParamDumpAll(void) {
  std::string text = "=== ncclParam Registry Dump ===\n";
  for (const Param& param : kTable) {
    if (listed(param)) text += describe(param);
  }
  print(text);
}

ncclResult_t ncclSetEncryption(const ncclEncryptionConfig_t* config) {
  if (config == nullptr) return null_argument("ncclSetEncryption", "config");
  if (config->magic != NCCL_API_MAGIC || config->size < sizeof(*config)) {
    return fail_in("ncclSetEncryption", ncclInvalidArgument,
                   "config was not made by NCCL_ENCRYPTION_CONFIG_INITIALIZER");
  }
  if (config->mode != NCCL_ENCRYPTION_MODE_NONE && config->mode != NCCL_ENCRYPTION_MODE_PSK) {
    return fail_in("ncclSetEncryption", ncclInvalidArgument, "invalid encryption mode %d", config->mode);
  }
  return fail_in("ncclSetEncryption", ncclInvalidUsage, "the CPU library does not encrypt its connections");
}
