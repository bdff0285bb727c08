/* The wrappers of in_job/patches.py in C, for the usual case: same spans, at a fraction of the price.
 *
 * The usual case is a call on the training thread, outside of another span, of an object that is
 * known, once an optimizer has stepped, without a GPU and without a trace window. Everything else
 * goes to the wrapper in Python, which does all of it and stays the reference.
 *
 * What costs most is not the work but the code that it runs through: between two operators of the
 * job nothing of ours is left in the near caches. A step of a small model ran 30,000 instructions of
 * CPython and 1,400 misses of the instruction cache for the wrappers in Python.
 */

#define _GNU_SOURCE
#include "spans.h"

#include <dlfcn.h>

enum { CLOSED = -1 }; /* as in patches.py */
enum { UNKNOWN = 0, NOT_TIMED = 1, TIMED = 2 };

#define HAS_VECTORCALL (1UL << 11) /* the flag of a type with such a slot */
#define COUNT_ARGUMENTS(flags) ((Py_ssize_t)((flags) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))

typedef PyObject *(*Vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);
/* PyObject_Vectorcall is of the stable ABI since 3.12, and exported since 3.11. */
static Vectorcall call_vector;

/* What wrappers look at first at every call, in a place where C finds it too. */

typedef struct {
    PyObject_HEAD
    int busy, idle;
    char slow, loading;
    unsigned long owner;
    long long owner_seen_ns, optimizer_count;
} Gate;

