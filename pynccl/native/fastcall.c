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
  PyThreadState* thread = PyEval_SaveThread();
  const int result = self->run(self->argument);
  PyEval_RestoreThread(thread);
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
  if (self) self->vectorcall = call;
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

// Set the list that recorded calls are appended to in this thread, or None; the caller keeps it alive.
static PyObject* set_recording(PyObject* module, PyObject* list) {
  (void)module;
  if (list != Py_None && !PyList_CheckExact(list))
    return PyErr_Format(PyExc_TypeError, "expected a list or None, not %R", list);
  recording = list == Py_None ? NULL : list;
  Py_RETURN_NONE;
}

static PyObject* get_recording(PyObject* module, PyObject* none) {
  (void)module, (void)none;
  return Py_NewRef(recording ? recording : Py_None);
}

static PyMethodDef functions[] = {
    {"set_recording", set_recording, METH_O, NULL},
    {"get_recording", get_recording, METH_NOARGS, NULL},
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
