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
 *    Python. No thread wakes up for that. From CPython 3.13 on that is at once. Before, a call that
 *    another thread adds is seen when the main thread takes the lock again, after the next operator
 *    (COMPUTE_EVAL_BREAKER in ceval.c): the flag that has it look, the eval breaker, is set here.
 *  - another thread's: the kernel says whether the main thread waits for it: it sleeps on a futex
 *    inside `_PyRuntime` then, where CPython keeps the lock of the main interpreter, and no lock of
 *    a program's. Where it waits, the caller looks at all threads.
 *
 * Who holds the lock stands in three words of `_PyRuntime`: the switch interval, the last holder,
 * whether it is held. They have been in this order since CPython 3.2; where they are is found once,
 * by their values, on the main thread that holds the lock. Where they are not found exactly once,
 * the caller waits for the lock as any thread does.
 *
 * No header of Python is needed: the functions are of its stable ABI, and their addresses are given.
 * So one build serves every interpreter.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define MOST_WAITING 100  /* samples that fall due while the main thread keeps the lock */
#define STATE_BYTES 2048  /* of the interpreter's state: the eval breaker is near its beginning */

enum { LOCK_UNKNOWN = -1, LOCK_ELSEWHERE = 0, LOCK_WAITED_FOR = 1, LOCK_HELD = 2 };
enum { STOPPED = -1 };

/* Where CPython keeps its lock (struct _gil_runtime_state). */
typedef struct {
    unsigned long interval;
    void *_Atomic last_holder;
    atomic_int locked;
} Lock;

typedef struct {
    void *(*get_thread)(void);
    void *(*get_interpreter)(void);
    int (*ensure)(void);
    void (*release)(int);
    int (*add_pending_call)(int (*)(void *), void *);
    int (*find_symbol)(const void *, Dl_info *, void **, int);
    /* Notes the stack of a thread; of in_job/frames.c. Called with the lock. */
    void (*take)(void *thread, long long due_ns, int lock_state);
    void *runtime;
    unsigned long interval; /* us */
    long sets_breaker;
} Python;

static Python python;
static unsigned long runtime_begin, runtime_end;
static Lock *lock;            /* 0 where it was not found */
static void *main_thread;     /* its PyThreadState */
static atomic_int *breaker;   /* 0 where it is not needed, or was not found */
static atomic_int is_prepared;
/* The pending call is not over yet: the queue is the job's, too. Set by the sampling thread, and
 * cleared by the main thread. */
static atomic_int queued;
static long long waiting_ns[MOST_WAITING]; /* when the samples that it takes were due */
static atomic_int waiting_count;
EXPORTED atomic_int haiprof_stopped;
EXPORTED atomic_llong haiprof_held_ns;  /* how long the main thread took samples, in all */
EXPORTED atomic_int haiprof_lock_state; /* when the last sample was due that the caller takes */

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int do_nothing(void *unused) {
    (void)unused;
    return 0;
}

/* Where `_PyRuntime` begins and ends. */
static int find_runtime(void) {
    Dl_info info;
    const ElfW(Sym) *symbol = 0;
    runtime_begin = runtime_end = 0;
    if (!python.runtime || !python.find_symbol) return 0;
    if (!python.find_symbol(python.runtime, &info, (void **)&symbol, RTLD_DL_SYMENT)) return 0;
    if (!symbol || info.dli_saddr != python.runtime) return 0;
    runtime_begin = (unsigned long)python.runtime;
    runtime_end = runtime_begin + symbol->st_size;
    return 1;
}

/* The lock, by what it holds now; 0 where not exactly one place holds that. */
static Lock *find_lock(void) {
    Lock *found = 0;
    for (unsigned long at = runtime_begin; at + sizeof(Lock) <= runtime_end; at += sizeof(void *)) {
        Lock *here = (Lock *)at;
        if (here->interval != python.interval || here->last_holder != main_thread ||
            here->locked != 1)
            continue;
        if (found) return 0;
        found = here;
    }
    return found;
}

/* The eval breaker: the first word of the interpreter's state that a pending call sets. */
static atomic_int *find_breaker(void) {
    static int before[STATE_BYTES / sizeof(int)];
    int *state = python.get_interpreter ? python.get_interpreter() : 0;
    if (!state) return 0;
    memcpy(before, state, sizeof before);
    if (python.add_pending_call(do_nothing, 0) != 0) return 0;
    for (unsigned at = 0; at < STATE_BYTES / sizeof(int); at++) {
        int now = *(volatile int *)(state + at);
        if (now == before[at]) continue;
        return before[at] == 0 && now == 1 ? (atomic_int *)(state + at) : 0;
    }
    return 0;
}

