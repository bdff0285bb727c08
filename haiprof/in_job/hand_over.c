/* Lets the training thread hand the interpreter lock over at a sample's time.
 *
 * A thread that waits for the lock gets it where the training thread lets go of it for long. That is
 * seldom the code that runs when a sample is due: operators let go for microseconds, in which
 * nobody else wakes up, and each of them begins the 5 ms anew after which CPython would switch by
 * itself. So samples of a loop over small operators all fall on the next long operator or sleep.
 *
 * Here the sampling thread sleeps without the lock, and then asks the main thread, by a pending
 * call, to let go of it between two bytecodes: where CPython switches threads anyway, and without
 * a line of Python there. From CPython 3.13 on that is at once. Before, a call that another thread
 * has added is seen when the main thread takes the lock again (COMPUTE_EVAL_BREAKER, ceval.c):
 * after the next operator, however short, or else after the 5 ms.
 * No header of Python is needed: the three functions are of its stable ABI, and their addresses are
 * given. So one build serves every interpreter.
 *
 * It also sees, before it asks, whether the main thread itself waits for the lock, which only
 * another thread of Python's can hold: it sleeps on a futex inside `_PyRuntime`, where CPython keeps
 * the lock of the main interpreter, and no lock of a program's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 50000000L   /* so soon a sleep ends after stop */
#define SPIN_NS 40000L       /* where another core is free, the sampling thread is there by then */
#define GIVE_UP_NS 10000000L /* longer the main thread does not wait for it: cores are scarce */
#define EXPORTED __attribute__((visibility("default")))

typedef void *(*save_function)(void);
typedef void (*restore_function)(void *);
typedef int (*add_function)(int (*)(void *), void *);
typedef int (*symbol_function)(const void *, Dl_info *, void **, int);

static save_function save_thread;
static restore_function restore_thread;
static add_function add_pending_call;
static sem_t taken;
static atomic_int wanted;  /* a sample is due and not taken */
static atomic_int queued;  /* the pending call is not made yet: the queue is the job's, too */
EXPORTED atomic_int haiprof_stopped;
EXPORTED atomic_llong haiprof_held_ns;  /* how long the main thread was held up, in all */
EXPORTED atomic_int haiprof_lock_wait;  /* it waited for the lock when the sample was due; -1: not known */
static unsigned long runtime_begin, runtime_end;

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* On the main thread, between two bytecodes, with the lock. It raises nothing and handles no signal. */
static int hand_over(void *unused) {
    (void)unused;
    atomic_store(&queued, 0);
    if (!atomic_load(&wanted)) return 0;
    void *state = save_thread();
    long long began = now_ns();
    while (atomic_load(&wanted) && now_ns() < began + SPIN_NS) continue;
    if (atomic_load(&wanted)) {  /* no yield: that would give the core to any other process */
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += GIVE_UP_NS - SPIN_NS;
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
        sem_timedwait(&taken, &until);
    }
    restore_thread(state);
    atomic_fetch_add(&haiprof_held_ns, now_ns() - began);
    return 0;
}

EXPORTED void haiprof_prepare(void *save, void *restore, void *add) {
    save_thread = (save_function)save;
    restore_thread = (restore_function)restore;
    add_pending_call = (add_function)add;
    sem_init(&taken, 0, 0);
    atomic_store(&wanted, 0);
    atomic_store(&queued, 0);
    atomic_store(&haiprof_stopped, 0);
    atomic_store(&haiprof_lock_wait, -1);
}

/* Where `_PyRuntime` begins and ends; without that, whether the lock is waited for is not known. */
EXPORTED void haiprof_find_lock(void *runtime, void *find_symbol) {
    Dl_info info;
    const ElfW(Sym) *symbol = 0;
    runtime_begin = runtime_end = 0;
    if (!((symbol_function)find_symbol)(runtime, &info, (void **)&symbol, RTLD_DL_SYMENT)) return;
    if (!symbol || info.dli_saddr != runtime) return;
    runtime_begin = (unsigned long)runtime;
    runtime_end = runtime_begin + symbol->st_size;
}

/* /proc/self is the main thread: "running", or the number of its call, and then the arguments. */
static int waits_for_lock(void) {
    char text[256];
    long number = 0;
    unsigned long address = 0;
    if (runtime_begin == runtime_end) return -1;
    struct stat opened, closed;
    int file = open("/proc/self/syscall", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    int known = fstat(file, &opened);
    /* Should the job close all descriptors meanwhile, and this number be its own file's now: pread
     * leaves that where it was, and it is not closed. */
    ssize_t size = pread(file, text, sizeof text - 1, 0);
    int is_ours = known == 0 && fstat(file, &closed) == 0 && closed.st_dev == opened.st_dev &&
                  closed.st_ino == opened.st_ino;
    if (is_ours) close(file);
    if (!is_ours || size <= 0) return -1;
    text[size] = 0;
    if (strncmp(text, "running", 7) == 0) return 0;
    if (sscanf(text, "%ld 0x%lx", &number, &address) != 2) return -1;
    return number == SYS_futex && address >= runtime_begin && address < runtime_end;
}

/* Sleeps until a time and asks for the lock; returns 0 once stopped. Called without the lock. */
EXPORTED int haiprof_wait(long long due_ns) {
    for (;;) {
        long long left = due_ns - now_ns();
        if (atomic_load(&haiprof_stopped)) return 0;
        if (left <= 0) break;
        if (left > SLICE_NS) left = SLICE_NS;
        struct timespec pause = {0, left};
        nanosleep(&pause, 0);
    }
    atomic_store(&haiprof_lock_wait, waits_for_lock());
    while (sem_trywait(&taken) == 0) continue;
    atomic_store(&wanted, 1);
    if (!atomic_exchange(&queued, 1) && add_pending_call(hand_over, 0) != 0)
        atomic_store(&queued, 0);
    return 1;
}

/* The sample is taken. Called with the lock. */
EXPORTED void haiprof_over(void) {
    atomic_store(&wanted, 0);
    sem_post(&taken);
}
