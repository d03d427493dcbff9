/* Runs with the library for LD_PRELOAD, and asks of its functions what those of the C library promise: by the first letter
 * of the argument. Ends with 0, or with the line where it was wrong. */

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(is_so) (void)((is_so) || (_exit(__LINE__), 0))
#define LARGE ((size_t)1 << 20)

static void *large(void)
{
    void *block = NULL;
    CHECK(!posix_memalign(&block, 64, LARGE));
    return memset(block, 7, LARGE);
}

static void make_and_free(void) { free(large()); }

static void alignments(void)
{
    void *block;
    for (size_t alignment = 0; alignment < 8; alignment++)
        CHECK(posix_memalign(&block, alignment, LARGE) == EINVAL);
    CHECK(posix_memalign(&block, 24, LARGE) == EINVAL);
    for (size_t alignment = 8; alignment <= 4 * LARGE; alignment *= 2) {
        CHECK(!posix_memalign(&block, alignment, LARGE) && (size_t)block % alignment == 0);
        free(block);
        free(aligned_alloc(alignment, 0));
    }
    CHECK(posix_memalign(&block, 64, (size_t)1 << 62) == ENOMEM);
}

static void other_calls(void)
{
    uint8_t *block = large();
    CHECK(malloc_usable_size(block) >= LARGE && !malloc_usable_size(NULL));
    CHECK(!realloc(block, (size_t)1 << 62) && errno == ENOMEM && block[LARGE - 1] == 7);
    block = reallocarray(block, LARGE / 2, 3);
    CHECK(block && block[LARGE - 1] == 7);
    free(block);
    CHECK(!realloc(large(), 0));
    block = large();
    errno = 77;
    free(block);
    CHECK(errno == 77);
    block = calloc(1, LARGE); /* zero, whatever was freed before */
    for (size_t at = 0; at < LARGE; at++)
        CHECK(!block[at]);
}

/* Handlers of a fork that are older than the first large block, and need blocks themselves. */
static void fork_handlers(void)
{
    pthread_atfork(make_and_free, make_and_free, make_and_free);
    make_and_free();
    pid_t child = fork();
    if (!child) {
        make_and_free();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && !status);
}

static void *work_when_cancelled(void *unused)
{
    pthread_cancel(pthread_self());
    for (int i = 0; i < 100; i++) /* allocating and freeing are no cancellation points */
        make_and_free();
    return unused;
}

static void cancellation(void)
{
    pthread_t thread;
    void *result;
    CHECK(!pthread_create(&thread, NULL, work_when_cancelled, NULL) && !pthread_join(thread, &result));
    CHECK(result != PTHREAD_CANCELED);
    make_and_free();
}

static void *make_and_free_there(void *unused)
{
    make_and_free();
    return unused;
}

static void small_stack(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    CHECK(!pthread_attr_init(&attributes) && !pthread_attr_setstacksize(&attributes, 16384));
    CHECK(!pthread_create(&thread, &attributes, make_and_free_there, NULL) && !pthread_join(thread, NULL));
}

static long most_resident(void) /* KiB */
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void locked_memory(void)
{
    long before = most_resident();
    if (!mlockall(MCL_FUTURE)) /* else this user may not */
        make_and_free();
    CHECK(most_resident() - before < 32 << 10);
}

static void freed_twice(void)
{
    void *before = large(), *block = large();
    free(before);
    free(block);
    free(block);
}

int main(int argc, char **argv)
{
    alarm(20); /* rather than wait for a lock for ever */
    switch (argc > 1 ? argv[1][0] : 0) {
    case 'a': alignments(); break;
    case 'o': other_calls(); break;
    case 'f': fork_handlers(); break;
    case 'c': cancellation(); break;
    case 's': small_stack(); break;
    case 'l': locked_memory(); break;
    case 't': freed_twice(); break;
    default: return 1;
    }
    return 0;
}
