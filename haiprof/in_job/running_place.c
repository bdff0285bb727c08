/* Reads where the main thread is, without the interpreter lock.
 *
 * Who holds the lock takes its samples itself, in a pending call (sample_clock.c), and CPython runs
 * those only after calls, at jumps back and as functions begin. Of
 *
 *     y = a * b
 *     log(y)
 *
 * all time of the product would be told of the call after it, and where a function returns the
 * product, of its caller. So, when a sample is due, the sampling thread reads which frames there
 * are and at which instructions: from version 3.11 on CPython stores those in its frames as it
 * goes. The sample that is taken later is cut to them (frames.c).
 *
 * Meanwhile the main thread goes on, and memory changes or vanishes. So nothing that was read is
 * followed but by the kernel, whose call fails where a pointer would crash, and nothing is believed
 * but what the stack has, too, that the main thread finds with the lock.
 *
 * Where CPython keeps all this differs by version. It is found by values that are known otherwise,
 * with the lock, on the sampling thread, which always has frames of several functions: two of them
 * tell which words of a frame are its code, its caller, its globals and its instruction. The first
 * samples compare the main thread's innermost frame with the one that the interpreter names. Where anything is not found exactly once (CPython
 * 3.10 and builds without the lock keep it otherwise), or is wrong then, no place is read.
 */
#define _GNU_SOURCE
#include "sampling.h"

#include <stdatomic.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    FRAME_WORDS = 8,
    WORDS_BEFORE = 248,
    PAGE_BYTES = 4096,
    THREAD_WORDS = 64,
    MOST_PAIRS = 64,
    MOST_TRIES = 10,
    MOST_CHECKS = 1000,
    MOST_READS = 3,    /* further callers are known where they were read with these */
    MOST_BEGIN = 1024, /* of the instructions in a code object, in bytes */
    MOST_CODE_BYTES = 1 << 24,
    TAG_BITS = 3,      /* CPython 3.14 marks some pointers in their last bits */
};

typedef uintptr_t Word;

static struct {
    int thread; /* word of the thread's state: the innermost frame */
    int record; /* or, unless -1, a record (_PyCFrame of 3.11 and 3.12) with this word for it */
    int code, caller, globals, instruction; /* words of a frame */
    Word begin; /* of the instructions in a code object, in bytes */
} layout;
static atomic_int is_found;
static Word checked; /* the frame that was compared last */
static int tries, checks;
static pid_t process;
static PyThreadState *main_state;

static int
read_words(Word address, Word *words, int count)
{
    size_t size = count * sizeof *words;
    struct iovec own = {words, size}, theirs = {(void *)address, size};
    return process_vm_readv(process, &own, 1, &theirs, 1, 0) == (ssize_t)size;
}

/* The address of the innermost frame; 0 where it cannot be read. */
static Word
read_innermost(PyThreadState *thread)
{
    Word found = 0;
    const volatile Word *word = (Word *)thread + layout.thread;
    if (haiprof_is_in_runtime(thread)) {
        found = *word; /* that memory is never unmapped */
    } else if (!read_words((Word)word, &found, 1)) {
        return 0;
    }
    if (layout.record >= 0 && !read_words(found + layout.record * sizeof(Word), &found, 1)) {
        return 0;
    }
    return found;
}

/* A frame, as the interpreter tells of it and as it is in memory. */
typedef struct {
    Word address, code, globals, words[FRAME_WORDS];
    long instruction;
} Known;

static int
read_known(PyFrameObject *frame, Known *known)
{
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    PyObject *globals = PyObject_GetAttrString((PyObject *)frame, "f_globals");
    known->address = haiprof_address_of(frame);
    known->code = (Word)code;
    known->globals = (Word)globals;
    known->instruction = haiprof_instruction_of(frame);
    Py_DECREF(code); /* the frame has both */
    Py_XDECREF(globals);
    PyErr_Clear();
    return globals != NULL && known->instruction >= 0 &&
        read_words(known->address, known->words, FRAME_WORDS);
}

/* Which word is the one value in one frame, and the other in the other; -1 if not exactly one. */
static int
find_word(const Known *inner, Word in_inner, const Known *outer, Word in_outer)
{
    int found = -1;
    for (int at = 0; at < FRAME_WORDS; at++) {
        if ((inner->words[at] & ~(Word)TAG_BITS) == in_inner &&
            (outer == NULL || (outer->words[at] & ~(Word)TAG_BITS) == in_outer)) {
            if (found >= 0) {
                return -1;
            }
            found = at;
        }
    }
    return found;
}

static int
find_instruction(const Known *inner, const Known *outer)
{
    int found = -1;
    for (int at = 0; at < FRAME_WORDS; at++) {
        Word begin = inner->words[at] - inner->code - (Word)inner->instruction;
        if (begin > 0 && begin < MOST_BEGIN &&
            begin == outer->words[at] - outer->code - (Word)outer->instruction) {
            if (found >= 0) {
                return -1;
            }
            found = at;
            layout.begin = begin;
        }
    }
    return found;
}

/* By two frames, of which one called the other. Where C stands between them, CPython 3.12 and later
 * have a frame of their own there: then another two tell. */
