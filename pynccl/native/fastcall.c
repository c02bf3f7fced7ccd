// Callables for the calls that Python makes most: prepared calls and single calls. A call through cffi would
// cost more than the rest of such a call. Python code runs only in special cases.

#include <stddef.h>

#include "python.h"

int pynccl_tell_python(PyObject* after, int result, PyObject* one, PyObject* two) {
  const char* format = two ? "iOO" : "iO";
  PyObject *done = PyObject_CallFunction(after, format, result, one, two), *type, *value, *trace;
  if (!done) {
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallFunction(after, format, PYNCCL_INTERRUPTED, one, two));
    PyErr_Restore(type, value, trace);
    return -1;
  }
  Py_DECREF(done);
  return 0;
}

// --- prepared calls ----------------------------------------------------------------------------------------

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  pynccl_list* calls;
  PyObject* value;  // what a call returns
  PyObject* after;  // called with any result but success and this object
} Call;

// A call with arguments, which Python handles.
static PyObject* call_with(Call* self, PyObject* const* args, size_t flags, PyObject* names) {
  PyObject* method = PyObject_GetAttrString((PyObject*)self, "_call_with");
  PyObject* result = method ? PyObject_Vectorcall(method, args, PyVectorcall_NARGS(flags), names) : NULL;
  Py_XDECREF(method);
  return result;
}

static PyObject* call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  Call* self = (Call*)callable;
  if (PyVectorcall_NARGS(flags) || (names && PyTuple_GET_SIZE(names)))
    return call_with(self, args, flags, names);
  if (!self->calls) return PyErr_Format(PyExc_RuntimeError, "this call was never prepared");
  // Read once: every access of a thread-local costs a call.
  pynccl_list* recording = pynccl_innermost();
  int result;
  if (recording) {
    // The call is only appended to a list: keep the GIL.
    result = pynccl_list_run(self->calls, 1);
  } else {
    PyThreadState* thread = PyEval_SaveThread();
    result = pynccl_list_run(self->calls, 1);
    PyEval_RestoreThread(thread);
  }
  if (result == PYNCCL_RECORDED && recording) {
    if (pynccl_keep_object(recording, callable)) return NULL;
  } else if (result && pynccl_tell_python(self->after, result, callable, NULL)) {
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
  // Before Python 3.12 a Python class does not inherit this flag.
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

PyTypeObject pynccl_Call = {
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

// (send, recv, count) or (send, recv, count, stream, wait): returns the result of pynccl_issue.
static PyObject* template_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  const Template* self = (Template*)callable;
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  size_t given[5];
  if ((count != 3 && count != 5) || names)
    return PyErr_Format(PyExc_TypeError, "expected 3 or 5 arguments by position");
  for (Py_ssize_t i = 0; i < count; ++i)
    if (pynccl_as_size(args[i], &given[i])) return NULL;
  // Keep the GIL for a call that is only recorded.
  PyThreadState* thread = pynccl_innermost() ? NULL : PyEval_SaveThread();
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

PyTypeObject pynccl_Template = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Template",
    .tp_basicsize = sizeof(Template),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Template, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = template_new,
    .tp_dealloc = template_dealloc,
};