/* On the main thread, between two bytecodes, with the lock. */
static int prepare_on_main(void *unused) {
    (void)unused;
    main_thread = python.get_thread();
    lock = find_runtime() ? find_lock() : 0;
    breaker = lock && python.sets_breaker ? find_breaker() : 0;
    atomic_store(&is_prepared, 1);
    return 0;
}

EXPORTED void haiprof_prepare(const Python *given) {
    python = *given;
    lock = 0;
    breaker = 0;
    atomic_store(&is_prepared, 0);
    atomic_store(&queued, 0);
    atomic_store(&haiprof_stopped, 0);
    atomic_store(&haiprof_lock_state, LOCK_UNKNOWN);
    python.add_pending_call(prepare_on_main, 0);
}

/* On the main thread, between two bytecodes, with the lock. It raises nothing, handles no signal. */
static int take_own(void *unused) {
    (void)unused;
    long long began = now_ns();
    int count = atomic_load(&haiprof_stopped) ? 0 : atomic_load(&waiting_count);
    for (int at = 0; at < count; at++) python.take(main_thread, waiting_ns[at], LOCK_HELD);
    atomic_fetch_add(&haiprof_held_ns, now_ns() - began);
    atomic_store(&queued, 0);
    return 0;
}

/* Asks the main thread for a sample; what falls due before it comes counts as many times. */
static void ask(long long due) {
    if (atomic_load(&queued)) {
        int count = atomic_load(&waiting_count);
        if (count < MOST_WAITING) {
            waiting_ns[count] = due;
            atomic_store(&waiting_count, count + 1);
        }
        return;
    }
    waiting_ns[0] = due;
    atomic_store(&waiting_count, 1);
    atomic_store(&queued, 1);
    if (python.add_pending_call(take_own, 0) != 0) atomic_store(&queued, 0);
    else if (breaker) atomic_store(breaker, 1);
}

/* /proc/self is the main thread: "running", or the number of its call, and then the arguments. */
static int waits_for_lock(void) {
    char text[256];
    long number = 0;
    unsigned long address = 0;
    struct stat opened, closed;
    int file = open("/proc/self/syscall", O_RDONLY | O_CLOEXEC);
    if (file < 0) return LOCK_UNKNOWN;
    int known = fstat(file, &opened);
    /* Should the job close all descriptors meanwhile, and this number be its own file's now: pread
     * leaves that where it was, and it is not closed. */
    ssize_t size = pread(file, text, sizeof text - 1, 0);
    int is_ours = known == 0 && fstat(file, &closed) == 0 && closed.st_dev == opened.st_dev &&
                  closed.st_ino == opened.st_ino;
    if (is_ours) close(file);
    if (!is_ours || size <= 0) return LOCK_UNKNOWN;
    text[size] = 0;
    if (strncmp(text, "running", 7) == 0) return LOCK_ELSEWHERE;
    if (sscanf(text, "%ld 0x%lx", &number, &address) != 2) return LOCK_UNKNOWN;
    int waits = number == SYS_futex && address >= runtime_begin && address < runtime_end;
    return waits ? LOCK_WAITED_FOR : LOCK_ELSEWHERE;
}

static int sleep_until(long long due) {
    for (;;) {
        if (atomic_load(&haiprof_stopped)) return 0;
        long long left = due - now_ns();
        if (left <= 0) return 1;
        struct timespec pause = {left / 1000000000, left % 1000000000};
        syscall(SYS_futex, &haiprof_stopped, FUTEX_WAIT_PRIVATE, 0, &pause, 0, 0);
    }
}

/* Takes samples as they fall due, or has them taken. Called without the lock.
 *
 * Returns how many are over; -1 once stopped. Where not all are, the caller takes the next one,
 * and looks at all threads: the main thread waits for another one, or nothing is known of it. */
EXPORTED int haiprof_take_samples(const long long *due, int count) {
    for (int at = 0; at < count; at++) {
        if (!sleep_until(due[at])) return STOPPED;
        int is_held = lock && atomic_load(&lock->locked) > 0;
        int is_main = is_held && atomic_load(&lock->last_holder) == main_thread;
        if (is_main) {
            ask(due[at]);
            continue;
        }
        if (at + 1 < count && due[at + 1] <= now_ns()) continue; /* it had no core, or was stopped */
        int state = !atomic_load(&is_prepared) || !lock ? LOCK_UNKNOWN : LOCK_ELSEWHERE;
        if (is_held) state = waits_for_lock();
        if (state != LOCK_ELSEWHERE) {
            atomic_store(&haiprof_lock_state, state);
            return at;
        }
        int before = python.ensure();
        if (!atomic_load(&haiprof_stopped)) python.take(main_thread, due[at], state);
        python.release(before);
    }
    return count;
}

/* Ends a wait at once; from any thread. */
EXPORTED void haiprof_stop(void) {
    atomic_store(&haiprof_stopped, 1);
    syscall(SYS_futex, &haiprof_stopped, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}