static PyMemberDef gate_members[] = {
    {"busy", T_INT, offsetof(Gate, busy), 0, "Not 0 where calls are passed on."},
    {"idle", T_INT, offsetof(Gate, idle), 0, "What `busy` returns to after a span."},
    {"slow", T_BOOL, offsetof(Gate, slow), 0, "Whether a span needs more than two times."},
    {"loading", T_BOOL, offsetof(Gate, loading), 0, "Whether a batch is being fetched."},
    {"owner", T_ULONG, offsetof(Gate, owner), 0, "The training thread."},
    {"owner_seen_ns", T_LONGLONG, offsetof(Gate, owner_seen_ns), 0, "When it last trained."},
    {"optimizer_count", T_LONGLONG, offsetof(Gate, optimizer_count), 0, "Optimizer steps."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot gate_slots[] = {
    {Py_tp_doc, "Base of patches.State."},
    {Py_tp_members, gate_members},
    {0, NULL},
};

static PyType_Spec gate_spec = {
    .name = "haiprof.in_job._spans.Gate",
    .basicsize = sizeof(Gate),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = gate_slots,
};

static int
is_usual(const Gate *gate)
{
    return gate->idle == 0 && !gate->slow && gate->owner == PyThread_get_thread_ident();
}

/* A function or method that takes spans: of modules, of the autograd engine, or of loaders. */

typedef struct {
    PyObject_HEAD
    Vectorcall call;
    PyObject *original, *wrapper, *names;
    Gate *gate;
    Spans *spans;
    PyObject *entries, *is_grad_enabled, *training; /* of modules: see object_numbers.Registry */
    PyObject *method_type, *weak;
} TimedCall;

static PyObject *
pass_on(PyObject *target, PyObject *const *arguments, size_t flags, PyObject *names)
{
    if (call_vector != NULL) {
        return call_vector(target, arguments, flags, names);
    }
    Py_ssize_t count = COUNT_ARGUMENTS(flags), named = names == NULL ? 0 : PyTuple_Size(names);
    PyObject *values = PyTuple_New(count), *by_name = named ? PyDict_New() : NULL, *result = NULL;
    if (values == NULL || (named && by_name == NULL)) {
        goto done;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        Py_INCREF(arguments[place]);
        PyTuple_SetItem(values, place, arguments[place]);
    }
    for (Py_ssize_t place = 0; place < named; place++) {
        PyObject *name = PyTuple_GetItem(names, place);
        if (PyDict_SetItem(by_name, name, arguments[count + place]) < 0) {
            goto done;
        }
    }
    result = PyObject_Call(target, values, by_name);
done:
    Py_XDECREF(values);
    Py_XDECREF(by_name);
    return result;
}

/* What is rarely due at a span's end, in Python, while the job's own exception waits. */
static PyObject *
finish_rarely(Gate *gate, int64_t code, int is_lost, PyObject *result)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = PyObject_CallMethod(
        (PyObject *)gate, "finish_call", "LO", (long long)code, is_lost ? Py_True : Py_False);
    if (done == NULL) { /* a signal handler of the job's raised */
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        Py_XDECREF(result);
        return NULL;
    }
    Py_DECREF(done);
    PyErr_Restore(type, value, traceback);
    return result;
}

/* TIMED with the code of a root module's span, NOT_TIMED for a module without parameters. */
static int
find_code(TimedCall *self, PyObject *module, int64_t *code)
{
    int found = UNKNOWN;
    PyObject *key = PyLong_FromVoidPtr(module), *grad = NULL, *training = NULL;
    PyObject *codes = key == NULL ? NULL : PyDict_GetItemWithError(self->entries, key);
    Py_XDECREF(key);
    if (codes == NULL || !PyTuple_Check(codes)) {
        goto done;
    }
    if (PyTuple_Size(codes) == 0) {
        return NOT_TIMED;
    }
    Py_INCREF(codes);
    grad = PyObject_CallNoArgs(self->is_grad_enabled);
    /* Without `__getattr__`, which may be Python's and raise what a signal handler of the job's does. */
    training = grad == NULL ? NULL : PyObject_GenericGetAttr(module, self->training);
    if (training == Py_True || training == Py_False) {
        PyObject *pair = PyTuple_GetItem(codes, grad == Py_True);
        PyObject *number = pair == NULL ? NULL : PyTuple_GetItem(pair, training == Py_True);
        *code = number == NULL ? -1 : PyLong_AsLongLong(number);
        found = *code < 0 ? UNKNOWN : TIMED;
    }
    Py_DECREF(codes);
    Py_XDECREF(grad);
    Py_XDECREF(training);
done:
    if (found == UNKNOWN) { /* the wrapper in Python meets the same, and says so */
        PyErr_Clear();
    }
    return found;
}

static PyObject *
call_module(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    TimedCall *self = (TimedCall *)object;
    Gate *gate = self->gate;
    if (gate->busy) {
        return pass_on(self->original, arguments, flags, names);
    }
    int64_t code = 0;
    int found = COUNT_ARGUMENTS(flags) && is_usual(gate) ? find_code(self, arguments[0], &code)
                                                         : UNKNOWN;
    if (found != TIMED) {
        PyObject *target = found == NOT_TIMED ? self->original : self->wrapper;
        return pass_on(target, arguments, flags, names);
    }
    int64_t start = begin_span(self->spans, code);
    gate->busy = FORWARD;
    PyObject *result = pass_on(self->original, arguments, flags, names);
    int is_lost = end_span(self->spans, start, code) < 0;
    if (is_lost || gate->slow) {
        result = finish_rarely(gate, code, is_lost, result);
    }
    gate->busy = gate->idle;
    return result;
}

static PyObject *
call_backward(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    TimedCall *self = (TimedCall *)object;
    Gate *gate = self->gate;
    if (gate->busy || !is_usual(gate)) {
        int is_passed = gate->busy == BACKWARD || gate->busy == CLOSED;
        return pass_on(is_passed ? self->original : self->wrapper, arguments, flags, names);
    }
    int64_t start = gate->owner_seen_ns = begin_span(self->spans, BACKWARD);
    gate->busy = BACKWARD;
    PyObject *result = pass_on(self->original, arguments, flags, names);
    if (end_span(self->spans, start, BACKWARD) < 0) {
        result = finish_rarely(gate, BACKWARD, 1, result);
    }
    gate->busy = gate->idle;
    return result;
}

static PyObject *
call_next(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    TimedCall *self = (TimedCall *)object;
    Gate *gate = self->gate;
    if (gate->loading || !is_usual(gate)) {
        PyObject *target = gate->loading ? self->original : self->wrapper;
        return pass_on(target, arguments, flags, names);
    }
    int64_t start = begin_span(self->spans, DATA);
    gate->loading = 1;
    PyObject *result = pass_on(self->original, arguments, flags, names);
    int is_end = result == NULL && PyErr_ExceptionMatches(PyExc_StopIteration);
    int64_t code = is_end ? DATA_END : DATA;
    int is_lost = end_span(self->spans, start, code) < 0;
    if (is_lost || gate->slow) {
        result = finish_rarely(gate, code, is_lost, result);
    }
    gate->loading = gate->idle == CLOSED;
    return result;
}

/* Whether an object is of a type of this module. */
static int
is_ours(PyObject *object, const char *name)
{
    PyObject *module = PyImport_ImportModule("haiprof.in_job._spans");
    PyObject *type = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    int found = type == NULL ? -1 : PyObject_IsInstance(object, type);
    Py_XDECREF(module);
    Py_XDECREF(type);
    if (found == 0) {
        PyErr_Format(PyExc_TypeError, "expected a %s", name);
    }
    return found == 1;
}

static PyObject *
keep(PyObject *object)
{
    Py_XINCREF(object);
    return object;
}

static PyObject *
timed_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(names))
{
    int kind;
    PyObject *original, *wrapper, *gate, *spans, *entries = NULL, *is_grad_enabled = NULL;
    if (!PyArg_ParseTuple(arguments, "iOOOO|O!O", &kind, &original, &wrapper, &gate, &spans,
                          &PyDict_Type, &entries, &is_grad_enabled) ||
        !is_ours(gate, "Gate") || !is_ours(spans, "SpanBuffer")) {
        return NULL;
    }
    if ((kind != FORWARD && kind != BACKWARD && kind != DATA) ||
        (kind == FORWARD && is_grad_enabled == NULL)) {
        return PyErr_Format(PyExc_ValueError, "no call of kind %d", kind);
    }
    PyObject *types = PyImport_ImportModule("types");
    PyObject *training = PyUnicode_InternFromString("training");
    PyObject *method = types == NULL ? NULL : PyObject_GetAttrString(types, "MethodType");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    TimedCall *self = method == NULL || training == NULL ? NULL : (TimedCall *)allocate(type, 0);
    Py_XDECREF(types);
    if (self == NULL) {
        Py_XDECREF(method);
        Py_XDECREF(training);
    } else {
        self->call = kind == FORWARD ? call_module : kind == BACKWARD ? call_backward : call_next;
        self->original = keep(original);
        self->wrapper = keep(wrapper);
        self->gate = (Gate *)keep(gate);
        self->spans = (Spans *)keep(spans);
        self->entries = keep(entries);
        self->is_grad_enabled = keep(is_grad_enabled);
        self->training = training;
        self->method_type = method;
    }
    return (PyObject *)self;
}

