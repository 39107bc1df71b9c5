/* The queue's hot calls in C: push a record, take one, wait for one. Optional: everything is in Python too.
 *
 * Python costs a call 2 to 5 µs with warm caches and several times that after a sleep, which is most of a round trip.
 * Here is the usual case alone; whatever is not usual (no room, a closed ring, large messages, something wrong) is left,
 * untouched, to the Python code, which then decides or raises. Nothing is kept here that Python must know: cursors are
 * read from the shared header every time, each by the one who writes it.
 *
 * What the layout means and why the orders are right: layout.py and fences.py. In the words of C11:
 *
 *   publish   the writer's release store of the write cursor, after header and body; the reader's release store of its
 *             read cursor, after its last look at the body.
 *   consume   the reader's acquire load of the write cursor, before it looks at the lap cursor and the record.
 *   full      a seq_cst fence between "I published" and "is anyone asleep?", against the same fence between "I sleep"
 *             and "is there something?"; likewise between "I have read" and "does the writer wait?".
 *
 * The shared memory is never trusted with our own: every place is bounded by the mapped size before it is touched, and
 * what does not fit is left to Python. No wait holds the GIL; a signal ends a sleep, and its handler runs at once.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* As in layout.py; native.py compares them with it. */
enum {
    CURSOR_AT = 64, WRITTEN_AT = 72, LAP_AT = 80, WANTED_AT = 128, CLOSED_AT = 192, ASLEEP_AT = 256,
    READERS_AT = 4096, LINE = 64, DATA_AT = 24576, RECORD_HEADER = 16, ALIGN = 16, TAG_SHIFT = 32, MAX_READERS = 64,
};
#define SKIP UINT64_MAX
#define LENGTH_MASK UINT64_C(0xFFFFFFFF)

/* As in waiting.py. */
enum { SPIN_MIN_NS = 4000, SLICE_NS = 2000000, SHY_WAITS = 200 };

/* Copies from this size on go past the caches, which they would only empty: 32 MiB in 1.4 ms instead of 2.4. */
#define STREAM_BYTES (8 << 20)
#define PREFETCH 2048

typedef _Atomic uint64_t Word;

static inline uint64_t load(Word *word) { return atomic_load_explicit(word, memory_order_relaxed); }
static inline uint64_t consume(Word *word) { return atomic_load_explicit(word, memory_order_acquire); }
static inline void store(Word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_relaxed); }
static inline void publish(Word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }
static inline void full(void) { atomic_thread_fence(memory_order_seq_cst); }

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- the mapped ring, the same for both ends ------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer map;
    uint8_t *base;
    unsigned long long capacity;
    int readers, event; /* event: the eventfd that wakes the other side */
} Ring;

/* A new end of `type`, which begins with a Ring. */
static void *ring_open(PyTypeObject *type, PyObject *map, unsigned long long capacity, int readers, int event) {
    Ring *ring = (Ring *)PyType_GenericAlloc(type, 0); /* zeroed */
    if (ring == NULL || PyObject_GetBuffer(map, &ring->map, PyBUF_WRITABLE) < 0)
        goto failed;
    ring->base = ring->map.buf;
    ring->capacity = capacity;
    ring->readers = readers;
    ring->event = event;
    if (ring->map.len >= DATA_AT && capacity <= (uint64_t)ring->map.len - DATA_AT && capacity >= 4096 &&
        capacity % 4096 == 0 && (uintptr_t)ring->base % LINE == 0 && readers >= 1 && readers <= MAX_READERS)
        return ring;
    PyErr_SetString(PyExc_ValueError, "the mapping does not fit its ring");
failed:
    Py_XDECREF((PyObject *)ring);
    return NULL;
}

static void ring_close(Ring *ring) {
    PyTypeObject *type = Py_TYPE((PyObject *)ring);
    PyBuffer_Release(&ring->map);
    PyObject_Free(ring);
    Py_DECREF(type);
}

static inline Word *word_at(const Ring *ring, uint64_t at) { return (Word *)(ring->base + at); }

static inline uint64_t record_size(uint64_t length) {
    return (RECORD_HEADER + length + ALIGN - 1) & ~(uint64_t)(ALIGN - 1);
}

