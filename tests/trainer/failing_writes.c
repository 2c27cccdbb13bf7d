/* Makes a filesystem fail for one process (LD_PRELOAD): write or fsync of files whose path holds $FAIL_PATH fails
 * with errno $FAIL_ERRNO. $FAIL_OP is "write" or "fsync". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(const char *op, int fd) {
    const char *wanted = getenv("FAIL_OP"), *part = getenv("FAIL_PATH"), *number = getenv("FAIL_ERRNO");
    char link[64], path[4096];
    if (!wanted || !part || !number || strcmp(wanted, op)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    if (!strstr(path, part)) return 0;
    errno = atoi(number);
    return 1;
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return fails("write", fd) ? -1 : real(fd, data, size);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return fails("fsync", fd) ? -1 : real(fd);
}
