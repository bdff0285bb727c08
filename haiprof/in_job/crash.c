/* Writes down where the main thread's Python was when native code ended this process by a signal.
 *
 * Only where the job has the default action for that signal: it still ends the process, and a core
 * file is written as without haiprof; a handler that the job installs takes this one's place. The
 * handler allocates nothing and takes no lock. What it reads it has the kernel copy, whose call
 * fails where a pointer would crash again (running_place.c). The file is written by a process that
 * shares this one's memory, which is waited for a second: a disk that hangs does not hold the job.
 *
 * Where a code object keeps its names and lines is found by values that are known, as in
 * running_place.c. The table of lines is that of CPython 3.11 and later (Objects/locations.md).
 */
#define _GNU_SOURCE
#include "sampling.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    CODE_WORDS = 40,
    MOST_FRAMES = 64,
    NAME_BYTES = 512,
    TABLE_BYTES = 1 << 14,
    TEXT_BYTES = 1 << 15,
    STACK_BYTES = 1 << 16,
    WAIT_MS = 1000,
};
static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

static char folder[4096], file_name[320];
static pid_t process;
static long main_task;
static struct {
    int file, name, table; /* words of a code object */
    int line;              /* its first line, in ints */
    size_t text, bytes;    /* where a str of ASCII and a bytes object begin */
} layout;
static int is_found;
static atomic_int has_entered;

static struct {
    char text[TEXT_BYTES];
    size_t size;
    unsigned char table[TABLE_BYTES];
    Place places[MOST_FRAMES];
} words;
static char stack_of_handler[STACK_BYTES], stack_of_writer[STACK_BYTES];

static int
read_bytes(uintptr_t address, void *into, size_t size)
{
    struct iovec own = {into, size}, theirs = {(void *)address, size};
    return process_vm_readv(process, &own, 1, &theirs, 1, 0) == (ssize_t)size;
}

/* The address of an attribute's value, which the code object keeps. */
static uintptr_t
address_of(PyObject *code, const char *name)
{
    PyObject *value = PyObject_GetAttrString(code, name);
    PyErr_Clear();
    Py_XDECREF(value);
    return (uintptr_t)value;
}

static long
first_line_of(PyObject *code)
{
    PyObject *value = PyObject_GetAttrString(code, "co_firstlineno");
    long line = value == NULL ? -1 : PyLong_AsLong(value);
    Py_XDECREF(value);
    PyErr_Clear();
    return line;
}

/* The place in two code objects of these values; -1 where it is not exactly one. */
static int
find_in_both(const void *one, const void *other, size_t size, int count, const void *in_one,
             const void *in_other)
{
    int found = -1;
    for (int at = 0; at < count; at++) {
        if (memcmp((const char *)one + at * size, in_one, size) == 0 &&
            memcmp((const char *)other + at * size, in_other, size) == 0) {
            if (found >= 0) {
                return -1;
            }
            found = at;
        }
    }
    return found;
}

static int
find_layout(PyObject *one, PyObject *other)
{
    static const char *const names[] = {"co_filename", "co_qualname", "co_linetable"};
    uintptr_t contents[2][CODE_WORDS];
    int *places[] = {&layout.file, &layout.name, &layout.table};
    int lines[] = {(int)first_line_of(one), (int)first_line_of(other)};
    if (!read_bytes((uintptr_t)one, contents[0], sizeof contents[0]) ||
        !read_bytes((uintptr_t)other, contents[1], sizeof contents[1])) {
        return 0;
    }
    for (int at = 0; at < 3; at++) {
        uintptr_t in_one = address_of(one, names[at]), in_other = address_of(other, names[at]);
        *places[at] = find_in_both(contents[0], contents[1], sizeof in_one, CODE_WORDS, &in_one,
                                   &in_other);
    }
    layout.line = find_in_both(contents[0], contents[1], sizeof(int), 2 * CODE_WORDS, &lines[0],
                               &lines[1]);
    PyObject *text = PyUnicode_FromString("haiprof"), *bytes = PyBytes_FromString("haiprof");
    if (text != NULL && bytes != NULL) {
        layout.text = (size_t)(PyUnicode_AsUTF8AndSize(text, NULL) - (char *)text);
        layout.bytes = (size_t)(PyBytes_AsString(bytes) - (char *)bytes);
    }
    Py_XDECREF(text);
    Py_XDECREF(bytes);
    PyErr_Clear();
    return layout.text && layout.bytes && lines[0] != lines[1] && layout.file >= 0 &&
        layout.name >= 0 && layout.table >= 0 && layout.line >= 0;
}

/* A number of 6 bits a byte, and the next byte. */
static unsigned
read_number(const unsigned char **at, const unsigned char *end)
{
    unsigned found = 0, shift = 0;
    while (*at < end) {
        unsigned char byte = *(*at)++;
        found |= (unsigned)(byte & 63) << shift;
        shift += 6;
        if (!(byte & 64) || shift > 24) {
            break;
        }
    }
    return found;
}

static int
read_signed(const unsigned char **at, const unsigned char *end)
{
    unsigned number = read_number(at, end);
    return number & 1 ? -(int)(number >> 1) : (int)(number >> 1);
}

/* The line of an instruction; that of the one before where it has none. */
static int
find_line(const unsigned char *at, const unsigned char *end, int line, long instruction)
{
    enum { NO_LINE = 15, LONG = 14, NO_COLUMN = 13, FIRST_OF_ONE_LINE = 10 };
    int found = line;
    long begin = 0;
    while (at < end && begin <= instruction) {
        int kind = *at >> 3 & 15, units = (*at & 7) + 1;
        at++;
        if (kind == LONG) {
            line += read_signed(&at, end);
            for (int part = 0; part < 3; part++) {
                read_number(&at, end);
            }
        } else if (kind == NO_COLUMN) {
            line += read_signed(&at, end);
        } else if (kind != NO_LINE) {
            line += kind >= FIRST_OF_ONE_LINE ? kind - FIRST_OF_ONE_LINE : 0;
            at += kind >= FIRST_OF_ONE_LINE ? 2 : 1;
        }
        if (kind != NO_LINE) {
            found = line;
        }
        begin += units * 2;
    }
    return found;
}

