// What Python calls most, without cffi, which costs more than all else that such a call does: prepared calls,
// single ones, and recordings. Python's code runs only where there is more to do. The module is cffi's, with
// these names beside `ffi` and `lib`.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

#include "calls.h"
#include "internal.h"
#include "recording.h"

// CPython gives its functions more than they need.
#pragma GCC diagnostic ignored "-Wunused-parameter"

static int keep_object(pynccl_list* list, PyObject* object) {
  void** kept = pynccl_room(list->kept, list->kept_count, &list->kept_capacity, sizeof *kept);
  if (!kept) return PyErr_NoMemory(), -1;
  list->kept = kept;
  kept[list->kept_count++] = Py_NewRef(object);
  return 0;
}

// --- prepared calls ----------------------------------------------------------------------------------------

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  pynccl_list* calls;
  PyObject* value;  // what a call returns
  PyObject* after;  // called with this object and any result but success
} Call;

// Hand a result to Python. Where that raises, maybe because of a signal and before it has begun, it is told.
static int handle(Call* self, int result) {
  PyObject *done = PyObject_CallFunction(self->after, "Oi", self, result), *type, *value, *trace;
  if (!done) {
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallFunction(self->after, "Oi", self, PYNCCL_INTERRUPTED));
    PyErr_Restore(type, value, trace);
    return -1;
  }
  Py_DECREF(done);
  return 0;
}

static PyObject* call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  Call* self = (Call*)callable;
  if (PyVectorcall_NARGS(flags) || (names && PyTuple_GET_SIZE(names)))
    return PyErr_Format(PyExc_TypeError, "a prepared call takes no arguments");
  if (!self->calls) return PyErr_Format(PyExc_RuntimeError, "this call was never prepared");
  // Looked up once: each look costs a call.
  pynccl_list* recording = pynccl_recording;
  int result;
  if (recording) {
    // It is only appended to a list.
    result = pynccl_list_run(self->calls);
  } else {
    PyThreadState* thread = PyEval_SaveThread();
    result = pynccl_list_run(self->calls);
    PyEval_RestoreThread(thread);
  }
  if (result == PYNCCL_RECORDED && recording) {
    if (keep_object(recording, callable)) return NULL;
  } else if (result && handle(self, result)) {
    return NULL;
  }
  return Py_NewRef(self->value);
}

static int call_init(PyObject* object, PyObject* args, PyObject* names) {
  Call* self = (Call*)object;
  Py_ssize_t calls;
  PyObject *value, *after;
  if (!PyArg_ParseTuple(args, "nOO", &calls, &value, &after)) return -1;
  Py_XSETREF(self->value, Py_NewRef(value));
  Py_XSETREF(self->after, Py_NewRef(after));
  self->calls = (pynccl_list*)calls;
  return 0;
}

static PyObject* call_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  Call* self = (Call*)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->vectorcall = call;
  // Before Python 3.12 a class made in Python does not inherit this.
  if (type->tp_call == PyVectorcall_Call) type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  return (PyObject*)self;
}

static int call_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(((Call*)object)->value);
  Py_VISIT(((Call*)object)->after);
  return 0;
}

static int call_clear(PyObject* object) {
  Call* self = (Call*)object;
  self->calls = NULL;
  Py_CLEAR(self->value);
  Py_CLEAR(self->after);
  return 0;
}

static void call_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  call_clear(object);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = call_new,
    .tp_init = call_init,
    .tp_traverse = call_traverse,
    .tp_clear = call_clear,
    .tp_dealloc = call_dealloc,
};

// --- single calls ------------------------------------------------------------------------------------------

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  const pynccl_call* like;
  PyObject* kept;  // what owns that
} Template;

