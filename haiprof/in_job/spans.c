/* The span buffer of in_job/spans.py in C: the same words in the same places, at less cost.
 *
 * A call here is whole under the interpreter lock. Between the job's own work caches are cold, and
 * what counts is how many lines of memory a span touches: two of 16 bytes each, one in the buffer
 * and one in the ring, and the header. Only the stable ABI is used, so that one build serves every
 * interpreter from 3.10 on; builds without the interpreter lock do not load it.
 */

#include "spans.h"

#include <stdlib.h>
#include <string.h>

int
grow_buffer(Spans *self)
{
    Py_ssize_t room = self->room ? 2 * self->room : FIRST_ROOM;
    Record *buffer = realloc(self->buffer, (size_t)room * sizeof(Record));
    if (buffer == NULL) {
        return -1;
    }
    self->buffer = buffer;
    self->room = room;
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
    return PyLong_FromLongLong(begin_span(self, code));
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
    long long values[2];
    if (read_integers(arguments, count, 2, values) < 0) {
        return NULL;
    }
    int64_t now = end_span(self, values[0], values[1]);
    return now < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(now);
}

static PyObject *
spans_put(PyObject *object, PyObject *const *arguments, Py_ssize_t count)
{
    long long values[3];
    if (read_integers(arguments, count, 3, values) < 0) {
        return NULL;
    }
    if (put_span((Spans *)object, values[0], values[1], values[2]) < 0) {
        return PyErr_NoMemory();
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

int
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
    int failed = add_type(module, "SpanBuffer", &spec) || add_call_types(module) ||
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
