// The module pynccl._native: cffi's, with the callables and functions of this folder beside `ffi` and `lib`.

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"
#include "python.h"
#include "segments.h"

// An object that releases what C knows by an address, when it is deallocated. A finalizer, of cffi's gc or a
// __del__, would be too early: the garbage collector may run it before a __del__ that still uses what it
// releases. And Python drops a KeyboardInterrupt that comes in a __del__.
static void free_list(PyObject* owner) { pynccl_list_free(PyCapsule_GetPointer(owner, "pynccl_list")); }
static void release_comm(PyObject* owner) { pynccl_comm_release(PyCapsule_GetPointer(owner, "pynccl_comm")); }

static void* address_of(PyObject* address) {
  void* owned = PyLong_AsVoidPtr(address);
  if (!owned && !PyErr_Occurred()) PyErr_NoMemory();
  return owned;
}
static PyObject* owner(PyObject* address, const char* name, PyCapsule_Destructor release) {
  void* owned = address_of(address);
  return owned ? PyCapsule_New(owned, name, release) : NULL;
}

// The same for what a forked child must not release, since it is its parent's, and for what may take long.
static PyObject* owner_here(void* owned, const char* name, PyCapsule_Destructor release) {
  PyObject* made = owned ? PyCapsule_New(owned, name, release) : NULL;
  if (made) PyCapsule_SetContext(made, (void*)(intptr_t)getpid());
  return made;
}
static void release_here(PyObject* owner, const char* name, void (*release)(uintptr_t)) {
  // At the interpreter's exit the driver may be gone; the end of the process releases what it has.
  if ((intptr_t)PyCapsule_GetContext(owner) != getpid() || Py_IsFinalizing()) return;
  uintptr_t address = (uintptr_t)PyCapsule_GetPointer(owner, name);
  PyThreadState* thread = PyEval_SaveThread();
  release(address);
  PyEval_RestoreThread(thread);
}
static void free_memory(uintptr_t memory) { pynccl_memory_free((pynccl_memory*)memory); }
static void release_hold(uintptr_t hold) { pyncclCpuWindowRelease(hold); }

static void end_memory(PyObject* owner) { release_here(owner, "pynccl_memory", free_memory); }
static void end_pin(PyObject* owner) { release_here(owner, "pynccl_pin", pynccl_segment_unpin); }
static void end_hold(PyObject* owner) { release_here(owner, "pynccl_hold", release_hold); }

static PyObject* own_memory(uintptr_t begin, int on_gpu) {
  pynccl_memory* memory = pynccl_memory_at(begin, on_gpu);
  PyObject* made = memory ? owner_here(memory, "pynccl_memory", end_memory) : PyErr_NoMemory();
  if (made) return Py_BuildValue("NK", made, (unsigned long long)begin);
  free(memory);
  ncclMemFree(begin);
  return NULL;
}
// Allocate memory: its owner and address, or the status of a failure. In one step, since a KeyboardInterrupt
// between two steps in Python would lose it.
static PyObject* allocate(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  size_t bytes;
  const int on_gpu = PyObject_IsTrue(args[1]);
  if (on_gpu < 0 || pynccl_as_size(args[0], &bytes)) return NULL;
  uintptr_t begin = 0;
  PyThreadState* thread = PyEval_SaveThread();
  const int r = ncclMemAlloc(&begin, bytes);
  PyEval_RestoreThread(thread);
  return r ? PyLong_FromLong(r) : own_memory(begin, on_gpu);
}
static PyObject* own_pin(PyObject* self, PyObject* address) {
  return owner_here(address_of(address), "pynccl_pin", end_pin);
}
static PyObject* own_hold(PyObject* self, PyObject* address) {
  return owner_here(address_of(address), "pynccl_hold", end_hold);
}
static PyObject* own_list(PyObject* self, PyObject* address) {
  return owner(address, "pynccl_list", free_list);
}
static PyObject* own_comm(PyObject* self, PyObject* address) {
  return owner(address, "pynccl_comm", release_comm);
}

// A `__del__` whose Ctrl-C takes effect behind it. In C, since Python looks for signals at the beginning of
// every Python function, in a decorator's before its `try`.
enum { MOST_INTERRUPTS = 3 };
static void* interrupt_soon(void* unused) {
  // At once, it would come in the next finalizer if a list of objects is dropped.
  nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  // As from a terminal: it also ends a sleep of the main thread.
  if (Py_IsInitialized()) kill(getpid(), SIGINT);
  return unused;
}
static void interrupt_later(void) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, interrupt_soon, NULL))
    PyErr_SetInterrupt();
  else
    pthread_detach(thread);
}
// The interrupt may come before the first line, so the finalizer runs again. Each finalizer can run twice.
static PyObject* finalize(PyObject* end, PyObject* object) {
  PyObject* ended = NULL;
  int interrupts = 0;
  while (!ended) {
    if (!PyErr_CheckSignals()) ended = PyObject_CallOneArg(end, object);
    if (ended || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) || ++interrupts > MOST_INTERRUPTS) break;
    PyErr_Clear();
  }
  if (interrupts) interrupt_later();
  return ended;
}
static PyMethodDef finalizing = {"__del__", finalize, METH_O, NULL};
static PyObject* finalizer(PyObject* self, PyObject* end) {
  PyObject* function = PyCFunction_New(&finalizing, end);
  PyObject* method = function ? PyInstanceMethod_New(function) : NULL;
  Py_XDECREF(function);
  return method;
}

static PyMethodDef functions[] = {
    {"own_list", own_list, METH_O, NULL},
    {"own_comm", own_comm, METH_O, NULL},
    {"allocate", (PyCFunction)(void (*)(void))allocate, METH_FASTCALL, NULL},
    {"own_pin", own_pin, METH_O, NULL},
    {"own_hold", own_hold, METH_O, NULL},
    {"finalizer", finalizer, METH_O, NULL},
    {"begin", (PyCFunction)(void (*)(void))pynccl_begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))pynccl_end, METH_FASTCALL, NULL},
    {"keep", pynccl_keep, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

// Generated by cffi; see Binding.emit.
PyObject* pynccl_cffi_module(void);

PyMODINIT_FUNC PyInit__native(void) {
  PyObject* self = pynccl_cffi_module();
  if (!self || PyModule_AddFunctions(self, functions)) return NULL;
  if (!pynccl_usual_names() || !pynccl_prepare_hinting() || PyModule_AddType(self, &pynccl_Call) ||
      PyModule_AddType(self, &pynccl_Template) || PyModule_AddType(self, &pynccl_Usual) ||
      PyModule_AddType(self, &pynccl_Hinting) || PyModule_AddType(self, &pynccl_Method) ||
      PyType_Ready(&pynccl_Open))
    return NULL;
#ifdef Py_GIL_DISABLED
  PyUnstable_Module_SetGIL(self, Py_MOD_GIL_NOT_USED);
#endif
  return self;
}
