/* Events of a piece of trace text into columns: the hot step of loading, once more in C.
 *
 * The same as decode.py, load.py and columns.py do, for text exactly as profilers write it. Anything
 * else (another category, an odd type, a time with more than three decimals, a key twice, an escape
 * of a character code, text that is no JSON) makes `scan` take nothing and return None, and Python
 * reads the piece. So there is nothing here that repairs, and results cannot differ: the tests hold
 * the two against each other. A piece is a bytes object, so its text ends with a zero byte, which
 * no rule below accepts: that is what keeps every loop within it. Only the stable ABI is used.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define VERSION 2 /* as load.py has it: one that was built of older text is not used */
#define MAX_DEPTH 64
#define MAX_TABLES 16
#define MAX_COLUMNS 32
#define BUCKETS 64
#define TIME_LIMIT_US (INT64_C(2305843009213693))       /* times.TIME_LIMIT_NS // 1000 */
#define DURATION_LIMIT_NS (INT64_C(1) << 51)            /* times.DURATION_LIMIT_NS */
#define EXACT_ABOVE_NS ((INT64_C(1) << 42) * 1000)      /* times.EXACT_ABOVE_US */

enum kind { INTEGER, FLOAT, TEXT, JSON };
/* Of a cell; Python takes 1 as known and all else as missing. */
enum state { UNSEEN = 0, KNOWN = 1, ESCAPED = 2, NULL_SEEN = 255 };
enum head { NAME, PID, TID, ID, PHASE, HEADS };

typedef struct { const char *key; int length, column, next; } Key;

typedef struct {
    enum kind kind;
    int64_t *values; /* FLOAT: the bits of a double; TEXT and JSON: offset << 32 | length, then code */
    uint8_t *states;
} Column;

typedef struct {
    char phases[8];
    int has_duration; /* must have one */
    int column_count, key_count, heads[HEADS];
    Column columns[MAX_COLUMNS];
    Key keys[2 * MAX_COLUMNS];
    int buckets[BUCKETS];
    int64_t *event, *category, *ts_ns, *dur_ns;
    Py_ssize_t rows, room;
} Table;

typedef struct { char *key; uint64_t hash; uint32_t length; uint8_t kind; int64_t code; } Name;

typedef struct {
    PyObject_HEAD
    PyObject *spec;  /* keeps the keys' text */
    PyObject *names; /* text or bytes to code */
    int table_count, category_count;
    Table tables[MAX_TABLES];
    Key categories[64];
    int category_tables[64], category_buckets[BUCKETS];
    Name *interned;
    size_t interned_count, interned_room;
} Scanner;

typedef struct {
    Scanner *self;
    const char *text, *at;
    int not_ascii, fractions; /* some time has decimals */
    int64_t latest_ns;
} Reader;

static inline int bucket(const char *key, int length) {
    return (length * 5 + (unsigned char)key[0] + 3 * (unsigned char)key[length - 1]) & (BUCKETS - 1);
}

static int find(const Key *keys, const int *buckets, const char *key, int length) {
    if (!length) return -1;
    for (int at = buckets[bucket(key, length)]; at >= 0; at = keys[at].next)
        if (keys[at].length == length && !memcmp(keys[at].key, key, length)) return at;
    return -1;
}

/* ---- JSON: each reader returns 0 for text that it does not know ---- */

