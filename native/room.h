/* How much memory this process may still take: the tightest of the memory cgroups above it, of the machine, and of a
 * limit that the program has set on its own resident memory. Nothing here allocates. The caller holds the lock.
 *
 * NOTE [Pages that were freed lazily]
 * A page that was given to MADV_FREE is counted as `inactive_file`, though it is anonymous, and stays counted so when it
 * is in use again (memory.stat; Linux 5.10 to 6.18). So what can be reclaimed of page cache is the lesser of that figure
 * and of the cache without shared memory. */

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_GROUPS = 32, MOST_FOLDER_BYTES = 1024 }; /* of a pod of Kubernetes: 205 to 330 */
static const int64_t LEAST_RESERVE = 24 << 20, MOST_RESERVE = 256 << 20; /* 8 MiB let the kernel kill trainings */
static const int64_t RESERVED_PART = 32;

typedef struct {
    char folder[MOST_FOLDER_BYTES];
    int version;
} Group;

typedef struct {
    int64_t left, reserve; /* bytes that may be taken, and those of them that are left to others */
    bool is_own;           /* by the program's own limit, of which the kernel knows nothing */
} Room;

typedef struct {
    Group groups[MOST_GROUPS];
    int num_groups;
    int64_t own_limit; /* of resident memory; 0: none */
} Limits;

/* Returns the length; 0: it cannot be read. No cancellation point: a thread that ended here would keep the lock. */
static size_t read_file(const char *folder, const char *name, char *text, size_t size)
{
    char path[MOST_FOLDER_BYTES + 32];
    int cancel_state;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        return 0;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, size - 1);
    if (file >= 0)
        close(file);
    pthread_setcancelstate(cancel_state, NULL);
    text[length > 0 ? length : 0] = 0;
    return length > 0 ? (size_t)length : 0;
}

/* -1: there is no such figure. */
static int64_t number_after(const char *text, const char *key)
{
    size_t length = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
        if (!strncmp(line, key, length) && (line[length] == ' ' || line[length] == ':'))
            return strtoll(line + length + 1, NULL, 10);
    return -1;
}

static int64_t number_in(const char *folder, const char *name)
{
    char text[64];
    return read_file(folder, name, text, sizeof text) && text[0] >= '0' && text[0] <= '9' ? strtoll(text, NULL, 10) : -1;
}

static int64_t cache_of(const Group *group)
{
    static const char *KEYS[2][3] = {{"total_inactive_file", "total_cache", "total_shmem"}, {"inactive_file", "file", "shmem"}};
    static char text[8192]; /* not on the stack, of which a thread may have 16 KiB; the lock is held */
    if (!read_file(group->folder, "memory.stat", text, sizeof text))
        return 0;
    const char **keys = KEYS[group->version - 1];
    int64_t inactive = number_after(text, keys[0]), cache = number_after(text, keys[1]) - number_after(text, keys[2]);
    int64_t least = inactive < cache ? inactive : cache; /* NOTE [Pages that were freed lazily] */
    return least > 0 ? least : 0;
}

static int64_t reserve_of(int64_t limit)
{
    int64_t part = limit / RESERVED_PART;
    return part < LEAST_RESERVE ? LEAST_RESERVE : part > MOST_RESERVE ? MOST_RESERVE : part;
}

static void tighten(Room *room, int64_t left, int64_t limit, bool is_own)
{
    int64_t reserve = reserve_of(limit);
    if (left - reserve < room->left - room->reserve)
        *room = (Room){left, reserve, is_own};
}

static Room find_room(const Limits *limits)
{
    static char text[2048];
    Room room = {INT64_MAX / 2, 0, false};
    if (read_file("/proc", "meminfo", text, sizeof text)) {
        int64_t total = number_after(text, "MemTotal"), available = number_after(text, "MemAvailable");
        if (total > 0 && available >= 0)
            tighten(&room, available << 10, total << 10, false);
    }
    for (int i = 0; i < limits->num_groups; i++) {
        const Group *group = &limits->groups[i];
        int64_t limit = number_in(group->folder, group->version == 1 ? "memory.limit_in_bytes" : "memory.max");
        int64_t used = number_in(group->folder, group->version == 1 ? "memory.usage_in_bytes" : "memory.current");
        if (limit < 0 || used < 0 || limit > INT64_MAX / 4)
            continue; /* no limit, no controller, or not for us to read */
        int64_t reserve = reserve_of(limit);
        if (limit - used < 2 * reserve) /* else its page cache does not matter, and takes longer to read */
            used -= cache_of(group);
        tighten(&room, limit - used, limit, false);
    }
    if (limits->own_limit && read_file("/proc/self", "statm", text, sizeof text)) {
        const char *resident = strchr(text, ' ');
        if (resident)
            tighten(&room, limits->own_limit - strtoll(resident, NULL, 10) * 4096, limits->own_limit, true);
    }
    return room;
}