static PyObject *
timed_bind(PyObject *object, PyObject *target, PyObject *Py_UNUSED(type))
{
    if (target == NULL || target == Py_None) {
        return keep(object);
    }
    return PyObject_CallFunctionObjArgs(((TimedCall *)object)->method_type, object, target, NULL);
}

/* By name, as a function is pickled; and a copy of it is itself. */
static PyObject *
timed_reduce(PyObject *object, PyObject *Py_UNUSED(version))
{
    return PyObject_GetAttrString(object, "__qualname__");
}

static int
timed_traverse(PyObject *object, visitproc visit, void *arg)
{
    TimedCall *self = (TimedCall *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->original);
    Py_VISIT(self->wrapper);
    Py_VISIT(self->gate);
    Py_VISIT(self->entries);
    Py_VISIT(self->is_grad_enabled);
    Py_VISIT(self->method_type);
    Py_VISIT(self->names);
    return 0;
}

static void
timed_free(PyObject *object)
{
    TimedCall *self = (TimedCall *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(object);
    if (self->weak != NULL) {
        PyObject_ClearWeakRefs(object);
    }
    Py_XDECREF(self->names);
    Py_XDECREF(self->original);
    Py_XDECREF(self->wrapper);
    Py_XDECREF((PyObject *)self->gate);
    Py_XDECREF((PyObject *)self->spans);
    Py_XDECREF(self->entries);
    Py_XDECREF(self->is_grad_enabled);
    Py_XDECREF(self->training);
    Py_XDECREF(self->method_type);
    release(object);
    Py_DECREF(type);
}

static PyMemberDef timed_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(TimedCall, names), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(TimedCall, call), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(TimedCall, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef timed_methods[] = {
    {"__reduce_ex__", timed_reduce, METH_O, "Pickled by name, as a function is."},
    {NULL, NULL, 0, NULL},
};

/* `__code__` is the original's and lies in the dictionary, where torch.profiler and Dynamo read it. */
static PyGetSetDef timed_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot timed_slots[] = {
    {Py_tp_call, NULL}, /* PyVectorcall_Call, exported since 3.8, of the stable ABI since 3.12 */
    {Py_tp_doc, "TimedCall(kind, original, wrapper, gate, spans[, entries, is_grad_enabled])"},
    {Py_tp_new, timed_new},
    {Py_tp_dealloc, timed_free},
    {Py_tp_traverse, timed_traverse},
    {Py_tp_descr_get, timed_bind},
    {Py_tp_members, timed_members},
    {Py_tp_methods, timed_methods},
    {Py_tp_getset, timed_attributes},
    {0, NULL},
};

static PyType_Spec timed_spec = {
    .name = "haiprof.in_job._spans.TimedCall",
    .basicsize = sizeof(TimedCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR |
        HAS_VECTORCALL,
    .slots = timed_slots,
};

/* Both ends of an optimizer's step. */

typedef struct {
    PyObject_HEAD
    Gate *gate;
    Spans *spans;
    PyObject *entries;
} StepEnds;

static PyObject *
step_begin(PyObject *object, PyObject *Py_UNUSED(unused))
{
    StepEnds *self = (StepEnds *)object;
    return PyLong_FromLongLong(is_usual(self->gate) ? begin_span(self->spans, OPTIMIZER) : 0);
}

static PyObject *
step_end(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    StepEnds *self = (StepEnds *)object;
    Gate *gate = self->gate;
    int64_t start = count == 2 ? PyLong_AsLongLong(arguments[1]) : -1, code = -1, end = -1;
    if (start > 0 && is_usual(gate)) {
        PyObject *key = PyLong_FromVoidPtr(arguments[0]);
        PyObject *number = key == NULL ? NULL : PyDict_GetItemWithError(self->entries, key);
        Py_XDECREF(key);
        code = number == NULL ? -1 : PyLong_AsLongLong(number);
        end = code < 0 ? -1 : end_span(self->spans, start, code);
    }
    if (end < 0) { /* the hook in Python meets the same, and says so */
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    gate->owner_seen_ns = end;
    gate->optimizer_count++;
    Py_RETURN_TRUE;
}

static PyObject *
step_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(names))
{
    PyObject *gate, *spans, *entries;
    if (!PyArg_ParseTuple(arguments, "OOO!", &gate, &spans, &PyDict_Type, &entries) ||
        !is_ours(gate, "Gate") || !is_ours(spans, "SpanBuffer")) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    StepEnds *self = (StepEnds *)allocate(type, 0);
    if (self != NULL) {
        self->gate = (Gate *)keep(gate);
        self->spans = (Spans *)keep(spans);
        self->entries = keep(entries);
    }
    return (PyObject *)self;
}

static int
step_traverse(PyObject *object, visitproc visit, void *arg)
{
    StepEnds *self = (StepEnds *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->gate);
    Py_VISIT(self->entries);
    return 0;
}

static void
step_free(PyObject *object)
{
    StepEnds *self = (StepEnds *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(object);
    Py_XDECREF((PyObject *)self->gate);
    Py_XDECREF((PyObject *)self->spans);
    Py_XDECREF(self->entries);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef step_methods[] = {
    {"begin", step_begin, METH_NOARGS,
     "A step begins: the time in ns, or 0 where the hook is to do it."},
    {"end", (PyCFunction)(void (*)(void))step_end, METH_FASTCALL,
     "An optimizer's step that began then is over; False where the hook is to do it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot step_slots[] = {
    {Py_tp_doc, "StepEnds(gate, spans, entries)"},
    {Py_tp_new, step_new},
    {Py_tp_dealloc, step_free},
    {Py_tp_traverse, step_traverse},
    {Py_tp_methods, step_methods},
    {0, NULL},
};

static PyType_Spec step_spec = {
    .name = "haiprof.in_job._spans.StepEnds",
    .basicsize = sizeof(StepEnds),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = step_slots,
};

int
add_call_types(PyObject *module)
{
    *(void **)&call_vector = dlsym(RTLD_DEFAULT, "PyObject_Vectorcall");
    timed_slots[0].pfunc = dlsym(RTLD_DEFAULT, "PyVectorcall_Call");
    if (timed_slots[0].pfunc == NULL) {
        PyErr_SetString(PyExc_ImportError, "this interpreter exports no PyVectorcall_Call");
        return -1;
    }
    return add_type(module, "Gate", &gate_spec) || add_type(module, "TimedCall", &timed_spec) ||
        add_type(module, "StepEnds", &step_spec);
}
