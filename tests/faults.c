/* Faults of a filesystem, injected into one process (LD_PRELOAD). HPCRL_FAULT (TEST_FAULT for roles of a run) says which:
 *
 *   op=write errno=28 path=/weights/ skip=3 count=1 short=100 delay_us=500 when=/path/of/a/switch
 *
 * op: open, read, write, fsync, rename; change: what makes or alters files; any. path: part of the file's path. skip, count: leave out the first, then hit so
 * many (0: all). errno: fail with it. short: do at most so many bytes (0 for read: end of file). delay_us: wait first.
 * when: only while this file exists. who: only in this replica of a run, as engine-0. control: only while this file
 * exists, and as its text says (the same words), so that faults can be chosen while a run goes on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char op[16], part[512], when[512], who[64], control[512];
static int number;
static long skip, count, shorten = -1, delay_us;
static atomic_long seen;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct timespec read_at;

static void parse(const char *text) {
    char *copy = strdup(text), *save = NULL;
    for (char *word = strtok_r(copy, " \n", &save); word; word = strtok_r(NULL, " \n", &save)) {
        char *value = strchr(word, '=');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(word, "op")) snprintf(op, sizeof op, "%s", value);
        else if (!strcmp(word, "path")) snprintf(part, sizeof part, "%s", value);
        else if (!strcmp(word, "when")) snprintf(when, sizeof when, "%s", value);
        else if (!strcmp(word, "who")) snprintf(who, sizeof who, "%s", value);
        else if (!strcmp(word, "control")) snprintf(control, sizeof control, "%s", value);
        else if (!strcmp(word, "errno")) number = atoi(value);
        else if (!strcmp(word, "skip")) skip = atol(value);
        else if (!strcmp(word, "count")) count = atol(value);
        else if (!strcmp(word, "short")) shorten = atol(value);
        else if (!strcmp(word, "delay_us")) delay_us = atol(value);
    }
    free(copy);
    const char *role = getenv("HPCRL_ROLE"), *replica = getenv("HPCRL_REPLICA");
    char mine[64];
    snprintf(mine, sizeof mine, "%s-%s", role ? role : "", replica ? replica : "");
    if (who[0] && strcmp(who, mine)) op[0] = 0;
}

static void lock(void);
static void unlock(void);

__attribute__((constructor)) static void setup(void) {
    /* no child is made while another thread holds it */
    pthread_atfork(lock, unlock, unlock);
    const char *text = getenv("HPCRL_FAULT");
    if (!text) text = getenv("TEST_FAULT");
    if (text) parse(text);
}

/* Take the fault from the control file, where there is one and it has changed; by calls that are not ours. */
static void look(void) {
    struct stat now;
    char text[1024];
    int saved = errno;
    sigset_t all, before;
    sigfillset(&all);
    /* a handler of the program may write into a pipe, which comes here once more */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&mutex);
    if (stat(control, &now)) op[0] = 0, read_at.tv_sec = 0;
    else if (now.st_mtim.tv_sec != read_at.tv_sec || now.st_mtim.tv_nsec != read_at.tv_nsec) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC);
        long n = fd < 0 ? -1 : syscall(SYS_read, fd, text, sizeof text - 1);
        if (fd >= 0) syscall(SYS_close, fd);
        if (n > 0) {
            text[n] = 0;
            op[0] = part[0] = who[0] = 0;
            number = 0, skip = count = delay_us = 0, shorten = -1;
            atomic_store(&seen, 0);
            parse(text);
            read_at = now.st_mtim;
        }
    }
    pthread_mutex_unlock(&mutex);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = saved;
}

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }

static int wanted(const char *what) {
    if (control[0]) look();
    if (!op[0]) return 0;
    return !strcmp(op, what) || !strcmp(op, "any") || (!strcmp(op, "change") && strcmp(what, "read") && strcmp(what, "open"));
}

static int hit(const char *what, const char *path) {
    if (!wanted(what) || !path || !strstr(path, part)) return 0;
    if (when[0]) {
        int saved = errno, there = access(when, F_OK) == 0;
        errno = saved;
        if (!there) return 0;
    }
    long n = atomic_fetch_add(&seen, 1);
    if (n < skip || (count && n >= skip + count)) return 0;
    if (delay_us) usleep((useconds_t)delay_us);
    return 1;
}

static int hit_fd(const char *what, int fd) {
    char link[64], path[4096];
    if (!wanted(what)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hit(what, path);
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define FAIL_IF(condition) \
    int faulty = (condition); \
    if (faulty && number) { errno = number; return -1; }


ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    FAIL_IF(hit_fd("read", fd));
    if (faulty && shorten >= 0 && size > (size_t)shorten) size = (size_t)shorten;
    return size ? real(fd, data, size) : 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    FAIL_IF(hit_fd("write", fd));
    if (faulty && shorten > 0 && size > (size_t)shorten) size = (size_t)shorten;
    return real(fd, data, size);
}

#define VECTOR(name, what) \
    ssize_t name(int fd, const struct iovec *vector, int length, off64_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t, int); \
        FAIL_IF(hit_fd(what, fd)); \
        if (!faulty || shorten < 0 || length < 1) return real(fd, vector, length, offset, flags); \
        struct iovec first = vector[0]; \
        if (first.iov_len > (size_t)shorten) first.iov_len = (size_t)shorten; \
        return first.iov_len ? real(fd, &first, 1, offset, flags) : 0; \
    }
VECTOR(preadv64v2, "read") /* what Python's os.preadv and os.pwritev call */
VECTOR(pwritev64v2, "write")

#define POSITIONED(name) \
    ssize_t name(int fd, const void *data, size_t size, off64_t offset) { \
        REAL(ssize_t, name, int, const void *, size_t, off64_t); \
        FAIL_IF(hit_fd("write", fd)); \
        if (faulty && shorten > 0 && size > (size_t)shorten) size = (size_t)shorten; \
        return real(fd, data, size, offset); \
    }
POSITIONED(pwrite64)
POSITIONED(pwrite)

int fsync(int fd) {
    REAL(int, fsync, int);
    FAIL_IF(hit_fd("fsync", fd));
    return real(fd);
}

int rename(const char *old, const char *new) {
    REAL(int, rename, const char *, const char *);
    FAIL_IF(hit("rename", old) || hit("rename", new));
    return real(old, new);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
        va_end(list); \
        REAL(int, name, const char *, int, ...); \
        int writes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR) && !strcmp(op, "change"); \
        FAIL_IF(hit(writes ? "create" : "open", path)); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
