/* Reads the stacks of threads at one moment, and numbers those that are sampled, for frames.py.
 *
 * Up to CPython 3.11 a frame object is made when somebody first looks, and making one may start a
 * garbage collection. That runs code of the job, which lets go of the interpreter lock: the thread
 * that is looked at goes on, its frame ends, and the new object refers to memory that is used
 * again; the next step to a caller crashes (sys._current_frames() and f_back of CPython 3.11). Here
 * the collector is off while frames are read, and no bytecode runs in between, so that nobody else
 * can notice: neither the collector's state nor a frame that outlives its function, whose variables
 * would be freed on the wrong thread. Only the stable ABI is used, and two functions of CPython's
 * public interface that are not in it, by their names.
 *
 * A sample is a number: that of a node of a tree, whose nodes are a caller's node, a code object
 * and an instruction. Nodes hold their code objects, so that the identity of one is never that of
 * another; their number is bounded.
 */
#define _GNU_SOURCE
#include "sampling.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { VERSION = 7 }; /* also in frames.py */
enum { MOST_FRAMES = 256, MOST_ASKED = 200, LEFT_OUT = -1 };

static PyFrameObject *(*get_back)(PyFrameObject *); /* PyFrame_GetBack */
static int (*get_instruction)(PyFrameObject *);     /* PyFrame_GetLasti, from CPython 3.11 on */

long
haiprof_instruction_of(PyFrameObject *frame)
{
    if (get_instruction != NULL) {
        return get_instruction(frame);
    }
    PyObject *number = PyObject_GetAttrString((PyObject *)frame, "f_lasti");
    long instruction = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(number);
    PyErr_Clear();
    return instruction;
}

/* The caller's frame, in place of the frame. */
PyFrameObject *
haiprof_step_out(PyFrameObject *frame)
{
    PyFrameObject *back = get_back(frame);
    Py_DECREF(frame);
    return back;
}

/* (code, instruction) of a frame and its callers, innermost first; NULL with an error. */
static PyObject *
read_stack(PyFrameObject *frame, PyObject *until, Py_ssize_t limit)
{
    PyObject *stack = PyList_New(0);
    Py_INCREF(frame);
    for (; stack != NULL && frame != NULL && PyList_Size(stack) < limit;
         frame = haiprof_step_out(frame)) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        if (code == until) {
            Py_DECREF(code);
            break;
        }
        PyObject *pair = Py_BuildValue("(Nl)", code, haiprof_instruction_of(frame));
        if (pair == NULL || PyList_Append(stack, pair) < 0) {
            Py_CLEAR(stack);
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(frame);
    return stack;
}

static PyObject *
read_threads(PyObject *idents, PyObject *until, Py_ssize_t limit)
{
    PyObject *function = PySys_GetObject("_current_frames"); /* borrowed */
    PyObject *frames = function == NULL ? NULL : PyObject_CallNoArgs(function);
    PyObject *stacks = frames == NULL ? NULL : PyDict_New();
    PyObject *ident, *frame;
    Py_ssize_t place = 0;
    while (stacks != NULL && PyDict_Next(frames, &place, &ident, &frame)) {
        int wanted = idents == Py_None ? 1 : PySequence_Contains(idents, ident);
        PyObject *stack = wanted > 0 ? read_stack((PyFrameObject *)frame, until, limit) : NULL;
        if (wanted < 0 || (wanted && (stack == NULL || PyDict_SetItem(stacks, ident, stack) < 0))) {
            Py_CLEAR(stacks);
        }
        Py_XDECREF(stack);
    }
    Py_XDECREF(frames);
    if (function == NULL && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_RuntimeError, "sys._current_frames is gone");
    }
    return stacks;
}

static PyObject *
read_stacks(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *idents, *until;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(arguments, "OOn", &idents, &until, &limit)) {
        return NULL;
    }
    int collects = PyGC_Disable();
    PyObject *stacks = read_threads(idents, until, limit);
    if (collects) {
        PyGC_Enable();
    }
    return stacks;
}

