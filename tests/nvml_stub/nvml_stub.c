/* A small libnvidia-ml.so.1 of our own: GPUs whose counters follow the clock.
 *
 * Written from the public nvml.h documentation; it holds what haiprof calls, and no more. The
 * environment says how it behaves:
 *   STUB_GPUS=n           how many GPUs (1)
 *   STUB_DRIVER=version   the driver's version (580.159.04)
 *   STUB_SLOW_US=n        every utilisation call takes that long
 *   STUB_LOST_AFTER=n     GPU 0 is lost after so many utilisation calls
 *   STUB_MIG=1            MIG is on
 *   STUB_GPM=denied|none  GPM samples are refused, or not of this GPU
 *   STUB_XID=code         one XID error of the last GPU
 *   STUB_NO_MEMORY_V2=1   as a driver without nvmlDeviceGetMemoryInfo_v2: it is refused as not found
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, TIMEOUT = 10,
       FUNCTION_NOT_FOUND = 13, LOST = 15 };

typedef struct { unsigned index; unsigned utilization_calls; } Gpu;
typedef struct { unsigned field, scope; long long timestamp, latency; int type, result;
                 union { double d; unsigned u; unsigned long long ull; } value; } FieldValue;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned gpu; double seconds; } Sample;
typedef struct { unsigned id; int result; double value; char *names[3]; } Metric;
typedef struct { unsigned version, count; Sample *first, *second; Metric metrics[]; } MetricsGet;
typedef struct { Gpu *gpu; unsigned long long type, data; unsigned gi, ci; } Event;

static Gpu gpus[16];
static int users, registered, events_sent;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int is(const char *name, const char *word) {
    const char *text = getenv(name);
    return text && !strcmp(text, word);
}

static int check(const Gpu *gpu) {
    int lost_after = number("STUB_LOST_AFTER", -1);
    if (!users) return UNINITIALIZED;
    if (lost_after >= 0 && gpu->index == 0 && (int)gpu->utilization_calls > lost_after) return LOST;
    return OK;
}

#define CHECKED(gpu) do { int result = check(gpu); if (result) return result; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; users++; return OK; }
int nvmlShutdown(void) { if (!users) return UNINITIALIZED; users--; return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "some error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    const char *version = getenv("STUB_DRIVER");
    snprintf(text, size, "%s", version ? version : "580.159.04");
    return users ? OK : UNINITIALIZED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = number("STUB_GPUS", 1);
    return users ? OK : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    gpus[index].index = index;
    *gpu = &gpus[index];
    return check(*gpu);
}

int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size) {
    snprintf(text, size, "GPU-00000000-0000-0000-0000-%012u", gpu->index);
    return check(gpu);
}

int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size) {
    snprintf(text, size, "NVIDIA Stub");
    return check(gpu);
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0x1A + gpu->index);
    return check(gpu);
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *pending) {
    *now = *pending = number("STUB_MIG", 0);
    return check(gpu);
}

int nvmlDeviceGetArchitecture(Gpu *gpu, unsigned *architecture) {
    *architecture = 9;
    return check(gpu);
}

int nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned rates[2]) {
    usleep(number("STUB_SLOW_US", 0));
    gpu->utilization_calls++;
    CHECKED(gpu);
    if (number("STUB_MIG", 0)) return NOT_SUPPORTED;
    rates[0] = 40 + gpu->index;
    rates[1] = 7;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, MemoryV2 *memory) {
    CHECKED(gpu);
    if (number("STUB_NO_MEMORY_V2", 0)) return FUNCTION_NOT_FOUND;
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memory->total = 80ull << 30;
    memory->reserved = 1ull << 30;
    memory->used = 5ull << 30;
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) {
    CHECKED(gpu);
    memory->total = 80ull << 30;
    memory->used = 6ull << 30;
    memory->free = memory->total - memory->used;
    return OK;
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts) { *milliwatts = 500000; return check(gpu); }
int nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, unsigned *limit) { *limit = 700000; return check(gpu); }

int nvmlDeviceGetClockInfo(Gpu *gpu, int kind, unsigned *megahertz) {
    *megahertz = kind == 1 ? 1755 : 2619;
    return check(gpu);
}

int nvmlDeviceGetMaxClockInfo(Gpu *gpu, int kind, unsigned *megahertz) {
    *megahertz = kind == 1 ? 1980 : 2619;
    return check(gpu);
}

int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *celsius) {
    *celsius = 50 + sensor;
    return check(gpu);
}

int nvmlDeviceGetTemperatureThreshold(Gpu *gpu, int which, unsigned *celsius) {
    *celsius = 92 - which;
    return check(gpu);
}

int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, unsigned long long *bits) {
    *bits = 0x24;
    return check(gpu);
}

int nvmlDeviceGetCurrPcieLinkGeneration(Gpu *gpu, unsigned *value) { *value = 5; return check(gpu); }
int nvmlDeviceGetMaxPcieLinkGeneration(Gpu *gpu, unsigned *value) { *value = 5; return check(gpu); }
int nvmlDeviceGetCurrPcieLinkWidth(Gpu *gpu, unsigned *value) { *value = 16; return check(gpu); }
int nvmlDeviceGetMaxPcieLinkWidth(Gpu *gpu, unsigned *value) { *value = 16; return check(gpu); }

int nvmlDeviceGetFieldValues(Gpu *gpu, int count, FieldValue *values) {
    CHECKED(gpu);
    for (int at = 0; at < count; at++) {
        FieldValue *answer = &values[at];
        answer->result = OK;
        answer->type = 3;
        switch (answer->field) {
        case 83: answer->value.ull = (unsigned long long)(seconds() * 500000); break;
        case 186: answer->type = 1; answer->value.u = 510000; break;
        case 82: answer->type = 1; answer->value.u = 60; break;
        case 74: answer->value.ull = (unsigned long long)(seconds() * 1e9 / 4); break;
        case 75: case 76: case 77: case 79: case 269: case 270: case 271: answer->value.ull = 0; break;
        case 138: case 139:
            if (answer->scope != 0xFFFFFFFFu) { answer->result = INVALID; break; }
            answer->value.ull = (unsigned long long)(seconds() * 1048576 * (answer->field - 137));
            break;
        case 3: case 4: case 5: case 6: case 94: answer->value.ull = answer->field; break;
        default: answer->result = NOT_SUPPORTED;
        }
    }
    return OK;
}

int nvmlGpmQueryDeviceSupport(Gpu *gpu, unsigned support[2]) {
    support[1] = !is("STUB_GPM", "none");
    return check(gpu);
}

int nvmlGpmSampleAlloc(Sample **sample) { *sample = calloc(1, sizeof **sample); return OK; }
int nvmlGpmSampleFree(Sample *sample) { free(sample); return OK; }

int nvmlGpmSampleGet(Gpu *gpu, Sample *sample) {
    CHECKED(gpu);
    if (is("STUB_GPM", "denied")) return NO_PERMISSION;
    sample->gpu = gpu->index;
    sample->seconds = seconds();
    return OK;
}

int nvmlGpmMetricsGet(MetricsGet *request) {
    if (request->version != 1 || request->second->seconds - request->first->seconds < 0.1) return INVALID;
    for (unsigned at = 0; at < request->count; at++) {
        Metric *metric = &request->metrics[at];
        metric->result = metric->id == 13 ? NOT_SUPPORTED : OK;
        metric->value = metric->id == 20 || metric->id == 21 ? 64.0 * metric->id : metric->id;
    }
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, void *processes) {
    (void)processes;
    *count = 0;
    return check(gpu);
}

int nvmlEventSetCreate(void **events) { *events = &registered; return OK; }
int nvmlEventSetFree(void *events) { (void)events; return OK; }

int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long kinds, void *events) {
    (void)events;
    registered |= kinds & 8 ? 1 << gpu->index : 0;
    return check(gpu);
}

int nvmlEventSetWait_v2(void *events, Event *event, unsigned timeout_ms) {
    (void)events;
    unsigned last = number("STUB_GPUS", 1) - 1;
    if (!number("STUB_XID", 0) || !(registered & 1 << last) || events_sent++) {
        usleep(timeout_ms * 1000);
        return TIMEOUT;
    }
    *event = (Event){&gpus[last], 8, number("STUB_XID", 0), 0, 0};
    return OK;
}
