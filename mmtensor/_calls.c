/* System calls in a row, without going back to Python in between.

   Opening a file as a tensor is five system calls, which take 8 us; made one by one from
   Python they take 11, and the objects of Python that hold the result as much again
   (measured). Here is the usual case of opening and of making a file, in one call each.

   Every function here either does all of its work or none of it and returns None: whatever
   is unusual (an error, another size, a file system that lacks something) is for the Python
   code to do again, to explain, and to decide. So nothing is decided here, and without a
   compiler the package works as well. */

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
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* As in rawfile.py: below this, writing reserves the blocks as well, and is quicker; and how
   much is written at a time. */
#define SMALL (1 << 16)
#define ONCE (1 << 30)

static long page;

/* The table of live mappings, of pages.py: what a mapping is found by goes with it. */
static PyObject *live_mappings = NULL;

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
    int descriptor;  /* to be closed; -1: nothing */
    char readonly;   /* whether a buffer that can be written to is refused */
    PyObject *keys;  /* a list, or NULL */
    PyObject *entry; /* what is found in live_mappings under those keys, or NULL */
    /* What fstat(2) said of the file. */
    unsigned long long device, inode;
    long long size, changed;
} Memory;

static PyObject *
memory_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Memory *self = (Memory *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->descriptor = -1;
    return (PyObject *)self;
}

static int
memory_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    Memory *self = (Memory *)object;
    Py_ssize_t address, nbytes, base, length;
    if (!PyArg_ParseTuple(arguments, "nnnn", &address, &nbytes, &base, &length))
        return -1;
    self->address = (void *)address;
    self->nbytes = nbytes;
    self->base = (void *)base;
    self->length = length;
    return 0;
}

static void
forget_keys(Memory *self)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->keys); i++) {
        PyObject *key = PyList_GET_ITEM(self->keys, i);
        Py_INCREF(key);
        if (PyDict_GetItemWithError(live_mappings, key) == self->entry)
            PyDict_DelItem(live_mappings, key);
        PyErr_Clear();
        Py_DECREF(key);
    }
    PyErr_Restore(type, value, traceback);
}

