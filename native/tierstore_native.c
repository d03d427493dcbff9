/* Threads that write, read and checksum records without the interpreter.
 *
 * A pool runs transfers: a job is one record in one file. A write takes the checksum and then writes; a read fills the
 * destination and then takes the checksum. Results go into a list, and an eventfd tells the loop that there are some.
 * The threads never call Python, so they never wait for its lock, and nobody waits for them to give it back.
 *
 * What a job means is said in tierstore/disk/native.py, which is the only caller. tierstore/disk/records.py does the
 * same in Python. The codec "floats" is in floats.h.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "floats.h"
#include "xxh3.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it, and pages come when they are touched */
#endif

enum { READ, WRITE, NUM_DIRECTIONS };

static const size_t PAGE = 4096;
static const size_t SIDE_BYTES = 16384;       /* a head and a tail, each shorter than a page, and padding */
static const size_t CALL_BYTES = 64 << 20;    /* far below the 2 GiB that Linux cuts a call to (write(2)) */
static const size_t POPULATED_BYTES = 1 << 20; /* pages of shorter destinations come as fast by themselves */
static const size_t TIMED_BYTES = 1 << 20;    /* shorter transfers time the system call, not the drive */
static const int LEAST_TRANSFERS = 4;
static const uint64_t LEAST_BYTES = 4 << 20;

typedef struct Job {
    struct Job *next;
    unsigned long long number;
    int direction, descriptor, has_checksum, error;
    off_t offset;
    uint8_t *memory;
    size_t num_bytes, head_bytes, interior_bytes, side_bytes;
    uint64_t seed, checksum;
    double transfer_seconds, cpu_seconds, bytes_per_second;
} Job;

typedef struct {
    Job *first, **last;
} Queue;

/* The speed of all transfers of a direction together: `TransferClock` of tierstore/disk/codec/load.py. */
typedef struct {
    int running[NUM_DIRECTIONS], moved[NUM_DIRECTIONS];
    double busy_seconds[NUM_DIRECTIONS], now;
    uint64_t moved_bytes[NUM_DIRECTIONS];
} Clock;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    Queue waiting, ended;
    Clock clock;
    sem_t turns[NUM_DIRECTIONS];
    pthread_t *threads;
    int most_threads, num_threads, num_idle, num_waiting, nice, event; /* a thread is idle until it has taken a job */
    bool is_told, is_ending;
    char name[12];
} Pool;

static void queue_init(Queue *queue)
{
    queue->first = NULL;
    queue->last = &queue->first;
}

static void queue_put(Queue *queue, Job *job)
{
    job->next = NULL;
    *queue->last = job;
    queue->last = &job->next;
}

static Job *queue_take(Queue *queue)
{
    Job *job = queue->first;
    queue->first = job->next;
    if (queue->first == NULL)
        queue->last = &queue->first;
    return job;
}

