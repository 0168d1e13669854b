/* System calls in a row, without going back to Python in between.

   Opening a file as a tensor is five system calls, which take 8 us; made one by one from
   Python they take 11, and the objects of Python that hold the result as much again
   (measured). Here is the usual case of opening and of making a file, in one call each.

   open_map, create_map and find_live do all of their work or none of it, and return None
   then: whatever is unusual (a missing file, another size, a file system that lacks
   something) is for the Python code to do again, to explain, and to decide. So nothing is
   decided here, and without a compiler the package works as well. */

#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>
#include <structmember.h>

#ifndef __linux__

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "mmtensor._calls"};

PyMODINIT_FUNC
PyInit__calls(void)
{
    (void)module;
    PyErr_SetString(PyExc_ImportError, "mmtensor._calls is for Linux");
    return NULL;
}

#else

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

/* Of this interface; memory.py takes no other one. */
#define INTERFACE 3

static long page;

/* Memory: bytes at an address, and what the system has to get back.

   The base of pages.Mapping. Being freed by C, it needs no finalizer, during which weak
   references would still lead to it. Through the buffer protocol NumPy makes an array of it
   at a fifth of what __array_interface__ takes. */
typedef struct {
    PyObject_HEAD
    void *address;
    Py_ssize_t nbytes;
    void *base; /* of the map, which begins at a page */
    Py_ssize_t length;
    int descriptor; /* to be closed; -1: nothing */
    char readonly;  /* whether a buffer that can be written to is refused */
    /* Where it is found: a dict, the keys (a list) and the weak reference there. None of them
       leads back here, so the garbage collector need not know. */
    PyObject *table, *keys, *entry;
    /* What fstat(2) said of the file. */
    unsigned long long device, inode;
    long long changed;
} Memory;

static PyObject *
memory_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Memory *self = (Memory *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->descriptor = -1;
    return (PyObject *)self;
}

static void
forget_keys(Memory *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->keys); i++) {
        PyObject *key = Py_NewRef(PyList_GET_ITEM(self->keys, i));
        if (PyDict_GetItemWithError(self->table, key) == self->entry)
            PyDict_DelItem(self->table, key);
        PyErr_Clear();
        Py_DECREF(key);
    }
    PyErr_Restore(type, value, traceback);
}

static void
memory_dealloc(PyObject *object)
{
    Memory *self = (Memory *)object;
    if (self->keys != NULL)
        forget_keys(self);
    Py_CLEAR(self->table);
    Py_CLEAR(self->keys);
    Py_CLEAR(self->entry);
    if (self->descriptor >= 0)
        close(self->descriptor);
    if (self->length > 0) {
        /* Freeing the pages of a large map takes milliseconds. */
        Py_BEGIN_ALLOW_THREADS
        munmap(self->base, (size_t)self->length);
        Py_END_ALLOW_THREADS
    }
    Py_TYPE(self)->tp_free(object);
}

static int
memory_buffer(PyObject *object, Py_buffer *view, int flags)
{
    Memory *self = (Memory *)object;
    return PyBuffer_FillInfo(view, object, self->address, self->nbytes, self->readonly, flags);
}

/* The same bytes as a buffer that can be written to, whatever `readonly` says. */
typedef struct {
    PyObject_HEAD
    Memory *memory;
} Writeable;

static int
writeable_buffer(PyObject *object, Py_buffer *view, int flags)
{
    Memory *memory = ((Writeable *)object)->memory;
    return PyBuffer_FillInfo(view, object, memory->address, memory->nbytes, 0, flags);
}

static void
writeable_dealloc(PyObject *object)
{
    Py_DECREF(((Writeable *)object)->memory);
    PyObject_Free(object);
}

static PyBufferProcs writeable_as_buffer = {writeable_buffer, NULL};

static PyTypeObject WriteableType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mmtensor._calls.Writeable",
    .tp_basicsize = sizeof(Writeable),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = writeable_dealloc,
    .tp_as_buffer = &writeable_as_buffer,
};

static PyObject *
memory_writeable(PyObject *self, void *closure)
{
    Writeable *found = PyObject_New(Writeable, &WriteableType);
    if (found != NULL)
        found->memory = (Memory *)Py_NewRef(self);
    return (PyObject *)found;
}

