// The signals that a communicator waits for, in messages.
#pragma once

#include "comm.h"

// Append the signals of the calls that wait now: expected, and with the CPU library arrived. NVIDIA's library
// does not say how many have arrived. Nothing is appended without the flight recorder.
void pynccl_say_signals(const pynccl_comm* comm, char* text, size_t size);