typedef struct {
    PyObject *code;
    int32_t instruction, caller;
} Node;

static Node *nodes; /* node 0 has no frame */
static int32_t node_count, nodes_told, node_room, most_nodes;
static int32_t *slots; /* nodes by a hash of what they are; 0 where there is none */
static uint32_t slot_count;
static struct {
    long long time_ns, node;
    Moment moment;
} *samples;
static int sample_count, most_samples;
static PyObject *sampled_until;

static uint32_t
slot_of(const Node *node)
{
    uint64_t hash = ((uint64_t)(uintptr_t)node->code >> 4) * 0x9E3779B97F4A7C15u;
    hash ^= ((uint64_t)(uint32_t)node->caller << 32 | (uint32_t)node->instruction) *
        0xC2B2AE3D27D4EB4Fu;
    return (uint32_t)(hash >> 32) & (slot_count - 1);
}

static int
grow(void)
{
    int32_t room = node_room ? 2 * node_room : 1024;
    Node *more = realloc(nodes, room * sizeof(Node));
    if (more != NULL) {
        nodes = more;
    }
    int32_t *empty = more == NULL ? NULL : calloc(2 * room, sizeof(int32_t));
    if (empty == NULL) {
        return 0;
    }
    free(slots);
    slots = empty;
    slot_count = 2 * room;
    node_room = room;
    for (int32_t number = 1; number < node_count; number++) {
        uint32_t slot = slot_of(&nodes[number]);
        while (slots[slot]) {
            slot = (slot + 1) & (slot_count - 1);
        }
        slots[slot] = number;
    }
    return 1;
}

/* Code that is known to live by its address; None for what Python was asked for (frames.py). */
static PyObject *known_codes;
static PyObject *unknown_codes; /* [(address, address of its globals)] to ask it for */
static int asked_count;

static void
hold_code(PyObject *code)
{
    PyObject *address = PyLong_FromVoidPtr(code);
    if (address == NULL || PyDict_SetItem(known_codes, address, code) < 0) {
        PyErr_Clear();
    }
    Py_XDECREF(address);
}

/* The node of a frame that a node called. */
static int32_t
find_node(int32_t caller, PyObject *code, long instruction)
{
    if (caller == LEFT_OUT || (node_count >= node_room && !grow())) {
        return LEFT_OUT;
    }
    Node wanted = {code, (int32_t)instruction, caller};
    uint32_t slot = slot_of(&wanted);
    for (; slots[slot]; slot = (slot + 1) & (slot_count - 1)) {
        const Node *known = &nodes[slots[slot]];
        if (known->code == code && known->instruction == wanted.instruction &&
            known->caller == caller) {
            return slots[slot];
        }
    }
    if (node_count >= most_nodes) {
        return LEFT_OUT;
    }
    Py_INCREF(code);
    hold_code(code);
    nodes[node_count] = wanted;
    slots[slot] = node_count;
    return node_count++;
}

/* The code object of a place that has no frame any more; NULL where it may be gone as well. */
static PyObject *
find_code(const Place *place)
{
    PyObject *address = PyLong_FromVoidPtr((void *)place->code);
    PyObject *code = address == NULL ? NULL : PyDict_GetItemWithError(known_codes, address);
    if (address != NULL && code == NULL && asked_count < MOST_ASKED) {
        PyObject *pair = Py_BuildValue("(OK)", address, (unsigned long long)place->globals);
        asked_count++;
        if (pair != NULL && PyList_Append(unknown_codes, pair) == 0) {
            PyDict_SetItem(known_codes, address, Py_None);
        }
        Py_XDECREF(pair);
    }
    Py_XDECREF(address);
    PyErr_Clear();
    return code == Py_None ? NULL : code;
}