static PyObject *
memory_hold(PyObject *self, void *closure)
{
    return Py_NewRef(self);
}

/* Arguments as C integers: 0 and an exception where they are none, or do not fit. */
static int
as_long_long(PyObject *object, long long least, long long most, long long *value)
{
    *value = PyLong_AsLongLong(object);
    if (*value == -1 && PyErr_Occurred())
        return 0;
    if (*value < least || *value > most) {
        PyErr_Format(PyExc_OverflowError, "%lld is out of range", *value);
        return 0;
    }
    return 1;
}

static int
as_int(PyObject *object, int *value)
{
    long long wide;
    int fits = as_long_long(object, INT_MIN, INT_MAX, &wide);
    *value = (int)wide;
    return fits;
}

static int
as_size(PyObject *object, Py_ssize_t least, Py_ssize_t *value)
{
    long long wide;
    int fits = as_long_long(object, least, PY_SSIZE_T_MAX, &wide);
    *value = (Py_ssize_t)wide;
    return fits;
}

static int
expect(const char *name, Py_ssize_t count, Py_ssize_t wanted)
{
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, count);
    return count == wanted;
}

static int
is_empty(Memory *self)
{
    if (self->address != NULL)
        PyErr_SetString(PyExc_ValueError, "it has its memory already");
    return self->address == NULL;
}

PyDoc_STRVAR(place_doc,
"place(address, nbytes)\n"
"--\n\n"
"Stand on memory that somebody else keeps.");

static PyObject *
memory_place(Memory *self, PyObject *const *arguments, Py_ssize_t count)
{
    Py_ssize_t nbytes;
    if (!expect("place", count, 2) || !is_empty(self) || !as_size(arguments[1], 0, &nbytes))
        return NULL;
    void *address = PyLong_AsVoidPtr(arguments[0]);
    if (address == NULL && PyErr_Occurred())
        return NULL;
    self->address = address;
    self->nbytes = nbytes;
    Py_RETURN_NONE;
}

/* Take a map over, whose first `delta` bytes come before the data. */
static void
take(Memory *self, void *base, Py_ssize_t delta, Py_ssize_t nbytes)
{
    self->base = base;
    self->length = nbytes + delta;
    self->address = (char *)base + delta;
    self->nbytes = nbytes;
}

PyDoc_STRVAR(map_bytes_doc,
"map_bytes(fd, offset, nbytes, protection, map_flags)\n"
"--\n\n"
"Map bytes of a descriptor, or raise the OSError of mmap(2).");

static PyObject *
memory_map_bytes(Memory *self, PyObject *const *arguments, Py_ssize_t count)
{
    int fd, protection, map_flags;
    long long offset;
    Py_ssize_t nbytes;
    if (!expect("map_bytes", count, 5) || !is_empty(self) || !as_int(arguments[0], &fd) ||
        !as_long_long(arguments[1], 0, LLONG_MAX, &offset) ||
        !as_size(arguments[2], 1, &nbytes) || !as_int(arguments[3], &protection) ||
        !as_int(arguments[4], &map_flags))
        return NULL;
    Py_ssize_t delta = (Py_ssize_t)(offset % page);
    void *base = mmap(NULL, (size_t)nbytes + (size_t)delta, protection, map_flags, fd,
                      offset - delta);
    if (base == MAP_FAILED)
        return PyErr_SetFromErrno(PyExc_OSError);
    take(self, base, delta, nbytes);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(found_under_doc,
"found_under(table, key, entry)\n"
"--\n\n"
"Note an entry of a table that goes when this goes.");

static PyObject *
memory_found_under(Memory *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (!expect("found_under", count, 3))
        return NULL;
    if (!PyDict_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "the table must be a dict");
        return NULL;
    }
    if (self->keys == NULL) {
        self->keys = PyList_New(0);
        if (self->keys == NULL)
            return NULL;
        self->table = Py_NewRef(arguments[0]);
        self->entry = Py_NewRef(arguments[2]);
    }
    if (PyList_Append(self->keys, arguments[1]))
        return NULL;
    Py_RETURN_NONE;
}

