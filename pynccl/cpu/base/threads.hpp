// Detached threads.
#pragma once

#include <sys/resource.h>

#include <string>
#include <system_error>
#include <thread>

namespace pncpu {

// Throws std::system_error; its text names the purpose.
template <class Body>
void start_thread(const char* purpose, Body body) {
  try {
    std::thread(std::move(body)).detach();
  } catch (const std::system_error& error) {
    rlimit limit{};
    getrlimit(RLIMIT_NPROC, &limit);
    throw std::system_error(error.code(), "cannot start a thread for " + std::string(purpose) +
                                              " (RLIMIT_NPROC is " + std::to_string(limit.rlim_cur) + ")");
  }
}

}  // namespace pncpu