/* A stack, innermost frame first; static: the interpreter lock is held. */
static struct {
    PyObject *code;
    uintptr_t address;
    long instruction;
} stack[MOST_FRAMES];

static int
find_place(const Place *place, int from, int count)
{
    for (; from < count; from++) {
        if (stack[from].address == place->frame && (uintptr_t)stack[from].code == place->code) {
            return from;
        }
    }
    return count;
}

/* The stack of a frame, as it was when places were read.
 *
 * Frames that were entered since are cut off, and those that are over are added, if their code is
 * known to exist still. That leaves out CPython's own frames between C and Python, too. */
static int32_t
find_stack(PyFrameObject *frame, const Place *places, int place_count)
{
    int count = 0;
    for (; frame != NULL && count < MOST_FRAMES; frame = haiprof_step_out(frame)) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        if (code == sampled_until) {
            Py_DECREF(code);
            break;
        }
        stack[count].code = code;
        stack[count].address = place_count ? haiprof_address_of(frame) : 0;
        stack[count++].instruction = haiprof_instruction_of(frame);
    }
    Py_XDECREF(frame);
    int begin = count, left = 0; /* frames that were cut off; places whose frames are over */
    while (left < place_count && (begin = find_place(&places[left], 0, count)) == count) {
        left++;
    }
    if (begin == count) {
        begin = left = 0;
    } else {
        for (int at = begin, place = left; place < place_count; place++) {
            int same = find_place(&places[place], at, count);
            if (same == count) {
                continue;
            }
            if (stack[same].instruction == places[place].instruction) {
                break; /* it is still in that call, and so are its callers */
            }
            stack[same].instruction = places[place].instruction;
            at = same + 1;
        }
    }
    int32_t node = 0;
    for (int at = count - 1; at >= 0; at--) {
        if (at >= begin) {
            node = find_node(node, stack[at].code, stack[at].instruction);
        }
        Py_DECREF(stack[at].code); /* its frame or its node holds it */
    }
    while (left-- > 0) {
        PyObject *code = find_code(&places[left]);
        if (code != NULL) {
            node = find_node(node, code, places[left].instruction);
        }
    }
    return node;
}

/* The frame of the thread with an ident; NULL where none runs Python code. */
static PyFrameObject *
frame_of(unsigned long ident)
{
    PyObject *function = PySys_GetObject("_current_frames"); /* borrowed */
    PyObject *frames = function == NULL ? NULL : PyObject_CallNoArgs(function);
    PyObject *key = frames == NULL ? NULL : PyLong_FromUnsignedLong(ident);
    PyObject *frame = key == NULL ? NULL : PyDict_GetItemWithError(frames, key);
    Py_XINCREF(frame);
    Py_XDECREF(key);
    Py_XDECREF(frames);
    PyErr_Clear();
    return (PyFrameObject *)frame;
}