static void
memory_dealloc(PyObject *object)
{
    Memory *self = (Memory *)object;
    if (self->keys != NULL && self->entry != NULL && live_mappings != NULL)
        forget_keys(self);
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

static PyObject *
memory_hold(PyObject *self, void *closure)
{
    return Py_NewRef(self);
}

static PyMemberDef memory_members[] = {
    {"address", T_PYSSIZET, offsetof(Memory, address), READONLY, NULL},
    {"nbytes", T_PYSSIZET, offsetof(Memory, nbytes), READONLY, NULL},
    {"descriptor", T_INT, offsetof(Memory, descriptor), 0, NULL},
    {"readonly", T_BOOL, offsetof(Memory, readonly), 0, NULL},
    {"keys", T_OBJECT, offsetof(Memory, keys), 0, NULL},
    {"entry", T_OBJECT, offsetof(Memory, entry), 0, NULL},
    {"st_dev", T_ULONGLONG, offsetof(Memory, device), 0, NULL},
    {"st_ino", T_ULONGLONG, offsetof(Memory, inode), 0, NULL},
    {"st_size", T_LONGLONG, offsetof(Memory, size), 0, NULL},
    {"st_ctime_ns", T_LONGLONG, offsetof(Memory, changed), 0, NULL},
    {NULL}};

static PyGetSetDef memory_getset[] = {{"hold", memory_hold, NULL, NULL, NULL}, {NULL}};

static PyBufferProcs memory_as_buffer = {memory_buffer, NULL};

static PyTypeObject MemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mmtensor._calls.Memory",
    .tp_basicsize = sizeof(Memory),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = PyDoc_STR("Memory(address, nbytes, base, length)\n--\n\n"
                        "Bytes at an address, and what to unmap when they are gone."),
    .tp_new = memory_new,
    .tp_init = memory_init,
    .tp_dealloc = memory_dealloc,
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

/* Take the map over into an object; what fstat(2) said goes along. */
static void
fill(Memory *memory, void *base, Py_ssize_t delta, Py_ssize_t nbytes, const struct stat *status)
{
    memory->base = base;
    memory->length = nbytes + delta;
    memory->address = (char *)base + delta;
    memory->nbytes = nbytes;
    memory->device = status->st_dev;
    memory->inode = status->st_ino;
    memory->size = status->st_size;
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
    if (count != 10) {
        PyErr_SetString(PyExc_TypeError, "open_map takes 10 arguments");
        return NULL;
    }
    int flags = (int)PyLong_AsLong(arguments[2]);
    int protection = (int)PyLong_AsLong(arguments[3]);
    int map_flags = (int)PyLong_AsLong(arguments[4]);
    long long offset = PyLong_AsLongLong(arguments[5]);
    Py_ssize_t nbytes = PyLong_AsSsize_t(arguments[6]);
    long long size = PyLong_AsLongLong(arguments[7]);
    int directory = (int)PyLong_AsLong(arguments[8]);
    char *wanted;
    Py_ssize_t length;
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(arguments[9], &wanted, &length) < 0)
        return NULL;
    if (PySys_Audit("open", "OOi", arguments[1], Py_None, flags) < 0)
        return NULL;
    PyObject *name = PyUnicode_EncodeFSDefault(arguments[1]);
    if (name == NULL)
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
                base = mmap(NULL, (size_t)(nbytes + delta), protection, map_flags, fd,
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
    fill(memory, base, delta, nbytes, &status);
    return (PyObject *)memory;
}

/* Write bytes, or zeros, to a new file; reserve its blocks first where that pays. */
static int
write_new(int fd, const char *address, Py_ssize_t nbytes)
{
    static char zeros[SMALL]; /* which nobody writes to */
    if (nbytes > SMALL) {
        if (fallocate(fd, 0, 0, nbytes))
            return -1;
        if (address == NULL)
            return 0;
    }
    else if (address == NULL)
        address = zeros;
    for (Py_ssize_t done = 0; done < nbytes;) {
        Py_ssize_t left = nbytes - done;
        ssize_t written = pwrite(fd, address + done, (size_t)(left < ONCE ? left : ONCE), done);
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
make_file(int directory, const char *path, const char *address, Py_ssize_t nbytes,
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
    if (!write_new(fd, address, nbytes) && !fstat(fd, status)) {
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
"create_map(kind, path, address, nbytes, directory)\n"
"--\n\n"
"Make a file that must not exist yet, write it, and map it for reading and writing.\n\n"
"Returns an object of the class `kind`, or None, with nothing left, where that fails.\n\n"
"address: of the bytes, which the caller keeps alive; 0: zeros.\n"
"directory: a descriptor that a relative path begins at: the file has its name from the\n"
"start; or -100 (AT_FDCWD): it is given the name when it is whole.");

static PyObject *
create_map(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "create_map takes 5 arguments");
        return NULL;
    }
    const char *address = (const char *)PyLong_AsSize_t(arguments[2]);
    Py_ssize_t nbytes = PyLong_AsSsize_t(arguments[3]);
    int directory = (int)PyLong_AsLong(arguments[4]);
    if (PyErr_Occurred())
        return NULL;
    if (nbytes <= 0) {
        PyErr_SetString(PyExc_ValueError, "nbytes must be positive");
        return NULL;
    }
    if (PySys_Audit("open", "OOi", arguments[1], Py_None, O_CREAT | O_RDWR | O_CLOEXEC) < 0)
        return NULL;
    PyObject *name = PyUnicode_EncodeFSDefault(arguments[1]);
    if (name == NULL)
        return NULL;
    Memory *memory = empty_memory(arguments[0]);
    if (memory == NULL) {
        Py_DECREF(name);
        return NULL;
    }
    const char *path = PyBytes_AS_STRING(name);
    void *base;
    struct stat status;
    Py_BEGIN_ALLOW_THREADS
    base = make_file(directory, path, address, nbytes, &status);
    Py_END_ALLOW_THREADS
    Py_DECREF(name);
    if (base == MAP_FAILED) {
        Py_DECREF(memory);
        Py_RETURN_NONE;
    }
    fill(memory, base, 0, nbytes, &status);
    return (PyObject *)memory;
}

PyDoc_STRVAR(size_at_doc,
"size_at(path, memory)\n"
"--\n\n"
"Return the size of the file at a path; -1 if it is not the one that was mapped.");

static PyObject *
size_at(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 2 || !PyObject_TypeCheck(arguments[1], &MemoryType)) {
        PyErr_SetString(PyExc_TypeError, "size_at takes a path and a Memory");
        return NULL;
    }
    Memory *memory = (Memory *)arguments[1];
    PyObject *name = PyUnicode_EncodeFSDefault(arguments[0]);
    if (name == NULL)
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
"find_live(reference)\n"
"--\n\n"
"Return the live mapping that a reference leads to, or None.\n\n"
"None as well if the path names another file by now, or one of another size. Views of one\n"
"file in one message have the very same tuple: for them the path is looked at once.");

static PyObject *
find_live(PyObject *module, PyObject *reference)
{
    static PyObject *last_reference = NULL, *last_entry = NULL;
    if (reference == last_reference) {
        PyObject *found = target(last_entry);
        if (found != NULL)
            return found;
    }
    if (!PyTuple_Check(reference) || PyTuple_GET_SIZE(reference) != 6 || live_mappings == NULL)
        Py_RETURN_NONE;
    PyObject *entry = PyDict_GetItemWithError(live_mappings, reference);
    if (entry == NULL || !PyWeakref_Check(entry)) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(entry);
    PyObject *found = target(entry);
    PyObject *name = NULL;
    if (found == NULL || !PyObject_TypeCheck(found, &MemoryType))
        goto none;
    Memory *memory = (Memory *)found;
    long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(reference, 4));
    name = PyUnicode_EncodeFSDefault(PyTuple_GET_ITEM(reference, 0));
    if (name == NULL || PyErr_Occurred())
        goto none;
    const char *path = PyBytes_AS_STRING(name);
    struct stat status;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = stat(path, &status);
    Py_END_ALLOW_THREADS
    if (failed || status.st_dev != memory->device || status.st_ino != memory->inode ||
        status.st_size != size)
        goto none;
    /* A file on overlayfs that was copied up is another one under the same number: who has
       not mapped it for writing sees that its status has changed. */
    PyObject *mode = PyTuple_GET_ITEM(reference, 1);
    if (!(PyUnicode_Check(mode) && !PyUnicode_CompareWithASCIIString(mode, "r+")) &&
        changed_at(&status) != memory->changed)
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
    PyObject *name = PyUnicode_EncodeFSDefault(argument);
    if (name == NULL)
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

PyDoc_STRVAR(forget_doc,
"forget_in(live_mappings)\n"
"--\n\n"
"Name the dict that mappings take their entries out of when they go.");

static PyObject *
forget_in(PyObject *module, PyObject *argument)
{
    if (!PyDict_Check(argument)) {
        PyErr_SetString(PyExc_TypeError, "expected a dict");
        return NULL;
    }
    Py_XSETREF(live_mappings, Py_NewRef(argument));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"open_map", (PyCFunction)(void (*)(void))open_map, METH_FASTCALL, open_map_doc},
    {"create_map", (PyCFunction)(void (*)(void))create_map, METH_FASTCALL, create_map_doc},
    {"size_at", (PyCFunction)(void (*)(void))size_at, METH_FASTCALL, size_at_doc},
    {"find_live", find_live, METH_O, find_live_doc},
    {"handle_at", handle_at, METH_O, handle_at_doc},
    {"forget_in", forget_in, METH_O, forget_doc},
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
    if (PyType_Ready(&MemoryType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddObjectRef(module, "Memory", (PyObject *)&MemoryType) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}

#endif
