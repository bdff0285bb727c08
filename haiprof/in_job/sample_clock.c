/* Waits for the times of samples, and has each one taken where that costs the training least.
 *
 * Who reads the main thread's stack must hold the interpreter lock. A thread that waits for it gets
 * it where the main thread lets go of it for long. That is seldom the code that runs when a sample
 * is due: operators let go for microseconds, in which nobody else wakes up, and each of them begins
 * the 5 ms anew after which CPython would switch by itself. So all samples of a loop over small
 * operators would fall on the next long operator or sleep. When a sample is due, the lock is
 *
 *  - free: the main thread is in an operator, a sleep, a read. The sampling thread takes the lock,
 *    for which it need not wait, and the sample.
 *  - the main thread's: it runs Python, or C that keeps the lock. It takes the sample itself, in a
 *    pending call: between two bytecodes, where CPython would switch threads, and without a line of
 *    Python. No thread wakes up for that. Where it was when the sample was due, the sampling thread
 *    has read before (running_place.c). From CPython 3.13 on that is at once. Before, a call that
 *    another thread adds is seen when the main thread takes the lock again, after the next operator
 *    (COMPUTE_EVAL_BREAKER in ceval.c): the flag that has it look, the eval breaker, is set here.
 *  - another thread's: the kernel says whether the main thread waits for it: it sleeps on a futex
 *    inside `_PyRuntime` then, where CPython keeps the lock of the main interpreter, and no lock of
 *    a program's. It takes the sample when it has the lock: a third thread that waits for that would
 *    hold it up. Some times a second the sampling thread does, and looks at all threads.
 *
 * Who holds the lock stands in three words of `_PyRuntime`: the switch interval, the last holder,
 * whether it is held. They have been in this order since CPython 3.2; where they are is found once,
 * by their values, on the main thread that holds the lock. Where they are not found exactly once,
 * and where another thread than the main one is sampled, who looks waits as any thread does.
 *
 * Whether the thread is on a core, its CPU clock says: read twice, it has gone on. Where it has not,
 * /proc/self/task/N/syscall names the call that it sleeps in. Both, and the time that it waited for
 * a core (schedstat), need no right that a process lacks for itself, and no interpreter lock.
 */
#define _GNU_SOURCE
#include "sampling.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_WAITING 100 /* samples that fall due while the main thread keeps the lock */
#define STATE_BYTES 2048 /* of the interpreter's state: the eval breaker is near its beginning */
#define HIGH_DESCRIPTOR 960 /* as base/descriptors.py: the kernel gives such numbers out last */
#define BUSY_PART 8 /* who was off its cores for less than 1/8 of the time waited for none */
#define QUEUE_EVERY_NS 40000000
#define MOST_BEHIND_NS 1000000000

/* Where CPython keeps its lock (struct _gil_runtime_state). */
typedef struct {
    unsigned long interval;
    void *_Atomic last_holder;
    atomic_int locked;
} Lock;

static unsigned long runtime_begin, runtime_end;
static Lock *lock;          /* NULL where it was not found */
static PyThreadState *main_thread;
static unsigned long switch_interval;
static int sets_breaker;
static atomic_int *breaker; /* NULL where it is not needed, or was not found */
static atomic_int is_prepared;
/* The pending call is not over yet: the queue is the job's, too. Set by the sampling thread, and
 * cleared by the main thread. */
static atomic_int queued;
static struct {
    Moment moment;
    Place places[MOST_PLACES];
    int place_count;
} waiting[MOST_WAITING]; /* how the thread stood when the samples that it takes were due */
static atomic_int waiting_count;
static atomic_int stopped;
static atomic_llong held_ns; /* how long the main thread took samples, in all */
static atomic_llong lock_ns; /* and stood still while the sampling thread held the lock for them */

/* The thread that is sampled, as the kernel knows it. */
typedef struct {
    int descriptor;
    struct stat identity;
} File;
static File no_file = {.descriptor = -1}, calls = {.descriptor = -1}, schedule = {.descriptor = -1};
static long task;
static long long due_ns;
static long long seen_ns, cpu_ns;    /* of the sample before; -1: not known */
static long long asked_ns, queue_ns; /* when it was last asked how long it waited for a core */
static uint32_t random_state;

