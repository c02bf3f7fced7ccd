// The callable of a call in the usual case: the arrays are contiguous and on the communicator's device, the
// template exists, and the caller passes no stream. It checks all that in C.

#include <stddef.h>

#include "python.h"

// Attributes are CuPy's; other arrays have no template here.
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* templates;  // by type of array, operation and dtype
  PyObject* stream;     // returns the current stream; None where calls have none
  PyObject* device;     // the communicator's
  PyObject* after;      // called with (result, send, recv) for any result but success
  PyObject* otherwise;  // called with the same arguments in all other cases
} Usual;

static PyObject *name_contiguous, *name_data, *name_device, *name_dtype, *name_ndim, *name_pointer,
    *name_shape, *name_size, *name_usual;

static int size_of(PyObject* object, PyObject* name, size_t* out) {
  PyObject* value = PyObject_GetAttr(object, name);
  const int failed = !value || pynccl_as_size(value, out);
  Py_XDECREF(value);
  return failed ? -1 : 0;
}

static int same_attribute(PyObject* one, PyObject* other, PyObject* name) {
  PyObject *first = PyObject_GetAttr(one, name), *second = first ? PyObject_GetAttr(other, name) : NULL;
  const int same = second ? PyObject_RichCompareBool(first, second, Py_EQ) : -1;
  Py_XDECREF(first);
  Py_XDECREF(second);
  return same;
}

// Like same_attribute of the shapes. CuPy makes a tuple for each `shape`, so vectors are compared by size.
static int same_shape(PyObject* one, PyObject* other, size_t count) {
  size_t dims, others, size;
  if (size_of(one, name_ndim, &dims) || size_of(other, name_ndim, &others)) return -1;
  if (dims != 1 || others != 1) return same_attribute(one, other, name_shape);
  return size_of(other, name_size, &size) ? -1 : size == count;
}

// 1 and the address if the array can be used as it is; 0 if not; -1 with an exception.
static int usual_array(const Usual* self, PyObject* array, size_t* address) {
  PyObject* contiguous = PyObject_GetAttr(array, name_contiguous);
  int usual = contiguous ? PyObject_IsTrue(contiguous) : -1;
  Py_XDECREF(contiguous);
  if (usual <= 0) return usual;
  PyObject* data = PyObject_GetAttr(array, name_data);
  if (!data) return -1;
  if (self->stream != Py_None) {
    PyObject* device = PyObject_GetAttr(data, name_device);
    usual = device ? PyObject_RichCompareBool(device, self->device, Py_EQ) : -1;
    Py_XDECREF(device);
  }
  if (usual > 0 && size_of(data, name_pointer, address)) usual = -1;
  Py_DECREF(data);
  return usual;
}

// 1 and the template if there is one; 0 if not; -1 with an exception.
static int usual_template(const Usual* self, PyObject* send, PyObject* op, const Template** found) {
  PyObject* by_op = PyDict_GetItemWithError(self->templates, (PyObject*)Py_TYPE(send));
  PyObject* by_dtype = by_op ? PyDict_GetItemWithError(by_op, op) : NULL;
  PyObject* dtype = by_dtype ? PyObject_GetAttr(send, name_dtype) : NULL;
  *found = dtype ? (Template*)PyDict_GetItemWithError(by_dtype, dtype) : NULL;
  Py_XDECREF(dtype);
  return *found ? 1 : PyErr_Occurred() ? -1 : 0;
}

