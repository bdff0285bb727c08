/* Whether a pickle holds plain values alone, for trace_format/memory_snapshot.py.
 *
 * Python's compiled reader is ten times as fast as the one in Python, and trusts what it reads: it
 * calls what a pickle names, makes room for any place of the memo that a pickle claims, and hashes
 * tuples in tuples until the stack overflows. Here every instruction is followed first. None may
 * name, call or build an object or reach beyond the text, places of the memo are taken in order, as
 * everything that writes pickles takes them, and no tuple is the key of a dictionary. Of each value
 * on the stack only its kind is kept. Only the stable ABI is used.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum { VERSION = 1 }; /* also in plain_pickle.py */
enum kind { VALUE, TUPLE, MARK };

/* The little-endian number in `count` bytes. */
static uint64_t
number_at(const unsigned char *at, int count)
{
    uint64_t value = 0;
    for (int i = count - 1; i >= 0; i--) {
        value = value << 8 | at[i];
    }
    return value;
}

/* Bytes of an instruction's argument; -1 where it is none of plain values. */
static int
argument_size(unsigned char code)
{
    switch (code) {
    case '(': case '0': case 'N': case 0x88: case 0x89:     /* MARK POP NONE NEWTRUE NEWFALSE */
    case ']': case 'a': case 'e': case '}': case 's': case 'u': /* lists and dictionaries */
    case ')': case 't': case 0x85: case 0x86: case 0x87:    /* tuples */
    case 0x94: return 0;                                    /* MEMOIZE */
    case 0x80: case 'K': case 'q': case 'h': return 1;      /* PROTO BININT1 BINPUT BINGET */
    case 0x8a: case 0x8c: case 'C': return 1;               /* LONG1 SHORT_BINUNICODE SHORT_BINBYTES */
    case 'M': return 2;                                     /* BININT2 */
    case 'J': case 'r': case 'j': case 'X': case 'B': return 4; /* .. LONG_BINPUT, LONG_BINGET, .. */
    case 'G': case 0x8d: case 0x95: return 8;               /* BINFLOAT BINUNICODE8 FRAME */
    default: return -1;
    }
}

/* Whether the argument is the length of what follows and belongs to the value. */
static int
has_content(unsigned char code)
{
    return code == 0x8a || code == 0x8c || code == 'C' || code == 'X' || code == 'B' ||
        code == 0x8d;
}

typedef struct {
    unsigned char *stack, *memo; /* kinds */
    uint64_t height, places;
} Machine;

/* Values above the last mark. */
static uint64_t
count_values(const Machine *machine)
{
    uint64_t count = 0;
    while (count < machine->height && machine->stack[machine->height - 1 - count] != MARK) {
        count++;
    }
    return count;
}

/* Takes values off the stack, and the mark below them; 0 where there is none. */
static int
take_to_mark(Machine *machine)
{
    uint64_t count = count_values(machine);
    if (count == machine->height) {
        return 0;
    }
    machine->height -= count + 1;
    return 1;
}

/* Takes `count` values off the stack; 0 where there are not as many. */
static int
take(Machine *machine, uint64_t count)
{
    for (; count > 0; count--) {
        if (machine->height == 0 || machine->stack[machine->height - 1] == MARK) {
            return 0;
        }
        machine->height--;
    }
    return 1;
}

/* Whether one of the keys is a tuple: every second value of the last `count`. */
static int
has_tuple_keys(const Machine *machine, uint64_t count)
{
    for (uint64_t back = count; back > 1; back -= 2) {
        if (machine->stack[machine->height - back] == TUPLE) {
            return 1;
        }
    }
    return 0;
}

/* What an instruction does to the stack and the memo; 0 where that cannot be. */
static int
follow(Machine *machine, unsigned char code, uint64_t argument)
{
    enum kind made = VALUE;
    switch (code) {
    case 0x80: case 0x95:
        return 1;
    case '(':
        made = MARK;
        break;
    case '0':
        return machine->height > 0 && machine->height--;
    case 'a':
        return take(machine, 1);
    case 's':
        return machine->height >= 2 && !has_tuple_keys(machine, 2) && take(machine, 2);
    case 'e':
        return take_to_mark(machine);
    case 'u':
        return !has_tuple_keys(machine, count_values(machine)) && take_to_mark(machine);
    case 'q': case 'r': case 0x94:
        argument = code == 0x94 ? machine->places : argument;
        if (argument > machine->places || !take(machine, 1)) {
            return 0;
        }
        machine->height++; /* it stays */
        machine->places += argument == machine->places;
        machine->memo[argument] = machine->stack[machine->height - 1];
        return 1;
    case 'h': case 'j':
        if (argument >= machine->places) {
            return 0;
        }
        made = machine->memo[argument];
        break;
    case 't':
        if (!take_to_mark(machine)) {
            return 0;
        }
        made = TUPLE;
        break;
    case 0x85: case 0x86: case 0x87:
        if (!take(machine, code - 0x84)) {
            return 0;
        }
        made = TUPLE;
        break;
    case ')':
        made = TUPLE;
        break;
    default: /* a value of its own */
        break;
    }
    machine->stack[machine->height++] = (unsigned char)made;
    return 1;
}

/* Follows a pickle to its end. An instruction puts one value on the stack and one into the memo at
 * most, so that arrays as long as the pickle hold both. */
static int
is_plain(const unsigned char *at, uint64_t left, Machine *machine)
{
    while (left > 0) {
        unsigned char code = *at++;
        left--;
        if (code == '.') {
            return machine->height > 0 && machine->stack[machine->height - 1] != MARK;
        }
        int size = argument_size(code);
        if (size < 0 || left < (uint64_t)size) {
            return 0;
        }
        uint64_t argument = number_at(at, size);
        at += size;
        left -= (uint64_t)size;
        if (has_content(code)) {
            if (argument > left) {
                return 0;
            }
            at += argument;
            left -= argument;
        }
        else if (code == 0x95 && argument > left) {
            return 0;
        }
        if (!follow(machine, code, argument)) {
            return 0;
        }
    }
    return 0; /* it does not end */
}

static PyObject *
check(PyObject *module, PyObject *content)
{
    char *bytes;
    Py_ssize_t size;
    (void)module;
    if (PyBytes_AsStringAndSize(content, &bytes, &size) < 0) {
        return NULL;
    }
    Machine machine = {PyMem_Malloc((size_t)size + 1), PyMem_Malloc((size_t)size + 1), 0, 0};
    if (machine.stack == NULL || machine.memo == NULL) {
        PyMem_Free(machine.stack);
        PyMem_Free(machine.memo);
        return PyErr_NoMemory();
    }
    int found = is_plain((const unsigned char *)bytes, (uint64_t)size, &machine);
    PyMem_Free(machine.stack);
    PyMem_Free(machine.memo);
    return PyBool_FromLong(found);
}

static PyMethodDef functions[] = {
    {"is_plain", check, METH_O, "is_plain(content): whether it holds plain values and ends."},
    {NULL, NULL, 0, NULL},
};

static int
add_content(PyObject *module)
{
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_content},
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "haiprof.trace_format._plain_pickle",
    .m_doc = "Whether a pickle holds plain values alone.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__plain_pickle(void)
{
    return PyModuleDef_Init(&definition);
}