static double seconds_of(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* --- the clock; the pool's lock is held ------------------------------------------------------------------------- */

static void clock_advance(Clock *clock, double now)
{
    int num_running = clock->running[READ] + clock->running[WRITE];
    for (int direction = 0; num_running && direction < NUM_DIRECTIONS; direction++)
        clock->busy_seconds[direction] += (now - clock->now) * clock->running[direction] / num_running;
    clock->now = now;
}

static void clock_begin(Clock *clock, int direction, double now)
{
    clock_advance(clock, now);
    clock->running[direction]++;
}

/* Returns bytes per second if enough has ended since the last result, else 0. */
static double clock_end(Clock *clock, int direction, double now, size_t num_bytes)
{
    clock_advance(clock, now);
    clock->running[direction]--;
    clock->moved_bytes[direction] += num_bytes;
    clock->moved[direction]++;
    double busy_seconds = clock->busy_seconds[direction];
    uint64_t moved_bytes = clock->moved_bytes[direction];
    if (clock->moved[direction] < LEAST_TRANSFERS || moved_bytes < LEAST_BYTES || busy_seconds <= 0)
        return 0;
    clock->moved[direction] = 0;
    clock->moved_bytes[direction] = 0;
    clock->busy_seconds[direction] = 0;
    return (double)moved_bytes / busy_seconds;
}

/* --- a job ------------------------------------------------------------------------------------------------------ */

/* Move interior and side block whole; short calls are continued. Returns 0 or an errno. */
static int move_all(const Job *job, uint8_t *side)
{
    uint8_t *interior = job->memory + job->head_bytes;
    size_t whole = job->interior_bytes + job->side_bytes, done = 0;
    while (done < whole) {
        struct iovec parts[2];
        int num_parts = 0;
        if (done < job->interior_bytes) {
            size_t left = job->interior_bytes - done;
            parts[num_parts++] = (struct iovec){interior + done, left < CALL_BYTES ? left : CALL_BYTES};
        }
        if (done + CALL_BYTES >= job->interior_bytes && job->side_bytes) {
            size_t begun = done > job->interior_bytes ? done - job->interior_bytes : 0;
            if (num_parts == 0 || parts[0].iov_len == job->interior_bytes - done)
                parts[num_parts++] = (struct iovec){side + begun, job->side_bytes - begun};
        }
        off_t offset = job->offset + (off_t)done;
        ssize_t moved = job->direction == WRITE ? pwritev(job->descriptor, parts, num_parts, offset)
                                                : preadv(job->descriptor, parts, num_parts, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return errno;
        if (moved == 0)
            return EIO; /* the file ended too early */
        done += (size_t)moved;
    }
    return 0;
}

/* Have a turn at the drive, and move the bytes in it. */
static void transfer(Pool *pool, Job *job, uint8_t *side)
{
    bool is_timed = job->num_bytes >= TIMED_BYTES;
    while (sem_wait(&pool->turns[job->direction]) != 0)
        ; /* EINTR */
    double began = seconds_of(CLOCK_MONOTONIC);
    if (is_timed) {
        pthread_mutex_lock(&pool->lock);
        clock_begin(&pool->clock, job->direction, began);
        pthread_mutex_unlock(&pool->lock);
    }
    job->error = move_all(job, side);
    double ended = seconds_of(CLOCK_MONOTONIC);
    sem_post(&pool->turns[job->direction]);
    job->transfer_seconds = ended - began;
    if (is_timed) {
        pthread_mutex_lock(&pool->lock);
        if (ended < pool->clock.now) /* another thread was here first */
            ended = pool->clock.now;
        job->bytes_per_second = clock_end(&pool->clock, job->direction, ended, job->error ? 0 : job->num_bytes);
        pthread_mutex_unlock(&pool->lock);
    }
}

static void run(Pool *pool, Job *job, uint8_t *side)
{
    double cpu_began = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    uint8_t *tail = job->memory + job->head_bytes + job->interior_bytes;
    size_t tail_bytes = job->num_bytes - job->head_bytes - job->interior_bytes;
    if (job->direction == WRITE) {
        if (job->has_checksum)
            job->checksum = xxh3(job->memory, job->num_bytes, job->seed);
        memcpy(side, job->memory, job->head_bytes);
        memcpy(side + job->head_bytes, tail, tail_bytes);
        transfer(pool, job, side);
    } else {
        if (job->num_bytes >= POPULATED_BYTES) { /* before the turn, so page faults take no time at the drive */
            uintptr_t first = (uintptr_t)job->memory & ~(PAGE - 1);
            madvise((void *)first, (uintptr_t)tail + tail_bytes - first, MADV_POPULATE_WRITE);
        }
        transfer(pool, job, side);
        memcpy(job->memory, side, job->head_bytes);
        memcpy(tail, side + job->head_bytes, tail_bytes);
        sched_yield(); /* lets the next job read meanwhile, even if it waits for this thread's core */
        if (job->has_checksum && !job->error)
            job->checksum = xxh3(job->memory, job->num_bytes, job->seed);
    }
    job->cpu_seconds = seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu_began;
}

/* --- the threads ------------------------------------------------------------------------------------------------ */

static void lower_priority(int by)
{
    int of_process = getpriority(PRIO_PROCESS, (id_t)getpid());
    int wanted = of_process + by;
    setpriority(PRIO_PROCESS, 0, wanted < 19 ? wanted : 19); /* 0: this thread (Linux) */
}

static void *work(void *argument)
{
    Pool *pool = argument;
    lower_priority(pool->nice);
    uint8_t *side = mmap(NULL, SIDE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_mutex_lock(&pool->lock);
    while (true) {
        pool->num_idle++;
        while (pool->waiting.first == NULL && !pool->is_ending)
            pthread_cond_wait(&pool->has_work, &pool->lock);
        pool->num_idle--;
        if (pool->waiting.first == NULL)
            break;
        Job *job = queue_take(&pool->waiting);
        pool->num_waiting--;
        pthread_mutex_unlock(&pool->lock);
        if (side == MAP_FAILED)
            job->error = ENOMEM;
        else
            run(pool, job, side);
        pthread_mutex_lock(&pool->lock);
        queue_put(&pool->ended, job);
        if (!pool->is_told) {
            pool->is_told = true;
            eventfd_write(pool->event, 1);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    if (side != MAP_FAILED)
        munmap(side, SIDE_BYTES);
    return NULL;
}

/* Start one more thread; the lock is held. Signals are the interpreter's: these threads get none. */
static int start_thread(Pool *pool)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(&pool->threads[pool->num_threads], NULL, work, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) {
        char name[16];
        snprintf(name, sizeof name, "%s-%u", pool->name, (unsigned)pool->num_threads % 1000u);
        pthread_setname_np(pool->threads[pool->num_threads], name);
        pool->num_threads++;
    }
    return error;
}

static void free_jobs(Queue *queue)
{
    while (queue->first != NULL)
        free(queue_take(queue));
}

static void end_pool(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->is_ending = true;
    pthread_cond_broadcast(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
    for (int number = 0; number < pool->num_threads; number++)
        pthread_join(pool->threads[number], NULL);
    free_jobs(&pool->ended);
    close(pool->event);
    sem_destroy(&pool->turns[READ]);
    sem_destroy(&pool->turns[WRITE]);
    pthread_cond_destroy(&pool->has_work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool);
}

/* --- for Python ------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Pool *pool; /* NULL: closed, or abandoned in a forked child */
} PoolObject;

static Pool *pool_of(PyObject *self)
{
    Pool *pool = ((PoolObject *)self)->pool;
    if (pool == NULL)
        PyErr_SetString(PyExc_ValueError, "the pool is closed");
    return pool;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"num_threads", "num_turns", "nice", "name", NULL};
    int num_threads, num_turns, nice_by;
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiis", names, &num_threads, &num_turns, &nice_by, &name))
        return NULL;
    if (num_threads < 1 || num_turns < 1)
        return PyErr_Format(PyExc_ValueError, "a pool needs threads and turns, not %d and %d", num_threads, num_turns);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PoolObject *self = (PoolObject *)allocate(type, 0);
    Pool *pool = calloc(1, sizeof *pool);
    pthread_t *threads = calloc((size_t)num_threads, sizeof *threads);
    int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (self == NULL || pool == NULL || threads == NULL || event < 0) {
        if (!PyErr_Occurred())
            event < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyErr_NoMemory();
        if (event >= 0)
            close(event);
        free(threads);
        free(pool);
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->has_work, NULL);
    queue_init(&pool->waiting);
    queue_init(&pool->ended);
    for (int direction = 0; direction < NUM_DIRECTIONS; direction++)
        sem_init(&pool->turns[direction], 0, (unsigned)num_turns);
    pool->threads = threads;
    pool->most_threads = num_threads;
    pool->nice = nice_by;
    pool->event = event;
    snprintf(pool->name, sizeof pool->name, "%s", name);
    self->pool = pool;
    return (PyObject *)self;
}

static void pool_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self); /* one that was not closed is left to its threads */
    Py_DECREF(type);
}

static PyObject *pool_submit(PyObject *self, PyObject *args)
{
    Pool *pool = pool_of(self);
    unsigned long long number, address, seed;
    long long offset;
    int is_write, descriptor, has_checksum;
    Py_ssize_t num_bytes, head_bytes, interior_bytes, side_bytes;
    if (pool == NULL ||
        !PyArg_ParseTuple(args, "KpiLKnnnnpK", &number, &is_write, &descriptor, &offset, &address, &num_bytes,
                          &head_bytes, &interior_bytes, &side_bytes, &has_checksum, &seed))
        return NULL;
    Py_ssize_t tail_bytes = num_bytes - head_bytes - interior_bytes;
    if (head_bytes < 0 || interior_bytes < 0 || tail_bytes < 0 || side_bytes < head_bytes + tail_bytes ||
        side_bytes > (Py_ssize_t)SIDE_BYTES || num_bytes <= (Py_ssize_t)XXH3_LONGER_THAN) {
        PyErr_SetString(PyExc_ValueError, "the parts of the record do not fit together");
        return NULL;
    }
    Job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return PyErr_NoMemory();
    job->number = number;
    job->direction = is_write ? WRITE : READ;
    job->descriptor = descriptor;
    job->offset = (off_t)offset;
    job->memory = (uint8_t *)(uintptr_t)address;
    job->num_bytes = (size_t)num_bytes;
    job->head_bytes = (size_t)head_bytes;
    job->interior_bytes = (size_t)interior_bytes;
    job->side_bytes = (size_t)side_bytes;
    job->has_checksum = has_checksum;
    job->seed = seed;
    int error = 0;
    pthread_mutex_lock(&pool->lock); /* held for instructions only, never across a transfer */
    if (pool->num_waiting >= pool->num_idle && pool->num_threads < pool->most_threads)
        error = start_thread(pool);
    if (pool->num_threads > 0) {
        queue_put(&pool->waiting, job);
        pool->num_waiting++;
        pthread_cond_signal(&pool->has_work);
        error = 0; /* fewer threads than wanted do the same */
    }
    pthread_mutex_unlock(&pool->lock);
    if (error != 0) {
        free(job);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *pool_take(PyObject *self, PyObject *Py_UNUSED(unused))
{
    Pool *pool = pool_of(self);
    PyObject *found = pool == NULL ? NULL : PyList_New(0);
    if (found == NULL)
        return NULL;
    eventfd_t ignored;
    eventfd_read(pool->event, &ignored);
    pthread_mutex_lock(&pool->lock);
    Queue ended = pool->ended;
    if (ended.first == NULL)
        ended.last = &ended.first;
    queue_init(&pool->ended);
    pool->is_told = false;
    pthread_mutex_unlock(&pool->lock);
    while (ended.first != NULL) {
        Job *job = queue_take(&ended);
        PyObject *result = Py_BuildValue("KiKddd", job->number, job->error, job->checksum, job->transfer_seconds,
                                         job->cpu_seconds, job->bytes_per_second);
        free(job);
        if (result == NULL || PyList_Append(found, result) < 0) {
            Py_XDECREF(result);
            Py_DECREF(found);
            free_jobs(&ended);
            return NULL;
        }
        Py_DECREF(result);
    }
    return found;
}

static PyObject *pool_fileno(PyObject *self, PyObject *Py_UNUSED(unused))
{
    Pool *pool = pool_of(self);
    return pool == NULL ? NULL : PyLong_FromLong(pool->event);
}

static PyObject *pool_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    Pool *pool = ((PoolObject *)self)->pool;
    ((PoolObject *)self)->pool = NULL;
    if (pool != NULL) {
        Py_BEGIN_ALLOW_THREADS
        end_pool(pool);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyObject *pool_abandon(PyObject *self, PyObject *Py_UNUSED(unused))
{
    Pool *pool = ((PoolObject *)self)->pool;
    ((PoolObject *)self)->pool = NULL;
    if (pool != NULL)
        close(pool->event);
    Py_RETURN_NONE;
}

static PyMethodDef pool_methods[] = {
    {"submit", pool_submit, METH_VARARGS,
     "submit(number, is_write, descriptor, offset, address, num_bytes, head_bytes, interior_bytes, side_bytes,\n"
     "has_checksum, seed)\n\nQueue a transfer. The memory at `address` must stay valid until `take` returns it."},
    {"take", pool_take, METH_NOARGS,
     "Those that have ended since the last call: (number, errno, checksum, transfer_seconds, cpu_seconds,\n"
     "bytes_per_second). The last is the speed of the drive, where enough has been moved to tell; else 0."},
    {"fileno", pool_fileno, METH_NOARGS, "An eventfd that can be read when something has ended."},
    {"close", pool_close, METH_NOARGS, "Finish what is queued, and end the threads. Blocks."},
    {"abandon", pool_abandon, METH_NOARGS, "In a forked child, which has none of the threads: forget the pool."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "Pool(num_threads, num_turns, nice, name)\n\nThreads that transfer records. They start as needed."},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {0, NULL},
};

static PyType_Spec pool_spec = {"tierstore_native.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};

static PyObject *module_xxh3(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *memory;
    Py_ssize_t num_bytes;
    unsigned long long seed;
    if (!PyArg_ParseTuple(args, "y#K", &memory, &num_bytes, &seed))
        return NULL;
    if (num_bytes <= (Py_ssize_t)XXH3_LONGER_THAN)
        return PyErr_Format(PyExc_ValueError, "more than %d bytes, please", (int)XXH3_LONGER_THAN);
    return PyLong_FromUnsignedLongLong(xxh3((const uint8_t *)memory, (size_t)num_bytes, seed));
}

/* Takes two buffers to read and to write, and a workspace; returns false with an exception. */
static bool floats_buffers(PyObject *args, Py_buffer *from, Py_buffer *to, Py_buffer *workspace, int *itemsize)
{
    if (!PyArg_ParseTuple(args, "y*w*iw*", from, to, itemsize, workspace))
        return false;
    Py_ssize_t most = from->len > to->len ? from->len : to->len;
    if ((*itemsize == 2 || *itemsize == 4) && workspace->len >= most)
        return true;
    PyErr_SetString(PyExc_ValueError, "elements have 2 or 4 bytes, and the workspace is as long as the block");
    PyBuffer_Release(from);
    PyBuffer_Release(to);
    PyBuffer_Release(workspace);
    return false;
}

static PyObject *module_pack_floats(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer block, room, workspace;
    int itemsize;
    size_t used = 0;
    if (!floats_buffers(args, &block, &room, &workspace, &itemsize))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (room.len >= block.len)
        used = floats_pack(block.buf, (size_t)block.len, itemsize, room.buf, workspace.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&block);
    PyBuffer_Release(&room);
    PyBuffer_Release(&workspace);
    return PyLong_FromSize_t(used);
}

static PyObject *module_unpack_floats(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer payload, block, workspace;
    int itemsize;
    bool is_sound;
    if (!floats_buffers(args, &payload, &block, &workspace, &itemsize))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    is_sound = floats_unpack(payload.buf, (size_t)payload.len, itemsize, block.buf, (size_t)block.len, workspace.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&payload);
    PyBuffer_Release(&block);
    PyBuffer_Release(&workspace);
    return PyBool_FromLong(is_sound);
}

static PyMethodDef module_methods[] = {
    {"pack_floats", module_pack_floats, METH_VARARGS,
     "pack_floats(block, room, itemsize, workspace): the bytes used of the room, or 0: the block stays as it is."},
    {"unpack_floats", module_unpack_floats, METH_VARARGS,
     "unpack_floats(payload, block, itemsize, workspace): fills the block; False: these are no packed floats."},
    {"xxh3", module_xxh3, METH_VARARGS, "xxh3(buffer, seed): the XXH3 hash of 64 bits of more than 240 bytes."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
#if defined(__x86_64__)
    floats_fill_lanes();
#endif
    PyObject *type = PyType_FromModuleAndSpec(module, &pool_spec, NULL);
    int failed = type == NULL ? -1 : PyModule_AddObjectRef(module, "Pool", type);
    Py_XDECREF(type);
    return failed;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tierstore_native",
    .m_doc = "Transfers of tierstore's records, without the interpreter.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit_tierstore_native(void)
{
    return PyModuleDef_Init(&module_definition);
}
