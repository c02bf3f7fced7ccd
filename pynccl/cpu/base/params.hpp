// Parameters: one table of every variable that the CPU library reads, and where their values come from. The
// environment wins (read at every call), then ~/.nccl.conf (or NCCL_CONF_FILE), then /etc/nccl.conf (both
// read once).
#pragma once

#include <cstdint>

#include "base/nccl.hpp"

namespace pncpu {

// nullptr when unset. The pointer is the environment's own or lives for ever. Only names of the table.
const char* param_str(const char* name);
bool param_is_set(const char* name);  // to anything but its default

// The table's default when unset or malformed; a malformed value is told once at Warn.
int64_t param_int(const char* name);
double param_seconds(const char* name);

// What is malformed of this library's own, PYNCCL_CPU_*, in words; nullptr when nothing is. Valid until the
// thread asks again.
const char* param_error();

// The whole text as a number, whatever the program's locale.
bool parse_real(const char* text, double* out);

}  // namespace pncpu