static void wake(const Ring *ring) {
    static const uint64_t one = 1;
    Py_BEGIN_ALLOW_THREADS
    /* It cannot block or fill up: nobody reads the counter, the descriptor does not block. */
    ssize_t done = write(ring->event, &one, sizeof one);
    (void)done;
    Py_END_ALLOW_THREADS
}

/* ---- the yield phase: see waiting.Spin, which is derived from this and has the same rules in Python ------------- */

typedef struct {
    PyObject_HEAD
    long long longest, budget, shy;
} Spin;

static PyMemberDef spin_members[] = {
    {"longest", T_LONGLONG, offsetof(Spin, longest), 0, "ns"},
    {"budget", T_LONGLONG, offsetof(Spin, budget), 0, "ns that the next wait may yield"},
    {"shy", T_LONGLONG, offsetof(Spin, shy), 0, "waits to come that do not yield"},
    {NULL},
};
static PyType_Slot spin_slots[] = {{Py_tp_members, spin_members}, {0, NULL}};
static PyType_Spec spin_spec = {
    "launcher.ipc._native.SpinFields", sizeof(Spin), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, spin_slots};
static PyTypeObject *SpinType, *ReaderType, *WriterType;

static void spin_slept(Spin *spin, int64_t waited) {
    if (spin->shy)
        spin->shy--;
    else if (waited < 2 * spin->longest)
        spin->budget = spin->longest;
    else
        spin->budget = spin->budget >= 2 * SPIN_MIN_NS ? spin->budget >> 1 : 0;
}

/* ---- a reader ---------------------------------------------------------------------------------------------------- */

typedef struct {
    Ring ring;
    Word *mine; /* its read cursor; the count of records read follows */
    _Atomic uint8_t *asleep;
    PyObject *decoders; /* tuple: tag → callable, or None: leave it to Python */
    PyObject *empty;
} Reader;

static inline int moved(Reader *reader) { return consume(word_at(&reader->ring, CURSOR_AT)) != load(reader->mine); }

static inline int is_ready(Reader *reader) { return moved(reader) || load(word_at(&reader->ring, CLOSED_AT)); }

static inline int any_ready(Reader **readers, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (is_ready(readers[i]))
            return 1;
    return 0;
}

/* Yield until one is ready or the budget is used up. */
static int spin_run(Spin *spin, Reader **readers, Py_ssize_t count) {
    if (spin->budget <= 0)
        return 0;
    int ready;
    int64_t took;
    Py_BEGIN_ALLOW_THREADS
    int64_t last = now_ns(), end = last + spin->budget;
    do {
        sched_yield();
        ready = any_ready(readers, count);
        int64_t time = now_ns();
        took = time - last;
        last = time;
    } while (!ready && last < end);
    Py_END_ALLOW_THREADS
    if (took > SLICE_NS)
        spin->budget = 0, spin->shy = SHY_WAITS;
    else if (ready)
        spin->budget = spin->budget * 2 < spin->longest ? spin->budget * 2 : spin->longest;
    return ready;
}

