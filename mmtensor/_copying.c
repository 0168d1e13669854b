/* Copying pieces of memory that lie far apart, each while the next is on its way.

   No byte is read or written that was not checked, whatever another thread does to the numbers
   meanwhile: each is read into a variable, and that is checked. Where something is unusual, False
   is returned, and the target may be half written: Python or torch does it all again then, and
   says what is wrong. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Of this interface; copying.py takes no other one. */
#define INTERFACE 1

#ifdef __GNUC__
#define ASK_FOR(address) __builtin_prefetch((const void *)(address), 0, 1)
#else
#define ASK_FOR(address) ((void)(address))
#endif

/* Bytes that are asked for, and copied, at a time; and in a line of the processor's cache. */
#define PIECE 1024
#define LINE 64

/* Copy a piece of memory and ask for the next one meanwhile, which begins at another page and is
   nothing that the processor foresees: 256 rows of 12 KB out of 245 MB take 218 us, and by
   index_select 291 (measured). Asking is harmless, whatever lies at the address. */
static void
copy_ahead(char *target, const char *source, Py_ssize_t nbytes, uintptr_t next, Py_ssize_t more)
{
    for (Py_ssize_t start = 0; start < nbytes; start += PIECE) {
        Py_ssize_t piece = nbytes - start < PIECE ? nbytes - start : PIECE;
        Py_ssize_t asked = more - start < PIECE ? more - start : PIECE;
        for (Py_ssize_t line = 0; line < asked; line += LINE)
            ASK_FOR(next + (uintptr_t)(start + line));
        memcpy(target + start, source + start, (size_t)piece);
    }
}

static int
expect(const char *name, Py_ssize_t count, Py_ssize_t wanted)
{
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, count);
    return count == wanted;
}

static int
as_size(PyObject *object, Py_ssize_t least, Py_ssize_t *size)
{
    *size = PyLong_AsSsize_t(object);
    if (*size == -1 && PyErr_Occurred())
        return 0;
    if (*size < least)
        PyErr_Format(PyExc_OverflowError, "%zd is out of range", *size);
    return *size >= least;
}

PyDoc_STRVAR(copy_rows_doc,
"copy_rows(target, source, ids, count, row, rows)\n"
"--\n\n"
"Copy rows of memory by their numbers, and tell whether all of them exist.\n\n"
"target, source, ids: addresses; the numbers are int64, `count` of them.\n"
"row, rows: bytes in a row, and how many rows the source has.");

static PyObject *
copy_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    Py_ssize_t numbers, row, rows, good = 0;
    if (!expect("copy_rows", count, 6) || !as_size(arguments[3], 0, &numbers) ||
        !as_size(arguments[4], 1, &row) || !as_size(arguments[5], 0, &rows))
        return NULL;
    char *target = PyLong_AsVoidPtr(arguments[0]);
    const char *source = PyLong_AsVoidPtr(arguments[1]);
    const volatile int64_t *ids = PyLong_AsVoidPtr(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t id; good < numbers; good++)
        if ((id = ids[good]) < 0 || id >= rows)
            break;
    if (good == numbers && numbers) {
        int64_t id = ids[0];
        for (good = 0; good < numbers && id >= 0 && id < rows; good++) {
            int64_t next = good + 1 < numbers ? ids[good + 1] : id;
            copy_ahead(target + good * row, source + id * row, row,
                       (uintptr_t)source + (uintptr_t)next * (uintptr_t)row, row);
            id = next;
        }
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good == numbers);
}

/* The memory of some objects. */
typedef struct {
    Py_buffer buffers[6];
    Py_ssize_t count;
} Arrays;

static void
release(Arrays *arrays)
{
    while (arrays->count)
        PyBuffer_Release(&arrays->buffers[--arrays->count]);
}

/* Get the memory of objects: first one of any bytes, if so said, then arrays of numbers of 8 bytes to
   read, then those to write. 0 where one is no such array in C order, each number at its place. */
static int
get_arrays(Arrays *arrays, PyObject *const *objects, int bytes, int read, int write)
{
    for (arrays->count = 0; arrays->count < bytes + read + write; arrays->count++) {
        Py_ssize_t i = arrays->count;
        Py_buffer *buffer = &arrays->buffers[i];
        int flags = i < bytes + read ? PyBUF_SIMPLE : PyBUF_WRITABLE;
        if (PyObject_GetBuffer(objects[i], buffer, flags)) {
            PyErr_Clear();
            release(arrays);
            return 0;
        }
        if (i >= bytes && ((uintptr_t)buffer->buf % sizeof(int64_t) ||
                           buffer->itemsize != sizeof(int64_t))) {
            PyBuffer_Release(buffer);
            release(arrays);
            return 0;
        }
    }
    return 1;
}

static Py_ssize_t
length_of(const Py_buffer *buffer)
{
    return buffer->len / (Py_ssize_t)sizeof(int64_t);
}

PyDoc_STRVAR(look_up_doc,
"look_up(total, ids, offsets, shapes, starts, picked_offsets, picked_shapes)\n"
"--\n\n"
"Note where some elements of a jagged tensor are, and tell whether all is in order with them.\n\n"
"total: how many numbers there are in all.\n"
"ids, offsets, shapes: int64, of n, N + 1 and N x d numbers.\n"
"starts, picked_offsets, picked_shapes: where to write n, n + 1 and n x d numbers.");

