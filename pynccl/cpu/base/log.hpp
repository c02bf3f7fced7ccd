// Diagnostics: NCCL_DEBUG lines and the text behind ncclGetLastError.
#pragma once

#include <string>

#include "base/error.hpp"

namespace pncpu {

enum class Level { None = 0, Version, Warn, Info, Abort, Trace };

// Writes one line, in one write(), when NCCL_DEBUG asks for that level; NCCL_DEBUG_FILE (%h host, %p pid) or
// stdout.
void log(Level level, const char* fmt, ...) __attribute__((format(printf, 2, 3)));

// Sets the last error, logs it at Warn, returns the code's result.
ncclResult_t fail(ErrorCode code, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
// The text begins with the function that failed.
ncclResult_t fail_in(const char* function, ErrorCode code, const char* fmt, ...)
    __attribute__((format(printf, 3, 4)));
// The text begins with the rank in a communicator.
ncclResult_t fail_at(int rank, int nranks, ErrorCode code, const char* fmt, ...)
    __attribute__((format(printf, 4, 5)));
std::string place_of(int rank, int nranks);

// Sets this thread's last error, which is then the process's newest.
void set_last_error(ErrorCode code, const std::string& text, const LateRanks& late = {}) noexcept;
// Adds to this thread's last error which ranks are late.
ncclResult_t blame(const LateRanks& late) noexcept;

// This thread's own last error, else the process's newest, else "". The text is valid until this thread's
// next call of a function of this header.
const char* last_error();
ErrorCode last_error_code();
LateRanks late_ranks();
// The last error's code with another result: a call may return a result of its own for it.
ErrorCode last_error_as(ncclResult_t result);

// Writes text to the log's destination whatever NCCL_DEBUG says.
void print(const std::string& text);

// NCCL_DEBUG and NCCL_DEBUG_FILE are read again at the next line (ncclResetDebugInit).
void reset_debug();

// Makes the module usable in a forked child; other threads may have held its locks.
void log_atfork_child();

}  // namespace pncpu
