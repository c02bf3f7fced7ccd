// Parameters: one table of every variable that the CPU library reads, and where their values come from. The
// environment wins (read at every call), then ~/.nccl.conf (or NCCL_CONF_FILE), then /etc/nccl.conf (both
// read once).
#pragma once

#include <cstdint>

#include "base/nccl.hpp"

namespace pncpu {

// nullptr if unset. The pointer is valid until the environment changes, or forever. Only for names of the
// table.
const char* param_str(const char* name);
bool param_is_set(const char* name);  // to a value other than its default

// The table's default if unset or malformed; a malformed value is logged once at Warn.
int64_t param_int(const char* name);
double param_seconds(const char* name);

// The first malformed variable of PYNCCL_CPU_*, as a sentence; nullptr: none. Valid until the thread's next
// call.
const char* param_error();

// Parses the whole text as a number, independently of the locale.
bool parse_real(const char* text, double* out);

}  // namespace pncpu
