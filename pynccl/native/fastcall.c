// Callables that run one C function with the GIL released: of a prepared call, which calls Python only where
// there is more to do, and of a single one. A call through cffi costs more than all else that such a call
// does.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

// CPython gives its functions more than they need.
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define PYNCCL_RECORDED 1002
#define PYNCCL_INTERRUPTED 1009

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  int (*run)(void*);
  void* argument;
  PyObject* value;  // what a call returns
  PyObject* after;  // called with this object and any result but success
} Call;

// What an open recording keeps alive; recordings of a thread are nested.
typedef struct Frame {
  struct Frame* outer;
  void* calls;  // the pynccl_list
  PyObject** kept;
  Py_ssize_t count, capacity;
} Frame;

static __thread Frame *frame, *spare;

static int keep_object(PyObject* object) {
  if (frame->count == frame->capacity) {
    const Py_ssize_t capacity = frame->capacity ? 2 * frame->capacity : 32;
    PyObject** kept = PyMem_RawRealloc(frame->kept, capacity * sizeof *kept);
    if (!kept) return PyErr_NoMemory(), -1;
    frame->kept = kept;
    frame->capacity = capacity;
  }
  frame->kept[frame->count++] = Py_NewRef(object);
  return 0;
}

// Have Python see to a result. Where that raises, maybe because of a signal and before it has begun, it is
// told.
static int see_to(Call* self, int result) {
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
  if (!self->run) return PyErr_Format(PyExc_RuntimeError, "this call was never prepared");
  int result;
  if (frame) {
    // It is only appended to a list.
    result = self->run(self->argument);
  } else {
    PyThreadState* thread = PyEval_SaveThread();
    result = self->run(self->argument);
    PyEval_RestoreThread(thread);
  }
  if (result == PYNCCL_RECORDED && frame) {
    if (keep_object(callable)) return NULL;
  } else if (result && see_to(self, result)) {
    return NULL;
  }
  return Py_NewRef(self->value);
}

static int call_init(PyObject* object, PyObject* args, PyObject* names) {
  Call* self = (Call*)object;
  Py_ssize_t run, argument;
  PyObject *value, *after;
  if (!PyArg_ParseTuple(args, "nnOO", &run, &argument, &value, &after)) return -1;
  Py_XSETREF(self->value, Py_NewRef(value));
  Py_XSETREF(self->after, Py_NewRef(after));
  self->run = (int (*)(void*))run;
  self->argument = (void*)argument;
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
  self->run = NULL;
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
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._fastcall.Call",
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

// --- single calls ---

// The binding's functions of these names, see calls.h.
static void* (*record)(void*);
static int (*run_recorded)(void*);
static int (*issue)(const void*, uintptr_t, uintptr_t, size_t, uintptr_t, int);
static int (*issue_usual)(const void*, uintptr_t, uintptr_t, size_t);

static PyObject* bind(PyObject* module, PyObject* args) {
  Py_ssize_t one, two, three, four;
  if (!PyArg_ParseTuple(args, "nnnn", &one, &two, &three, &four)) return NULL;
  record = (void* (*)(void*))one;
  run_recorded = (int (*)(void*))two;
  issue = (int (*)(const void*, uintptr_t, uintptr_t, size_t, uintptr_t, int))three;
  issue_usual = (int (*)(const void*, uintptr_t, uintptr_t, size_t))four;
  Py_RETURN_NONE;
}

typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  void* like;      // a pynccl_call
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
  PyThreadState* thread = frame ? NULL : PyEval_SaveThread();
  const int result = count == 3 ? issue_usual(self->like, given[0], given[1], given[2])
                                : issue(self->like, given[0], given[1], given[2], given[3], (int)given[4]);
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
  self->like = (void*)like;
  self->kept = Py_NewRef(kept);
  return (PyObject*)self;
}

static void template_dealloc(PyObject* object) {
  Py_DECREF(((Template*)object)->kept);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject TemplateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._fastcall.Template",
    .tp_basicsize = sizeof(Template),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Template, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = template_new,
    .tp_dealloc = template_dealloc,
};

// --- recordings ---

// Record this thread's calls in the list at an address. False, and nothing done, inside another recording,
// unless `nested` is true: then that one waits until this has ended.
static PyObject* begin(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  void* calls = count == 2 ? PyLong_AsVoidPtr(args[0]) : NULL;
  if (!calls)
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "expected an address and a bool");
  if (frame && args[1] != Py_True) Py_RETURN_FALSE;
  Frame* inner = spare ? spare : PyMem_RawCalloc(1, sizeof *inner);
  if (!inner) return PyErr_NoMemory();
  spare = NULL;
  inner->outer = frame;
  inner->calls = calls;
  frame = inner;
  record(calls);
  Py_RETURN_TRUE;
}

// End the recording into the list at an address and, if `runs` is true, run it; answers what that did, 0
// where nothing was run. Unless all is done then, what has to stay alive goes into a Python list.
static PyObject* end(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  void* calls = count == 3 && PyList_Check(args[2]) ? PyLong_AsVoidPtr(args[1]) : NULL;
  if (!calls)
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "expected a bool, an address and a list");
  if (!frame || frame->calls != calls)
    return PyErr_Format(PyExc_RuntimeError,
                        "this thread has not begun this recording, or not as the last one");
  Frame* ended = frame;
  frame = ended->outer;
  record(frame ? frame->calls : NULL);
  const int runs = args[0] == Py_True;
  int result = 0;
  if (runs) {
    PyThreadState* thread = PyEval_SaveThread();
    result = run_recorded(ended->calls);
    PyEval_RestoreThread(thread);
  }
  for (Py_ssize_t i = 0; i < ended->count; ++i) {
    if (!runs || result) PyList_Append(args[2], ended->kept[i]);
    Py_DECREF(ended->kept[i]);
  }
  ended->count = 0;
  if (spare) PyMem_RawFree(spare->kept), PyMem_RawFree(spare);
  spare = ended;
  return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

// Keep an object alive until the open recording has run.
static PyObject* keep(PyObject* module, PyObject* object) {
  if (frame && keep_object(object)) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))end, METH_FASTCALL, NULL},
    {"keep", keep, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_fastcall", .m_size = -1,
                                    .m_methods = functions};

PyMODINIT_FUNC PyInit__fastcall(void) {
  PyObject* self = PyModule_Create(&module);
  if (!self || PyModule_AddType(self, &CallType) || PyModule_AddType(self, &TemplateType)) return NULL;
#ifdef Py_GIL_DISABLED
  PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
  return self;
}
