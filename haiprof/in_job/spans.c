/* The span buffer of in_job/spans.py in C: the same words in the same places, at less cost.
 *
 * A call here is whole under the interpreter lock. Between the job's own work caches are cold, and
 * what counts is how many lines of memory a span touches: two of 16 bytes each, one in the buffer
 * and one in the ring, and the header. Only the stable ABI is used, so that one build serves every
 * interpreter from 3.10 on; builds without the interpreter lock do not load it.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* As in run_format/ring.py and run_format/schema.py; tests compare what both sides write. */
enum { HEADER_WORDS = 32, COUNT = 3, STEPS = 8, OPEN = 16, OPEN_COUNT = 16 };
enum { TAG_BITS = 6, TAG_MASK = 63, DATA = 1, DATA_END = 2, OPTIMIZER = 8 };
enum { VERSION = 1 }; /* also in spans.py: one more with every change that spans.py would notice */
enum { CAPACITY = 1 << 15, FIRST_ROOM = 1 << 10, KEPT_ROOM = 1 << 16 };

typedef struct {
    int64_t start, end;
} Record;

typedef struct {
    PyObject_HEAD
    Record *buffer;
    Py_ssize_t count, room;
    volatile int64_t *header; /* of the ring, or `own` */
    volatile Record *ring;    /* NULL without one */
    int64_t own[HEADER_WORDS];
} Spans;

