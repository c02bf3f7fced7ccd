#include "scan.h"

#include <string.h>

#define PYNCCL_NUMBERS 8
// The first of them are never negative.
#define PYNCCL_COUNTS 3

static const char* const pynccl_number_names[PYNCCL_NUMBERS] = {"seq",  "peer_seq", "group",   "send",
                                                                "recv", "offset",   "time_ns", "end_ns"};

// A text that is read from the left; `at` is NULL after something that is not expected.
typedef struct pynccl_reader {
  const char* at;
  const char* end;
} pynccl_reader;

static int pynccl_next_is(const pynccl_reader* r, char one) {
  return r->at && r->at < r->end && *r->at == one;
}

static void pynccl_expect(pynccl_reader* r, const char* text) {
  const size_t size = strlen(text);
  if (!r->at || (size_t)(r->end - r->at) < size || memcmp(r->at, text, size))
    r->at = NULL;
  else
    r->at += size;
}

// A string without escapes: others are left to a real parser.
static void pynccl_skip_string(pynccl_reader* r) {
  pynccl_expect(r, "\"");
  while (r->at && !pynccl_next_is(r, '"'))
    r->at = r->at < r->end && *r->at != '\\' && (unsigned char)*r->at >= ' ' ? r->at + 1 : NULL;
  if (r->at) ++r->at;
}

static int64_t pynccl_read_number(pynccl_reader* r) {
  int64_t value = 0;
  const int negative = pynccl_next_is(r, '-');
  if (negative) ++r->at;
  const char* first = r->at;
  for (; r->at && r->at < r->end && *r->at >= '0' && *r->at <= '9'; ++r->at)
    if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *r->at - '0', &value)) {
      r->at = NULL;
      return 0;
    }
  // JSON has no empty numbers, and none that begin with 0.
  if (!r->at || r->at == first || (*first == '0' && r->at > first + 1)) r->at = NULL;
  return negative ? -value : value;
}

static void pynccl_skip_value(pynccl_reader* r) {
  if (pynccl_next_is(r, '"'))
    pynccl_skip_string(r);
  else if (pynccl_next_is(r, 't'))
    pynccl_expect(r, "true");
  else if (pynccl_next_is(r, 'f'))
    pynccl_expect(r, "false");
  else if (pynccl_next_is(r, 'n'))
    pynccl_expect(r, "null");
  else
    pynccl_read_number(r);
}

static uint64_t pynccl_mix(uint64_t hash, const char* from, const char* to) {
  for (; from < to; ++from) hash = (hash ^ (unsigned char)*from) * 0x100000001b3;
  return hash;
}

// The index of the number with this name; -1 for another field.
static int pynccl_number_named(const char* name, size_t size) {
  for (int i = 0; i < PYNCCL_NUMBERS; ++i)
    if (strlen(pynccl_number_names[i]) == size && !memcmp(name, pynccl_number_names[i], size)) return i;
  return -1;
}

static int pynccl_is_named(const pynccl_reader* r, const char* name) {
  return (size_t)(r->end - r->at) >= strlen(name) && !memcmp(r->at, name, strlen(name));
}

// Read one field into the record; return whether it is the name of the call.
static int pynccl_read_field(pynccl_reader* r, pynccl_scanned* record) {
  const char* start = r->at;
  const int call = pynccl_is_named(r, "\"call\"");
  // The line of a communicator.
  if (pynccl_is_named(r, "\"comm\"")) r->at = NULL;
  pynccl_skip_string(r);
  const int number = r->at ? pynccl_number_named(start + 1, r->at - start - 2) : -1;
  pynccl_expect(r, ": ");
  if (number < 0 || pynccl_next_is(r, 'n')) {
    pynccl_skip_value(r);
    // In a damaged dump a name may stand twice: the last one counts.
    if (number >= 0) (&record->seq)[number] = PYNCCL_NO_NUMBER;
    if (r->at) record->kind = pynccl_mix(record->kind, start, r->at);
    return call;
  }
  // That it is there belongs to the kind.
  if (r->at) record->kind = pynccl_mix(record->kind, start, r->at);
  if (number < PYNCCL_COUNTS && pynccl_next_is(r, '-')) r->at = NULL;
  (&record->seq)[number] = pynccl_read_number(r);
  return 0;
}

static void pynccl_read_record(pynccl_reader* r, pynccl_scanned* record) {
  record->kind = 0xcbf29ce484222325;
  for (int i = 0; i < PYNCCL_NUMBERS; ++i) (&record->seq)[i] = PYNCCL_NO_NUMBER;
  int called = 0;
  pynccl_expect(r, "{");
  while (r->at) {
    called |= pynccl_read_field(r, record);
    if (pynccl_next_is(r, '}')) break;
    pynccl_expect(r, ", ");
  }
  pynccl_expect(r, "}\n");
  if (!called) r->at = NULL;
}

int pynccl_scan(const char* text, int64_t size, int64_t at, pynccl_scanned* found, int most, int64_t* end) {
  int count = 0;
  pynccl_reader reader = {text + at, text + size};
  while (count < most) {
    pynccl_scanned* record = &found[count];
    record->at = reader.at - text;
    *end = record->at;
    pynccl_read_record(&reader, record);
    if (!reader.at) return count;
    ++count;
  }
  *end = reader.at - text;
  return count;
}
