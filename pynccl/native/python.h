// What the files share that use Python's C API: open.c, fastcall.c, usual.c, hinting.c and module.c.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "calls.h"
#include "internal.h"
#include "recording.h"

#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

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
extern PyTypeObject pynccl_Usual, pynccl_Method;
int pynccl_usual_names(void);
// hinting.c, likewise.
extern PyTypeObject pynccl_Hinting;
int pynccl_prepare_hinting(void);

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

// fastcall.c: pass a result, with the object or the two that it belongs to, to `after`. If that raises,
// perhaps in a signal handler before its first line, report it; -1 with the exception.
int pynccl_tell_python(PyObject* after, int result, PyObject* one, PyObject* two);

static inline int pynccl_as_size(PyObject* value, size_t* out) {
  PyObject* index = PyLong_CheckExact(value) ? Py_NewRef(value) : PyNumber_Index(value);
  if (!index) return -1;
  *out = PyLong_AsSize_t(index);
  Py_DECREF(index);
  return *out == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

#pragma GCC visibility pop