void
haiprof_take_sample(PyThreadState *thread, unsigned long ident, const Moment *moment,
                    const Place *places, int place_count)
{
    struct timespec now;
    if (sample_count >= most_samples) {
        return;
    }
    int collects = PyGC_Disable();
    PyFrameObject *frame = thread == NULL ? frame_of(ident) : PyThreadState_GetFrame(thread);
    samples[sample_count].node = find_stack(frame, places, place_count);
    if (collects) {
        PyGC_Enable();
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    samples[sample_count].time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    samples[sample_count++].moment = *moment;
}

/* Forgets all samples and nodes; from now on so many are taken at most. */
static PyObject *
begin_samples(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *until;
    int sample_limit, node_limit;
    if (!PyArg_ParseTuple(arguments, "Oii", &until, &sample_limit, &node_limit)) {
        return NULL;
    }
    PyObject *no_codes = PyDict_New(), *none_unknown = no_codes == NULL ? NULL : PyList_New(0);
    if (none_unknown == NULL) {
        Py_XDECREF(no_codes);
        return NULL;
    }
    void *room = realloc(samples, sample_limit * sizeof *samples);
    if (room == NULL) {
        Py_DECREF(no_codes);
        Py_DECREF(none_unknown);
        return PyErr_NoMemory();
    }
    samples = room;
    most_samples = sample_limit;
    most_nodes = node_limit;
    PyObject *until_before = sampled_until, *codes_before = known_codes;
    PyObject *unknown_before = unknown_codes;
    known_codes = no_codes;
    unknown_codes = none_unknown;
    asked_count = 0;
    Py_INCREF(until);
    sampled_until = until;
    Node *nodes_before = nodes;
    int32_t count_before = node_count;
    free(slots);
    nodes = NULL;
    slots = NULL;
    node_room = sample_count = 0;
    node_count = nodes_told = 1;
    if (!grow()) {
        most_samples = 0;
        PyErr_NoMemory();
    }
    for (int32_t number = 1; number < count_before; number++) {
        Py_DECREF(nodes_before[number].code);
    }
    free(nodes_before);
    Py_XDECREF(until_before);
    Py_XDECREF(codes_before);
    Py_XDECREF(unknown_before);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* (samples as words of 8 bytes, [(caller, code, instruction) of nodes that are new], [(address of a
 * code object, of its globals) to look for]). */
static PyObject *
take_samples(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    /* Samples first: making an object may run code of the job, in which more are taken. */
    PyObject *taken = PyBytes_FromStringAndSize((const char *)samples,
                                                sample_count * (Py_ssize_t)sizeof *samples);
    sample_count = taken == NULL ? sample_count : 0;
    PyObject *new = taken == NULL ? NULL : PyList_New(0);
    while (new != NULL && nodes_told < node_count) {
        const Node *node = &nodes[nodes_told];
        PyObject *entry = Py_BuildValue("(iOi)", node->caller, node->code, node->instruction);
        if (entry == NULL || PyList_Append(new, entry) < 0) {
            Py_CLEAR(new);
        } else {
            nodes_told++;
        }
        Py_XDECREF(entry);
    }
    PyObject *none_unknown = new == NULL ? NULL : PyList_New(0);
    if (none_unknown == NULL) {
        Py_XDECREF(taken);
        Py_XDECREF(new);
        return NULL;
    }
    PyObject *unknown = unknown_codes;
    unknown_codes = none_unknown;
    return Py_BuildValue("(NNN)", taken, new, unknown);
}

/* A code object that was looked for. */
static PyObject *
know_code(PyObject *module, PyObject *code)
{
    (void)module;
    hold_code(code);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"read_stacks", read_stacks, METH_VARARGS, NULL},
    {"begin_samples", begin_samples, METH_VARARGS, NULL},
    {"take_samples", take_samples, METH_NOARGS, NULL},
    {"know_code", know_code, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* Functions are added here and not by the definition: a module with some in its definition would be
 * listed in the job's stderr when it crashes (faulthandler's list of extension modules). */
static int
add_content(PyObject *module)
{
    *(void **)&get_back = dlsym(RTLD_DEFAULT, "PyFrame_GetBack");
    *(void **)&get_instruction = dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    if (get_back == NULL) {
        PyErr_SetString(PyExc_ImportError, "this interpreter has no PyFrame_GetBack");
        return -1;
    }
    int failed = PyModule_AddFunctions(module, functions) < 0 ||
        PyModule_AddFunctions(module, haiprof_clock_functions) < 0 ||
        PyModule_AddFunctions(module, haiprof_crash_functions) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0;
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots_of_module[] = {
    {Py_mod_exec, add_content},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "haiprof.in_job._frames",
    .m_doc = "Stacks of threads, read and sampled in C.",
    .m_slots = slots_of_module,
};

PyMODINIT_FUNC
PyInit__frames(void)
{
    return PyModuleDef_Init(&definition);
}