#define METHOD(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef memory_methods[] = {
    {"place", METHOD(memory_place), METH_FASTCALL, place_doc},
    {"map_bytes", METHOD(memory_map_bytes), METH_FASTCALL, map_bytes_doc},
    {"found_under", METHOD(memory_found_under), METH_FASTCALL, found_under_doc},
    {NULL}};

static PyMemberDef memory_members[] = {
    {"address", T_PYSSIZET, offsetof(Memory, address), READONLY, NULL},
    {"nbytes", T_PYSSIZET, offsetof(Memory, nbytes), READONLY, NULL},
    {"descriptor", T_INT, offsetof(Memory, descriptor), 0, NULL},
    {"readonly", T_BOOL, offsetof(Memory, readonly), 0, NULL},
    {"keys", T_OBJECT, offsetof(Memory, keys), READONLY, NULL},
    {"entry", T_OBJECT, offsetof(Memory, entry), READONLY, NULL},
    {"st_dev", T_ULONGLONG, offsetof(Memory, device), 0, NULL},
    {"st_ino", T_ULONGLONG, offsetof(Memory, inode), 0, NULL},
    {"st_ctime_ns", T_LONGLONG, offsetof(Memory, changed), 0, NULL},
    {NULL}};

static PyGetSetDef memory_getset[] = {
    {"hold", memory_hold, NULL, NULL, NULL},
    {"writeable", memory_writeable, NULL, NULL, NULL},
    {NULL}};

static PyBufferProcs memory_as_buffer = {memory_buffer, NULL};

static PyTypeObject MemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mmtensor._calls.Memory",
    .tp_basicsize = sizeof(Memory),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = PyDoc_STR("Bytes at an address, and what the system gets back for them."),
    .tp_new = memory_new,
    .tp_dealloc = memory_dealloc,
    .tp_methods = memory_methods,
    .tp_members = memory_members,
    .tp_getset = memory_getset,
    .tp_as_buffer = &memory_as_buffer,
};

/* What the kernel calls a file: room for the largest handle (MAX_HANDLE_SZ). */
typedef struct {
    struct file_handle head;
    unsigned char bytes[128];
} Handle;

static int
ask_handle(int directory, const char *path, int flags, Handle *handle)
{
    int mount;
    handle->head.handle_bytes = sizeof handle->bytes;
    return name_to_handle_at(directory, path, &handle->head, &mount, flags);
}

static long long
changed_at(const struct stat *status)
{
    return status->st_ctim.tv_sec * 1000000000LL + status->st_ctim.tv_nsec;
}

static void
note_status(Memory *memory, const struct stat *status)
{
    memory->device = status->st_dev;
    memory->inode = status->st_ino;
    memory->changed = changed_at(status);
}

static Memory *
empty_memory(PyObject *type)
{
    if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, &MemoryType)) {
        PyErr_SetString(PyExc_TypeError, "expected a subclass of Memory");
        return NULL;
    }
    return (Memory *)memory_new((PyTypeObject *)type, NULL, NULL);
}

/* Whether a descriptor shows the file that was meant, of the right size. */
static int
is_right(int fd, const struct stat *status, long long size, const char *wanted, Py_ssize_t length)
{
    Handle handle;
    if (!S_ISREG(status->st_mode) || (size >= 0 && status->st_size != size))
        return 0;
    if (length == 0)
        return 1;
    return !ask_handle(fd, "", AT_EMPTY_PATH, &handle) &&
           handle.head.handle_bytes == (unsigned int)length &&
           !memcmp(handle.head.f_handle, wanted, (size_t)length);
}

PyDoc_STRVAR(open_map_doc,
"open_map(kind, path, flags, protection, map_flags, offset, nbytes, size, directory, handle)\n"
"--\n\n"
"Open a regular file that exists, look at its size, map it, and close it.\n\n"
"Returns an object of the class `kind`, or None where anything is not as expected.\n\n"
"offset, nbytes: the bytes to map; -1: all that follow the offset.\n"
"size: of the file; -1: whatever it is.\n"
"directory: a descriptor that a relative path begins at, or -100 (AT_FDCWD).\n"
"handle: the kernel's handle of the file; empty: whatever it is.");