// 1 and the result if the call was issued; 0 if it is not the usual case; -1 with an exception.
static int usual_issue(const Usual* self, PyObject* send, PyObject* recv, PyObject* op, int* result) {
  const Template* template;
  size_t source = 0, target, count, stream = 0;
  int usual = usual_template(self, send, op, &template);
  if (usual > 0) usual = usual_array(self, send, &source);
  if (usual > 0 && size_of(send, name_size, &count)) usual = -1;
  target = source;
  if (recv != Py_None && usual > 0) {
    usual = Py_TYPE(recv) == Py_TYPE(send) ? usual_array(self, recv, &target) : 0;
    if (usual > 0) usual = same_attribute(send, recv, name_dtype);
    if (usual > 0) usual = same_shape(send, recv, count);
  }
  if (usual <= 0) return usual;
  if (self->stream != Py_None) {
    PyObject* current = PyObject_CallNoArgs(self->stream);
    const int failed = !current || pynccl_as_size(current, &stream);
    Py_XDECREF(current);
    if (failed) return -1;
  }
  Py_INCREF(template);
  PyThreadState* thread = pynccl_innermost() ? NULL : PyEval_SaveThread();
  *result = self->stream == Py_None ? pynccl_issue_usual(template->like, source, target, count)
                                    : pynccl_issue(template->like, source, target, count, stream, 0);
  if (thread) PyEval_RestoreThread(thread);
  Py_DECREF(template);
  return 1;
}

// (send, recv, op, stream, config, wait): returns the array with the result.
static PyObject* usual_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  const Usual* self = (Usual*)callable;
  if (PyVectorcall_NARGS(flags) != 6 || names)
    return PyErr_Format(PyExc_TypeError, "expected 6 arguments by position");
  PyObject *send = args[0], *recv = args[1];
  int result = 0, issued = 0;
  if (args[3] == Py_None && args[4] == Py_None && args[5] == Py_True)
    issued = usual_issue(self, send, recv, args[2], &result);
  if (issued < 0) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_AttributeError))
      return NULL;
    PyErr_Clear();
  }
  if (issued <= 0) return PyObject_Vectorcall(self->otherwise, args, 6, NULL);
  pynccl_list* recording = pynccl_innermost();
  if (result == PYNCCL_RECORDED && recording) {
    if (pynccl_keep_object(recording, send) || (recv != Py_None && pynccl_keep_object(recording, recv)))
      return NULL;
  } else if (result && pynccl_tell_python(self->after, result, send, recv)) {
    return NULL;
  }
  return Py_NewRef(recv == Py_None ? send : recv);
}

static PyObject* usual_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  PyObject *templates, *stream, *device, *after, *otherwise;
  if (!PyArg_ParseTuple(args, "O!OOOO", &PyDict_Type, &templates, &stream, &device, &after, &otherwise))
    return NULL;
  Usual* self = (Usual*)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->vectorcall = usual_call;
  self->templates = Py_NewRef(templates);
  self->stream = Py_NewRef(stream);
  self->device = Py_NewRef(device);
  self->after = Py_NewRef(after);
  self->otherwise = Py_NewRef(otherwise);
  return (PyObject*)self;
}

static int usual_traverse(PyObject* object, visitproc visit, void* arg) {
  Usual* self = (Usual*)object;
  Py_VISIT(self->templates);
  Py_VISIT(self->stream);
  Py_VISIT(self->device);
  Py_VISIT(self->after);
  Py_VISIT(self->otherwise);
  return 0;
}

static int usual_clear(PyObject* object) {
  Usual* self = (Usual*)object;
  Py_CLEAR(self->templates);
  Py_CLEAR(self->stream);
  Py_CLEAR(self->device);
  Py_CLEAR(self->after);
  Py_CLEAR(self->otherwise);
  return 0;
}

static void usual_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  usual_clear(object);
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject pynccl_Usual = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Usual",
    .tp_basicsize = sizeof(Usual),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Usual, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = usual_new,
    .tp_traverse = usual_traverse,
    .tp_clear = usual_clear,
    .tp_dealloc = usual_dealloc,
};

// --- the method --------------------------------------------------------------------------------------------

// A function of a class whose objects have its Usual as `_all_reduce`: a call with positional arguments takes
// no Python frame. It passes for the function, whose attributes it has, in inspect, mock and copy.
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* function;
  PyObject* defaults;  // of recv, op and stream
  PyObject* weak;
} Method;