static int
find_frame_words(const Known *inner, const Known *outer)
{
    if (inner->code == outer->code) {
        return 0;
    }
    layout.code = find_word(inner, inner->code, outer, outer->code);
    layout.globals = find_word(inner, inner->globals, outer, outer->globals);
    layout.caller = find_word(inner, outer->address, NULL, 0);
    layout.instruction = find_instruction(inner, outer);
    return layout.code >= 0 && layout.globals >= 0 && layout.caller >= 0 && layout.instruction >= 0;
}

static int
find_thread_word(PyThreadState *thread, Word innermost)
{
    Word words[THREAD_WORDS], record[2];
    int count = 0;
    if (!read_words((Word)thread, words, THREAD_WORDS)) {
        return 0;
    }
    for (int at = 0; at < THREAD_WORDS; at++) {
        if (words[at] == innermost) {
            layout.thread = at;
            layout.record = -1;
            count++;
        } else if (read_words(words[at], record, 2)) {
            for (int place = 0; place < 2; place++) {
                /* Else it is a frame past the end of the stack, which the innermost had called. */
                if (record[place] == innermost && place != layout.caller) {
                    layout.thread = at;
                    layout.record = place;
                    count++;
                }
            }
        }
    }
    return count == 1;
}

static Word
address_of_innermost(PyThreadState *thread)
{
    PyFrameObject *frame = PyThreadState_GetFrame(thread);
    Word address = frame == NULL ? 0 : haiprof_address_of(frame);
    Py_XDECREF(frame);
    return address;
}

/* With the lock, on the thread, and no garbage collection. */
static int
find_layout(PyThreadState *thread)
{
    PyFrameObject *frame = PyThreadState_GetFrame(thread);
    Known frames[2];
    int found = 0;
    Word innermost = address_of_innermost(thread);
    for (int at = 0; frame != NULL && !found && at < MOST_PAIRS; at++) {
        int is_read = read_known(frame, &frames[at % 2]);
        if (!is_read) {
            break;
        }
        found = at > 0 && find_frame_words(&frames[(at - 1) % 2], &frames[at % 2]);
        frame = haiprof_step_out(frame);
    }
    Py_XDECREF(frame);
    return found && find_thread_word(thread, innermost);
}

void
haiprof_forget_places(void)
{
    atomic_store(&is_found, 0);
    tries = checks = 0;
    process = getpid();
}

void
haiprof_find_places(void)
{
    if (!atomic_load(&is_found) && tries < MOST_TRIES) {
        tries++;
        int collects = PyGC_Disable(); /* CPython 3.11 may collect as it makes a frame object */
        atomic_store(&is_found, find_layout(PyThreadState_Get()));
        if (collects) {
            PyGC_Enable();
        }
    }
}

int
haiprof_knows_places(PyThreadState *thread)
{
    main_state = thread;
    if (!atomic_load(&is_found) || checks >= MOST_CHECKS) {
        return atomic_load(&is_found);
    }
    int collects = PyGC_Disable();
    Word address = address_of_innermost(thread);
    if (address == 0 || read_innermost(thread) != address) {
        tries = MOST_TRIES;
        atomic_store(&is_found, 0);
    }
    checks += address != checked ? 10 : 1; /* the same frame tells less */
    checked = address;
    if (collects) {
        PyGC_Enable();
    }
    return atomic_load(&is_found);
}

/* Words of a frame, and of what is before it: often its callers, read in the same call. */
typedef struct {
    Word begin, end, words[WORDS_BEFORE + FRAME_WORDS];
} Window;

static const Word *
read_frame(Window *window, Word address, int may_read)
{
    const Word size = FRAME_WORDS * sizeof(Word), most = WORDS_BEFORE * sizeof(Word);
    if (address % sizeof(Word)) {
        return NULL;
    }
    if (address < window->begin || address > window->end - size) {
        if (!may_read) {
            return NULL;
        }
        /* Not from the page before, which may not be mapped. */
        Word page = address % PAGE_BYTES, before = page < most ? page : most;
        Word *begin = window->words + WORDS_BEFORE - before / sizeof(Word);
        if (!read_words(address - before, begin, FRAME_WORDS + (int)(before / sizeof(Word)))) {
            return NULL;
        }
        window->begin = address - before;
        window->end = address + size;
    }
    return window->words + WORDS_BEFORE + FRAME_WORDS - (window->end - address) / sizeof(Word);
}

static int
read_places(PyThreadState *thread, Place *places, int most, int reads)
{
    Window window;
    window.begin = window.end = FRAME_WORDS * sizeof(Word); /* nothing */
    int count = 0;
    Word at = atomic_load(&is_found) ? read_innermost(thread) : 0;
    for (int level = 0; at != 0 && level < most; level++) {
        const Word *words = read_frame(&window, at, level < reads);
        if (words == NULL) {
            break;
        }
        Word code = words[layout.code] & ~(Word)TAG_BITS;
        Word instruction = words[layout.instruction] - code - layout.begin;
        if (instruction % 2 == 0 && instruction < MOST_CODE_BYTES) { /* else it only just begins */
            places[count++] = (Place){at, code, words[layout.globals], (long)instruction};
        }
        at = words[layout.caller];
    }
    return count;
}

int
haiprof_read_places(PyThreadState *thread, Place *places)
{
    return read_places(thread, places, MOST_PLACES, MOST_READS);
}

int
haiprof_read_main_places(Place *places, int most)
{
    return main_state == NULL ? 0 : read_places(main_state, places, most, most);
}
