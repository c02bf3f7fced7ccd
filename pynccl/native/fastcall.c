// Callables for the calls that Python makes most: prepared calls, single calls, and recordings. A call
// through cffi would cost more than the rest of such a call. Python code runs only in special cases. The
// module is cffi's; these names stand beside `ffi` and `lib`.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

#include "calls.h"
#include "internal.h"
#include "recording.h"

// CPython passes more arguments than these functions need.
#pragma GCC diagnostic ignored "-Wunused-parameter"

enum { DROPPED = 2 };  // the value of `open` after another thread has dropped the recording

// Release the objects that the calls needed; append them to a Python list, if one is given.
static void drop_kept(pynccl_list* calls, PyObject* into) {
  for (int i = 0; i < calls->kept_count; ++i) {
    if (into) PyList_Append(into, calls->kept[i]);
    Py_DECREF(calls->kept[i]);
  }
  calls->kept_count = calls->open = 0;
}

// The recording of this thread's calls; NULL: calls run. A recording that another thread has dropped has
// ended; this thread removes its list from the chain.
static pynccl_list* innermost(void) {
  while (pynccl_recording && pynccl_recording->open == DROPPED) {
    drop_kept(pynccl_recording, NULL);
    pynccl_recording = pynccl_recording->outer;
  }
  return pynccl_recording;
}

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

// Pass a result to Python. If that raises, perhaps in a signal handler before the first line, report it.
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
  pynccl_list* recording = innermost();
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
  PyObject* kept;  // owns `like`
} Template;

static int as_size(PyObject* value, size_t* out) {
  PyObject* index = PyLong_CheckExact(value) ? Py_NewRef(value) : PyNumber_Index(value);
  if (!index) return -1;
  *out = PyLong_AsSize_t(index);
  Py_DECREF(index);
  return *out == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

// (send, recv, count) or (send, recv, count, stream, wait): returns the result of pynccl_issue.
static PyObject* template_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  const Template* self = (Template*)callable;
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  size_t given[5];
  if ((count != 3 && count != 5) || names)
    return PyErr_Format(PyExc_TypeError, "expected 3 or 5 arguments by position");
  for (Py_ssize_t i = 0; i < count; ++i)
    if (as_size(args[i], &given[i])) return NULL;
  // Keep the GIL for a call that is only recorded.
  PyThreadState* thread = innermost() ? NULL : PyEval_SaveThread();
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

// --- the usual call ----------------------------------------------------------------------------------------

// A call in the usual case: the arrays are contiguous and on the communicator's device, the template exists,
// and the caller passes no stream. Attributes are CuPy's; other arrays have no template here.
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* templates;  // by type of array, operation and dtype
  PyObject* stream;     // returns the current stream; None where calls have none
  PyObject* device;     // the communicator's
  PyObject* after;      // called with (result, send, recv) for any result but success
  PyObject* otherwise;  // called with the same arguments in all other cases
} Usual;

static PyObject *name_contiguous, *name_data, *name_device, *name_dtype, *name_pointer, *name_shape,
    *name_size;

static int size_of(PyObject* object, PyObject* name, size_t* out) {
  PyObject* value = PyObject_GetAttr(object, name);
  const int failed = !value || as_size(value, out);
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
  target = source;
  if (recv != Py_None && usual > 0) {
    usual = Py_TYPE(recv) == Py_TYPE(send) ? usual_array(self, recv, &target) : 0;
    if (usual > 0) usual = same_attribute(send, recv, name_dtype);
    if (usual > 0) usual = same_attribute(send, recv, name_shape);
  }
  if (usual <= 0) return usual;
  if (size_of(send, name_size, &count)) return -1;
  if (self->stream != Py_None) {
    PyObject* current = PyObject_CallNoArgs(self->stream);
    const int failed = !current || as_size(current, &stream);
    Py_XDECREF(current);
    if (failed) return -1;
  }
  Py_INCREF(template);
  PyThreadState* thread = innermost() ? NULL : PyEval_SaveThread();
  *result = self->stream == Py_None ? pynccl_issue_usual(template->like, source, target, count)
                                    : pynccl_issue(template->like, source, target, count, stream, 0);
  if (thread) PyEval_RestoreThread(thread);
  Py_DECREF(template);
  return 1;
}

// Pass a result to Python; see `handle`.
static int usual_after(const Usual* self, int result, PyObject* send, PyObject* recv) {
  PyObject *done = PyObject_CallFunction(self->after, "iOO", result, send, recv), *type, *value, *trace;
  if (!done) {
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallFunction(self->after, "iOO", PYNCCL_INTERRUPTED, send, recv));
    PyErr_Restore(type, value, trace);
    return -1;
  }
  Py_DECREF(done);
  return 0;
}