static int as_size(PyObject* value, size_t* out) {
  PyObject* index = PyLong_CheckExact(value) ? Py_NewRef(value) : PyNumber_Index(value);
  if (!index) return -1;
  *out = PyLong_AsSize_t(index);
  Py_DECREF(index);
  return *out == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

// (send, recv, count), or (send, recv, count, stream, wait): answers what pynccl_issue does.
static PyObject* template_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  const Template* self = (Template*)callable;
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  size_t given[5];
  if ((count != 3 && count != 5) || names)
    return PyErr_Format(PyExc_TypeError, "expected 3 or 5 arguments by position");
  for (Py_ssize_t i = 0; i < count; ++i)
    if (as_size(args[i], &given[i])) return NULL;
  // A call that is only recorded is not worth it.
  PyThreadState* thread = pynccl_recording ? NULL : PyEval_SaveThread();
  const int result = count == 3
                         ? pynccl_issue_usual(self->like, given[0], given[1], given[2])
                         : pynccl_issue(self->like, given[0], given[1], given[2], given[3], (int)given[4]);
  if (thread) PyEval_RestoreThread(thread);
  return PyLong_FromLong(result);
}

static PyObject* template_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  Py_ssize_t like;
  PyObject* kept;
  if (!PyArg_ParseTuple(args, "nO", &like, &kept)) return NULL;
  Template* self = (Template*)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->vectorcall = template_call;
  self->like = (const pynccl_call*)like;
  self->kept = Py_NewRef(kept);
  return (PyObject*)self;
}

static void template_dealloc(PyObject* object) {
  Py_DECREF(((Template*)object)->kept);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject TemplateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Template",
    .tp_basicsize = sizeof(Template),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Template, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = template_new,
    .tp_dealloc = template_dealloc,
};

// --- recordings --------------------------------------------------------------------------------------------

// Record this thread's calls in the list at an address. False, and nothing done, inside another recording,
// unless `nested` is true: then that one waits until this has ended.
static PyObject* begin(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  pynccl_list* calls = count == 2 ? PyLong_AsVoidPtr(args[0]) : NULL;
  if (!calls)
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "expected an address and a bool");
  if (pynccl_recording && args[1] != Py_True) Py_RETURN_FALSE;
  if (calls->open) return PyErr_Format(PyExc_RuntimeError, "this recording has begun already");
  calls->open = 1;
  calls->outer = pynccl_recording;
  pynccl_recording = calls;
  Py_RETURN_TRUE;
}

// End the recording into the list at an address and, if `runs` is true, run it; answers what that did, 0
// where nothing was run. Unless all is done then, what has to stay alive goes into a Python list.
static PyObject* end(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  pynccl_list* calls = count == 3 && PyList_Check(args[2]) ? PyLong_AsVoidPtr(args[1]) : NULL;
  if (!calls)
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "expected a bool, an address and a list");
  if (calls != pynccl_recording)
    return PyErr_Format(PyExc_RuntimeError,
                        "this thread has not begun this recording, or not as the last one");
  pynccl_recording = calls->outer;
  const int runs = args[0] == Py_True;
  int result = 0;
  if (runs) {
    PyThreadState* thread = PyEval_SaveThread();
    result = pynccl_list_run_recorded(calls);
    PyEval_RestoreThread(thread);
  }
  for (int i = 0; i < calls->kept_count; ++i) {
    if (!runs || result) PyList_Append(args[2], calls->kept[i]);
    Py_DECREF(calls->kept[i]);
  }
  calls->kept_count = calls->open = 0;
  return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

// Keep an object alive until the open recording has run.
static PyObject* keep(PyObject* module, PyObject* object) {
  pynccl_list* recording = pynccl_recording;
  if (recording && keep_object(recording, object)) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))end, METH_FASTCALL, NULL},
    {"keep", keep, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

// What cffi generates; see Binding.emit.
PyObject* pynccl_cffi_module(void);

PyMODINIT_FUNC PyInit__native(void) {
  PyObject* self = pynccl_cffi_module();
  if (!self || PyModule_AddFunctions(self, functions)) return NULL;
  if (PyModule_AddType(self, &CallType) || PyModule_AddType(self, &TemplateType)) return NULL;
#ifdef Py_GIL_DISABLED
  PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
  return self;
}