static inline void blank(Reader *r) {
    while (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t') r->at++;
}

static inline int literal(Reader *r, const char *word, size_t length) {
    if (strncmp(r->at, word, length)) return 0;
    r->at += length;
    return 1;
}

static const uint8_t SPECIAL[256] = {
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    ['"'] = 1, ['\\'] = 1,
};

/* A string; `start` and `length` are of what stands between the quotes. */
static int string(Reader *r, const char **start, int *length, int *escaped) {
    if (*r->at != '"') return 0;
    const char *p = r->at + 1;
    unsigned char high = 0;
    *start = p;
    *escaped = 0;
    for (;;) {
        unsigned char c;
        while (!SPECIAL[c = (unsigned char)*p]) { high |= c; p++; }
        if (c == '"') break;
        if (c != '\\' || !p[1] || !strchr("\"\\/bfnrt", p[1])) return 0;
        *escaped = 1;
        p += 2;
    }
    r->not_ascii |= high >> 7;
    *length = (int)(p - *start);
    r->at = p + 1;
    return 1;
}

static inline int is_digit(char c) { return c >= '0' && c <= '9'; }

/* The grammar of numbers; `is_plain`: without exponent, and its digits fit 64 bits. */
typedef struct { const char *start; int negative, is_plain, decimals; int64_t value; } Number;

static int number(Reader *r, Number *n) {
    const char *p = n->start = r->at;
    uint64_t value = 0; /* of 19 digits at most, which it holds */
    n->negative = *p == '-';
    p += n->negative;
    const char *first = p;
    if (!is_digit(*p) || (*p == '0' && is_digit(p[1]))) return 0;
    for (; is_digit(*p); p++) if (p - first < 19) value = value * 10 + (*p - '0');
    Py_ssize_t digits = p - first;
    int exponent = 0;
    n->decimals = 0;
    if (*p == '.') {
        const char *point = p++;
        if (!is_digit(*p)) return 0;
        for (; is_digit(*p); p++)
            if (digits++ < 19) value = value * 10 + (*p - '0');
        n->decimals = p - point - 1 > 18 ? 19 : (int)(p - point - 1);
    }
    if (*p == 'e' || *p == 'E') {
        exponent = 1;
        p++;
        if (*p == '+' || *p == '-') p++;
        if (!is_digit(*p)) return 0;
        while (is_digit(*p)) p++;
    }
    n->is_plain = digits <= 19 && !exponent && value <= INT64_MAX;
    n->value = (int64_t)value;
    r->at = p;
    return 1;
}

static int skip(Reader *r, int depth);

static int skip_members(Reader *r, int depth, char closer) {
    const char *start;
    int length, escaped;
    r->at++;
    blank(r);
    if (*r->at == closer) { r->at++; return 1; }
    for (;;) {
        if (closer == '}') {
            if (!string(r, &start, &length, &escaped)) return 0;
            blank(r);
            if (*r->at++ != ':') return 0;
            blank(r);
        }
        if (!skip(r, depth + 1)) return 0;
        blank(r);
        char c = *r->at++;
        if (c == closer) return 1;
        if (c != ',') return 0;
        blank(r);
    }
}

static int skip(Reader *r, int depth) {
    const char *start;
    int length, escaped;
    Number n;
    if (depth > MAX_DEPTH) return 0;
    switch (*r->at) {
    case '"': return string(r, &start, &length, &escaped);
    case '{': return skip_members(r, depth, '}');
    case '[': return skip_members(r, depth, ']');
    case 't': return literal(r, "true", 4);
    case 'f': return literal(r, "false", 5);
    case 'n': return literal(r, "null", 4);
    default: return number(r, &n);
    }
}

/* ---- cells ---- */

/* As columns._integer: a text counts by its last digits. */
static int integer_cell(Reader *r, int64_t *value, uint8_t *state) {
    const char *start;
    int length, escaped;
    Number n;
    *state = NULL_SEEN;
    if (*r->at == 'n') return literal(r, "null", 4);
    if (*r->at == '"') {
        if (!string(r, &start, &length, &escaped) || escaped) return 0;
        int from = length;
        while (from > 0 && start[from - 1] != ' ') from--;
        if (from == length || length - from >= 19) return 1;
        int64_t found = 0;
        for (int at = from; at < length; at++) {
            if (!is_digit(start[at])) return 1;
            found = found * 10 + (start[at] - '0');
        }
        *value = found;
        *state = KNOWN;
        return 1;
    }
    if (!number(r, &n) || !n.is_plain || n.decimals) return 0;
    *value = n.negative ? -n.value : n.value;
    *state = KNOWN;
    return 1;
}

static const double POWERS[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10,
                                1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18};

static int float_cell(Reader *r, int64_t *value, uint8_t *state) {
    Number n;
    double found;
    *state = NULL_SEEN;
    if (*r->at == 'n') return literal(r, "null", 4);
    if (!number(r, &n)) return 0;
    if (n.is_plain && n.value <= INT64_C(1) << 53) {
        found = (double)n.value / POWERS[n.decimals]; /* both exact, so rounded once */
        found = n.negative ? -found : found;
    } else {
        char *end;
        found = PyOS_string_to_double(n.start, &end, NULL);
        if (PyErr_Occurred()) { PyErr_Clear(); return 0; }
        if (end != r->at || found - found != 0) return 0;
    }
    memcpy(value, &found, sizeof found);
    *state = KNOWN;
    return 1;
}

static int text_cell(Reader *r, int64_t *value, uint8_t *state) {
    const char *start;
    int length, escaped;
    *state = NULL_SEEN;
    if (*r->at == 'n') return literal(r, "null", 4);
    if (!string(r, &start, &length, &escaped)) return 0;
    *value = (int64_t)(start - r->text) << 32 | length;
    *state = escaped ? ESCAPED : KNOWN;
    return 1;
}

static int json_cell(Reader *r, int64_t *value, uint8_t *state) {
    const char *start = r->at;
    if (!skip(r, 0)) return 0;
    *value = (int64_t)(start - r->text) << 32 | (r->at - start);
    *state = KNOWN;
    return 1;
}

static int cell(Reader *r, enum kind kind, int64_t *value, uint8_t *state) {
    switch (kind) {
    case INTEGER: return integer_cell(r, value, state);
    case FLOAT: return float_cell(r, value, state);
    case TEXT: return text_cell(r, value, state);
    default: return json_cell(r, value, state);
    }
}

/* A time in us with at most three decimals, in ns. */
static int time_cell(Reader *r, int64_t *ns, int *decimals) {
    static const int64_t scale[] = {1000, 100, 10, 1};
    Number n;
    if (!number(r, &n) || n.negative || !n.is_plain || n.decimals > 3) return 0;
    if (n.value / (1000 / scale[n.decimals]) >= TIME_LIMIT_US) return 0;
    *ns = n.value * scale[n.decimals];
    *decimals = n.decimals;
    return 1;
}

/* ---- events ---- */

static int grow(Table *t) {
    if (t->rows < t->room) return 1;
    Py_ssize_t room = t->room ? 2 * t->room : 1024;
    int64_t **own[] = {&t->event, &t->category, &t->ts_ns, &t->dur_ns};
    for (int at = 0; at < 4; at++) {
        int64_t *more = PyMem_Realloc(*own[at], room * sizeof(int64_t));
        if (!more) return 0;
        *own[at] = more;
    }
    for (int at = 0; at < t->column_count; at++) {
        int64_t *values = PyMem_Realloc(t->columns[at].values, room * sizeof(int64_t));
        if (!values) return 0;
        t->columns[at].values = values;
        uint8_t *states = PyMem_Realloc(t->columns[at].states, room);
        if (!states) return 0;
        t->columns[at].states = states;
    }
    t->room = room;
    return 1;
}

static int arguments(Reader *r, Table *t) {
    const char *start;
    int length, escaped;
    if (*r->at != '{') return 0;
    r->at++;
    blank(r);
    if (*r->at == '}') { r->at++; return 1; }
    for (;;) {
        if (!string(r, &start, &length, &escaped) || escaped) return 0;
        blank(r);
        if (*r->at++ != ':') return 0;
        blank(r);
        int key = find(t->keys, t->buckets, start, length);
        if (key < 0) {
            if (!skip(r, 0)) return 0;
        } else {
            Column *c = &t->columns[t->keys[key].column];
            if (c->states[t->rows]) return 0; /* twice, or by both spellings */
            if (!cell(r, c->kind, &c->values[t->rows], &c->states[t->rows])) return 0;
        }
        blank(r);
        char c = *r->at++;
        if (c == '}') return 1;
        if (c != ',') return 0;
        blank(r);
    }
}

enum { HAS_CAT = 1, HAS_TS = 2, HAS_DUR = 4, HAS_ARGS = 8 };
typedef struct { int64_t values[HEADS], ts_ns, dur_ns; uint8_t states[HEADS]; int category, has, ts_decimals, dur_decimals; } Head;

static int category(Reader *r, Head *h) {
    const char *start;
    int length, escaped;
    if (h->has & HAS_CAT || !string(r, &start, &length, &escaped)) return 0;
    Scanner *s = r->self;
    h->category = find(s->categories, s->category_buckets, start, length);
    h->has |= HAS_CAT;
    if (h->category < 0) return 0;
    int number = s->category_tables[h->category];
    if (number < 0) return 1;
    Table *t = &s->tables[number];
    if (!grow(t)) return 0;
    for (int at = 0; at < t->column_count; at++) t->columns[at].states[t->rows] = UNSEEN;
    return 1;
}

static int once(Head *h, int flag) {
    if (h->has & flag) return 0;
    h->has |= flag;
    return 1;
}

static int value_of(Reader *r, Head *h, const char *key, int length) {
#define IS(word) (length == sizeof word - 1 && !memcmp(key, word, sizeof word - 1))
    int head = IS("name") ? NAME : IS("pid") ? PID : IS("tid") ? TID
             : IS("id") ? ID : IS("ph") ? PHASE : HEADS;
    if (head < HEADS) {
        if (h->states[head]) return 0;
        enum kind kind = head == NAME || head == PHASE ? TEXT : INTEGER;
        return cell(r, kind, &h->values[head], &h->states[head]);
    }
    if (IS("ts")) return once(h, HAS_TS) && time_cell(r, &h->ts_ns, &h->ts_decimals);
    if (IS("dur")) return once(h, HAS_DUR) && time_cell(r, &h->dur_ns, &h->dur_decimals);
    if (IS("cat")) return category(r, h);
    if (IS("args")) {
        if (!once(h, HAS_ARGS) || !(h->has & HAS_CAT)) return 0;
        int number = r->self->category_tables[h->category];
        return number < 0 ? skip(r, 0) : arguments(r, &r->self->tables[number]);
    }
#undef IS
    return skip(r, 0);
}

static int add(Reader *r, Head *h, Table *t, int64_t event) {
    if (h->states[NAME] != KNOWN && h->states[NAME] != ESCAPED) return 0;
    if (h->states[PHASE] != KNOWN || (h->values[PHASE] & 0xffffffff) != 1) return 0;
    if (!strchr(t->phases, r->text[h->values[PHASE] >> 32])) return 0;
    if (!(h->has & HAS_TS) || (t->has_duration && !(h->has & HAS_DUR))) return 0;
    if (h->dur_ns >= DURATION_LIMIT_NS) return 0;
    for (int head = 0; head < HEADS; head++) {
        if (t->heads[head] < 0) continue;
        t->columns[t->heads[head]].values[t->rows] = h->values[head];
        t->columns[t->heads[head]].states[t->rows] = h->states[head];
    }
    r->fractions |= h->ts_decimals > 0;
    if (h->ts_ns > r->latest_ns) r->latest_ns = h->ts_ns;
    t->event[t->rows] = event;
    t->category[t->rows] = h->category;
    t->ts_ns[t->rows] = h->ts_ns;
    t->dur_ns[t->rows] = h->dur_ns;
    t->rows++;
    return 1;
}

static int event(Reader *r, int64_t place, uint32_t *counts) {
    const char *start;
    int length, escaped;
    Head h = {.category = -1};
    if (*r->at++ != '{') return 0;
    blank(r);
    for (;;) {
        if (!string(r, &start, &length, &escaped) || escaped) return 0;
        blank(r);
        if (*r->at++ != ':') return 0;
        blank(r);
        if (!value_of(r, &h, start, length)) return 0;
        blank(r);
        char c = *r->at++;
        if (c == '}') break;
        if (c != ',') return 0;
        blank(r);
    }
    if (h.category < 0) return 0;
    counts[h.category]++;
    int number = r->self->category_tables[h.category];
    return number < 0 || add(r, &h, &r->self->tables[number], place);
}

/* The number of events, or -1. */
static Py_ssize_t events(Reader *r, const char *end, int64_t first, uint32_t *counts) {
    Py_ssize_t count = 0;
    blank(r);
    for (;;) {
        if (!event(r, first + count, counts)) return -1;
        count++;
        blank(r);
        if (r->at == end) return count;
        if (*r->at++ != ',') return -1;
        blank(r);
    }
}

/* ---- names ---- */

/* SipHash-1-3 (Aumasson and Bernstein; the hash of Python's str), keyed anew in each process: who
 * writes a trace cannot choose names that fall into one place of the table, which would make
 * every look-up go through all of them. */
static uint64_t secret[2];

#define ROTATED(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define ROUND(a, b, c, d)                                                         \
    do {                                                                          \
        a += b; c += d; b = ROTATED(b, 13) ^ a; d = ROTATED(d, 16) ^ c;           \
        a = ROTATED(a, 32);                                                       \
        c += b; a += d; b = ROTATED(b, 17) ^ c; d = ROTATED(d, 21) ^ a;           \
        c = ROTATED(c, 32);                                                       \
    } while (0)

static uint64_t hashed(const char *text, size_t length, uint64_t kind) {
    uint64_t a = secret[0] ^ UINT64_C(0x736f6d6570736575), b = secret[1] ^ UINT64_C(0x646f72616e646f6d);
    uint64_t c = secret[0] ^ UINT64_C(0x6c7967656e657261), d = secret[1] ^ UINT64_C(0x7465646279746573);
    uint64_t word, last = (uint64_t)length << 56;
    b ^= kind;
    for (; length >= 8; text += 8, length -= 8) {
        memcpy(&word, text, 8);
        d ^= word;
        ROUND(a, b, c, d);
        a ^= word;
    }
    word = 0;
    memcpy(&word, text, length);
    last |= word;
    d ^= last;
    ROUND(a, b, c, d);
    a ^= last;
    c ^= 0xff;
    ROUND(a, b, c, d);
    ROUND(a, b, c, d);
    ROUND(a, b, c, d);
    return a ^ b ^ c ^ d;
}

#undef ROUND
#undef ROTATED

static PyObject *unescaped(const char *text, Py_ssize_t length) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char *plain = PyMem_Malloc(length + 1);
    Py_ssize_t count = 0;
    if (!plain) return PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < length; at++)
        plain[count++] = text[at] == '\\' ? to[strchr(from, text[++at]) - from] : text[at];
    PyObject *found = PyUnicode_DecodeUTF8(plain, count, NULL);
    PyMem_Free(plain);
    return found;
}