static int64_t
read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int
grow(Spans *self)
{
    Py_ssize_t room = self->room ? 2 * self->room : FIRST_ROOM;
    Record *buffer = realloc(self->buffer, (size_t)room * sizeof(Record));
    if (buffer == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->buffer = buffer;
    self->room = room;
    return 0;
}

static int
put_span(Spans *self, int64_t start_ns, int64_t end_ns, int64_t code)
{
    if (self->count == self->room && grow(self) < 0) {
        return -1;
    }
    int64_t start = (start_ns << TAG_BITS) | (code & TAG_MASK);
    int64_t end = (end_ns << TAG_BITS) | (code >> TAG_BITS);
    Record *record = &self->buffer[self->count++];
    record->start = start;
    record->end = end;
    if (self->ring != NULL) { /* the start first: a torn record ends before it begins */
        volatile Record *slot = &self->ring[self->header[COUNT] & (CAPACITY - 1)];
        slot->start = start;
        slot->end = end;
    }
    self->header[COUNT]++;
    if ((code & TAG_MASK) == OPTIMIZER) {
        self->header[STEPS]++;
    }
    return 0;
}

static PyObject *
spans_begin(PyObject *object, PyObject *argument)
{
    Spans *self = (Spans *)object;
    long long code = PyLong_AsLongLong(argument);
    if (code == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int64_t now = read_clock();
    self->header[OPEN + (code & (OPEN_COUNT - 1))] = now;
    return PyLong_FromLongLong(now);
}

static int
read_integers(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t wanted, long long *values)
{
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
        return -1;
    }
    for (Py_ssize_t place = 0; place < count; place++) {
        values[place] = PyLong_AsLongLong(arguments[place]);
        if (values[place] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
spans_end(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    Spans *self = (Spans *)object;
    int64_t now = read_clock();
    long long values[2];
    if (read_integers(arguments, count, 2, values) < 0 ||
        put_span(self, values[0], now, values[1]) < 0) {
        return NULL;
    }
    int64_t kind = values[1] & (OPEN_COUNT - 1);
    self->header[OPEN + (kind == DATA_END ? DATA : kind)] = 0;
    return PyLong_FromLongLong(now);
}

static PyObject *
spans_put(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    long long values[3];
    if (read_integers(arguments, count, 3, values) < 0 ||
        put_span((Spans *)object, values[0], values[1], values[2]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static void
forget(Spans *self)
{
    self->count = 0;
    if (self->room > KEPT_ROOM) {
        free(self->buffer);
        self->buffer = NULL;
        self->room = 0;
    }
}

static PyObject *
spans_take(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Spans *self = (Spans *)object;
    PyObject *taken = PyBytes_FromStringAndSize(
        (const char *)self->buffer, self->count * (Py_ssize_t)sizeof(Record));
    if (taken != NULL) {
        forget(self);
    }
    return taken;
}

static PyObject *
spans_clear(PyObject *object, PyObject *Py_UNUSED(unused))
{
    forget((Spans *)object);
    Py_RETURN_NONE;
}

static PyObject *
spans_attach(PyObject *object, PyObject *argument)
{
    Spans *self = (Spans *)object;
    volatile int64_t *header = PyLong_AsVoidPtr(argument);
    if (header == NULL) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no address");
    }
    self->ring = (volatile Record *)(header + HEADER_WORDS);
    Py_ssize_t first = self->count > CAPACITY / 2 ? self->count - CAPACITY / 2 : 0;
    for (Py_ssize_t place = first; place < self->count; place++) {
        self->ring[place - first].start = self->buffer[place].start;
        self->ring[place - first].end = self->buffer[place].end;
    }
    for (int word = OPEN; word < OPEN + OPEN_COUNT; word++) {
        header[word] = self->header[word];
    }
    header[STEPS] = self->header[STEPS];
    header[COUNT] = self->count - first;
    self->header = header;
    Py_RETURN_NONE;
}

static PyObject *
spans_detach(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Spans *self = (Spans *)object;
    memset(self->own, 0, sizeof(self->own));
    self->header = self->own;
    self->ring = NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t
spans_length(PyObject *object)
{
    return ((Spans *)object)->count;
}

static int
spans_init(PyObject *object, PyObject *arguments, PyObject *Py_UNUSED(names))
{
    if (!PyArg_ParseTuple(arguments, "")) {
        return -1;
    }
    Py_XDECREF(spans_detach(object, NULL));
    return 0;
}

static PyObject *
spans_new(PyTypeObject *type, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(names))
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = allocate(type, 0); /* all zero */
    if (object != NULL) {
        ((Spans *)object)->header = ((Spans *)object)->own;
    }
    return object;
}

static void
spans_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free(((Spans *)object)->buffer);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"begin", spans_begin, METH_O, "A span of that kind begins; the time in ns."},
    {"end", (PyCFunction)(void (*)(void))spans_end, METH_FASTCALL,
     "It is over, and is put in; the time in ns."},
    {"put", (PyCFunction)(void (*)(void))spans_put, METH_FASTCALL, "Puts in a span."},
    {"take", spans_take, METH_NOARGS, "All since the last time, as in phases.rec."},
    {"clear", spans_clear, METH_NOARGS, "Forgets what is in the buffer."},
    {"attach", spans_attach, METH_O, "From now on into the ring at that address, too."},
    {"detach", spans_detach, METH_NOARGS, "No longer into the ring."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Takes spans; see haiprof.in_job.spans.Spans."},
    {Py_tp_new, spans_new},
    {Py_tp_init, spans_init},
    {Py_tp_dealloc, spans_free},
    {Py_tp_methods, methods},
    {Py_sq_length, spans_length},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "haiprof.in_job._spans.SpanBuffer",
    .basicsize = sizeof(Spans),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

/* What wrappers look at first at every call: `busy`, in a place where C finds it too. */

typedef struct {
    PyObject_HEAD
    int busy;
} Gate;

static PyMemberDef gate_members[] = {
    {"busy", T_INT, offsetof(Gate, busy), 0, "Not 0 where calls are passed on."},
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

/* A method that passes calls on to the original while the gate is busy, and to a wrapper else.
 *
 * A model has hundreds of modules and calls each of them once a step: of all that haiprof does in a
 * step this is the most. `__code__` is the original's, as torch.profiler and Dynamo read it.
 */

typedef struct {
    PyObject_HEAD
    PyObject *original, *wrapper, *gate, *names;
} PassedCall;

static PyObject *
passed_call(PyObject *object, PyObject *arguments, PyObject *names)
{
    PassedCall *self = (PassedCall *)object;
    int busy = ((Gate *)self->gate)->busy;
    return PyObject_Call(busy ? self->original : self->wrapper, arguments, names);
}

static PyObject *
passed_bind(PyObject *object, PyObject *target, PyObject *Py_UNUSED(type))
{
    if (target == NULL || target == Py_None) {
        Py_INCREF(object);
        return object;
    }
    PyObject *types = PyImport_ImportModule("types");
    PyObject *bound = types == NULL ? NULL
        : PyObject_CallMethod(types, "MethodType", "OO", object, target);
    Py_XDECREF(types);
    return bound;
}

static PyObject *
passed_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(names))
{
    PyObject *original, *wrapper, *gate;
    if (!PyArg_ParseTuple(arguments, "OOO", &original, &wrapper, &gate)) {
        return NULL;
    }
    PyObject *module = PyImport_ImportModule("haiprof.in_job._spans");
    PyObject *base = module == NULL ? NULL : PyObject_GetAttrString(module, "Gate");
    Py_XDECREF(module);
    int is_gate = base == NULL ? -1 : PyObject_IsInstance(gate, base);
    Py_XDECREF(base);
    if (is_gate <= 0) {
        return is_gate < 0 ? NULL : PyErr_Format(PyExc_TypeError, "the third is no Gate");
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PassedCall *self = (PassedCall *)allocate(type, 0);
    if (self != NULL) {
        Py_INCREF(original);
        Py_INCREF(wrapper);
        Py_INCREF(gate);
        self->original = original;
        self->wrapper = wrapper;
        self->gate = gate;
    }
    return (PyObject *)self;
}

static int
passed_traverse(PyObject *object, visitproc visit, void *arg)
{
    PassedCall *self = (PassedCall *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->original);
    Py_VISIT(self->wrapper);
    Py_VISIT(self->gate);
    Py_VISIT(self->names);
    return 0;
}

static void
passed_free(PyObject *object)
{
    PassedCall *self = (PassedCall *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->names);
    Py_XDECREF(self->original);
    Py_XDECREF(self->wrapper);
    Py_XDECREF(self->gate);
    release(object);
    Py_DECREF(type);
}

static PyMemberDef passed_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(PassedCall, names), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef passed_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot passed_slots[] = {
    {Py_tp_doc, "PassedCall(original, wrapper, gate)"},
    {Py_tp_new, passed_new},
    {Py_tp_dealloc, passed_free},
    {Py_tp_traverse, passed_traverse},
    {Py_tp_call, passed_call},
    {Py_tp_descr_get, passed_bind},
    {Py_tp_members, passed_members},
    {Py_tp_getset, passed_attributes},
    {0, NULL},
};

static PyType_Spec passed_spec = {
    .name = "haiprof.in_job._spans.PassedCall",
    .basicsize = sizeof(PassedCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = passed_slots,
};

static int
add_type(PyObject *module, const char *name, PyType_Spec *type_spec)
{
    PyObject *type = PyType_FromSpec(type_spec);
    int failed = type == NULL || PyModule_AddObjectRef(module, name, type) < 0;
    Py_XDECREF(type);
    return failed;
}

static int
add_types(PyObject *module)
{
    int failed = add_type(module, "SpanBuffer", &spec) || add_type(module, "Gate", &gate_spec) ||
        add_type(module, "PassedCall", &passed_spec) ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0;
    return failed ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_types},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "haiprof.in_job._spans",
    .m_doc = "Spans, taken in C.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__spans(void)
{
    return PyModuleDef_Init(&definition);
}