static PyObject *
open_map(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int flags, protection, map_flags, directory;
    long long offset, size;
    Py_ssize_t nbytes, length;
    char *wanted;
    PyObject *name;
    if (!expect("open_map", count, 10) || !as_int(arguments[2], &flags) ||
        !as_int(arguments[3], &protection) || !as_int(arguments[4], &map_flags) ||
        !as_long_long(arguments[5], 0, LLONG_MAX, &offset) ||
        !as_size(arguments[6], -1, &nbytes) ||
        !as_long_long(arguments[7], -1, LLONG_MAX, &size) || !as_int(arguments[8], &directory) ||
        PyBytes_AsStringAndSize(arguments[9], &wanted, &length) ||
        PySys_Audit("open", "OOi", arguments[1], Py_None, flags) ||
        !PyUnicode_FSConverter(arguments[1], &name))
        return NULL;
    Memory *memory = empty_memory(arguments[0]);
    if (memory == NULL) {
        Py_DECREF(name);
        return NULL;
    }
    const char *path = PyBytes_AS_STRING(name);
    Py_ssize_t delta = (Py_ssize_t)(offset % page);
    void *base = MAP_FAILED;
    struct stat status;
    Py_BEGIN_ALLOW_THREADS
    int fd = openat(directory, path, flags);
    if (fd >= 0) {
        if (!fstat(fd, &status) && is_right(fd, &status, size, wanted, length)) {
            long long rest = status.st_size - offset;
            if (nbytes < 0)
                nbytes = (Py_ssize_t)rest;
            if (nbytes > 0 && nbytes <= rest)
                base = mmap(NULL, (size_t)nbytes + (size_t)delta, protection, map_flags, fd,
                            offset - delta);
        }
        close(fd);
    }
    Py_END_ALLOW_THREADS
    Py_DECREF(name);
    if (base == MAP_FAILED) {
        Py_DECREF(memory);
        Py_RETURN_NONE;
    }
    take(memory, base, delta, nbytes);
    note_status(memory, &status);
    return (PyObject *)memory;
}

/* Write bytes to a new file. A signal ends it like any error: Python deals with it. */
static int
write_new(int fd, const char *address, Py_ssize_t nbytes)
{
    for (Py_ssize_t done = 0; done < nbytes;) {
        ssize_t written = pwrite(fd, address + done, (size_t)(nbytes - done), done);
        if (written <= 0)
            return -1;
        done += written;
    }
    return 0;
}

/* Give an unnamed file its name, which must be free; see link_descriptor in syscalls.py. */
static int
give_name(int fd, const char *path)
{
    static int links_descriptors = 1;
    char source[32];
    if (links_descriptors) {
        if (!linkat(fd, "", AT_FDCWD, path, AT_EMPTY_PATH))
            return 0;
        if (errno != ENOENT)
            return -1;
    }
    snprintf(source, sizeof source, "/proc/self/fd/%d", fd);
    if (linkat(AT_FDCWD, source, AT_FDCWD, path, AT_SYMLINK_FOLLOW))
        return -1;
    links_descriptors = 0;
    return 0;
}

/* Make a file, write it, map it, and give it its name. Returns the map, or MAP_FAILED with
   nothing left of the file. */