/* The code of a text that is new here, as Python gives it: -1 for none, -2 for an error. */
static int64_t asked(Scanner *s, const char *text, Py_ssize_t length, int kind) {
    PyObject *key = kind == JSON ? PyBytes_FromStringAndSize(text, length)
                  : kind == ESCAPED ? unescaped(text, length)
                                    : PyUnicode_DecodeUTF8(text, length, NULL);
    if (!key) return -2;
    PyObject *code = PyObject_GetItem(s->names, key);
    Py_DECREF(key);
    if (!code) return -2;
    int64_t found = code == Py_None ? -1 : PyLong_AsLongLong(code);
    Py_DECREF(code);
    return PyErr_Occurred() ? -2 : found;
}

static int widen(Scanner *s) {
    size_t room = s->interned_room ? 2 * s->interned_room : 4096;
    Name *wider = PyMem_Calloc(room, sizeof(Name));
    if (!wider) { PyErr_NoMemory(); return 0; }
    for (size_t at = 0; at < s->interned_room; at++) {
        if (!s->interned[at].key) continue;
        size_t place = s->interned[at].hash & (room - 1);
        while (wider[place].key) place = (place + 1) & (room - 1);
        wider[place] = s->interned[at];
    }
    PyMem_Free(s->interned);
    s->interned = wider;
    s->interned_room = room;
    return 1;
}