// (send, recv, op, stream, config): returns the array with the result.
static PyObject* usual_call(PyObject* callable, PyObject* const* args, size_t flags, PyObject* names) {
  const Usual* self = (Usual*)callable;
  if (PyVectorcall_NARGS(flags) != 5 || names)
    return PyErr_Format(PyExc_TypeError, "expected 5 arguments by position");
  PyObject *send = args[0], *recv = args[1];
  int result = 0, issued = 0;
  if (args[3] == Py_None && args[4] == Py_None) issued = usual_issue(self, send, recv, args[2], &result);
  if (issued < 0) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_AttributeError))
      return NULL;
    PyErr_Clear();
  }
  if (issued <= 0) return PyObject_Vectorcall(self->otherwise, args, 5, NULL);
  pynccl_list* recording = innermost();
  if (result == PYNCCL_RECORDED && recording) {
    if (keep_object(recording, send) || (recv != Py_None && keep_object(recording, recv))) return NULL;
  } else if (result && usual_after(self, result, send, recv)) {
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

static PyTypeObject UsualType = {
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

static int intern_names(void) {
  return (name_contiguous = PyUnicode_InternFromString("_c_contiguous")) &&
         (name_data = PyUnicode_InternFromString("data")) &&
         (name_device = PyUnicode_InternFromString("device_id")) &&
         (name_dtype = PyUnicode_InternFromString("dtype")) &&
         (name_pointer = PyUnicode_InternFromString("ptr")) &&
         (name_shape = PyUnicode_InternFromString("shape")) &&
         (name_size = PyUnicode_InternFromString("size"));
}

// --- recordings --------------------------------------------------------------------------------------------

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
    self->calls->open = DROPPED;
  else
    Py_XDECREF(self->owner);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject OpenType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "pynccl._native.Open",
    .tp_basicsize = sizeof(Open),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = open_dealloc,
};

// (address, nested, owner): record this thread's calls in the list at that address. Returns None and does
// nothing inside another recording, unless `nested` is true: then the other one continues after this one has
// ended.
static PyObject* begin(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  pynccl_list* calls = count == 3 ? PyLong_AsVoidPtr(args[0]) : NULL;
  if (!calls)
    return PyErr_Occurred() ? NULL
                            : PyErr_Format(PyExc_TypeError, "expected an address, a bool and an owner");
  if (innermost() && args[1] != Py_True) Py_RETURN_NONE;
  if (calls->open) return PyErr_Format(PyExc_RuntimeError, "this recording has begun already");
  Open* open = PyObject_New(Open, &OpenType);
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
static PyObject* end(PyObject* module, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !Py_IS_TYPE(args[1], &OpenType) || !PyList_Check(args[2]))
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
static PyObject* keep(PyObject* module, PyObject* object) {
  pynccl_list* recording = innermost();
  if (recording && keep_object(recording, object)) return NULL;
  Py_RETURN_NONE;
}

// --- owners ------------------------------------------------------------------------------------------------

// An object that releases a struct when it is deallocated. cffi's gc releases in a finalizer, which the
// garbage collector may run before a __del__ that still uses the struct.
static void free_list(PyObject* owner) { pynccl_list_free(PyCapsule_GetPointer(owner, "pynccl_list")); }
static void release_comm(PyObject* owner) { pynccl_comm_release(PyCapsule_GetPointer(owner, "pynccl_comm")); }

static PyObject* owner(PyObject* address, const char* name, PyCapsule_Destructor release) {
  void* owned = PyLong_AsVoidPtr(address);
  if (!owned) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
  return PyCapsule_New(owned, name, release);
}
static PyObject* own_list(PyObject* self, PyObject* address) {
  return owner(address, "pynccl_list", free_list);
}
static PyObject* own_comm(PyObject* self, PyObject* address) {
  return owner(address, "pynccl_comm", release_comm);
}

static PyMethodDef functions[] = {
    {"own_list", own_list, METH_O, NULL},
    {"own_comm", own_comm, METH_O, NULL},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))end, METH_FASTCALL, NULL},
    {"keep", keep, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

// Generated by cffi; see Binding.emit.
PyObject* pynccl_cffi_module(void);

PyMODINIT_FUNC PyInit__native(void) {
  PyObject* self = pynccl_cffi_module();
  if (!self || PyModule_AddFunctions(self, functions)) return NULL;
  if (!intern_names() || PyModule_AddType(self, &CallType) || PyModule_AddType(self, &TemplateType) ||
      PyModule_AddType(self, &UsualType) || PyType_Ready(&OpenType))
    return NULL;
#ifdef Py_GIL_DISABLED
  PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
  return self;
}