static void *
make_file(int directory, const char *path, const char *address, Py_ssize_t nbytes, int reserve,
          struct stat *status)
{
    void *base = MAP_FAILED;
    int fd;
    if (directory >= 0)
        fd = openat(directory, path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
    else {
        const char *slash = strrchr(path, '/');
        char parent[PATH_MAX];
        if (slash == NULL || slash - path >= PATH_MAX)
            return base;
        Py_ssize_t length = slash == path ? 1 : slash - path;
        memcpy(parent, path, (size_t)length);
        parent[length] = '\0';
        fd = open(parent, O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
    }
    if (fd < 0)
        return base;
    if ((!reserve || !fallocate(fd, 0, 0, nbytes)) &&
        (address == NULL || !write_new(fd, address, nbytes)) && !fstat(fd, status)) {
        base = mmap(NULL, (size_t)nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base != MAP_FAILED && directory < 0 && give_name(fd, path)) {
            munmap(base, (size_t)nbytes);
            base = MAP_FAILED;
        }
    }
    close(fd);
    if (base == MAP_FAILED && directory >= 0)
        unlinkat(directory, path, 0);
    return base;
}

PyDoc_STRVAR(create_map_doc,
"create_map(kind, path, address, nbytes, reserve, directory)\n"
"--\n\n"
"Make a file that must not exist yet, write it, and map it for reading and writing.\n\n"
"Returns an object of the class `kind`, or None, with nothing left, where that fails.\n\n"
"address: of the bytes, which the caller keeps alive; 0: zeros.\n"
"reserve: whether to reserve the blocks first.\n"
"directory: a descriptor that a relative path begins at: the file has its name from the\n"
"start; or -100 (AT_FDCWD): it is given the name when it is whole.");

static PyObject *
create_map(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    int directory, reserve;
    Py_ssize_t nbytes;
    PyObject *name;
    if (!expect("create_map", count, 6) || !as_size(arguments[3], 1, &nbytes) ||
        !as_int(arguments[5], &directory))
        return NULL;
    const char *address = PyLong_AsVoidPtr(arguments[2]);
    if ((address == NULL && PyErr_Occurred()) ||
        (reserve = PyObject_IsTrue(arguments[4])) < 0 ||
        PySys_Audit("open", "OOi", arguments[1], Py_None, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC) ||
        !PyUnicode_FSConverter(arguments[1], &name))
        return NULL;
    char *zeros = NULL;
    if (address == NULL && !reserve && (address = zeros = calloc(1, (size_t)nbytes)) == NULL) {
        Py_DECREF(name);
        return PyErr_NoMemory();
    }
    Memory *memory = empty_memory(arguments[0]);
    if (memory == NULL) {
        free(zeros);
        Py_DECREF(name);
        return NULL;
    }
    const char *path = PyBytes_AS_STRING(name);
    void *base;
    struct stat status;
    Py_BEGIN_ALLOW_THREADS
    base = make_file(directory, path, address, nbytes, reserve, &status);
    Py_END_ALLOW_THREADS
    free(zeros);
    Py_DECREF(name);
    if (base == MAP_FAILED) {
        Py_DECREF(memory);
        Py_RETURN_NONE;
    }
    take(memory, base, 0, nbytes);
    note_status(memory, &status);
    return (PyObject *)memory;
}

PyDoc_STRVAR(size_at_doc,
"size_at(path, memory)\n"
"--\n\n"
"Return the size of the file at a path; -1 if it is not the one that was mapped.");

static PyObject *
size_at(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    PyObject *name;
    if (!expect("size_at", count, 2))
        return NULL;
    if (!PyObject_TypeCheck(arguments[1], &MemoryType)) {
        PyErr_SetString(PyExc_TypeError, "size_at takes a path and a Memory");
        return NULL;
    }
    Memory *memory = (Memory *)arguments[1];
    if (!PyUnicode_FSConverter(arguments[0], &name))
        return NULL;
    const char *path = PyBytes_AS_STRING(name);
    struct stat status;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = stat(path, &status);
    Py_END_ALLOW_THREADS
    Py_DECREF(name);
    if (failed || status.st_dev != memory->device || status.st_ino != memory->inode)
        return PyLong_FromLong(-1);
    return PyLong_FromLongLong(status.st_size);
}

/* What a weak reference leads to, or NULL. */
static PyObject *
target(PyObject *entry)
{
    PyObject *found = NULL;
#if PY_VERSION_HEX >= 0x030D0000
    if (PyWeakref_GetRef(entry, &found) < 0)
        PyErr_Clear();
#else
    found = PyWeakref_GetObject(entry);
    found = found == NULL || found == Py_None ? NULL : Py_NewRef(found);
#endif
    return found;
}

PyDoc_STRVAR(find_live_doc,
"find_live(live_mappings, reference)\n"
"--\n\n"
"Return the live mapping that a reference leads to, or None.\n\n"
"None as well if the path names another file by now, or one of another size. Views of one\n"
"file in one message have the very same tuple: for them the path is looked at once.");

/* Whether a file shows what was mapped. On overlayfs, one that was copied up is another file
   under the same number: who has not mapped it for writing sees that its status changed. */
static int
is_same(const char *path, const struct stat *status, const Memory *memory, int shared)
{
    struct statfs system;
    if (status->st_dev != memory->device || status->st_ino != memory->inode)
        return 0;
    if (shared || changed_at(status) == memory->changed)
        return 1;
    return !statfs(path, &system) && system.f_type != 0x794C7630; /* OVERLAYFS_SUPER_MAGIC */
}

static PyObject *
find_live(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    static PyObject *last_reference = NULL, *last_entry = NULL;
    if (!expect("find_live", count, 2))
        return NULL;
    PyObject *table = arguments[0], *reference = arguments[1];
    if (reference == last_reference) {
        PyObject *found = target(last_entry);
        if (found != NULL)
            return found;
    }
    if (!PyDict_Check(table) || !PyTuple_Check(reference) || PyTuple_GET_SIZE(reference) != 6)
        Py_RETURN_NONE;
    PyObject *entry = PyDict_GetItemWithError(table, reference);
    if (entry == NULL || !PyWeakref_Check(entry)) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(entry);
    PyObject *name = NULL, *found = target(entry);
    PyObject *mode = PyTuple_GET_ITEM(reference, 1);
    long long size;
    if (found == NULL || !PyObject_TypeCheck(found, &MemoryType) || !PyUnicode_Check(mode) ||
        !as_long_long(PyTuple_GET_ITEM(reference, 4), 0, LLONG_MAX, &size) ||
        !PyUnicode_FSConverter(PyTuple_GET_ITEM(reference, 0), &name))
        goto none;
    const char *path = PyBytes_AS_STRING(name);
    int shared = !PyUnicode_CompareWithASCIIString(mode, "r+");
    struct stat status;
    int same;
    Py_BEGIN_ALLOW_THREADS
    same = !stat(path, &status) && status.st_size == size &&
           is_same(path, &status, (Memory *)found, shared);
    Py_END_ALLOW_THREADS
    if (!same)
        goto none;
    Py_DECREF(name);
    Py_XSETREF(last_entry, entry);
    Py_XSETREF(last_reference, Py_NewRef(reference));
    return found;

none:
    PyErr_Clear();
    Py_XDECREF(name);
    Py_XDECREF(found);
    Py_DECREF(entry);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(handle_at_doc,
"handle_at(path)\n"
"--\n\n"
"Return the kernel's handle of a file, or nothing where there is none.");

static PyObject *
handle_at(PyObject *module, PyObject *argument)
{
    Handle handle;
    PyObject *name;
    if (!PyUnicode_FSConverter(argument, &name))
        return NULL;
    const char *path = PyBytes_AS_STRING(name);
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = ask_handle(AT_FDCWD, path, AT_SYMLINK_FOLLOW, &handle);
    Py_END_ALLOW_THREADS
    Py_DECREF(name);
    if (failed)
        return PyBytes_FromStringAndSize(NULL, 0);
    return PyBytes_FromStringAndSize((char *)handle.head.f_handle, handle.head.handle_bytes);
}

static PyMethodDef functions[] = {
    {"open_map", METHOD(open_map), METH_FASTCALL, open_map_doc},
    {"create_map", METHOD(create_map), METH_FASTCALL, create_map_doc},
    {"size_at", METHOD(size_at), METH_FASTCALL, size_at_doc},
    {"find_live", METHOD(find_live), METH_FASTCALL, find_live_doc},
    {"handle_at", handle_at, METH_O, handle_at_doc},
    {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mmtensor._calls",
    .m_doc = PyDoc_STR("System calls in a row, without going back to Python in between."),
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__calls(void)
{
    page = sysconf(_SC_PAGESIZE);
    if (PyType_Ready(&MemoryType) < 0 || PyType_Ready(&WriteableType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Memory", (PyObject *)&MemoryType) < 0 ||
        PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}

#endif
