/* Reads the stacks of threads at one moment, for in_job/frames.py.
 *
 * Up to CPython 3.11 a frame object is made when somebody first looks, and making one may start a
 * garbage collection. That runs code of the job, which lets go of the interpreter lock: the thread
 * that is looked at goes on, its frame ends, and the new object refers to memory that is used
 * again; the next step to a caller crashes (sys._current_frames() and f_back of CPython 3.11). Here
 * the collector is off while frames are read, and no bytecode runs in between, so that nobody else
 * can notice: neither the collector's state nor a frame that outlives its function, whose variables
 * would be freed on the wrong thread. Only the stable ABI is used.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <time.h>

enum { VERSION = 2 }; /* also in frames.py */

typedef struct {
    PyObject *code, *instruction, *back; /* names of attributes */
    PyObject *until;
    Py_ssize_t limit;
} Walk;

/* (code, instruction) of a frame and its callers, innermost first; NULL with an error. */
static PyObject *
read_stack(const Walk *walk, PyObject *innermost)
{
    PyObject *stack = PyList_New(0), *frame = innermost;
    Py_XINCREF(frame);
    while (stack != NULL && frame != NULL && frame != Py_None &&
           PyList_Size(stack) < walk->limit) {
        PyObject *code = PyObject_GetAttr(frame, walk->code);
        if (code != NULL && code == walk->until) {
            Py_DECREF(code);
            break;
        }
        PyObject *instruction = code == NULL ? NULL : PyObject_GetAttr(frame, walk->instruction);
        PyObject *pair = instruction == NULL ? NULL : PyTuple_Pack(2, code, instruction);
        Py_XDECREF(code);
        Py_XDECREF(instruction);
        if (pair == NULL || PyList_Append(stack, pair) < 0) {
            Py_CLEAR(stack);
        }
        Py_XDECREF(pair);
        PyObject *back = stack == NULL ? NULL : PyObject_GetAttr(frame, walk->back);
        Py_DECREF(frame);
        frame = back;
        if (stack != NULL && frame == NULL) {
            Py_CLEAR(stack);
        }
    }
    Py_XDECREF(frame);
    return stack;
}

static PyObject *
read_threads(const Walk *walk, PyObject *idents)
{
    PyObject *function = PySys_GetObject("_current_frames"); /* borrowed */
    PyObject *frames = function == NULL ? NULL : PyObject_CallNoArgs(function);
    PyObject *stacks = frames == NULL ? NULL : PyDict_New();
    PyObject *ident, *frame;
    Py_ssize_t place = 0;
    while (stacks != NULL && PyDict_Next(frames, &place, &ident, &frame)) {
        int wanted = idents == Py_None ? 1 : PySequence_Contains(idents, ident);
        PyObject *stack = wanted > 0 ? read_stack(walk, frame) : NULL;
        if (wanted < 0 || (wanted && (stack == NULL || PyDict_SetItem(stacks, ident, stack) < 0))) {
            Py_CLEAR(stacks);
        }
        Py_XDECREF(stack);
    }
    Py_XDECREF(frames);
    if (function == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "sys._current_frames is gone");
    }
    return stacks;
}

static PyObject *
read_stacks(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *idents;
    Walk walk = {0};
    if (!PyArg_ParseTuple(arguments, "OOn", &idents, &walk.until, &walk.limit)) {
        return NULL;
    }
    walk.code = PyUnicode_InternFromString("f_code");
    walk.instruction = PyUnicode_InternFromString("f_lasti");
    walk.back = PyUnicode_InternFromString("f_back");
    PyObject *stacks = NULL;
    if (walk.code != NULL && walk.instruction != NULL && walk.back != NULL) {
        int collects = PyGC_Disable();
        stacks = read_threads(&walk, idents);
        if (collects) {
            PyGC_Enable();
        }
    }
    Py_XDECREF(walk.code);
    Py_XDECREF(walk.instruction);
    Py_XDECREF(walk.back);
    return stacks;
}

static Walk own_walk;           /* of `take_sample`, and the list that takes its samples */
static PyObject *samples;
static Py_ssize_t most_samples;

/* Appends (time, lateness, state of the lock, stack) of a thread. Called with the lock, also in a
 * pending call: nothing is raised, and no error is there before. For sample_clock.c. */
static void
take_sample(void *thread, long long due_ns, int lock_state)
{
    struct timespec now;
    if (samples == NULL || PyList_Size(samples) >= most_samples) {
        return;
    }
    int collects = PyGC_Disable();
    PyObject *frame = (PyObject *)PyThreadState_GetFrame((PyThreadState *)thread);
    PyObject *stack = read_stack(&own_walk, frame == NULL ? Py_None : frame);
    Py_XDECREF(frame);
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    PyObject *sample = stack == NULL
        ? NULL
        : Py_BuildValue("(LLiN)", time_ns, time_ns - due_ns, lock_state, stack);
    if (sample == NULL || PyList_Append(samples, sample) < 0) {
        PyErr_Clear();
    }
    Py_XDECREF(sample);
    if (collects) {
        PyGC_Enable();
    }
}

/* The address of `take_sample`, which from now on fills another list. */
static PyObject *
sample_into(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *list, *until;
    Py_ssize_t most, limit;
    if (!PyArg_ParseTuple(arguments, "O!nOn", &PyList_Type, &list, &most, &until, &limit)) {
        return NULL;
    }
    if (own_walk.code == NULL) {
        own_walk.code = PyUnicode_InternFromString("f_code");
        own_walk.instruction = PyUnicode_InternFromString("f_lasti");
        own_walk.back = PyUnicode_InternFromString("f_back");
        if (own_walk.code == NULL || own_walk.instruction == NULL || own_walk.back == NULL) {
            return NULL;
        }
    }
    PyObject *list_before = samples, *until_before = own_walk.until;
    Py_INCREF(list);
    Py_INCREF(until);
    samples = list;
    most_samples = most;
    own_walk.until = until;
    own_walk.limit = limit;
    Py_XDECREF(list_before);
    Py_XDECREF(until_before);
    return PyLong_FromVoidPtr((void *)take_sample);
}

static PyMethodDef functions[] = {
    {"read_stacks", read_stacks, METH_VARARGS, NULL},
    {"sample_into", sample_into, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* Functions are added here and not by the definition: a module with some in its definition would be
 * listed in the job's stderr when it crashes (faulthandler's list of extension modules). */
static int
add_content(PyObject *module)
{
    int failed = PyModule_AddFunctions(module, functions) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0;
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_content},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "haiprof.in_job._frames",
    .m_doc = "Stacks of threads, read in C.",
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__frames(void)
{
    return PyModuleDef_Init(&definition);
}