static int64_t code_of(Scanner *s, const char *text, uint32_t length, int kind) {
    if (2 * s->interned_count >= s->interned_room && !widen(s)) return -2;
    uint64_t hash = hashed(text, length, kind);
    size_t place = hash & (s->interned_room - 1);
    for (Name *n; (n = &s->interned[place])->key; place = (place + 1) & (s->interned_room - 1))
        if (n->hash == hash && n->length == length && n->kind == kind
            && !memcmp(n->key, text, length)) return n->code;
    int64_t code = asked(s, text, length, kind);
    if (code == -2) return -2;
    char *key = PyMem_Malloc(length + 1);
    if (!key) { PyErr_NoMemory(); return -2; }
    memcpy(key, text, length);
    s->interned[place] = (Name){key, hash, length, (uint8_t)kind, code};
    s->interned_count++;
    return code;
}

/* Texts of the rows that a piece has added become codes, in the order in which Python asks. */
static int intern(Scanner *s, const char *text, const Py_ssize_t *rows_before) {
    for (int number = 0; number < s->table_count; number++) {
        Table *t = &s->tables[number];
        for (int at = 0; at < t->column_count; at++) {
            Column *c = &t->columns[at];
            if (c->kind != TEXT && c->kind != JSON) continue;
            for (Py_ssize_t row = rows_before[number]; row < t->rows; row++) {
                if (c->states[row] != KNOWN && c->states[row] != ESCAPED) continue;
                int kind = c->kind == JSON ? JSON : c->states[row] == ESCAPED ? ESCAPED : KNOWN;
                int64_t code = code_of(s, text + (c->values[row] >> 32),
                                       (uint32_t)(c->values[row] & 0xffffffff), kind);
                if (code == -2) return 0;
                c->values[row] = code;
                c->states[row] = code < 0 ? NULL_SEEN : KNOWN;
            }
        }
    }
    return 1;
}

