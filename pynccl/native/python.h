// What the files share that use Python's C API: open.c, fastcall.c, usual.c and module.c.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "calls.h"
#include "internal.h"
#include "recording.h"

// CPython passes more arguments than these functions need.
#pragma GCC diagnostic ignored "-Wunused-parameter"

#pragma GCC visibility push(hidden)

// fastcall.c: a single call.
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  const pynccl_call* like;
  PyObject* kept;  // owns `like`
} Template;

extern PyTypeObject pynccl_Call, pynccl_Template;
// usual.c; and the names of attributes that it looks up: 0 without memory.
extern PyTypeObject pynccl_Usual;
int pynccl_usual_names(void);

// open.c: an open recording, and the functions that begin and end one.
extern PyTypeObject pynccl_Open;
PyObject* pynccl_begin(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* pynccl_end(PyObject* module, PyObject* const* args, Py_ssize_t count);
PyObject* pynccl_keep(PyObject* module, PyObject* object);
// Remove the recordings that another thread has dropped from this thread's chain.
void pynccl_skip_dropped(void);
// Keep an object alive until a recording has run; -1 with an exception.
int pynccl_keep_object(pynccl_list* list, PyObject* object);

// The value of `open` after another thread has dropped the recording.
enum { PYNCCL_DROPPED = 2 };

// The recording of this thread's calls; NULL: calls run.
static inline pynccl_list* pynccl_innermost(void) {
  pynccl_list* recording = pynccl_recording;
  if (!recording || recording->open != PYNCCL_DROPPED) return recording;
  pynccl_skip_dropped();
  return pynccl_recording;
}

static inline int pynccl_as_size(PyObject* value, size_t* out) {
  PyObject* index = PyLong_CheckExact(value) ? Py_NewRef(value) : PyNumber_Index(value);
  if (!index) return -1;
  *out = PyLong_AsSize_t(index);
  Py_DECREF(index);
  return *out == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

#pragma GCC visibility pop
