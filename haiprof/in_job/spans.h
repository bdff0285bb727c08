/* What spans.c and calls.c share: the buffer of spans, and taking one. */

#ifndef HAIPROF_SPANS_H
#define HAIPROF_SPANS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* As in run_format/ring.py and run_format/schema.py; tests compare what both sides write. */
enum { HEADER_WORDS = 32, COUNT = 3, STEPS = 8, OPEN = 16, OPEN_COUNT = 16 };
enum { TAG_BITS = 6, TAG_MASK = 63 };
enum { DATA = 1, DATA_END = 2, FORWARD = 4, BACKWARD = 7, OPTIMIZER = 8 };
enum { VERSION = 2 }; /* also in spans.py: one more with every change that spans.py would notice */
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

/* -1 without memory; no exception is set, as the job's own may wait. */
int grow_buffer(Spans *self);

/* Adds the types of calls.c to the module; -1 with an exception. */
int add_call_types(PyObject *module);
int add_type(PyObject *module, const char *name, PyType_Spec *type_spec);

static inline int64_t
read_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int
put_span(Spans *self, int64_t start_ns, int64_t end_ns, int64_t code)
{
    if (self->count == self->room && grow_buffer(self) < 0) {
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

static inline int64_t
begin_span(Spans *self, int64_t code)
{
    int64_t now = read_clock();
    self->header[OPEN + (code & (OPEN_COUNT - 1))] = now;
    return now;
}

/* The time in ns; -1 without memory for it. */
static inline int64_t
end_span(Spans *self, int64_t start_ns, int64_t code)
{
    int64_t now = read_clock();
    if (put_span(self, start_ns, now, code) < 0) {
        return -1;
    }
    int64_t kind = code & (OPEN_COUNT - 1);
    self->header[OPEN + (kind == DATA_END ? DATA : kind)] = 0;
    return now;
}

#endif
