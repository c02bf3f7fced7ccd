// The base of classes that explain their AttributeErrors. A `__getattr__` would slow down every attribute
// that an object has: Python then looks for `__getattr__` and `__getattribute__` at each access.

#include "python.h"

static PyObject* name_explain;

// `__explain__(name)` raises the error for a name that the class does not have.
static void explain(PyObject* self, PyObject* name) {
  PyObject* method = PyObject_GenericGetAttr(self, name_explain);
  PyObject* nothing = method ? PyObject_CallOneArg(method, name) : NULL;
  Py_XDECREF(method);
  Py_XDECREF(nothing);
}

static PyObject* hinting_getattro(PyObject* self, PyObject* name) {
  PyObject* value = PyObject_GenericGetAttr(self, name);
  if (value || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  // Else a property of the class has raised the error.
  PyObject* has = PyObject_GetAttr((PyObject*)Py_TYPE(self), name);
  if (!has && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    explain(self, name);
  }
  Py_XDECREF(has);
  if (!PyErr_Occurred()) {
    PyErr_Restore(type, error, trace);
    return NULL;
  }
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return NULL;
}

PyTypeObject pynccl_Hinting = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Hinting",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_getattro = hinting_getattro,
};

int pynccl_prepare_hinting(void) {
  // A static type does not inherit it from `object`.
  pynccl_Hinting.tp_new = PyBaseObject_Type.tp_new;
  return (name_explain = PyUnicode_InternFromString("__explain__")) != NULL;
}
