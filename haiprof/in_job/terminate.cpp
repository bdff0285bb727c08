/* Writes down the C++ exception that ends this process, for in_job/terminate.py.
 *
 * An exception that no native code catches ends a process by std::terminate and SIGABRT: NCCL's
 * watchdog, gloo's checks, CUDA errors on threads of PyTorch. Its text goes to stderr alone, which is
 * the job's. Here a handler of our own writes type and text into the run directory and then calls the
 * handler that stood before it, which prints and aborts as it would have. Nothing is done before a
 * process ends that way. The file is written by a thread, which is waited for a second: a disk that
 * hangs does not hold the process. No header of Python is needed.
 */
#include <cxxabi.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <typeinfo>
#include <unistd.h>
#include <exception>

namespace {

constexpr size_t TEXT_BYTES = 4096;
constexpr time_t WAIT_S = 1;

std::terminate_handler before = nullptr;
char folder[4096];
char host[256];
struct Words {
    char content[TEXT_BYTES + 1024];
    size_t size;
    sem_t done;
} words; /* static: the writing thread may outlive the handler */

/* A line for each: Unix time, type, and then the text as it is. */
void describe()
{
    const char *type = "", *text = "terminate called without an active exception";
    char *readable = nullptr;
    std::exception_ptr exception = std::current_exception();
    if (exception) {
        text = "";
        try {
            std::rethrow_exception(exception);
        } catch (const std::exception &error) {
            type = typeid(error).name();
            text = error.what(); /* lives as long as `exception` does */
        } catch (const char *message) {
            type = "Pc";
            text = message;
        } catch (...) {
            const std::type_info *kind = abi::__cxa_current_exception_type();
            type = kind != nullptr ? kind->name() : "";
        }
        int status = 0;
        readable = abi::__cxa_demangle(type, nullptr, nullptr, &status);
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int written = snprintf(
        words.content, sizeof words.content, "%lld\n%.500s\n%.*s",
        now.tv_sec * 1000000000LL + now.tv_nsec, readable != nullptr ? readable : type,
        static_cast<int>(TEXT_BYTES), text != nullptr ? text : "");
    words.size = written > 0 ? static_cast<size_t>(written) : 0;
    if (words.size >= sizeof words.content) {
        words.size = sizeof words.content - 1;
    }
    free(readable);
}

/* Into a new file of a folder of ours; no link is followed, and nothing is written over. */
void *write_down(void *unused)
{
    if (mkdir(folder, 0700) == 0 || errno == EEXIST) {
        int place = open(folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        char name[300];
        snprintf(name, sizeof name, "%s-%d.terminate", host, static_cast<int>(getpid()));
        int file = place < 0 ? -1 : openat(
            place, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (file >= 0) {
            ssize_t count = write(file, words.content, words.size);
            (void)count; /* a short text is better than none */
            close(file);
        }
        if (place >= 0) {
            close(place);
        }
    }
    sem_post(&words.done);
    return unused;
}

[[noreturn]] void note_and_terminate()
{
    static bool entered = false; /* a second exception, in here or on another thread */
    if (!__atomic_exchange_n(&entered, true, __ATOMIC_SEQ_CST)) {
        describe();
        pthread_t thread;
        if (sem_init(&words.done, 0, 0) == 0 &&
            pthread_create(&thread, nullptr, write_down, nullptr) == 0) {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_sec += WAIT_S;
            while (sem_timedwait(&words.done, &until) != 0 && errno == EINTR) {
            }
        }
    }
    if (before != nullptr) {
        before();
    }
    abort();
}

} /* namespace */

/* From now on; 0 where it is so already, or names are too long. */
extern "C" __attribute__((visibility("default"))) int
haiprof_watch_terminate(const char *into, const char *name)
{
    if (before != nullptr || strlen(into) >= sizeof folder || strlen(name) >= sizeof host) {
        return 0;
    }
    strcpy(folder, into);
    strcpy(host, name);
    before = std::set_terminate(note_and_terminate);
    return 1;
}