static PyObject *
look_up(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    Py_ssize_t total;
    Arrays arrays;
    if (!expect("look_up", count, 7) || !as_size(arguments[0], 0, &total))
        return NULL;
    if (!get_arrays(&arrays, arguments + 1, 0, 3, 3))
        Py_RETURN_FALSE;
    Py_ssize_t n = length_of(&arrays.buffers[0]);
    Py_ssize_t elements = length_of(&arrays.buffers[1]) - 1;
    Py_ssize_t sizes = length_of(&arrays.buffers[2]);
    Py_ssize_t ndim = elements > 0 ? sizes / elements : 0;
    const volatile int64_t *ids = arrays.buffers[0].buf, *offsets = arrays.buffers[1].buf;
    const volatile int64_t *shapes = arrays.buffers[2].buf;
    int64_t *starts = arrays.buffers[3].buf, *picked_offsets = arrays.buffers[4].buf;
    int64_t *picked_shapes = arrays.buffers[5].buf;
    int good = elements > 0 && sizes == elements * ndim && length_of(&arrays.buffers[3]) == n &&
               length_of(&arrays.buffers[4]) == n + 1 &&
               length_of(&arrays.buffers[5]) == n * ndim;
    int64_t end = 0;
    if (good)
        picked_offsets[0] = 0;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        int64_t id = ids[i];
        if (id < 0 || id >= elements) {
            good = 0;
            break;
        }
        int64_t start = offsets[id], stop = offsets[id + 1];
        if (start < 0 || stop < start || stop > total || stop - start > PY_SSIZE_T_MAX - end) {
            good = 0;
            break;
        }
        int64_t product = 1;
        for (Py_ssize_t d = 0; d < ndim; d++) {
            int64_t size = shapes[id * ndim + d];
            if (size < 0 || (size && product > INT64_MAX / size)) {
                good = 0;
                break;
            }
            product *= size;
            picked_shapes[i * ndim + d] = size;
        }
        if (product != stop - start)
            good = 0;
        starts[i] = start;
        picked_offsets[i + 1] = end += stop - start;
    }
    release(&arrays);
    return PyBool_FromLong(good);
}

PyDoc_STRVAR(copy_ranges_doc,
"copy_ranges(target, room, itemsize, source, starts, offsets)\n"
"--\n\n"
"Copy pieces of memory, one after the other, and tell whether all of them exist.\n\n"
"target, room: an address, and how many bytes are wanted there: those of all pieces.\n"
"itemsize: bytes of a number.\n"
"source: the memory of all values.\n"
"starts, offsets: int64: at which number each of n pieces begins in the source, and n + 1, at\n"
"which it begins in the target: the first is 0.");

static PyObject *
copy_ranges(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    Py_ssize_t room, itemsize;
    Arrays arrays;
    if (!expect("copy_ranges", count, 6) || !as_size(arguments[1], 0, &room) ||
        !as_size(arguments[2], 1, &itemsize))
        return NULL;
    char *target = PyLong_AsVoidPtr(arguments[0]);
    if (PyErr_Occurred())
        return NULL;
    if (!get_arrays(&arrays, arguments + 3, 1, 2, 0))
        Py_RETURN_FALSE;
    Py_ssize_t n = length_of(&arrays.buffers[1]);
    const char *source = arrays.buffers[0].buf;
    const volatile int64_t *starts = arrays.buffers[1].buf, *offsets = arrays.buffers[2].buf;
    int64_t total = arrays.buffers[0].len / itemsize, wanted = room / itemsize, done = 0;
    int good = n > 0 && length_of(&arrays.buffers[2]) == n + 1 && room % itemsize == 0 &&
               offsets[0] == 0;
    Py_BEGIN_ALLOW_THREADS
    int64_t start = good ? starts[0] : 0, stop = good ? offsets[1] : 0;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        int64_t next = start, after = stop;
        if (stop < done || stop > wanted || start < 0 || stop - done > total - start) {
            good = 0;
            break;
        }
        if (i + 1 < n) {
            next = starts[i + 1];
            after = offsets[i + 2];
        }
        copy_ahead(target + done * itemsize, source + start * itemsize,
                   (Py_ssize_t)(stop - done) * itemsize,
                   (uintptr_t)source + (uintptr_t)next * (uintptr_t)itemsize,
                   after > stop && after <= wanted ? (Py_ssize_t)(after - stop) * itemsize : 0);
        done = stop;
        start = next;
        stop = after;
    }
    good = good && done == wanted;
    Py_END_ALLOW_THREADS
    release(&arrays);
    return PyBool_FromLong(good);
}

#define METHOD(function) ((PyCFunction)(void (*)(void))function)

static PyMethodDef functions[] = {
    {"copy_rows", METHOD(copy_rows), METH_FASTCALL, copy_rows_doc},
    {"look_up", METHOD(look_up), METH_FASTCALL, look_up_doc},
    {"copy_ranges", METHOD(copy_ranges), METH_FASTCALL, copy_ranges_doc},
    {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mmtensor._copying",
    .m_doc = PyDoc_STR("Copying pieces of memory, each while the next is on its way."),
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__copying(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
