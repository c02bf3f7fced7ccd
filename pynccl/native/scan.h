// The records in dumps, read at the speed at which `pynccl trace` needs them: a job leaves millions.
#pragma once

#include "internal.h"

// In the place of a number that a record does not have.
#define PYNCCL_NO_NUMBER INT64_MIN

// A record: its line, and the numbers that differ between calls that are alike.
typedef struct pynccl_scanned {
  // Equal for lines that are equal but for these numbers.
  uint64_t kind;
  // Where its line begins.
  int64_t at;
  int64_t seq;
  int64_t peer_seq;
  int64_t group;
  int64_t send;
  int64_t recv;
  int64_t offset;
  int64_t time_ns;
  int64_t end_ns;
} pynccl_scanned;

// Read the lines of a text that begin at `at`, up to the first that is no record in the form of dumps.c;
// return how many there are. `end` is where the next line begins.
int pynccl_scan(const char* text, int64_t size, int64_t at, pynccl_scanned* found, int most, int64_t* end);
