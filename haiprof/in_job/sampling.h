/* What frames.c and sample_clock.c share: one sample, and who takes it. */
#ifndef HAIPROF_SAMPLING_H
#define HAIPROF_SAMPLING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* As in run_format/stack_lines.py. */
enum { LOCK_UNKNOWN = -1, LOCK_ELSEWHERE = 0, LOCK_WAITED_FOR = 1, LOCK_HELD = 2 };
enum {
    WAITS_UNKNOWN = -1, WAITS_NONE, WAITS_FILE, WAITS_SOCKET, WAITS_PIPE, WAITS_LOCK, WAITS_SLEEP,
    WAITS_POLL, WAITS_OTHER, WAITS_FAULT
};

/* The thread as it was when a sample was due. Python reads a sample as these words, after the time
 * and the stack: frames.py. */
typedef struct {
    long long due_ns, cpu_ns, queue_ns, lock_state, wait;
} Moment;

/* Notes the stack of a thread, or where that is NULL of the one with that ident. Called with the
 * interpreter lock, also in a pending call: nothing is raised, and no error is there before. */
void haiprof_take_sample(PyThreadState *thread, unsigned long ident, const Moment *moment);

extern PyMethodDef haiprof_clock_functions[];

#endif