/* ---- the type ---- */

static int is_utf8(const char *text, Py_ssize_t length) {
    PyObject *found = PyUnicode_DecodeUTF8(text, length, NULL);
    if (!found) PyErr_Clear();
    Py_XDECREF(found);
    return found != NULL;
}

static PyObject *Scanner_scan(Scanner *self, PyObject *args) {
    char *text;
    Py_ssize_t length, rows_before[MAX_TABLES];
    long long first;
    uint32_t counts[64] = {0};
    PyObject *piece;
    if (!PyArg_ParseTuple(args, "SL", &piece, &first)) return NULL;
    if (PyBytes_AsStringAndSize(piece, &text, &length) < 0) return NULL;
    if (length >= INT32_MAX) Py_RETURN_NONE;
    for (int at = 0; at < self->table_count; at++) rows_before[at] = self->tables[at].rows;
    Reader r = {self, text, text, 0, 0, 0};
    Py_ssize_t count = events(&r, text + length, first, counts);
    if (count >= 0 && r.not_ascii && !is_utf8(text, length)) count = -1;
    if (count < 0) {
        for (int at = 0; at < self->table_count; at++) self->tables[at].rows = rows_before[at];
        Py_RETURN_NONE;
    }
    if (!intern(self, text, rows_before)) return NULL;
    PyObject *found = PyTuple_New(self->category_count);
    for (int at = 0; found && at < self->category_count; at++) {
        PyObject *one = PyLong_FromUnsignedLong(counts[at]);
        if (!one) { Py_CLEAR(found); break; }
        PyTuple_SetItem(found, at, one);
    }
    /* Whether Python would go on reading times as they are written. */
    return found ? Py_BuildValue("NO", found, r.fractions && r.latest_ns > EXACT_ABOVE_NS ? Py_True
                                                                                       : Py_False)
                 : NULL;
}

