// Open recordings: the calls of a thread go into a list from `begin` to `end`, and the objects that they need
// stay alive.

#include "python.h"

// Release the objects that the calls needed; append them to a Python list, if one is given.
static void drop_kept(pynccl_list* calls, PyObject* into) {
  for (int i = 0; i < calls->kept_count; ++i) {
    if (into) PyList_Append(into, calls->kept[i]);
    Py_DECREF(calls->kept[i]);
  }
  calls->kept_count = calls->open = 0;
}

void pynccl_skip_dropped(void) {
  while (pynccl_recording && pynccl_recording->open == PYNCCL_DROPPED) {
    drop_kept(pynccl_recording, NULL);
    pynccl_recording = pynccl_recording->outer;
  }
}

int pynccl_keep_object(pynccl_list* list, PyObject* object) {
  void** kept = pynccl_room(list->kept, list->kept_count, &list->kept_capacity, sizeof *kept);
  if (!kept) return PyErr_NoMemory(), -1;
  list->kept = kept;
  kept[list->kept_count++] = Py_NewRef(object);
  return 0;
}

// An open recording of a thread. If it is dropped before its end, for example by an exception, it runs
// nothing and leaves the thread's chain before its list is freed.
typedef struct {
  PyObject_HEAD pynccl_list* calls;  // NULL: it has ended
  PyObject* owner;                   // owns `calls`
} Open;

// Remove a list from this thread's chain; 0: another thread's chain has it.
static int leave_chain(const pynccl_list* calls) {
  pynccl_list** at = &pynccl_recording;
  while (*at && *at != calls) at = &(*at)->outer;
  if (!*at) return 0;
  *at = calls->outer;
  return 1;
}

static void open_dealloc(PyObject* object) {
  Open* self = (Open*)object;
  if (self->calls && leave_chain(self->calls)) {
    drop_kept(self->calls, NULL);
    self->calls = NULL;
  }
  // The list stays in another thread's chain, so it must stay in memory.
  if (self->calls)
    self->calls->open = PYNCCL_DROPPED;
  else
    Py_XDECREF(self->owner);
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject pynccl_Open = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Open",
    .tp_basicsize = sizeof(Open),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = open_dealloc,
};

// (address, nested, owner): record this thread's calls in the list at that address. Returns None and does
// nothing inside another recording, unless `nested` is true: then the other one continues after this one has
// ended.
PyObject* pynccl_begin(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  pynccl_list* calls = count == 3 ? PyLong_AsVoidPtr(args[0]) : NULL;
  if (!calls)
    return PyErr_Occurred() ? NULL
                            : PyErr_Format(PyExc_TypeError, "expected an address, a bool and an owner");
  pynccl_skip_dropped();
  if (pynccl_recording && args[1] != Py_True) Py_RETURN_NONE;
  if (calls->open) return PyErr_Format(PyExc_RuntimeError, "this recording has begun already");
  Open* open = PyObject_New(Open, &pynccl_Open);
  if (!open) return NULL;
  open->calls = calls;
  open->owner = Py_NewRef(args[2]);
  calls->open = 1;
  calls->outer = pynccl_recording;
  pynccl_recording = calls;
  return (PyObject*)open;
}

// (runs, open, kept): end a recording and, if `runs` is true, run it. Returns the result; 0 if nothing ran.
// If the calls are not complete, the objects that must stay alive go into the list `kept`.
PyObject* pynccl_end(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !Py_IS_TYPE(args[1], &pynccl_Open) || !PyList_Check(args[2]))
    return PyErr_Format(PyExc_TypeError, "expected a bool, an open recording and a list");
  Open* open = (Open*)args[1];
  pynccl_list* calls = open->calls;
  if (!calls || calls != pynccl_recording)
    return PyErr_Format(PyExc_RuntimeError,
                        "this thread has not begun this recording, or not as the last one");
  pynccl_recording = calls->outer;
  open->calls = NULL;
  const int runs = args[0] == Py_True;
  int result = 0;
  if (runs) {
    PyThreadState* thread = PyEval_SaveThread();
    result = pynccl_list_run_recorded(calls);
    PyEval_RestoreThread(thread);
  }
  drop_kept(calls, !runs || result ? args[2] : NULL);
  Py_CLEAR(open->owner);
  return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

// Keep an object alive until the open recording has run.
PyObject* pynccl_keep(PyObject* module, PyObject* object) {
  pynccl_skip_dropped();
  pynccl_list* recording = pynccl_recording;
  if (recording && pynccl_keep_object(recording, object)) return NULL;
  Py_RETURN_NONE;
}