/* Say that we sleep, look once more, sleep. 1: ready; 0: woken by something else, or time is up; -1: an exception. */
static int park(Spin *spin, Reader **readers, Py_ssize_t count, int epoll, int timeout_ms) {
    struct epoll_event events[16];
    int ready, interrupted = 0;
    int64_t started = now_ns();
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        atomic_store_explicit(readers[i]->asleep, 1, memory_order_relaxed);
    full();
    ready = any_ready(readers, count);
    if (!ready) {
        interrupted = epoll_wait(epoll, events, 16, timeout_ms) < 0 && errno == EINTR;
        ready = any_ready(readers, count);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        atomic_store_explicit(readers[i]->asleep, 0, memory_order_relaxed);
    Py_END_ALLOW_THREADS
    if (ready)
        spin_slept(spin, now_ns() - started + spin->budget);
    return interrupted && PyErr_CheckSignals() < 0 ? -1 : ready;
}

static void give_back(Reader *reader, uint64_t cursor) {
    publish(reader->mine, cursor);
    store(reader->mine + 1, load(reader->mine + 1) + 1);
    full();
    uint64_t wanted = load(word_at(&reader->ring, WANTED_AT));
    if (wanted && cursor >= wanted)
        wake(&reader->ring);
}

/* The next record, which is there, decoded; or NotImplemented, and it is still there. */
static PyObject *take_record(Reader *reader) {
    Ring *ring = &reader->ring;
    uint64_t cursor = load(reader->mine), lap = load(word_at(ring, LAP_AT));
    if (cursor < lap)
        cursor = lap;
    uint64_t at = cursor % ring->capacity;
    if (at % ALIGN)
        Py_RETURN_NOTIMPLEMENTED;
    uint64_t word = load(word_at(ring, DATA_AT + at));
    if (word == SKIP) {
        cursor += ring->capacity - at;
        at = 0;
        word = load(word_at(ring, DATA_AT));
    }
    uint64_t length = word & LENGTH_MASK, kind = word >> TAG_SHIFT;
    if (load(word_at(ring, DATA_AT + at + 8)) != load(reader->mine + 1) || kind > 255 ||
        length > ring->capacity - at - RECORD_HEADER)
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *decode = PyTuple_GetItem(reader->decoders, (Py_ssize_t)kind); /* borrowed */
    if (decode == NULL)
        return NULL;
    if (decode == Py_None)
        Py_RETURN_NOTIMPLEMENTED;
    char *body = (char *)ring->base + DATA_AT + at + RECORD_HEADER;
    PyObject *view = PyMemoryView_FromMemory(body, (Py_ssize_t)length, PyBUF_READ);
    if (view == NULL)
        return NULL;
    PyObject *got = PyObject_CallFunctionObjArgs(decode, view, NULL); /* keeps nothing: native.simple_decoders */
    Py_DECREF(view);
    if (got == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear(); /* Python will meet it again, and tell it in its own words */
        Py_RETURN_NOTIMPLEMENTED;
    }
    give_back(reader, cursor + record_size(length));
    return got;
}

static Spin *as_spin(PyObject *object) {
    if (PyObject_TypeCheck(object, SpinType))
        return (Spin *)object;
    PyErr_SetString(PyExc_TypeError, "expected a Spin");
    return NULL;
}

static int as_int(PyObject *object, int *value) {
    long found = PyLong_AsLong(object);
    *value = found > INT_MAX ? INT_MAX : found < INT_MIN ? INT_MIN : (int)found;
    return found == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *wrong_arguments(void) {
    PyErr_SetString(PyExc_TypeError, "wrong arguments");
    return NULL;
}

/* take(spin | None, epoll, timeout_ms): see native.py. */
static PyObject *reader_take(Reader *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3)
        return wrong_arguments();
    if (!moved(self)) {
        if (load(word_at(&self->ring, CLOSED_AT)))
            Py_RETURN_NOTIMPLEMENTED;
        if (args[0] == Py_None)
            return Py_NewRef(self->empty);
        Spin *spin = as_spin(args[0]);
        int epoll, timeout_ms, ready;
        if (spin == NULL || as_int(args[1], &epoll) < 0 || as_int(args[2], &timeout_ms) < 0)
            return NULL;
        ready = spin_run(spin, &self, 1);
        if (!ready && epoll >= 0)
            ready = park(spin, &self, 1, epoll, timeout_ms);
        if (ready < 0)
            return NULL;
        if (!ready || !moved(self))
            Py_RETURN_NOTIMPLEMENTED;
    }
    return take_record(self);
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *map, *decoders, *empty;
    unsigned long long capacity;
    int readers, index, event;
    if (!PyArg_ParseTuple(args, "OKiiiO!O", &map, &capacity, &readers, &index, &event, &PyTuple_Type, &decoders, &empty))
        return NULL;
    if (PyTuple_Size(decoders) != 256 || index < 0 || index >= readers) {
        PyErr_SetString(PyExc_ValueError, "decoders must be 256, index a reader's");
        return NULL;
    }
    Reader *self = ring_open(type, map, capacity, readers, event);
    if (self != NULL) {
        self->mine = word_at(&self->ring, READERS_AT + (uint64_t)LINE * index);
        self->asleep = (_Atomic uint8_t *)(self->ring.base + ASLEEP_AT + index);
        self->decoders = Py_NewRef(decoders);
        self->empty = Py_NewRef(empty);
    }
    return (PyObject *)self;
}

static void reader_dealloc(Reader *self) {
    Py_XDECREF(self->decoders);
    Py_XDECREF(self->empty);
    ring_close(&self->ring);
}

static PyMethodDef reader_methods[] = {
    {"take", (PyCFunction)(void (*)(void))reader_take, METH_FASTCALL, NULL},
    {NULL},
};
static PyType_Slot reader_slots[] = {
    {Py_tp_new, reader_new}, {Py_tp_dealloc, reader_dealloc}, {Py_tp_methods, reader_methods}, {0, NULL}};
static PyType_Spec reader_spec = {
    "launcher.ipc._native.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, reader_slots};

/* ---- the writer -------------------------------------------------------------------------------------------------- */

typedef struct {
    Ring ring;
    unsigned long long longest; /* bytes of a body that goes into the ring */
    unsigned long long turn;    /* where in the data Python decides how to go on */
    unsigned long long slowest; /* never ahead of the slowest reader */
} Writer;

/* push(tag, head): True: sent; False: nothing was done. See native.py. */
static PyObject *writer_push(Writer *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2)
        return wrong_arguments();
    Ring *ring = &self->ring;
    Word *cursor_word = word_at(ring, CURSOR_AT), *written_word = word_at(ring, WRITTEN_AT);
    unsigned long tag = PyLong_AsUnsignedLong(args[0]);
    if (tag == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    if (tag > 255 || load(word_at(ring, CLOSED_AT)))
        Py_RETURN_FALSE;
    Py_buffer head;
    if (PyObject_GetBuffer(args[1], &head, PyBUF_SIMPLE) < 0)
        return NULL;
    uint64_t length = (uint64_t)head.len, size = record_size(length), cursor = load(cursor_word);
    uint64_t at = cursor % ring->capacity;
    if (length > self->longest || length > LENGTH_MASK || at % ALIGN || size > ring->capacity - at ||
        at + size > self->turn || cursor + size - self->slowest > ring->capacity) {
        PyBuffer_Release(&head);
        Py_RETURN_FALSE;
    }
    memcpy(ring->base + DATA_AT + at + RECORD_HEADER, head.buf, length);
    PyBuffer_Release(&head);
    uint64_t written = load(written_word);
    store(word_at(ring, DATA_AT + at + 8), written);
    store(word_at(ring, DATA_AT + at), length | (uint64_t)tag << TAG_SHIFT);
    publish(cursor_word, cursor + size);
    store(written_word, written + 1);
    full();
    uint64_t sleepers = 0;
    for (int at_byte = 0; at_byte < ring->readers; at_byte += 8)
        sleepers |= load(word_at(ring, ASLEEP_AT + at_byte));
    if (sleepers) {
        /* The wake-up follows the clearing: who says late that it sleeps is woken for nothing, never not at all. */
        for (int at_byte = 0; at_byte < ring->readers; at_byte += 8)
            store(word_at(ring, ASLEEP_AT + at_byte), 0);
        wake(ring);
    }
    Py_RETURN_TRUE;
}

static PyObject *writer_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *map;
    unsigned long long capacity, longest;
    int readers, event;
    if (!PyArg_ParseTuple(args, "OKiiK", &map, &capacity, &readers, &event, &longest))
        return NULL;
    Writer *self = ring_open(type, map, capacity, readers, event);
    if (self != NULL)
        self->longest = longest;
    return (PyObject *)self;
}

static PyMemberDef writer_members[] = {
    {"turn", T_ULONGLONG, offsetof(Writer, turn), 0, NULL},
    {"slowest", T_ULONGLONG, offsetof(Writer, slowest), 0, NULL},
    {NULL},
};
static PyMethodDef writer_methods[] = {
    {"push", (PyCFunction)(void (*)(void))writer_push, METH_FASTCALL, NULL},
    {NULL},
};
static PyType_Slot writer_slots[] = {
    {Py_tp_new, writer_new}, {Py_tp_dealloc, ring_close}, {Py_tp_methods, writer_methods},
    {Py_tp_members, writer_members}, {0, NULL}};
static PyType_Spec writer_spec = {
    "launcher.ipc._native.Writer", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT, writer_slots};

/* ---- the module -------------------------------------------------------------------------------------------------- */

/* The Readers in a tuple; how many there are, or -1 and an exception. */
static Py_ssize_t as_readers(PyObject *tuple, Reader **readers) {
    Py_ssize_t many = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    for (Py_ssize_t i = 0; i < many && many <= MAX_READERS; i++) {
        readers[i] = (Reader *)PyTuple_GetItem(tuple, i);
        if (!PyObject_TypeCheck((PyObject *)readers[i], ReaderType))
            many = -1;
    }
    if (many >= 0 && many <= MAX_READERS)
        return many;
    wrong_arguments();
    return -1;
}

/* ready(readers): see native.py. */
static PyObject *native_ready(PyObject *Py_UNUSED(module), PyObject *tuple) {
    Reader *readers[MAX_READERS];
    Py_ssize_t many = as_readers(tuple, readers);
    PyObject *found = many < 0 ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; i < many && found != NULL; i++) {
        PyObject *index = is_ready(readers[i]) ? PyLong_FromSsize_t(i) : NULL;
        if (index != NULL && PyList_Append(found, index) < 0)
            Py_CLEAR(found);
        Py_XDECREF(index);
    }
    return found;
}

