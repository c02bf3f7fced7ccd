// Detached threads.
#pragma once

#include <string>
#include <system_error>
#include <thread>

namespace pncpu {

inline constexpr const char* kThreadLimits = "RLIMIT_NPROC, RLIMIT_AS, or the cgroup's pids.max";

// Throws std::system_error; its text names the purpose.
template <class Body>
void start_thread(const char* purpose, Body body) {
  try {
    std::thread(std::move(body)).detach();
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            "cannot start a thread for " + std::string(purpose) + " (" + kThreadLimits + ")");
  }
}

}  // namespace pncpu