static PyObject* method_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  const Method* self = (Method*)callable;
  const Py_ssize_t given = PyVectorcall_NARGS(flags);
  if (given < 2 || given > 5 || names) return PyObject_Vectorcall(self->function, args, flags, names);
  PyObject* usual = PyObject_GetAttr(args[0], name_usual);
  if (!usual) return NULL;
  PyObject* all[] = {args[1], NULL, NULL, NULL, Py_None, Py_True};
  for (Py_ssize_t i = 2; i < 5; ++i)
    all[i - 1] = i < given ? args[i] : PyTuple_GET_ITEM(self->defaults, i - 2);
  PyObject* result = PyObject_Vectorcall(usual, all, 6, NULL);
  Py_DECREF(usual);
  return result;
}

static PyObject* method_get(PyObject* self, PyObject* object, PyObject* type) {
  return object ? PyMethod_New(self, object) : Py_NewRef(self);
}

static PyObject* method_getattro(PyObject* self, PyObject* name) {
  PyObject* value = PyObject_GenericGetAttr(self, name);
  if (value || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
  PyErr_Clear();
  return PyObject_GetAttr(((Method*)self)->function, name);
}

static int method_setattro(PyObject* self, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(((Method*)self)->function, name, value);
}

static PyObject* method_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  PyObject* function;
  if (!PyArg_ParseTuple(args, "O!", &PyFunction_Type, &function)) return NULL;
  PyObject* defaults = PyFunction_GET_DEFAULTS(function);
  if (!defaults || PyTuple_GET_SIZE(defaults) != 3)
    return PyErr_Format(PyExc_TypeError, "expected a function with three defaults: recv, op and stream");
  Method* self = (Method*)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->vectorcall = method_call;
  self->function = Py_NewRef(function);
  self->defaults = Py_NewRef(defaults);
  return (PyObject*)self;
}

static int method_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(((Method*)object)->function);
  Py_VISIT(((Method*)object)->defaults);
  return 0;
}

static int method_clear(PyObject* object) {
  Py_CLEAR(((Method*)object)->function);
  Py_CLEAR(((Method*)object)->defaults);
  return 0;
}

static void method_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  PyObject_ClearWeakRefs(object);
  method_clear(object);
  Py_TYPE(object)->tp_free(object);
}

static PyObject* method_repr(PyObject* self) { return PyObject_Repr(((Method*)self)->function); }

static PyObject* method_doc(PyObject* self, void* unused) {
  return PyObject_GetAttrString(((Method*)self)->function, "__doc__");
}

static PyObject* method_class(PyObject* self, void* unused) { return Py_NewRef(&PyFunction_Type); }

static PyGetSetDef method_properties[] = {
    {"__doc__", method_doc, NULL, NULL, NULL},
    {"__class__", method_class, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

// As for a function: a copy is the function itself, and pickle looks for its name.
static PyObject* method_reduce(PyObject* self, PyObject* protocol) {
  return PyObject_GetAttrString(self, "__qualname__");
}

static PyMethodDef method_methods[] = {
    {"__reduce_ex__", method_reduce, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef method_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Method, function), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject pynccl_Method = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Method",
    .tp_basicsize = sizeof(Method),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Method, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = method_get,
    .tp_getattro = method_getattro,
    .tp_setattro = method_setattro,
    .tp_members = method_members,
    .tp_getset = method_properties,
    .tp_methods = method_methods,
    .tp_repr = method_repr,
    .tp_weaklistoffset = offsetof(Method, weak),
    .tp_new = method_new,
    .tp_traverse = method_traverse,
    .tp_clear = method_clear,
    .tp_dealloc = method_dealloc,
};

int pynccl_usual_names(void) {
  return (name_contiguous = PyUnicode_InternFromString("_c_contiguous")) &&
         (name_data = PyUnicode_InternFromString("data")) &&
         (name_device = PyUnicode_InternFromString("device_id")) &&
         (name_dtype = PyUnicode_InternFromString("dtype")) &&
         (name_ndim = PyUnicode_InternFromString("ndim")) &&
         (name_pointer = PyUnicode_InternFromString("ptr")) &&
         (name_shape = PyUnicode_InternFromString("shape")) &&
         (name_size = PyUnicode_InternFromString("size")) &&
         (name_usual = PyUnicode_InternFromString("_all_reduce"));
}