static Table *table_at(Scanner *self, PyObject *number) {
    long at = PyLong_AsLong(number);
    if (at >= 0 && at < self->table_count) return &self->tables[at];
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such table");
    return NULL;
}

static PyObject *Scanner_rows(Scanner *self, PyObject *number) {
    Table *t = table_at(self, number);
    return t ? PyLong_FromSsize_t(t->rows) : NULL;
}

static PyObject *Scanner_take(Scanner *self, PyObject *number) {
    Table *t = table_at(self, number);
    if (!t) return NULL;
    Py_ssize_t bytes = t->rows * (Py_ssize_t)sizeof(int64_t);
    PyObject *found = PyList_New(0);
    for (int at = 0; found && at < t->column_count; at++) {
        PyObject *one = Py_BuildValue("y#y#", t->columns[at].values, bytes,
                                      t->columns[at].states, t->rows);
        if (!one || PyList_Append(found, one) < 0) Py_CLEAR(found);
        Py_XDECREF(one);
    }
    if (!found) return NULL;
    PyObject *whole = Py_BuildValue("y#y#y#y#N", t->event, bytes, t->category, bytes, t->ts_ns,
                                    bytes, t->dur_ns, bytes, found);
    if (whole) t->rows = 0;
    return whole;
}

static int chain(Key *keys, int *buckets, int at, PyObject *key, int column) {
    char *text;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(key, &text, &length) < 0 || !length) return 0;
    int place = bucket(text, (int)length);
    keys[at] = (Key){text, (int)length, column, buckets[place]};
    buckets[place] = at;
    return 1;
}

static int set_table(Table *t, PyObject *spec) {
    const char *phases;
    PyObject *columns;
    if (!PyArg_ParseTuple(spec, "spO!", &phases, &t->has_duration, &PyTuple_Type, &columns)) return 0;
    strncpy(t->phases, phases, sizeof t->phases - 1);
    memset(t->buckets, 0xff, sizeof t->buckets);
    memset(t->heads, 0xff, sizeof t->heads);
    if (PyTuple_Size(columns) > MAX_COLUMNS) return 0;
    for (Py_ssize_t at = 0; at < PyTuple_Size(columns); at++) {
        int kind, head;
        PyObject *keys;
        if (!PyArg_ParseTuple(PyTuple_GetItem(columns, at), "iiO!", &kind, &head, &PyTuple_Type, &keys))
            return 0;
        t->columns[at].kind = (enum kind)kind;
        t->column_count++;
        if (head >= 0 && head < HEADS) t->heads[head] = (int)at;
        for (Py_ssize_t k = 0; k < PyTuple_Size(keys); k++) {
            if (t->key_count == 2 * MAX_COLUMNS) return 0;
            if (!chain(t->keys, t->buckets, t->key_count, PyTuple_GetItem(keys, k), (int)at)) return 0;
            t->key_count++;
        }
    }
    return 1;
}

