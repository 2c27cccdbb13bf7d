/* Records what one or several processes change below a directory (LD_PRELOAD), in the order in which it happened.
 *
 * HPCRL_RECORD_ROOT: the directory. HPCRL_RECORD_LOG: where records are appended. A record is a `struct head`, two
 * texts and data; tests/durability/recording.py reads it. Only calls that succeeded are recorded. Each call and its
 * record are made under one lock of all threads and processes, so that the order of records is that of effects.
 * `hpcrl_record_mark` lets the recorded program say something at its place in that order.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, WRITE, TRUNCATE, EXTEND, SYNC, CLOSE, RENAME, UNLINK, MKDIR, RMDIR, LINK, SYMLINK, MARK, MAP };

struct head {
    uint32_t kind, pid;
    uint64_t inode;
    int64_t offset;
    uint32_t first, second;
    uint64_t data;
};

static const char *root;
static size_t root_length;
static int log_fd = -1;
static pid_t owner;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int real_open(const char *path, int flags, mode_t mode) {
    REAL(int, open64, const char *, int, ...);
    return real(path, flags, mode);
}

static void lock(void) {
    pthread_mutex_lock(&mutex);
    if (owner != getpid()) { /* the lock of a file belongs to who opened it, so a child opens it anew */
        owner = getpid();
        log_fd = real_open(getenv("HPCRL_RECORD_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log_fd < 0) abort();
    }
    flock(log_fd, LOCK_EX);
}

static void unlock(void) {
    int saved = errno;
    flock(log_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

static int watching(void) {
    if (!root) {
        root = getenv("HPCRL_RECORD_ROOT");
        if (!root || !getenv("HPCRL_RECORD_LOG")) root = "";
        root_length = strlen(root);
    }
    return root_length > 0;
}

static int inside(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static void put(enum kind kind, uint64_t inode, int64_t offset, const char *first, const char *second,
                const void *data, size_t size) {
    struct head head = {kind, (uint32_t)getpid(), inode, offset, (uint32_t)strlen(first), (uint32_t)strlen(second), size};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)first, head.first}, {(void *)second, head.second},
                            {(void *)data, size}};
    REAL(ssize_t, writev, int, const struct iovec *, int);
    int saved = errno;
    if (real(log_fd, parts, 4) != (ssize_t)(sizeof head + head.first + head.second + size)) abort();
    errno = saved;
}

/* The full path of `path` seen from `dirfd`, without resolving links; whether it is of interest. */
static int full_path(int dirfd, const char *path, char *full) {
    char base[PATH_MAX], link[64];
    if (!watching() || !path) return 0;
    if (path[0] == '/') snprintf(full, PATH_MAX, "%s", path);
    else {
        int saved = errno;
        ssize_t n = -1;
        if (dirfd == AT_FDCWD) n = getcwd(base, sizeof base) ? (ssize_t)strlen(base) : -1;
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
            n = readlink(link, base, sizeof base - 1);
        }
        errno = saved;
        if (n < 0) return 0;
        base[n] = 0;
        if (snprintf(full, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return inside(full);
}

/* The inode behind a descriptor, or 0 where it is of no interest. */
static uint64_t inode_of(int fd) {
    char link[64], path[PATH_MAX];
    struct stat64 info;
    uint64_t inode = 0;
    if (!watching()) return 0;
    int saved = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n > 0) {
        path[n] = 0;
        if (inside(path) && !fstat64(fd, &info)) inode = info.st_ino;
    }
    errno = saved;
    return inode;
}

void hpcrl_record_mark(const char *text) {
    if (!watching()) return;
    lock();
    put(MARK, 0, 0, text, "", NULL, 0);
    unlock();
}

static int open_at(int dirfd, const char *path, int flags, mode_t mode) {
    REAL(int, openat64, int, const char *, int, ...);
    char full[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !full_path(dirfd, path, full)) return real(dirfd, path, flags, mode);
    lock();
    int fd = real(dirfd, path, flags, mode);
    if (fd >= 0) {
        uint64_t inode = inode_of(fd);
        if (inode) put(CREATE, inode, flags & O_TRUNC ? 0 : -1, full, "", NULL, 0);
    }
    unlock();
    return fd;
}

#define MODE \
    va_list list; \
    va_start(list, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0; \
    va_end(list)
int open(const char *path, int flags, ...) { MODE; return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; return open_at(AT_FDCWD, path, flags, mode); }
int openat(int dirfd, const char *path, int flags, ...) { MODE; return open_at(dirfd, path, flags, mode); }
int openat64(int dirfd, const char *path, int flags, ...) { MODE; return open_at(dirfd, path, flags, mode); }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    uint64_t inode = inode_of(fd);
    if (!inode) return real(fd, data, size);
    lock();
    ssize_t done = real(fd, data, size);
    if (done > 0) put(WRITE, inode, lseek64(fd, 0, SEEK_CUR) - done, "", "", data, (size_t)done);
    unlock();
    return done;
}

#define POSITIONED(name) \
    ssize_t name(int fd, const void *data, size_t size, off64_t offset) { \
        REAL(ssize_t, name, int, const void *, size_t, off64_t); \
        uint64_t inode = inode_of(fd); \
        if (!inode) return real(fd, data, size, offset); \
        lock(); \
        ssize_t done = real(fd, data, size, offset); \
        if (done > 0) put(WRITE, inode, offset, "", "", data, (size_t)done); \
        unlock(); \
        return done; \
    }
POSITIONED(pwrite)
POSITIONED(pwrite64)

#define GATHERED(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off64_t, int); \
        uint64_t inode = inode_of(fd); \
        if (!inode) return real(fd, parts, count, offset, flags); \
        lock(); \
        ssize_t done = real(fd, parts, count, offset, flags), left = done; \
        for (int i = 0; i < count && left > 0; i++) { \
            size_t size = (size_t)left < parts[i].iov_len ? (size_t)left : parts[i].iov_len; \
            if (size) put(WRITE, inode, offset, "", "", parts[i].iov_base, size); \
            offset += (off64_t)size; \
            left -= (ssize_t)size; \
        } \
        unlock(); \
        return done; \
    }