static long long
read_clock(clockid_t clock)
{
    struct timespec time;
    return clock_gettime(clock, &time) ? -1 : time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int
do_nothing(void *unused)
{
    (void)unused;
    return 0;
}

/* Where `_PyRuntime` begins and ends; 0 where that is not known. */
static int
find_runtime(void)
{
    runtime_begin = runtime_end = 0;
#ifdef __GLIBC__
    Dl_info info;
    const ElfW(Sym) *symbol = NULL;
    const void *runtime = dlsym(RTLD_DEFAULT, "_PyRuntime");
    if (runtime && dladdr1(runtime, &info, (void **)&symbol, RTLD_DL_SYMENT) && symbol &&
        info.dli_saddr == runtime) {
        runtime_begin = (unsigned long)runtime;
        runtime_end = runtime_begin + symbol->st_size;
    }
#endif
    return runtime_end != 0;
}

int
haiprof_is_in_runtime(const void *address)
{
    return (unsigned long)address >= runtime_begin && (unsigned long)address < runtime_end;
}

/* The lock, by what it holds now; NULL where not exactly one place holds that. */
static Lock *
find_lock(void)
{
    Lock *found = NULL;
    for (unsigned long at = runtime_begin; at + sizeof(Lock) <= runtime_end; at += sizeof(void *)) {
        Lock *here = (Lock *)at;
        if (here->interval != switch_interval || here->last_holder != main_thread ||
            here->locked != 1) {
            continue;
        }
        if (found != NULL) {
            return NULL;
        }
        found = here;
    }
    return found;
}

/* The eval breaker: the first word of the interpreter's state that a pending call sets. */
static atomic_int *
find_breaker(void)
{
    static int before[STATE_BYTES / sizeof(int)];
    int *state = (int *)PyInterpreterState_Get();
    memcpy(before, state, sizeof before);
    if (Py_AddPendingCall(do_nothing, NULL) != 0) {
        return NULL;
    }
    for (unsigned at = 0; at < STATE_BYTES / sizeof(int); at++) {
        int now = *(volatile int *)(state + at);
        if (now != before[at]) {
            return before[at] == 0 && now == 1 ? (atomic_int *)(state + at) : NULL;
        }
    }
    return NULL;
}

/* On the main thread, between two bytecodes, with the lock. */
static int
prepare_on_main(void *unused)
{
    (void)unused;
    main_thread = PyThreadState_Get();
    lock = find_runtime() ? find_lock() : NULL;
    breaker = lock != NULL && sets_breaker ? find_breaker() : NULL;
    haiprof_knows_places(main_thread);
    haiprof_watch_crashes();
    atomic_store(&is_prepared, 1);
    return 0;
}

/* Arguments: the switch interval in us, whether a pending call has to be made seen. */
static PyObject *
prepare(PyObject *module, PyObject *arguments)
{
    (void)module;
    if (!PyArg_ParseTuple(arguments, "kp", &switch_interval, &sets_breaker)) {
        return NULL;
    }
    lock = NULL;
    breaker = NULL;
    task = 0;
    due_ns = 0;
    random_state = (uint32_t)getpid();
    haiprof_forget_places();
    atomic_store(&is_prepared, 0);
    atomic_store(&queued, 0);
    atomic_store(&stopped, 0);
    Py_AddPendingCall(prepare_on_main, NULL);
    Py_RETURN_NONE;
}

/* On the main thread, between two bytecodes, with the lock. It raises nothing, handles no signal. */
static int
take_own(void *unused)
{
    (void)unused;
    long long began = read_clock(CLOCK_MONOTONIC);
    int count = atomic_load(&stopped) ? 0 : atomic_load(&waiting_count);
    int is_true = count && haiprof_knows_places(main_thread);
    for (int at = 0; at < count; at++) {
        haiprof_take_sample(main_thread, 0, &waiting[at].moment, waiting[at].places,
                            is_true ? waiting[at].place_count : 0);
    }
    atomic_fetch_add(&held_ns, read_clock(CLOCK_MONOTONIC) - began);
    atomic_store(&queued, 0);
    return 0;
}

/* Asks the main thread for a sample; what falls due before it comes counts as many times. */
static void
ask(const Moment *moment, const Place *places, int place_count)
{
    int count = atomic_load(&queued) ? atomic_load(&waiting_count) : 0;
    if (count == MOST_WAITING) {
        return;
    }
    waiting[count].moment = *moment;
    memcpy(waiting[count].places, places, place_count * sizeof *places);
    waiting[count].place_count = place_count;
    atomic_store(&waiting_count, count + 1);
    if (count == 0) {
        atomic_store(&queued, 1);
        if (Py_AddPendingCall(take_own, NULL) != 0) {
            atomic_store(&queued, 0);
        } else if (breaker != NULL) {
            atomic_store(breaker, 1);
        }
    }
}

/* Should the job close all descriptors, our number may be its own file's now: each time before one
 * is used it is compared, pread leaves a file where it was, and only ours is closed. */
static int
is_ours(const File *file)
{
    struct stat now;
    return file->descriptor >= 0 && fstat(file->descriptor, &now) == 0 &&
        now.st_dev == file->identity.st_dev && now.st_ino == file->identity.st_ino;
}

static void
close_file(File *file)
{
    if (is_ours(file)) {
        close(file->descriptor);
    }
    *file = no_file;
}

static void
open_file(File *file, const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%ld/%s", task, name);
    int low = open(path, O_RDONLY | O_CLOEXEC);
    if (low < 0) {
        return;
    }
    long most = sysconf(_SC_OPEN_MAX);
    int high = fcntl(low, F_DUPFD_CLOEXEC, most > HIGH_DESCRIPTOR + 8 ? HIGH_DESCRIPTOR : 3);
    if (high >= 0) {
        close(low);
    }
    file->descriptor = high >= 0 ? high : low;
    fstat(file->descriptor, &file->identity);
}

static int
read_file(File *file, char *text, size_t room)
{
    ssize_t size = is_ours(file) ? pread(file->descriptor, text, room - 1, 0) : -1;
    text[size > 0 ? size : 0] = 0;
    return size > 0;
}

/* What a descriptor is. It is not asked of a server, which may hang. */
static int
wait_for_descriptor(unsigned long number)
{
    struct statx found;
    if (syscall(SYS_statx, (int)number, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE,
                &found) != 0) {
        return WAITS_OTHER;
    }
    switch (found.stx_mode & S_IFMT) {
    case S_IFREG:
    case S_IFDIR:
    case S_IFBLK:
        return WAITS_FILE;
    case S_IFSOCK:
        return WAITS_SOCKET;
    case S_IFIFO:
        return WAITS_PIPE;
    default:
        return WAITS_OTHER;
    }
}

/* Who polls one descriptor waits for that: a read with a time limit begins so. */
static int
wait_for_poll(unsigned long address, unsigned long count)
{
    struct pollfd polled;
    struct iovec own = {&polled, sizeof polled}, theirs = {(void *)address, sizeof polled};
    if (count != 1 || process_vm_readv(getpid(), &own, 1, &theirs, 1, 0) != sizeof polled) {
        return count == 0 ? WAITS_SLEEP : WAITS_POLL;
    }
    int found = wait_for_descriptor((unsigned long)polled.fd);
    return found == WAITS_OTHER ? WAITS_POLL : found;
}

static const struct {
    int wait;
    short calls[28];
} waits[] = {
    {WAITS_LOCK, {SYS_futex, SYS_flock}},
    {WAITS_SLEEP, {SYS_nanosleep, SYS_clock_nanosleep}},
    {WAITS_SOCKET, {SYS_connect, SYS_accept, SYS_accept4, SYS_recvfrom, SYS_recvmsg, SYS_recvmmsg,
                   SYS_sendto, SYS_sendmsg, SYS_sendmmsg}},
    {WAITS_POLL, {SYS_epoll_pwait,
#ifdef SYS_epoll_wait
                 SYS_epoll_wait,
#endif
    }},
    {WAITS_FILE, {SYS_fsync, SYS_fdatasync, SYS_sync, SYS_syncfs, SYS_sync_file_range, SYS_msync,
                 SYS_openat, SYS_statx, SYS_newfstatat, SYS_faccessat, SYS_getdents64, SYS_unlinkat,
                 SYS_renameat2, SYS_mkdirat, SYS_ftruncate, SYS_fallocate, SYS_readahead,
                 SYS_readlinkat, SYS_copy_file_range,
#ifdef SYS_open
                 SYS_open, SYS_stat, SYS_lstat, SYS_access, SYS_unlink, SYS_rename, SYS_mkdir,
                 SYS_readlink,
#endif
    }},
};

/* What a thread waits for in a call of the kernel, by its number and first arguments. */
static int
wait_for_call(long number, unsigned long first, unsigned long second)
{
    switch (number) {
    case SYS_read: case SYS_pread64: case SYS_readv: case SYS_preadv: case SYS_preadv2:
    case SYS_write: case SYS_pwrite64: case SYS_writev: case SYS_pwritev: case SYS_pwritev2:
    case SYS_close: case SYS_sendfile: case SYS_splice:
        return wait_for_descriptor(first);
    case -1:
        return WAITS_FAULT; /* it sleeps, and in no call */
#ifdef SYS_poll
    case SYS_poll:
#endif
    case SYS_ppoll:
        return wait_for_poll(first, second);
#ifdef SYS_select
    case SYS_select:
#endif
    case SYS_pselect6:
        return first == 0 ? WAITS_SLEEP : WAITS_POLL;
    default:
        break;
    }
    for (unsigned kind = 0; kind < sizeof waits / sizeof *waits; kind++) {
        const short *call = waits[kind].calls;
        for (int at = 0; at == 0 || (call[at] && at < 28); at++) {
            if (call[at] == number) {
                return waits[kind].wait;
            }
        }
    }
    return WAITS_OTHER;
}

/* What a thread that is on no core waits for, and whether that is the interpreter lock. */
static void
read_wait(Moment *moment)
{
    char text[256];
    long number = 0;
    unsigned long first = 0, second = 0;
    if (!read_file(&calls, text, sizeof text)) {
        return;
    }
    if (strncmp(text, "running", 7) == 0) {
        moment->wait = WAITS_NONE; /* or it is ready to run: this thread may have its core */
        moment->lock_state = LOCK_ELSEWHERE;
    } else if (sscanf(text, "%ld 0x%lx 0x%lx", &number, &first, &second) >= 1) {
        int is_lock = number == SYS_futex && first >= runtime_begin && first < runtime_end;
        moment->lock_state = is_lock ? LOCK_WAITED_FOR : LOCK_ELSEWHERE;
        moment->wait = wait_for_call(number, first, second);
    }
}

static clockid_t
clock_of(long thread)
{
    return (clockid_t)(~(unsigned)thread << 3 | 6); /* CPUCLOCK_SCHED of one thread */
}

/* How the thread stands now; `lock_state` is for the case that another thread holds the lock. */
static Moment
look(long thread, int holds_lock)
{
    Moment moment = {due_ns, -1, -1, LOCK_UNKNOWN, WAITS_UNKNOWN};
    if (thread != task) {
        close_file(&calls);
        close_file(&schedule);
        task = thread;
        seen_ns = cpu_ns = asked_ns = queue_ns = -1;
        if (task) {
            open_file(&calls, "syscall");
            open_file(&schedule, "schedstat");
        }
    }
    if (!task) {
        return moment;
    }
    clockid_t clock = clock_of(task);
    long long cpu = read_clock(clock), now = read_clock(CLOCK_MONOTONIC), passed = now - seen_ns;
    long long used = cpu < 0 || cpu_ns < 0 ? -1 : cpu - cpu_ns;
    if ((holds_lock && used > passed / 2) || (cpu >= 0 && read_clock(clock) > cpu)) {
        moment.wait = WAITS_NONE;
        moment.lock_state = LOCK_ELSEWHERE;
    } else {
        read_wait(&moment);
    }
    if (used < passed - passed / BUSY_PART && now - asked_ns >= QUEUE_EVERY_NS) {
        char text[96];
        long long queue = -1;
        if (read_file(&schedule, text, sizeof text)) {
            sscanf(text, "%*u %lld", &queue);
        }
        moment.queue_ns = queue < 0 || queue_ns < 0 ? -1 : queue - queue_ns;
        queue_ns = queue;
        asked_ns = now;
    }
    moment.cpu_ns = used;
    cpu_ns = cpu;
    seen_ns = now;
    return moment;
}

static int
sleep_until(long long due)
{
    for (;;) {
        if (atomic_load(&stopped)) {
            return 0;
        }
        long long left = due - read_clock(CLOCK_MONOTONIC);
        if (left <= 0) {
            return 1;
        }
        struct timespec pause = {left / 1000000000, left % 1000000000};
        syscall(SYS_futex, &stopped, FUTEX_WAIT_PRIVATE, 0, &pause, NULL, 0);
    }
}

/* The next time: uneven, so that samples do not keep pace with the steps of the job. It counts from
 * the time before, however late that sample came: else there would be fewer while cores are busy. */
static void
set_due(long long pause)
{
    long long now = read_clock(CLOCK_MONOTONIC);
    if (due_ns < now - MOST_BEHIND_NS) {
        due_ns = now; /* the first one, or it was stopped */
    }
    random_state = random_state * 1103515245u + 12345u;
    due_ns += pause / 2 + (long long)((double)pause * (random_state >> 1) / 0x80000000u);
}

/* Takes samples as they fall due, or has them taken.
 *
 * Arguments: ident of the thread; whether it is the main one; its number in the kernel, or 0; mean
 * ns between two samples; until when at least; from when on to return where the thread waits for
 * the lock. Returns how many were due; None once stopped. */
static PyObject *
sample(PyObject *module, PyObject *arguments)
{
    (void)module;
    unsigned long ident;
    int is_first;
    long number;
    long long pause, ends, returns;
    if (!PyArg_ParseTuple(arguments, "kplLLL", &ident, &is_first, &number, &pause, &ends,
                          &returns)) {
        return NULL;
    }
    int goes_on = 1, is_known;
    long count = 0;
    if (is_first) {
        haiprof_find_places();
    }
    PyThreadState *own = PyEval_SaveThread();
    while (goes_on) {
        if (due_ns == 0) {
            set_due(pause);
        }
        goes_on = sleep_until(due_ns);
        if (!goes_on) {
            break;
        }
        is_known = is_first && atomic_load(&is_prepared);
        int is_held = is_known && lock != NULL && atomic_load(&lock->locked) > 0;
        int is_main = is_held && atomic_load(&lock->last_holder) == main_thread;
        Place places[MOST_PLACES];
        int place_count = is_main ? haiprof_read_places(main_thread, places) : 0;
        Moment moment = look(number, is_main);
        if (due_ns >= ends) {
            goes_on = 0;
        }
        set_due(pause);
        if (!is_known || lock == NULL) {
            moment.lock_state = LOCK_UNKNOWN;
        } else if (is_main) {
            moment.lock_state = LOCK_HELD;
        } else if (!is_held) {
            moment.lock_state = LOCK_ELSEWHERE;
        }
        int is_waiting = moment.lock_state == LOCK_WAITED_FOR;
        if (is_waiting) {
            place_count = haiprof_read_places(main_thread, places);
        }
        if (is_main || is_waiting) {
            ask(&moment, places, place_count);
            count++;
            if (is_waiting && read_clock(CLOCK_MONOTONIC) >= returns) {
                break; /* others are looked at once this thread has the lock, as they are then */
            }
            continue;
        }
        if (due_ns <= read_clock(CLOCK_MONOTONIC)) {
            continue; /* it had no core, or was stopped: the next one tells as much */
        }
        count++;
        PyEval_RestoreThread(own);
        long long began = read_clock(CLOCK_MONOTONIC), ran = task ? read_clock(clock_of(task)) : 0;
        if (moment.wait != WAITS_NONE && ran > cpu_ns) {
            moment.wait = WAITS_UNKNOWN; /* it has gone on: its stack is another one by now */
        }
        if (!atomic_load(&stopped)) {
            haiprof_take_sample(is_known ? main_thread : NULL, ident, &moment, NULL, 0);
        }
        /* Who computes meanwhile, as in an operator, did not wait for the lock. */
        long long took = read_clock(CLOCK_MONOTONIC) - began;
        took -= task && ran >= 0 ? read_clock(clock_of(task)) - ran : 0;
        atomic_fetch_add(&lock_ns, took > 0 ? took : 0);
        own = PyEval_SaveThread();
    }
    int is_over = atomic_load(&stopped);
    if (is_over) {
        close_file(&calls);
        close_file(&schedule);
        task = 0;
    }
    PyEval_RestoreThread(own);
    if (is_over) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLong(count);
}

/* How long the main thread took samples so far, and stood still while the sampling thread held the
 * lock for them. */
static PyObject *
read_held_ns(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return Py_BuildValue("(LL)", atomic_load(&held_ns), atomic_load(&lock_ns));
}

/* Ends a wait at once; from any thread. */
static PyObject *
stop(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    atomic_store(&stopped, 1);
    syscall(SYS_futex, &stopped, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    Py_RETURN_NONE;
}

PyMethodDef haiprof_clock_functions[] = {
    {"prepare", prepare, METH_VARARGS, NULL},
    {"sample", sample, METH_VARARGS, NULL},
    {"held_ns", read_held_ns, METH_NOARGS, NULL},
    {"stop", stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