static void
add(const char *text, size_t size)
{
    if (words.size + size <= sizeof words.text) {
        memcpy(words.text + words.size, text, size);
        words.size += size;
    }
}

static void
add_number(long long number)
{
    char text[24];
    int at = sizeof text;
    unsigned long long left = number < 0 ? 0 : (unsigned long long)number;
    do {
        text[--at] = (char)('0' + left % 10);
        left /= 10;
    } while (left);
    add(text + at, sizeof text - at);
}

/* A str of ASCII; one of other characters is kept otherwise, and left out. */
static void
add_name(uintptr_t object)
{
    uintptr_t length;
    char name[NAME_BYTES];
    if (!read_bytes(object + 2 * sizeof length, &length, sizeof length) || length >= sizeof name ||
        !read_bytes(object + layout.text, name, length)) {
        return;
    }
    for (uintptr_t at = 0; at < length; at++) {
        if (name[at] < ' ' || name[at] > '~') {
            return;
        }
    }
    add(name, length);
}

/* A line for each frame: its line, its function, its file; the innermost first. */
static void
add_frame(const Place *place)
{
    uintptr_t code[CODE_WORDS], size;
    if (!read_bytes(place->code, code, sizeof code)) {
        return;
    }
    uintptr_t table = code[layout.table];
    int line = ((int *)code)[layout.line];
    if (read_bytes(table + 2 * sizeof size, &size, sizeof size) && size <= sizeof words.table &&
        read_bytes(table + layout.bytes, words.table, size)) {
        line = find_line(words.table, words.table + size, line, place->instruction);
    }
    add_number(line);
    add("\t", 1);
    add_name(code[layout.name]);
    add("\t", 1);
    add_name(code[layout.file]);
    add("\n", 1);
}

/* Into a new file of a folder of ours; no link is followed, and nothing is written over. */
static int
write_down(void *unused)
{
    (void)unused;
    if (mkdir(folder, 0700) == 0 || errno == EEXIST) {
        int place = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        int file = place < 0 ? -1 : openat(
            place, file_name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (file >= 0) {
            ssize_t count = write(file, words.text, words.size);
            (void)count; /* a short text is better than none */
        }
    }
    _exit(0);
}

static void
note(int number, siginfo_t *info, void *context)
{
    (void)context;
    /* In a forked child another process would be read, and told of. */
    if (getpid() == process && is_found && !atomic_exchange(&has_entered, 1)) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        add_number(now.tv_sec * 1000000000LL + now.tv_nsec);
        add("\t", 1);
        add_number(number);
        add("\t", 1);
        add_number(syscall(SYS_gettid) == main_task);
        add("\n", 1);
        int count = haiprof_read_main_places(words.places, MOST_FRAMES);
        for (int at = 0; at < count; at++) {
            add_frame(&words.places[at]);
        }
        pid_t writer = count == 0 ? -1 : clone(
            write_down, stack_of_writer + sizeof stack_of_writer, CLONE_VM | CLONE_FILES, NULL);
        struct timespec pause = {0, 1000000};
        for (int ms = 0; writer > 0 && ms < WAIT_MS; ms++) {
            if (waitpid(writer, NULL, __WALL | WNOHANG) != 0) {
                break;
            }
            nanosleep(&pause, NULL);
        }
    }
    struct sigaction none = {.sa_handler = SIG_DFL};
    sigemptyset(&none.sa_mask);
    sigaction(number, &none, NULL); /* also where another handler calls this one, as a JVM's does */
    if (info == NULL || info->si_code <= 0) { /* sent, as by abort(): what faults does so again */
        syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), number);
    }
}

/* On the main thread. */
void
haiprof_watch_crashes(void)
{
    stack_t own = {.ss_sp = stack_of_handler, .ss_size = sizeof stack_of_handler}, known;
    if (!is_found || getpid() != process) {
        return;
    }
    main_task = syscall(SYS_gettid);
    if (sigaltstack(NULL, &known) == 0 && (known.ss_flags & SS_DISABLE)) {
        sigaltstack(&own, NULL); /* for a stack that is full */
    }
    for (unsigned at = 0; at < sizeof SIGNALS / sizeof *SIGNALS; at++) {
        struct sigaction before, after = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND};
        after.sa_sigaction = note;
        sigemptyset(&after.sa_mask);
        if (sigaction(SIGNALS[at], NULL, &before) == 0 && !(before.sa_flags & SA_SIGINFO) &&
            before.sa_handler == SIG_DFL) {
            sigaction(SIGNALS[at], &after, NULL);
        }
    }
}

/* Arguments: the folder for the file of a crash, its name, and two code objects. */
static PyObject *
write_crashes(PyObject *module, PyObject *arguments)
{
    (void)module;
    const char *into, *name;
    PyObject *one, *other;
    if (!PyArg_ParseTuple(arguments, "yyOO", &into, &name, &one, &other)) {
        return NULL;
    }
    process = getpid();
    if (strlen(into) < sizeof folder && strlen(name) < sizeof file_name) {
        strcpy(file_name, name);
        strcpy(folder, into);
        is_found = find_layout(one, other);
    }
    Py_RETURN_NONE;
}

PyMethodDef haiprof_crash_functions[] = {
    {"write_crashes", write_crashes, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
