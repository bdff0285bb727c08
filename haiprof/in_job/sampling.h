/* What frames.c, running_place.c, sample_clock.c and crash.c share: one sample, and who takes it. */
#ifndef HAIPROF_SAMPLING_H
#define HAIPROF_SAMPLING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

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

/* A frame and its instruction as they were read when a sample was due. The addresses are numbers to
 * compare: what they are of may be gone. */
typedef struct {
    uintptr_t frame, code, globals;
    long instruction;
} Place;
enum { MOST_PLACES = 16 }; /* of one thread: its innermost frames */

/* Notes the stack of a thread, or where that is NULL of the one with that ident, cut to the places
 * that were read before. Called with the interpreter lock, also in a pending call: nothing is
 * raised, and no error is there before. */
void haiprof_take_sample(PyThreadState *thread, unsigned long ident, const Moment *moment,
                         const Place *places, int place_count);

PyFrameObject *haiprof_step_out(PyFrameObject *frame);
long haiprof_instruction_of(PyFrameObject *frame);

/* Where CPython keeps a frame: its frame object has a pointer to it from 3.11 to 3.14. */
static inline uintptr_t
haiprof_address_of(PyFrameObject *frame)
{
    return ((uintptr_t *)frame)[3];
}

/* Whether places are read, and what was read is true; on the thread, with the interpreter lock. */
int haiprof_knows_places(PyThreadState *thread);
void haiprof_forget_places(void);

/* Looks where this thread's frames are kept, unless that is known; with the lock, not on the main one. */
void haiprof_find_places(void);

/* Whether memory is the interpreter's static one. */
int haiprof_is_in_runtime(const void *address);

/* The innermost places of a thread, whoever holds the lock; says how many. */
int haiprof_read_places(PyThreadState *thread, Place *places);

/* So many of the main thread, in a handler of a signal. */
int haiprof_read_main_places(Place *places, int most);

/* Installs the handlers of crashes; on the main thread. */
void haiprof_watch_crashes(void);

extern PyMethodDef haiprof_clock_functions[], haiprof_crash_functions[];

#endif