static int Scanner_init(Scanner *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *tables, *categories, *names;
    if (self->spec) { PyErr_SetString(PyExc_TypeError, "made already"); return -1; }
    if (!PyArg_ParseTuple(args, "O!O!O", &PyTuple_Type, &tables, &PyTuple_Type, &categories, &names))
        return -1;
    self->spec = Py_NewRef(args);
    self->names = Py_NewRef(names);
    memset(self->category_buckets, 0xff, sizeof self->category_buckets);
    int fits = PyTuple_Size(tables) <= MAX_TABLES && PyTuple_Size(categories) <= 64;
    for (Py_ssize_t at = 0; fits && at < PyTuple_Size(tables); at++, self->table_count++)
        fits = set_table(&self->tables[at], PyTuple_GetItem(tables, at));
    for (Py_ssize_t at = 0; fits && at < PyTuple_Size(categories); at++, self->category_count++) {
        PyObject *key;
        int table;
        fits = PyArg_ParseTuple(PyTuple_GetItem(categories, at), "Si", &key, &table)
            && table < self->table_count
            && chain(self->categories, self->category_buckets, (int)at, key, 0);
        if (fits) self->category_tables[at] = table;
    }
    if (!fits && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not such tables");
    return fits ? 0 : -1;
}

static void Scanner_dealloc(Scanner *self) {
    for (int number = 0; number < MAX_TABLES; number++) {
        Table *t = &self->tables[number];
        PyMem_Free(t->event); PyMem_Free(t->category); PyMem_Free(t->ts_ns); PyMem_Free(t->dur_ns);
        for (int at = 0; at < MAX_COLUMNS; at++) {
            PyMem_Free(t->columns[at].values);
            PyMem_Free(t->columns[at].states);
        }
    }
    for (size_t at = 0; at < self->interned_room; at++) PyMem_Free(self->interned[at].key);
    PyMem_Free(self->interned);
    Py_XDECREF(self->spec);
    Py_XDECREF(self->names);
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"scan", (PyCFunction)Scanner_scan, METH_VARARGS,
     "scan(piece, first) -> events by category and whether times are too fine for floats; or None."},
    {"rows", (PyCFunction)Scanner_rows, METH_O, "rows(table) -> how many rows of it wait."},
    {"take", (PyCFunction)Scanner_take, METH_O,
     "take(table) -> event, category, ts_ns, dur_ns and (values, states) of each column."},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Scanner(tables, categories, names): see load.py."},
    {Py_tp_init, Scanner_init},
    {Py_tp_dealloc, Scanner_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    "haiprof.trace_format.kineto._native.Scanner", sizeof(Scanner), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots,
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "haiprof.trace_format.kineto._native", .m_size = -1,
};

/* Python's own source of randomness; PYTHONHASHSEED, which users set to 0, does not reach it. */
static int draw_secret(void) {
    PyObject *os = PyImport_ImportModule("os");
    PyObject *drawn = os ? PyObject_CallMethod(os, "urandom", "n", (Py_ssize_t)sizeof secret) : NULL;
    char *bytes;
    Py_ssize_t length;
    int is_drawn = drawn && PyBytes_AsStringAndSize(drawn, &bytes, &length) == 0
                && length == (Py_ssize_t)sizeof secret;
    if (is_drawn) memcpy(secret, bytes, sizeof secret);
    Py_XDECREF(drawn);
    Py_XDECREF(os);
    return is_drawn ? 0 : -1;
}

PyMODINIT_FUNC PyInit__native(void) {
    if (draw_secret() < 0) return NULL;
    PyObject *found = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (found && (!type || PyModule_AddType(found, (PyTypeObject *)type) < 0
                  || PyModule_AddIntConstant(found, "VERSION", VERSION) < 0)) Py_CLEAR(found);
    Py_XDECREF(type);
    return found;
}