/* wait(readers, spin, first | None, epoll, timeout_ms): see native.py. */
static PyObject *native_wait(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 5)
        return wrong_arguments();
    Reader *readers[MAX_READERS], *first = NULL;
    Py_ssize_t many = as_readers(args[0], readers);
    if (many < 0)
        return NULL;
    if (args[2] != Py_None) {
        if (!PyObject_TypeCheck(args[2], ReaderType))
            return wrong_arguments();
        first = (Reader *)args[2];
    }
    Spin *spin = as_spin(args[1]);
    int epoll, timeout_ms;
    if (spin == NULL || as_int(args[3], &epoll) < 0 || as_int(args[4], &timeout_ms) < 0)
        return NULL;
    int ready = any_ready(readers, many);
    if (!ready)
        ready = first != NULL ? spin_run(spin, &first, 1) : spin_run(spin, readers, many);
    if (!ready && epoll >= 0)
        ready = park(spin, readers, many, epoll, timeout_ms);
    return ready < 0 ? NULL : PyBool_FromLong(ready);
}

static void copy_bytes(uint8_t *to, const uint8_t *from, size_t size) {
#ifdef __SSE2__
    if (size >= STREAM_BYTES && (uintptr_t)to % 16 == 0) {
        for (; size >= 64; size -= 64, to += 64, from += 64) {
            const __m128i *in = (const __m128i *)from;
            __m128i *out = (__m128i *)to;
            _mm_prefetch((const char *)from + PREFETCH, _MM_HINT_NTA);
            __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
            __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
        _mm_sfence(); /* such stores are outside the order of all others */
    }
#endif
    memcpy(to, from, size);
}

/* copy(to, at, data): see native.py. */
static PyObject *native_copy(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer to, from;
    unsigned long long at;
    if (!PyArg_ParseTuple(args, "w*Ky*", &to, &at, &from))
        return NULL;
    int fits = at <= (uint64_t)to.len && (uint64_t)from.len <= (uint64_t)to.len - at;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_bytes((uint8_t *)to.buf + at, from.buf, (size_t)from.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "beyond the end of the mapping");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"wait", (PyCFunction)(void (*)(void))native_wait, METH_FASTCALL, NULL},
    {"ready", native_ready, METH_O, NULL},
    {"copy", native_copy, METH_VARARGS, NULL},
    {NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    SpinType = (PyTypeObject *)PyType_FromSpec(&spin_spec);
    ReaderType = (PyTypeObject *)PyType_FromSpec(&reader_spec);
    WriterType = (PyTypeObject *)PyType_FromSpec(&writer_spec);
    PyObject *layout = Py_BuildValue(
        "(iiiiiiiiiiii)", CURSOR_AT, WRITTEN_AT, LAP_AT, WANTED_AT, CLOSED_AT, ASLEEP_AT, READERS_AT, LINE, DATA_AT,
        RECORD_HEADER, TAG_SHIFT, MAX_READERS);
    if (SpinType == NULL || ReaderType == NULL || WriterType == NULL || layout == NULL ||
        PyModule_AddObjectRef(module, "SpinFields", (PyObject *)SpinType) < 0 ||
        PyModule_AddObjectRef(module, "Reader", (PyObject *)ReaderType) < 0 ||
        PyModule_AddObjectRef(module, "Writer", (PyObject *)WriterType) < 0 ||
        PyModule_AddObjectRef(module, "LAYOUT", layout) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    Py_DECREF(layout);
    return module;
}
