// A callable that runs one C function with the GIL released and calls Python only where there is more to do.
// cffi cannot raise from C, and its calls cost more than a prepared call may.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

#define PYNCCL_RECORDED 1002

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  int (*run)(void*);
  void* argument;
  PyObject* value;  // what a call returns
  PyObject* after;  // called with this object and any result but success
} Call;

// What this thread's open recording keeps alive: a list, borrowed from whoever set it.
static __thread PyObject* recording;

static PyObject* call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  Call* self = (Call*)callable;
  (void)args;
  if (PyVectorcall_NARGS(flags) || (names && PyTuple_GET_SIZE(names)))
    return PyErr_Format(PyExc_TypeError, "a prepared call takes no arguments");
  if (!self->run) return PyErr_Format(PyExc_RuntimeError, "this call was never prepared");
  int result;
  if (recording) {
    // It is only appended to a list.
    result = self->run(self->argument);
  } else {
    PyThreadState* thread = PyEval_SaveThread();
    result = self->run(self->argument);
    PyEval_RestoreThread(thread);
  }
  if (result == PYNCCL_RECORDED && recording) {
    if (PyList_Append(recording, callable)) return NULL;
  } else if (result) {
    PyObject* done = PyObject_CallFunction(self->after, "Oi", callable, result);
    if (!done) return NULL;
    Py_DECREF(done);
  }
  return Py_NewRef(self->value);
}

static int call_init(PyObject* object, PyObject* args, PyObject* names) {
  Call* self = (Call*)object;
  static char* keywords[] = {"run", "argument", "value", "after", NULL};
  Py_ssize_t run, argument;
  PyObject *value, *after;
  if (!PyArg_ParseTupleAndKeywords(args, names, "nnOO", keywords, &run, &argument, &value, &after)) return -1;
  Py_XSETREF(self->value, Py_NewRef(value));
  Py_XSETREF(self->after, Py_NewRef(after));
  self->run = (int (*)(void*))run;
  self->argument = (void*)argument;
  return 0;
}

static PyObject* call_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  (void)args, (void)names;
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

// The binding's pynccl_record and pynccl_list_run_recorded, see calls.h.
static void* (*record)(void*);
static int (*run_recorded)(void*);

static PyObject* bind(PyObject* module, PyObject* args) {
  (void)module;
  Py_ssize_t one, two;
  if (!PyArg_ParseTuple(args, "nn", &one, &two)) return NULL;
  record = (void* (*)(void*))one;
  run_recorded = (int (*)(void*))two;
  Py_RETURN_NONE;
}

// Record this thread's calls: in C in the list at an address, and what they need alive in a list of Python's that
// the caller keeps alive. Returns what was there before, to be given to this again.
static PyObject* begin(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  (void)module;
  if (count != 2 || !(args[1] == Py_None || PyList_CheckExact(args[1])))
    return PyErr_Format(PyExc_TypeError, "expected an address and a list or None");
  void* calls = PyLong_AsVoidPtr(args[0]);
  if (!calls && PyErr_Occurred()) return NULL;
  PyObject* kept = recording;
  recording = args[1] == Py_None ? NULL : args[1];
  calls = record(calls);
  if (!calls) Py_RETURN_NONE;
  return Py_BuildValue("NO", PyLong_FromVoidPtr(calls), kept ? kept : Py_None);
}

// End the recording and run what was recorded; returns the result.
static PyObject* run(PyObject* module, PyObject* address) {
  (void)module;
  void* calls = PyLong_AsVoidPtr(address);
  if (!calls && PyErr_Occurred()) return NULL;
  recording = NULL;
  PyThreadState* thread = PyEval_SaveThread();
  const int result = run_recorded(calls);
  PyEval_RestoreThread(thread);
  return PyLong_FromLong(result);
}

// Keep an object alive until this thread's open recording has run.
static PyObject* keep(PyObject* module, PyObject* object) {
  (void)module;
  if (recording && PyList_Append(recording, object)) return NULL;
  Py_RETURN_NONE;
}

static PyObject* is_recording(PyObject* module, PyObject* none) {
  (void)module, (void)none;
  return PyBool_FromLong(recording != NULL);
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"run", run, METH_O, NULL},
    {"keep", keep, METH_O, NULL},
    {"is_recording", is_recording, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_fastcall", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__fastcall(void) {
  PyObject* self = PyModule_Create(&module);
  if (!self || PyModule_AddType(self, &CallType)) return NULL;
#ifdef Py_GIL_DISABLED
  PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
  return self;
}