GATHERED(pwritev2)
GATHERED(pwritev64v2)

#define SIZED(name, kind) \
    int name(int fd, off64_t size) { \
        REAL(int, name, int, off64_t); \
        uint64_t inode = inode_of(fd); \
        if (!inode) return real(fd, size); \
        lock(); \
        int failed = real(fd, size); \
        if (!failed) put(kind, inode, size, "", "", NULL, 0); \
        unlock(); \
        return failed; \
    }
SIZED(ftruncate, TRUNCATE)
SIZED(ftruncate64, TRUNCATE)

#define ALLOCATION(name) \
    int name(int fd, int mode, off64_t offset, off64_t size) { \
        REAL(int, name, int, int, off64_t, off64_t); \
        uint64_t inode = inode_of(fd); \
        if (!inode) return real(fd, mode, offset, size); \
        lock(); \
        int failed = real(fd, mode, offset, size); \
        if (!failed) put(EXTEND, inode, offset + size, "", "", NULL, 0); \
        unlock(); \
        return failed; \
    }
ALLOCATION(fallocate)
ALLOCATION(fallocate64)

#define SYNCING(name, kind) \
    int name(int fd) { \
        REAL(int, name, int); \
        uint64_t inode = inode_of(fd); \
        if (!inode) return real(fd); \
        lock(); \
        int failed = real(fd); \
        if (!failed) put(kind, inode, 0, "", "", NULL, 0); \
        unlock(); \
        return failed; \
    }
SYNCING(fsync, SYNC)
SYNCING(fdatasync, SYNC)
SYNCING(close, CLOSE)

void *mmap64(void *at, size_t size, int protection, int flags, int fd, off64_t offset) {
    REAL(void *, mmap64, void *, size_t, int, int, int, off64_t);
    uint64_t inode = (flags & MAP_SHARED) && (protection & PROT_WRITE) && fd >= 0 ? inode_of(fd) : 0;
    void *memory = real(at, size, protection, flags, fd, offset);
    if (inode && memory != MAP_FAILED) {
        lock();
        put(MAP, inode, 0, "", "", NULL, 0);
        unlock();
    }
    return memory;
}

static int rename_at(int from, const char *old, int to, const char *new) {
    REAL(int, renameat, int, const char *, int, const char *);
    char first[PATH_MAX], second[PATH_MAX];
    if (!full_path(from, old, first) || !full_path(to, new, second)) return real(from, old, to, new);
    lock();
    int failed = real(from, old, to, new);
    if (!failed) put(RENAME, 0, 0, first, second, NULL, 0);
    unlock();
    return failed;
}
int renameat(int from, const char *old, int to, const char *new) { return rename_at(from, old, to, new); }
int rename(const char *old, const char *new) { return rename_at(AT_FDCWD, old, AT_FDCWD, new); }

static int unlink_at(int dirfd, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    char full[PATH_MAX];
    if (!full_path(dirfd, path, full)) return real(dirfd, path, flags);
    lock();
    int failed = real(dirfd, path, flags);
    if (!failed) put(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, 0, full, "", NULL, 0);
    unlock();
    return failed;
}
int unlinkat(int dirfd, const char *path, int flags) { return unlink_at(dirfd, path, flags); }
int unlink(const char *path) { return unlink_at(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlink_at(AT_FDCWD, path, AT_REMOVEDIR); }

static int mkdir_at(int dirfd, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    char full[PATH_MAX];
    struct stat64 info;
    if (!full_path(dirfd, path, full)) return real(dirfd, path, mode);
    lock();
    int failed = real(dirfd, path, mode);
    if (!failed && !stat64(full, &info)) put(MKDIR, info.st_ino, 0, full, "", NULL, 0);
    unlock();
    return failed;
}
int mkdirat(int dirfd, const char *path, mode_t mode) { return mkdir_at(dirfd, path, mode); }
int mkdir(const char *path, mode_t mode) { return mkdir_at(AT_FDCWD, path, mode); }

int link(const char *old, const char *new) {
    REAL(int, link, const char *, const char *);
    char first[PATH_MAX], second[PATH_MAX];
    if (!full_path(AT_FDCWD, old, first) || !full_path(AT_FDCWD, new, second)) return real(old, new);
    lock();
    int failed = real(old, new);
    if (!failed) put(LINK, 0, 0, first, second, NULL, 0);
    unlock();
    return failed;
}

int symlink(const char *target, const char *path) {
    REAL(int, symlink, const char *, const char *);
    char full[PATH_MAX];
    if (!full_path(AT_FDCWD, path, full)) return real(target, path);
    lock();
    int failed = real(target, path);
    if (!failed) put(SYMLINK, 0, 0, target, full, NULL, 0);
    unlock();
    return failed;
}
